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
    what = f"the run cannot continue: {error}"
    remedy = "run the same command again; tasks without a journal entry run again, and every file is checked first"
    print(f"surgetank workflow: {Problem(what, remedy=remedy)}", file=sys.stderr)
    sys.exit(1)
