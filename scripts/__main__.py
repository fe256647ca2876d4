"""`python -m turngym.scripts` is the `turngym` command."""

import sys

from turngym.scripts.main import main

sys.exit(main())
