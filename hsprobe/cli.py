"""The command line: parse, call, exit. Exit codes as diff(1): 0 same, 1 different, 2 trouble."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence

from hsprobe import __version__
from hsprobe.commands import capture, check, convert, demo, diff, explain, impact, inspect, noise, run, watch
from hsprobe.commands.arguments import Parser
from hsprobe.errors import HsprobeError

TROUBLE = 2
INTERRUPTED = 130

_DESCRIPTION = """\
hsprobe answers one question for those who train a speculative-decoding draft
and serve it: are the hidden states that the draft sees in production the ones
it was trained on, and if not, what is wrong?
"""

_EPILOG = """\
examples:
  hsprobe demo
  hsprobe check --target TARGET --draft DRAFT
  hsprobe capture --server -o infer.h5 --prompts train.h5 -- --model-path TARGET ...
  hsprobe diff train.h5 infer.h5
  hsprobe inspect infer.h5

exit codes: 0 same (or done), 1 different, 2 trouble, 130 interrupted
"""


def build_parser() -> argparse.ArgumentParser:
    """The parser with all subcommands; the one chosen is in `run` of the parsed arguments."""
    parser = argparse.ArgumentParser(
        prog="hsprobe",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"hsprobe {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=Parser)
    for command in (demo, check, capture, run, watch, diff, impact, noise, inspect, convert, explain):
        command.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    args = build_parser().parse_args(argv)
    try:
        code = int(args.run(args))
        sys.stdout.flush()
    except HsprobeError as error:
        return _trouble(str(error))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (`head`, a pager) has gone; what is still buffered must not raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return TROUBLE
    except Exception as error:
        # Never Python's own exit code 1: that would read as "different".
        traceback.print_exc()
        return _trouble(f"This is a fault in hsprobe itself ({type(error).__name__}). Please report it.")
    return code


def _trouble(sentence: str) -> int:
    print(f"hsprobe: {' '.join(sentence.split())}", file=sys.stderr)
    return TROUBLE


if __name__ == "__main__":
    sys.exit(main())
