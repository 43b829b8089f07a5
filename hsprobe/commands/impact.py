"""`hsprobe impact`: what wrong states cost in accepted tokens, finding by finding."""

from __future__ import annotations

import argparse

from hsprobe.commands.arguments import local, positive, readable
from hsprobe.commands.dumps import add_options, options_of

_DESCRIPTION = """\
Run the draft offline on both sides' hidden states and say what the served ones
cost: the accept length that the draft would reach with the states it was
trained on, the one it reaches with those that it is served, and how much of the
difference each finding of hsprobe diff accounts for.

Every request of INFER is drafted and verified as the server does it (greedily,
one chain of drafts a pass), against the tokens that the server generated. The
prediction for the served states is held against the server's own counters.

INFER must hold generated tokens: capture with --max-new-tokens 64 or more, and
TRAIN as many, from the same prompts.
"""

_EPILOG = """\
each finding has two figures:
  alone costs   accept length lost when the training side's states are spoilt by
                this finding alone
  mended gives  accept length won when it alone is undone in the served states

examples:
  hsprobe impact train.h5 infer.h5 --draft DRAFT
  hsprobe impact train.h5 infer.h5 --draft DRAFT --target TARGET --device cuda
  hsprobe impact train.h5 infer.h5 --draft DRAFT --format json -o impact.json

exit codes: 0 no loss, 1 the served side loses acceptance beyond noise (at least
--least-loss of the accept length, and two standard errors over the requests; or
the server accepts over 10 % less than its draft does offline on the same
states), 2 trouble
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `impact` to the command line."""
    parser = subparsers.add_parser(
        "impact",
        help="say what wrong states cost in accepted tokens",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("train", metavar="TRAIN", type=readable, help="dump or trace it was trained on")
    parser.add_argument("infer", metavar="INFER", type=readable, help="trace of what the server computed")
    parser.add_argument("--draft", metavar="DIR", type=local, required=True, help="folder of the draft")
    parser.add_argument(
        "--target",
        metavar="DIR",
        type=local,
        help="folder of the target, whose token embeddings the draft uses (default: the one INFER names)",
    )
    parser.add_argument(
        "--steps", metavar="N", type=positive, help="drafted tokens a pass (default: as the server was told)"
    )
    parser.add_argument(
        "--least-loss",
        metavar="X",
        type=_share,
        default=0.02,
        help="a loss of a smaller share of the accept length is none (default: %(default)s)",
    )
    parser.add_argument("--device", metavar="NAME", default="cpu", help="torch device (default: %(default)s)")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default: text")
    parser.add_argument("-o", "--output", metavar="FILE", type=local, help="write the report to FILE")
    add_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 without a loss, 1 with one. Raises HsprobeError for trouble."""
    from hsprobe.impact import impact
    from hsprobe.report import impact as report
    from hsprobe.report.output import write
    from hsprobe.report.progress import Telling

    with Telling() as progress:
        found = impact(
            args.train,
            args.infer,
            draft=args.draft,
            target=args.target,
            steps=args.steps,
            least_loss=args.least_loss,
            device=args.device,
            dump=options_of(args),
            told=progress.tell,
            on_text=lambda done, total: progress.tell(f"running the draft, {done} of {total} requests"),
        )
    write(args.output, lambda stream: report.write(found, args.format, stream))
    return 1 if found.lost else 0


def _share(text: str) -> float:
    value = float(text)
    if not 0.0 <= value < 1.0:
        raise argparse.ArgumentTypeError("must be from 0 up to 1")
    return value
