"""The flags for long comparisons: who does the work, and where what is done is kept."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from hsprobe.commands.arguments import local, positive
from hsprobe.commands.dumps import options_of
from hsprobe.errors import HsprobeError

if TYPE_CHECKING:
    from hsprobe.cluster.journal import Journal
    from hsprobe.diagnose.dumped import Told

LOCAL, RAY = "local", "ray"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add them as a group."""
    group = parser.add_argument_group("large data", "terabytes, many machines (see docs/large.md)")
    group.add_argument(
        "--engine",
        choices=(LOCAL, RAY),
        default=LOCAL,
        help="who compares: processes of this machine, or the workers of Ray (default: %(default)s)",
    )
    group.add_argument(
        "--workers",
        metavar="N",
        type=positive,
        help="most processes that compare, 1 for this one alone (default: one for each core; "
        "small data takes no more than one)",
    )
    group.add_argument(
        "--ray-address",
        metavar="ADDRESS",
        help="with --engine ray: a running cluster (auto, HOST:PORT, ray://HOST:PORT); "
        "default: workers on this machine, for the time of the comparison",
    )
    group.add_argument(
        "--journal",
        metavar="FILE",
        type=local,
        help="keep what is done in FILE; run again after an interruption, the comparison goes on from there",
    )


@contextmanager
def engine_of(args: argparse.Namespace, told: Told) -> Iterator[None]:
    """Comparisons inside the `with` block are done as the flags say.

    Raises:
        HsprobeError: Ray is missing or cannot be reached, or the journal is no journal.
    """
    from hsprobe.compare.engine import Engine, using

    _check(args)
    with ExitStack() as stack:
        engine: Engine
        given = [where for where in (args.first, args.second) if where is not None]
        journal = None if args.journal is None else stack.enter_context(_journal(args, told))
        if args.engine == RAY:
            from hsprobe.cluster.rays import RayEngine

            told("starting Ray" if args.ray_address is None else f"joining Ray at {args.ray_address}")
            engine = stack.enter_context(RayEngine(args.ray_address, args.workers))
        else:
            from hsprobe.cluster.processes import ProcessEngine

            engine = stack.enter_context(ProcessEngine(args.workers, given))
        if journal is not None:
            from hsprobe.cluster.continued import Continued

            engine = Continued(engine, journal, given)
        with using(engine):
            yield


def _check(args: argparse.Namespace) -> None:
    if args.ray_address is not None and args.engine != RAY:
        raise HsprobeError("--ray-address is for --engine ray.", "Add --engine ray, or leave it out.")
    if args.ray_address is not None and args.workers is not None:
        raise HsprobeError("A running Ray cluster has the workers that it has.", "Leave out --workers.")


def _journal(args: argparse.Namespace, told: Told) -> Journal:
    from hsprobe.cluster.continued import about
    from hsprobe.cluster.journal import Journal

    first = ("TRAIN" if args.second is not None else "INFER", args.first, repr(options_of(args)))
    second = () if args.second is None else (("INFER", args.second, ""),)
    journal = Journal(args.journal, about({name: (where, how) for name, where, how in (first, *second)}))
    if journal.anew:
        told(f"the journal {args.journal} is started anew: {journal.anew}", stays=True)
    elif journal.kept:
        parts = "1 part" if journal.kept == 1 else f"{journal.kept:,} parts"
        told(f"{parts} of this comparison done before, from {args.journal}", stays=True)
    return journal
