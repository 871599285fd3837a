"""`python -m surgetank.workflow.execute DRAFT`: the program that `surgetank run` starts for `surgetank workflow run`.
Not for users."""

import sys
from pathlib import Path

from ..problem import Problem
from .launch import inside

try:
    sys.exit(inside(Path(sys.argv[1])))
except Problem as problem:
    print(f"surgetank workflow: {problem}", file=sys.stderr)
    sys.exit(problem.code)
except OSError as error:
    # (For example, a task removed the journal.)
    what = f"the run could not go on: {error}"
    remedy = "the same command again; what the journal does not know of is made again, and no file counts that was not looked at"
    print(f"surgetank workflow: {Problem(what, remedy=remedy)}", file=sys.stderr)
    sys.exit(1)
