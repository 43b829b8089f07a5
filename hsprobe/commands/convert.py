"""`hsprobe convert`: any dump to a trace, and dumps and traces to safetensors."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hsprobe.commands.arguments import local, readable
from hsprobe.commands.dumps import add_options, options_of
from hsprobe.errors import HsprobeError

if TYPE_CHECKING:
    from hsprobe.formats.convert import Outcome

_DESCRIPTION = """\
Turn a training dump into a trace, sample by sample; or a dump or a trace into
safetensors, a file a sample. Run again after an interruption, it goes on where
it was. What a dump does not record stays unrecorded, unless a flag says it.
"""

_EPILOG = """\
examples:
  hsprobe convert hidden_states/ train.h5
  hsprobe convert hidden_states/ train.h5 --train-layers 2,30,58
  hsprobe convert infer.h5 infer-tensors/ --to safetensors

exit codes: 0 done, 2 trouble, 130 interrupted
"""
_NAMED = 3


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `convert` to the command line."""
    parser = subparsers.add_parser(
        "convert",
        help="turn a training dump into a trace, or either into safetensors",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="SRC", type=readable, help="a training dump, or a trace")
    parser.add_argument(
        "target", metavar="DST", type=local, help="the trace (.h5), or a folder for safetensors"
    )
    parser.add_argument("--to", choices=("trace", "safetensors"), help="default: a trace if DST ends in .h5")
    parser.add_argument("--num-layers", metavar="N", type=int, help="layers of the target model")
    add_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 once written. Raises HsprobeError for trouble."""
    from hsprobe.formats import convert, tensors_out
    from hsprobe.formats.registry import in_words, is_trace, open_dump
    from hsprobe.report.progress import RowProgress
    from hsprobe.trace.reader import Trace

    to = args.to or ("trace" if args.target.suffix in (".h5", ".hdf5") else "safetensors")
    if is_trace(args.source):
        if to == "trace":
            raise HsprobeError(
                f"{args.source} is a trace already.", "Give --to safetensors to turn it into those."
            )
        with Trace.open(args.source) as trace, RowProgress("Converting requests") as progress:
            _say(tensors_out.from_trace(trace, args.target, progress.advanced_to), args.target)
        return 0
    dump = open_dump(args.source, options_of(args))
    print(f"{args.source}: {in_words(dump)}", file=sys.stderr)
    with RowProgress("Converting samples") as progress:
        if to == "trace":
            outcome = convert.to_trace(
                dump, args.target, num_layers=args.num_layers, told=progress.advanced_to
            )
        else:
            outcome = tensors_out.from_dump(dump, args.target, progress.advanced_to)
    _say(outcome, args.target)
    return 0


def _say(outcome: Outcome, target: Path) -> None:
    kept = f" ({outcome.kept:,} from before)" if outcome.kept else ""
    print(f"{target}: {outcome.samples:,} samples{kept}, {outcome.rows:,} rows")
    if outcome.left_out:
        print("the last states were left out: give --num-layers to label states from before the final norm")
    if outcome.skipped:
        print(f"{len(outcome.skipped):,} samples could not be read:", file=sys.stderr)
        for name, why in outcome.skipped[:_NAMED]:
            print(f"  {why if name in why else f'{name}: {why}'}", file=sys.stderr)
        if len(outcome.skipped) > _NAMED:
            print(f"  and {len(outcome.skipped) - _NAMED:,} more", file=sys.stderr)
