"""`python -m turngym`: the same as the `turngym` command."""

import sys

from turngym.scripts.main import main

if __name__ == "__main__":
    sys.exit(main())
