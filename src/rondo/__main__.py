"""`python -m rondo` is the command `rondo`."""

import sys

from rondo.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
