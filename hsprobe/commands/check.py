"""`hsprobe check`: what can be said of a draft and its target before anything is served."""

from __future__ import annotations

import argparse

from hsprobe.commands.arguments import local, readable
from hsprobe.commands.dumps import add_options, options_of
from hsprobe.formats.sglang_models import ALGORITHMS

_DESCRIPTION = """\
Read the configs of a target and a draft and the headers of their safetensors
files, and say what SGLang will do with them: which depths of the target the
draft will be handed, and every setting, shape and tensor that is known to go
wrong. No server, no GPU, under a second.

With what the draft was trained on, a dump of any producer that hsprobe knows
or a trace (hsprobe capture --model ... --layers ...), the depths of its chunks
are compared too.
"""

_EPILOG = """\
examples:
  hsprobe check --target TARGET --draft DRAFT
  hsprobe check --target TARGET --draft DRAFT --train train.h5
  hsprobe check --target TARGET --draft DRAFT --train hidden_states/ --train-layers 1,17,32
  hsprobe check --target TARGET --draft DRAFT --sglang 0.5.9
  hsprobe check --target TARGET --draft DRAFT --algorithm DFLASH --strict
  hsprobe explain CK102     # what a code means; all of them: docs/check.md

exit codes: 0 no error (with --strict: no warning either), 1 errors, 2 trouble
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `check` to the command line."""
    parser = subparsers.add_parser(
        "check",
        help="check a draft and its target before they are served",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--target", metavar="DIR", type=local, required=True, help="folder of the target")
    parser.add_argument("--draft", metavar="DIR", type=local, required=True, help="folder of the draft")
    parser.add_argument(
        "--train", metavar="TRAIN", type=readable, help="trace or dump of what the draft was trained on"
    )
    parser.add_argument(
        "--sglang",
        metavar="VERSION",
        help="version that will serve them (default: the installed one, else the newest known)",
    )
    parser.add_argument(
        "--algorithm",
        metavar="NAME",
        help=f"--speculative-algorithm that will be given: {', '.join(ALGORITHMS)} "
        "(default: the one that the draft was made for)",
    )
    parser.add_argument("--strict", action="store_true", help="exit code 1 for warnings too")
    parser.add_argument(
        "--format", choices=("text", "json", "junit", "github"), default="text", help="default: text"
    )
    parser.add_argument("-o", "--output", metavar="FILE", type=local, help="write the report to FILE")
    add_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 without errors, 1 with. Raises HsprobeError for trouble."""
    from hsprobe.check.model import Severity
    from hsprobe.check.run import check
    from hsprobe.report import checked
    from hsprobe.report.output import write

    report = check(
        args.target,
        args.draft,
        train=args.train,
        dump=options_of(args) if args.train is not None else None,
        version=args.sglang,
        algorithm=args.algorithm,
    )
    write(args.output, lambda stream: checked.write(report, args.format, stream))
    bad = report.count(Severity.ERROR) + (report.count(Severity.WARNING) if args.strict else 0)
    return 1 if bad else 0
