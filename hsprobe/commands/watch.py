"""`hsprobe watch`: what a running server records, while it does."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from hsprobe.commands.arguments import readable
from hsprobe.errors import HsprobeError

if TYPE_CHECKING:
    from hsprobe.capture.watch import Tally, Watch

_DESCRIPTION = """\
Show what a server records while a capture is under way: passes, rows,
acceptance, disk, gaps, and with --against the error of every site so far.
Nothing is sent to the server; it may be watched beside any capture.
"""

_EPILOG = """\
examples:
  hsprobe watch http://127.0.0.1:30000 --against train.h5
  hsprobe watch SPOOLS --once

exit codes: 0 done, 2 trouble
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `watch` to the command line."""
    parser = subparsers.add_parser(
        "watch",
        help="show what a running server records",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "server", metavar="SERVER", help="URL of a server started with HSPROBE_CAPTURE, or its spool folder"
    )
    parser.add_argument("--against", metavar="TRAIN", type=readable, help="trace to compare with")
    parser.add_argument(
        "--every", metavar="S", type=_seconds, default=1.0, help="seconds between looks (default: 1)"
    )
    parser.add_argument("--once", action="store_true", help="show what there is, and end")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 when the server has ended, or Ctrl-C. Raises HsprobeError for trouble."""
    from hsprobe.capture.watch import Reference, Watch
    from hsprobe.trace.reader import Trace

    folder = _folder(args.server)
    with ExitStack() as stack:
        reference = None
        if args.against is not None:
            reference = Reference(stack.enter_context(Trace.open(args.against)))
        watch = Watch(folder, reference)
        if args.once:
            _print(watch.read(), compared=reference is not None)
        else:
            _follow(watch, args.every, compared=reference is not None)
    return 0


def _follow(watch: Watch, seconds: float, *, compared: bool) -> None:
    """Until the server ends, its folder goes, or a person has seen enough."""
    import time

    from rich.console import Console
    from rich.live import Live

    from hsprobe.report import watching

    console = Console(highlight=False, emoji=False, markup=False)
    try:
        if not console.is_terminal:
            said = ""
            while watch.folder.is_dir() and not watch.read().ended:
                now = watching.line(watch.tally)
                if now != said:
                    print(now, flush=True)
                said = now
                time.sleep(seconds)
            _print(watch.tally, compared=compared)
            return
        with Live(console=console, auto_refresh=False) as live:
            while watch.folder.is_dir():
                live.update(watching.screen(watch.read(), compared=compared), refresh=True)
                if watch.tally.ended:
                    return
                time.sleep(seconds)
    except KeyboardInterrupt:
        return


def _print(tally: Tally, *, compared: bool) -> None:
    from rich.console import Console

    from hsprobe.report import watching
    from hsprobe.report.terminal import printed

    console = Console(highlight=False, emoji=False, markup=False)
    print(printed(watching.screen(tally, compared=compared), console), end="")


def _folder(server: str) -> Path:
    if "://" not in server:
        folder = Path(server)
    else:
        import urllib.parse

        from hsprobe.trace.place import directory_for_port

        try:
            folder = directory_for_port(urllib.parse.urlsplit(server).port or 80)
        except ValueError:
            raise HsprobeError(
                f"{server} is not an address.", "Write it as http://127.0.0.1:30000."
            ) from None
    if not folder.is_dir():
        raise HsprobeError(
            f"There is no spool folder {folder}.",
            "Start the server on this machine and as this user with HSPROBE_CAPTURE=1, or name its folder.",
        )
    return folder


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.05 <= value <= 3600:
        raise argparse.ArgumentTypeError("must be from 0.05 to 3600")
    return value
