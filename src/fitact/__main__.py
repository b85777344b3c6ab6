"""`python -m fitact` is the command line."""

import sys

from fitact.cli import main

sys.exit(main())
