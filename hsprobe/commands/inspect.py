"""`hsprobe inspect`: what is in a trace, in one screen."""

from __future__ import annotations

import argparse
from pathlib import Path

_DESCRIPTION = "Show what a trace holds: producer, model, requests, passes by phase, tensors and gaps."

_EPILOG = """\
examples:
  hsprobe inspect infer.h5
  hsprobe inspect infer.h5 --format json
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `inspect` to the command line."""
    parser = subparsers.add_parser(
        "inspect",
        help="show what is in a trace",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="the trace")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default: text")
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="write to FILE")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 once shown. Raises HsprobeError for trouble."""
    from hsprobe.report import json, overview
    from hsprobe.report.output import write
    from hsprobe.trace.reader import Trace

    with Trace.open(args.file) as trace:
        facts = overview.facts(trace)
    if args.format == "json":
        write(args.output, lambda stream: json.dump(facts, stream))
    else:
        write(args.output, lambda stream: overview.write(facts, stream))
    return 0
