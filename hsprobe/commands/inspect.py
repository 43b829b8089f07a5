"""`hsprobe inspect`: what is in a trace or a training dump, in one screen."""

from __future__ import annotations

import argparse

from hsprobe.commands.arguments import local, readable
from hsprobe.commands.dumps import add_options, options_of

_DESCRIPTION = """\
Show what a trace holds: producer, model, requests, passes by phase, tensors and
gaps. Of a training dump: who wrote it, how many samples, what it records of its
layers, norm, shift and padding, and what of that is only its producer's default.
"""

_EPILOG = """\
examples:
  hsprobe inspect infer.h5
  hsprobe inspect infer.h5 --format json
  hsprobe inspect hidden_states/
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `inspect` to the command line."""
    parser = subparsers.add_parser(
        "inspect",
        help="show what is in a trace or a training dump",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "file", metavar="FILE", type=readable, help="a trace, or the file or folder of a dump"
    )
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default: text")
    parser.add_argument("-o", "--output", metavar="FILE", type=local, help="write to FILE")
    add_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 once shown. Raises HsprobeError for trouble."""
    from hsprobe.formats.registry import is_trace, open_dump
    from hsprobe.report import dumps, json, overview
    from hsprobe.report.output import write
    from hsprobe.trace.reader import Trace

    if is_trace(args.file):
        with Trace.open(args.file) as trace:
            facts, show = overview.facts(trace), overview.write
    else:
        facts, show = dumps.facts(open_dump(args.file, options_of(args))), dumps.write
    if args.format == "json":
        write(args.output, lambda stream: json.dump(facts, stream))
    else:
        write(args.output, lambda stream: show(facts, stream))
    return 0
