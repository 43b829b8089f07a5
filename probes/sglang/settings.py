"""What to record, read from the environment, which every process of a server inherits."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SITES = (
    "embed",
    "layer",
    "mid",
    "aux",
    "logits_processor",
    "draft.input",
    "draft.fc",
    "draft.embed",
    "draft.mixed",
    "draft.qkv",
    "draft.context",
    "draft.attention",
    "draft.gate_up",
    "draft.layer",
    "draft.final",
    "draft.logits",
)
DEFAULT_MAX_BYTES = 16 << 30


@dataclass(frozen=True)
class Settings:
    """One capture's choices.

    Attributes:
        directory: where spools go; ``None`` means the private folder named after the server's port.
        sites: names of the sites to record.
        depths: depths to record at the sites ``layer`` and ``mid``; ``None`` records all of them.
        max_bytes: spool size at which recording stops, in bytes, for each rank.
        ranks: the ranks that record; ``None`` means all of them.
    """

    directory: Path | None
    sites: frozenset[str]
    depths: frozenset[int] | None
    max_bytes: int
    ranks: frozenset[int] | None = None

    def wants(self, site: str, depth: int | None = None) -> bool:
        """Is this site (at this depth) to be recorded?"""
        return site in self.sites and (depth is None or self.depths is None or depth in self.depths)


def parse_numbers(text: str, what: str) -> frozenset[int]:
    """``"0,3,5-8"`` as a set of numbers.

    Args:
        what: what a number stands for, in the error: ``"depth"`` or ``"rank"``.

    Raises:
        ValueError: text is not a list of numbers and ranges.
    """
    numbers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is None:
            raise ValueError(f"{part!r} is not a {what} or a range of {what}s")
        first = int(match[1])
        numbers.update(range(first, int(match[2] or first) + 1))
    return frozenset(numbers)


def parse_sites(text: str) -> frozenset[str]:
    """``"aux,draft.input"`` as a set of site names; ``draft`` stands for all of the draft's.

    Raises:
        ValueError: a name is not a site.
    """
    sites: set[str] = set()
    for name in (part.strip() for part in text.split(",")):
        chosen = {site for site in SITES if site == name or site.startswith(f"{name}.")}
        if not chosen:
            raise ValueError(f"{name!r} is not a site; the sites are {', '.join(SITES)}")
        sites |= chosen
    return frozenset(sites)


def from_environment(environment: Mapping[str, str] = os.environ) -> Settings:
    """Read ``HSPROBE_CAPTURE`` and ``HSPROBE_SITES``, ``_DEPTHS``, ``_RANKS`` and ``_MAX_BYTES``.

    Raises:
        ValueError: one of them cannot be understood.
    """
    target = environment.get("HSPROBE_CAPTURE", "")
    sites, depths = environment.get("HSPROBE_SITES"), environment.get("HSPROBE_DEPTHS")
    ranks = environment.get("HSPROBE_RANKS")
    return Settings(
        directory=None if target in ("", "1") else Path(target),
        sites=parse_sites(sites) if sites else frozenset(SITES),
        depths=parse_numbers(depths, "depth") if depths else None,
        max_bytes=int(environment.get("HSPROBE_MAX_BYTES") or DEFAULT_MAX_BYTES),
        ranks=parse_numbers(ranks, "rank") if ranks else None,
    )
