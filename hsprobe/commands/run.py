"""`hsprobe run`: a command in whose SGLang servers the probes start, whatever the release of SGLang."""

from __future__ import annotations

import argparse
import os
import shutil

from hsprobe.errors import HsprobeError

_DESCRIPTION = """\
Run a command with hsprobe's probes in the SGLang servers that it starts.

SGLang from 0.5.11 on finds hsprobe by itself: there HSPROBE_CAPTURE=1 in the
environment is enough, and this command adds that. Older releases have no
plugins; this command starts the probes in their scheduler processes, with
nothing but the environment. Signals and the exit code are the command's own.

HSPROBE_CAPTURE, HSPROBE_SITES and the other variables keep the values that they have
(docs/production.md).
"""

_EPILOG = """\
examples:
  serve with SGLang 0.5.9, and record from it as often as you like
    hsprobe run -- python -m sglang.launch_server --port 30000 --model-path TARGET
    hsprobe capture --server http://127.0.0.1:30000 -o infer.h5 --prompts train.h5

exit codes: the command's own, or 2 where it cannot be started
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `run` to the command line."""
    parser = subparsers.add_parser(
        "run",
        help="run a server of any SGLang with the probes in it",
        usage="hsprobe run [-h] -- COMMAND ...",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", nargs="*", metavar="-- COMMAND ...", help="the command and its arguments")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Become the command.

    Raises:
        HsprobeError: there is none, or it cannot be started.
    """
    from hsprobe.probes import startup

    if not args.command:
        raise HsprobeError(
            "There is no command to run.",
            "Write it after --, as in: hsprobe run -- python -m sglang.launch_server --model-path TARGET",
        )
    program = shutil.which(args.command[0])
    if program is None:
        raise HsprobeError(
            f"{args.command[0]} is not a program that can be run here.", "Check its name and PATH."
        )
    environment = startup.environment()
    environment.setdefault("HSPROBE_CAPTURE", "1")
    try:
        os.execve(program, args.command, environment)
    except OSError as error:
        raise HsprobeError(
            f"{program} could not be started: {error.strerror}.", "Run it without hsprobe first."
        ) from None
