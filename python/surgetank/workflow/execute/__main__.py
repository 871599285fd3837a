"""`python -m surgetank.workflow.execute DRAFT`: what `surgetank run` starts for `surgetank workflow run`. Not for users."""

import sys
from pathlib import Path

from ..problem import Problem
from .launch import inside

try:
    sys.exit(inside(Path(sys.argv[1])))
except Problem as problem:
    print(f"surgetank workflow: {problem}", file=sys.stderr)
    sys.exit(problem.code)
