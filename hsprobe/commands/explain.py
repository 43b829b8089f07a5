"""`hsprobe explain`: what a finding's code means, and what to do about it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from hsprobe.errors import HsprobeError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hsprobe.report.explained import Entry

_DESCRIPTION = """\
Print what a fault class (HS...) is: its symptom, its cause, the evidence that
tells it from its neighbours, and its mend; or what a rule of hsprobe check
(CK...) looks at, why, and where to read about it. Without a code, list all.
"""

_EPILOG = """\
examples:
  hsprobe explain HS101
  hsprobe explain layer_shift
  hsprobe explain CK102
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
    parser.add_argument("code", metavar="CODE", nargs="?", help="HS101, CK102, or a name")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 once printed. Raises HsprobeError for a code that is not one."""
    from hsprobe.check import registry as rules
    from hsprobe.diagnose import explanation
    from hsprobe.diagnose.registry import catalogue
    from hsprobe.report import explained

    faults, texts = catalogue(), rules.catalogue()
    if not args.code:
        print(explained.listing(faults, explanation.GROUPS))
        print()
        print(explained.listing(texts, rules.GROUPS))
        return 0
    wanted = args.code.strip().upper()
    for fault in faults:
        if wanted in (fault.code, fault.name):
            print(explained.entry(fault, explanation.section(fault)))
            return 0
    for text in texts:
        if wanted in (text.code, text.name):
            print(explained.entry(text, rules.section(text)))
            return 0
    raise HsprobeError(
        f"There is no fault class and no rule {args.code!r}.", f"The codes are {_codes([*faults, *texts])}."
    )


def _codes(entries: Iterable[Entry]) -> str:
    return ", ".join(entry.code for entry in entries)
