"""What to record, read from the environment, which every process of a server inherits."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hsprobe.probes.sglang import sampling
from hsprobe.probes.sglang.sampling import Sampling

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
DEFAULT_MEMORY = 256 << 20
DEFAULT_DEVICE_MEMORY = 1 << 30


@dataclass(frozen=True)
class Settings:
    """One capture's choices.

    Attributes:
        directory: where spools go; ``None`` means the private folder named after the server's port.
        sites: names of the sites to record.
        depths: depths to record at the sites ``layer`` and ``mid``; ``None`` records all of them.
        max_bytes: spool size at which recording stops, in bytes, for each rank.
        ranks: the ranks that record; ``None`` means all of them.
        memory: bytes of host memory, for each rank, for what waits to be written.
        device_memory: bytes of device memory, for each rank, for copies made inside CUDA graphs; 0 turns
            capture inside graphs off.
        sampling: what to record, and what to do when the writer falls behind.
    """

    directory: Path | None
    sites: frozenset[str]
    depths: frozenset[int] | None
    max_bytes: int = DEFAULT_MAX_BYTES
    ranks: frozenset[int] | None = None
    memory: int = DEFAULT_MEMORY
    device_memory: int = DEFAULT_DEVICE_MEMORY
    sampling: Sampling = field(default_factory=Sampling)

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


def parse_size(text: str) -> int:
    """``"512M"`` as a number of bytes; K, M, G and T stand for powers of 1024.

    Raises:
        ValueError: text is not a size.
    """
    match = re.fullmatch(r"\s*(\d+)\s*([KMGT]?)i?B?\s*", text, re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is not a size such as 512M or 16G")
    return int(match[1]) << (10 * " KMGT".index(match[2].upper() or " "))


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
    """Read ``HSPROBE_CAPTURE`` and ``HSPROBE_SITES``, ``_DEPTHS``, ``_RANKS``, ``_MAX_BYTES``, ``_MEMORY``,
    ``_DEVICE_MEMORY``, and what `sampling.from_environment` reads.

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
        ranks=parse_numbers(ranks, "rank") if ranks else None,
        max_bytes=_size(environment, "HSPROBE_MAX_BYTES", DEFAULT_MAX_BYTES),
        memory=_size(environment, "HSPROBE_MEMORY", DEFAULT_MEMORY),
        device_memory=_size(environment, "HSPROBE_DEVICE_MEMORY", DEFAULT_DEVICE_MEMORY),
        sampling=sampling.from_environment(environment),
    )


def _size(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name)
    return parse_size(text) if text else default
