"""`python -m tests.mutants`."""

import sys

from .run import main

sys.exit(main())
