"""``python -m hsprobe``."""

import sys

from hsprobe.cli import main

if __name__ == "__main__":
    sys.exit(main())
