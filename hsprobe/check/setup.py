"""The two models, the version and the algorithm of one check."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hsprobe.check import files
from hsprobe.check.captured import Captured, captured
from hsprobe.check.config import Config
from hsprobe.check.files import Weights
from hsprobe.check.trained import Trained, trained
from hsprobe.errors import HsprobeError
from hsprobe.formats.sglang_ids import parse_version
from hsprobe.formats.sglang_models import ALGORITHM_SINCE, ALGORITHMS, NEWEST, OLDEST, Version
from hsprobe.remote.location import Location

if TYPE_CHECKING:
    from hsprobe.formats.dump import Options

_TARGET_TENSORS = tuple(
    f"{prefix}{name}.weight"
    for prefix in ("", "model.", "language_model.", "language_model.model.", "model.language_model.")
    for name in ("embed_tokens", "lm_head")
)


@dataclass(frozen=True)
class Setup:
    """All that a rule may look at. `number` is the version as a tuple, to compare with."""

    target: Config
    draft: Config
    target_weights: Weights
    draft_weights: Weights
    version: str
    version_from: str
    algorithm: str
    algorithm_from: str
    captured: Captured
    train: Trained | None = None

    @property
    def number(self) -> Version:
        """The version as a tuple; the newest known where it cannot be read."""
        return parse_version(self.version) or parse_version(NEWEST) or ()

    def since(self, *version: int) -> bool:
        """Whether SGLang is of this version or a later one."""
        return self.number >= version

    @property
    def has_algorithm(self) -> bool:
        """Whether this version knows the algorithm."""
        return self.number >= ALGORITHM_SINCE.get(self.algorithm, ())

    @property
    def is_eagle3(self) -> bool:
        """Whether the draft is of the EAGLE-3 kind, whatever algorithm it is served with."""
        return draft_kind(self.draft, self.draft_weights) == "EAGLE3"


def prepare(
    target: Path,
    draft: Path,
    *,
    train: Location | None,
    dump: Options | None,
    version: str | None,
    algorithm: str | None,
) -> Setup:
    """Read both folders, and what the draft was trained on where that is given.

    Raises:
        HsprobeError: something cannot be read or makes no sense.
    """
    homes = files.folder(target), files.folder(draft)
    target_config, draft_config = (Config.read(home) for home in homes)
    target_weights = files.weights(homes[0], _TARGET_TENSORS)
    draft_weights = files.weights(homes[1])
    version, version_from = _version(version)
    algorithm, algorithm_from = _algorithm(algorithm, draft_config, draft_weights)
    return Setup(
        target=target_config,
        draft=draft_config,
        target_weights=target_weights,
        draft_weights=draft_weights,
        version=version,
        version_from=version_from,
        algorithm=algorithm,
        algorithm_from=algorithm_from,
        captured=captured(target_config, draft_config, version, algorithm),
        train=None if train is None else trained(train, dump, target_config.num_layers),
    )


def draft_kind(draft: Config, weights: Weights) -> str:
    """The algorithm that a draft was made for, from its class, else from its tensors.

    Source of the classes: `EntryClass` in `sglang/srt/models/*`; those of targets are rewritten to MTP heads
    by `configs/model_config.py` (`ModelConfig._config_draft_model`).
    """
    name = draft.architecture
    for word, kind in (("DSpark", "DSPARK"), ("DFlash", "DFLASH"), ("Assistant", "FROZEN_KV_MTP")):
        if word in name:
            return kind
    if "Eagle3" in name or "EAGLE3" in name:
        return "EAGLE3"
    if name.endswith(("NextN", "MTP")):
        return "NEXTN"
    if any(part in tensor for tensor in weights.named for part in ("midlayer.", "d2t", ".hidden_norm.")):
        return "EAGLE3"
    if draft.raw.get("eagle_config") or draft.raw.get("draft_vocab_size"):
        return "EAGLE3"
    return "EAGLE" if "Eagle" in name else "NEXTN"


def _algorithm(given: str | None, draft: Config, weights: Weights) -> tuple[str, str]:
    if given is None:
        return draft_kind(draft, weights), "from the draft's config and tensors"
    found = given.upper()
    if found not in ALGORITHMS:
        raise HsprobeError(
            f"There is no algorithm {given[:40]!r} that hands target states to a draft.",
            f"Give one of {', '.join(ALGORITHMS)}.",
        )
    return found, "as given"


def _version(given: str | None) -> tuple[str, str]:
    if given is not None:
        number = parse_version(given)
        if number is None or len(given) > 40 or not given.isprintable():
            raise HsprobeError(f"{given[:40]!r} is no version of SGLang.", "Give one like 0.5.23.")
        if number < (parse_version(OLDEST) or ()):
            return given, f"older than {OLDEST}, the oldest known: taken as that"
        newer = number > (parse_version(NEWEST) or ())
        return given, f"newer than {NEWEST}, the newest known: taken as that" if newer else "as given"
    try:
        return importlib.metadata.version("sglang"), "installed"
    except importlib.metadata.PackageNotFoundError:
        return NEWEST, "none is installed: the newest known"
