"""One check, from two folders to a report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hsprobe.check.config import Config
from hsprobe.check.files import Weights
from hsprobe.check.model import CheckReport, Side
from hsprobe.check.registry import all_rules, problems
from hsprobe.check.setup import prepare
from hsprobe.remote.location import Location

if TYPE_CHECKING:
    from hsprobe.formats.dump import Options


def check(
    target: Path,
    draft: Path,
    *,
    train: Location | None = None,
    dump: Options | None = None,
    version: str | None = None,
    algorithm: str | None = None,
) -> CheckReport:
    """Check a draft against its target, for a version of SGLang.

    Args:
        target, draft: folders of the models. train: a trace or a dump of what the draft was trained on.
        dump: what the user says about a dump.
        version: of SGLang; None for the installed one, else the newest known.
        algorithm: None for the one that the draft was made for.

    Raises:
        HsprobeError: a file is missing, cut short, or makes no sense.
    """
    setup = prepare(target, draft, train=train, dump=dump, version=version, algorithm=algorithm)
    return CheckReport(
        target=_side(target, setup.target, setup.target_weights),
        draft=_side(draft, setup.draft, setup.draft_weights),
        version=setup.version,
        version_from=setup.version_from,
        algorithm=setup.algorithm,
        algorithm_from=setup.algorithm_from,
        captured=setup.captured,
        rules=len(all_rules()),
        problems=problems(setup),
    )


def _side(path: Path, config: Config, weights: Weights) -> Side:
    if weights.readable:
        held = f"{len(weights.named)} tensors"
    elif weights.missing:
        held = "files missing"
    else:
        held = "pickled weights, not opened" if weights.others else "no weights"
    return Side(
        path=str(path),
        architecture=config.architecture,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        dtype=config.dtype,
        weights=held,
    )
