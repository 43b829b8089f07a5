"""`hsprobe noise`: measure how far apart two right captures are."""

from __future__ import annotations

import argparse
import math

from hsprobe.commands.arguments import local, readable
from hsprobe.commands.dumps import add_options, options_of

_DESCRIPTION = """\
Learn from two benign captures how large an error is nothing but noise: for
every depth, phase and pair of dtypes, robust quantiles of the row errors.

A stands for TRAIN (a training dump or a reference), B for INFER (a capture of
a server that is known to be right). What is learned takes the place of the
built-in noise model in: hsprobe diff --noise FILE
"""

_EPILOG = """\
examples:
  hsprobe noise reference.h5 good.h5 -o tolerance.json
  hsprobe diff --noise tolerance.json train.h5 infer.h5

exit codes: 0 done, 2 trouble
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `noise` to the command line."""
    parser = subparsers.add_parser(
        "noise",
        help="learn from two benign captures what error is only noise",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("first", metavar="A", type=readable, help="a benign trace or dump, as TRAIN")
    parser.add_argument("second", metavar="B", type=readable, help="another of the same model, as INFER")
    parser.add_argument("-o", "--output", metavar="FILE", type=local, required=True, help="the file to write")
    parser.add_argument(
        "--safety",
        metavar="X",
        type=_safety,
        default=3.0,
        help="a comparison may show X times the errors measured (default: %(default)s)",
    )
    add_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 once written. Raises HsprobeError for trouble."""
    from hsprobe.cluster.processes import ProcessEngine
    from hsprobe.compare import tolerance
    from hsprobe.compare.engine import using
    from hsprobe.diagnose.learn import learn
    from hsprobe.report import noise
    from hsprobe.report.output import write
    from hsprobe.report.progress import Telling

    with Telling() as telling, ProcessEngine() as engine, using(engine):
        learned = learn(args.first, args.second, safety=args.safety, dump=options_of(args), told=telling.tell)
    tolerance.write(learned.tolerance, args.output)
    write(None, lambda stream: noise.write(learned, args.output, stream))
    return 0


def _safety(text: str) -> float:
    value = float(text)
    if not math.isfinite(value) or not 1.0 <= value <= 1000.0:
        raise argparse.ArgumentTypeError("must be from 1 to 1000")
    return value
