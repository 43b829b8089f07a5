"""Print the JSON Schema of `--format json`."""

import sys

from hsprobe.report.schema import text

if __name__ == "__main__":
    sys.stdout.write(text())
