"""Parsers whose last positional may be left out, wherever the options stand."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hsprobe.errors import HsprobeError
from hsprobe.remote.location import Location, Remote, locate


class Parser(argparse.ArgumentParser):
    """As argparse's own; with `intermixed` set, options may stand between required and optional positionals.

    Without that, an optional positional gets its default as soon as an option follows the one before it.
    """

    intermixed = False

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """See argparse."""
        if not self.intermixed:
            return super().parse_known_args(args, namespace)
        # The intermixed method calls this one, twice.
        self.intermixed = False
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self.intermixed = True


def readable(text: str) -> Location:
    """What dumps and traces are given as: a local path or a URL."""
    try:
        return locate(text)
    except HsprobeError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def local(text: str) -> Path:
    """What has to lie on this machine: files to write, folders of checkpoints."""
    found = readable(text)
    if isinstance(found, Remote):
        raise argparse.ArgumentTypeError(f"{text!r} is a URL, and this has to be a local path")
    return found


def positive(text: str) -> int:
    """A number of things, at least one."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value
