"""Parsers whose last positional may be left out, wherever the options stand."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any


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
