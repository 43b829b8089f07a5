"""`hsprobe explain`: what a finding's code means, and what to do about it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from hsprobe.errors import HsprobeError

if TYPE_CHECKING:
    from hsprobe.diagnose.explanation import Explanation

_DESCRIPTION = """\
Print what a fault class is: its symptom, its cause, the evidence that tells it
from its neighbours, and its mend. Without a code, list all classes.
"""

_EPILOG = """\
examples:
  hsprobe explain HS101
  hsprobe explain layer_shift
  hsprobe explain
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `explain` to the command line."""
    parser = subparsers.add_parser(
        "explain",
        help="say what a finding's code means",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("code", metavar="CODE", nargs="?", help="HS101, or the class's name")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 once printed. Raises HsprobeError for a code that is not one."""
    from hsprobe.diagnose.registry import catalogue
    from hsprobe.report import explained

    found = list(catalogue())
    print(explained.entry(_chosen(args.code, found)) if args.code else explained.listing(found))
    return 0


def _chosen(code: str, catalogue: list[Explanation]) -> Explanation:
    wanted = code.strip().upper()
    for found in catalogue:
        if wanted in (found.code, found.name):
            return found
    known = ", ".join(found.code for found in catalogue)
    raise HsprobeError(f"There is no fault class {code!r}.", f"The codes are {known}.")
