"""`python -m surgetank.workflow`."""

import sys

from .cli import main

sys.exit(main())
