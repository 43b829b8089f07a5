"""`hsprobe diff`: compare a training dump with a capture and name what is wrong."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from hsprobe.commands import engines
from hsprobe.commands.arguments import Parser, local, positive, readable
from hsprobe.commands.dumps import add_options, options_of
from hsprobe.errors import HsprobeError

if TYPE_CHECKING:
    from hsprobe.diagnose.consistency import SelfReport

FORMATS = ("text", "json", "junit", "github", "markdown", "html")

_DESCRIPTION = """\
Say for every chunk that the draft is handed which depth of the target it
carries, whether that is what the draft was trained on, and if not, which line
to change.

TRAIN is a training dump, or a reference of the whole model (hsprobe capture
--model). INFER is a capture of the running server. Rows are compared where the
token ids up to and including their own are the same.

With --draft, the draft itself is computed from what the capture says it was
given, and each of its stages held against what the server's draft made of it.

With --between-ranks the ranks of INFER are compared with one another alone.

INFER alone is compared with itself: what the server computed for the same
tokens in different phases and passes, and handed to the draft.
"""

_EPILOG = """\
examples:
  hsprobe diff train.h5 infer.h5
  hsprobe diff train.h5 infer.h5 --format json -o report.json
  hsprobe diff train.h5 infer.h5 --format html -o report.html
  hsprobe diff train.h5 infer.h5 --format github   # in a workflow
  hsprobe diff train.h5 infer.h5 --noise tolerance.json   # see: hsprobe noise
  hsprobe diff infer.h5                 # does the server agree with itself?
  hsprobe diff infer.h5 --draft DRAFT   # does its draft compute what its checkpoint says?
  hsprobe diff train.h5 infer.h5 --draft DRAFT
  hsprobe diff infer.h5 --between-ranks # do the ranks agree? (tensor parallel)
  hsprobe diff reference.h5 infer.h5    # from: hsprobe capture --model DIR
  hsprobe diff hidden_states/ infer.h5  # a dump of SpecForge, ModelOpt, speculators...
  hsprobe diff s3://bucket/hidden_states infer.h5   # also gs:, hf:, https:
  hsprobe diff hidden_states/ infer.h5 --journal audit.journal   # goes on if interrupted
  hsprobe diff reference.h5 infer.h5 --workers 8   # of large data; default: all cores
  hsprobe diff hidden_states/ infer.h5 --engine ray --ray-address auto
  hsprobe diff dump.h5 infer.h5 --map input_ids=ids --map aux=states  # foreign HDF5

exit codes: 0 same, 1 different, 2 trouble
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `diff` to the command line."""
    parser = subparsers.add_parser(
        "diff",
        help="compare a training dump with a capture and name what is wrong",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if isinstance(parser, Parser):
        parser.intermixed = True
    parser.usage = "hsprobe diff [-h] [options] [TRAIN] INFER"
    parser.add_argument(
        "first",
        metavar="TRAIN",
        type=readable,
        help="what the draft was trained on: a training dump as it lies, or a trace",
    )
    parser.add_argument(
        "second", metavar="INFER", type=readable, nargs="?", help="trace of what the server computed"
    )
    parser.add_argument("--format", choices=FORMATS, default="text", help="default: text")
    parser.add_argument("-o", "--output", metavar="FILE", type=local, help="write the report to FILE")
    parser.add_argument(
        "--rows",
        metavar="N",
        type=positive,
        default=512,
        help="identify chunks on at most N rows; errors always take all (default: %(default)s)",
    )
    parser.add_argument(
        "--noise",
        metavar="FILE",
        type=local,
        help="judge by the noise measured with 'hsprobe noise' where FILE covers it",
    )
    add_options(parser)
    engines.add_options(parser)
    _add_more_views(parser)
    parser.set_defaults(run=run)


def _add_more_views(parser: argparse.ArgumentParser) -> None:
    """What else can be looked at than the states of the target."""
    parser.add_argument(
        "--draft",
        metavar="DIR",
        type=local,
        help="folder of the trained draft: compute it from what it was given, and compare every stage",
    )
    parser.add_argument(
        "--target",
        metavar="DIR",
        type=local,
        help="with --draft: folder of the target, whose embedding it uses (default: the one INFER names)",
    )
    parser.add_argument(
        "--between-ranks",
        action="store_true",
        help="compare the ranks of INFER with one another, without TRAIN",
    )


def run(args: argparse.Namespace) -> int:
    """0 if the traces match, 1 if not. Raises HsprobeError for trouble."""
    from hsprobe.diagnose import diff
    from hsprobe.diagnose.consistency import consistency
    from hsprobe.diagnose.model import Report
    from hsprobe.report import formats
    from hsprobe.report.output import write
    from hsprobe.report.progress import Telling

    report: Report | SelfReport
    with Telling() as telling, engines.engine_of(args, telling.tell):
        if args.between_ranks:
            report = _between_ranks(args)
        elif args.second is None:
            report = consistency(args.first, noise=args.noise, draft=args.draft, target=args.target)
        else:
            report = diff(
                args.first,
                args.second,
                rows=args.rows,
                noise=args.noise,
                dump=options_of(args),
                told=telling.tell,
                draft=args.draft,
                target=args.target,
            )
    write(args.output, lambda stream: formats.write(report, args.format, stream))
    return 0 if report.same else 1


def _between_ranks(args: argparse.Namespace) -> SelfReport:
    from hsprobe.diagnose.ranks.between import between_ranks

    if args.second is not None:
        raise HsprobeError(
            "--between-ranks compares the ranks of one capture, and two traces were given.",
            "Leave TRAIN out, or the option: hsprobe diff TRAIN INFER looks at every rank too.",
        )
    return between_ranks(args.first)
