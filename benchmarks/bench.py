"""All that is to be reached, in one run: ``make bench``, or ``python -m benchmarks.bench [NAME...]``.

Names: speed, peak, identification, growth. Each is a script of its own, with options and a description. Takes
about 15 minutes on two quiet cores and 5 GB of disk in the folder for temporary files; figures depend on the
machine and on what else runs on it, ratios less so.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks import growth, identification, peak, speed
from benchmarks.table import Row, show

PARTS = {
    "speed": speed.measure,
    "peak": peak.measure,
    "identification": identification.measure,
    "growth": growth.measure,
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PARTS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    unknown = [name for name in args.names if name not in PARTS]
    if unknown:
        parser.error(f"there is no {unknown[0]}; there are {', '.join(PARTS)}")
    rows: list[Row] = []
    for name in args.names or PARTS:
        print(f"measuring {name}", flush=True)
        rows += PARTS[name]()
    show(rows, args.json)


if __name__ == "__main__":
    main()
