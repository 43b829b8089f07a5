"""`hsprobe demo`: the founding case, on traces of a real server that come with hsprobe."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from hsprobe.commands.arguments import local
from hsprobe.errors import HsprobeError

if TYPE_CHECKING:
    from hsprobe.diagnose import Report

_DESCRIPTION = """\
Compare what a draft was trained on with what two servers handed it: one with
eagle_aux_hidden_state_layer_ids that begin with -1, and one with the ids that
hsprobe then names. The traces were recorded from SGLang 0.5.23 and come with
hsprobe; neither SGLang nor a GPU is needed.
"""

_EPILOG = """\
examples:
  hsprobe demo
  hsprobe demo -o traces && hsprobe diff traces/train.h5 traces/broken.h5

exit codes: 0 done, 2 trouble
"""

_CASES = (
    ("broken.h5", "served with eagle_aux_hidden_state_layer_ids [-1, 5, 8]: nothing crashes"),
    ("right.h5", "served with the ids that hsprobe named"),
)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `demo` to the command line."""
    parser = subparsers.add_parser(
        "demo",
        help="show what hsprobe finds, on traces that come with it",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-o", "--output", metavar="DIR", type=local, help="copy the traces to DIR")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 once shown. Raises HsprobeError where the traces cannot be copied."""
    from importlib.resources import as_file, files

    from rich.console import Console

    from hsprobe.report import terminal

    console = Console(highlight=False, emoji=False, markup=False)
    with as_file(files("hsprobe.data")) as folder:
        if args.output is not None:
            folder = _copied(folder, args.output)
        for name, what in _CASES:
            report = _compared(folder, name, args.output or Path())
            print(f"# {what}\n$ hsprobe diff {report.train.path} {report.infer.path}")
            print(terminal.printed(terminal.render(report), console))
    return 0


def _compared(folder: Path, name: str, shown: Path) -> Report:
    """The report of one case, its traces under the names that a person would give."""
    from dataclasses import replace

    from hsprobe.diagnose import diff

    report = diff(folder / "train.h5", folder / name)
    train = replace(report.train, path=str(shown / "train.h5"))
    return replace(report, train=train, infer=replace(report.infer, path=str(shown / name)))


def _copied(source: Path, target: Path) -> Path:
    import shutil

    try:
        target.mkdir(parents=True, exist_ok=True)
        for trace in sorted(source.glob("*.h5")):
            shutil.copy(trace, target)
    except OSError as error:
        raise HsprobeError(
            f"The traces cannot be copied to {target}: {error.strerror}.", "Give another -o DIR."
        ) from error
    return target
