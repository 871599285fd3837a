/* Programs that cannot take the shim (foreign.c); also for crates/surgetank, which starts the first program. */
#ifndef SURGETANK_FOREIGN_H
#define SURGETANK_FOREIGN_H

#include <stdbool.h>

#define ST_FOREIGN_TEXT 512

/* `search`: the PATH for a name without a slash; NULL: `program` is a path. */
bool st_is_foreign(const char *program, const char *search);
/* Checks the open file; for a script, its interpreter is put into `script`. */
bool st_is_foreign_file(int file, char script[ST_FOREIGN_TEXT]);

#endif
