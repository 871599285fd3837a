# Programs made and run in the directory: dynamic, static, scripts; with an empty environment; started by other programs.
# needs: gcc env
cat >hello.c <<'C'
#include <stdio.h>
#include <stdlib.h>
int main(int count, char **words) {
    FILE *out = fopen("written-by-program", "a");
    if (!out) { perror("fopen"); return 1; }
    fprintf(out, "%s\n", count > 1 ? words[1] : "nothing");
    fclose(out);
    printf("hello %s\n", count > 1 ? words[1] : "world");
    return 3;
}
C
gcc -O1 -o dynamic hello.c
gcc -O1 -static -o static hello.c
./dynamic one || echo "exit $?"
./static two || echo "exit $?"
env -i ./dynamic three || echo "exit $?"
env -i "$PWD/static" four || echo "exit $?"
cat written-by-program
printf '#!/bin/sh\necho "a script in $(basename "$PWD")" >>by-script\n' >script
chmod +x script
mkdir sub
(cd sub && ../script)
cat sub/by-script
cp static replaced
./replaced five || echo "exit $?"
cp dynamic new-version
mv new-version replaced
./replaced six || echo "exit $?"
chmod -x replaced
./replaced seven 2>/dev/null || echo "exit $?"
printf 'int twice(int x) { return 2 * x; }\n' >library.c
gcc -shared -fPIC -o liblibrary.so library.c
"$PYTHON" -c 'import ctypes; print(ctypes.CDLL("./liblibrary.so").twice(21))'
# The file is busy while it runs.
cp "$(command -v sleep)" sleeper
./sleeper 60 & child=$!
until [[ $(readlink "/proc/$child/exe") == *sleeper ]]; do sleep 0.02; done
(echo x >sleeper) 2>/dev/null || echo busy
kill $child
wait $child || echo "ended by $(($? - 128))"
