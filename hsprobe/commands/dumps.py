"""The flags that say about a training dump what it does not say itself."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hsprobe.formats.dump import Options


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add them as a group."""
    group = parser.add_argument_group(
        "training dumps", "what a dump does not say itself (see docs/formats.md)"
    )
    group.add_argument("--train-format", metavar="NAME", help="who wrote it, where that cannot be told")
    group.add_argument(
        "--train-layers",
        metavar="IDS",
        type=_ids,
        help="layer ids of its chunks, in its producer's numbering and stored order",
    )
    group.add_argument(
        "--train-final",
        choices=("pre", "post"),
        help="whether its last state is from before or after the final norm",
    )
    group.add_argument(
        "--train-first-token", metavar="ID", type=int, help="first token of each sample, where it was lost"
    )
    group.add_argument(
        "--map",
        metavar="NAME=PATH",
        action="append",
        default=[],
        type=_pair,
        help="of a foreign HDF5, npz or safetensors file: the data set that is NAME (input_ids, aux, final, "
        "layer/3); {} in PATH stands for the sample",
    )


def options_of(args: argparse.Namespace) -> Options:
    """What was given."""
    from hsprobe.formats.dump import Options

    return Options(
        format=args.train_format,
        layers=args.train_layers,
        final=args.train_final,
        first_token=args.train_first_token,
        maps=dict(args.map),
    )


def _ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of layer ids like 2,30,58") from None


def _pair(text: str) -> tuple[str, str]:
    name, equals, place = text.partition("=")
    if not (name and equals and place):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=PATH")
    return name, place
