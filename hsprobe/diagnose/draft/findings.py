"""From verdicts on a draft to findings; imports no torch, as every fault class imports it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hsprobe.diagnose.draft.model import DraftFindings, Verdict
from hsprobe.diagnose.explanation import Explanation
from hsprobe.diagnose.model import Finding, Mend
from hsprobe.errors import HsprobeError
from hsprobe.trace.reader import Trace

UNEXPLAINED = "unexplained"


def held_against(trace: Trace, draft: Path | str, target: Path | str | None) -> DraftFindings:
    """The draft of a capture held against a checkpoint (see `gather.examine`).

    Raises:
        HsprobeError: torch is not installed, or as of `examine`.
    """
    try:
        from hsprobe.diagnose.draft.gather import examine
    except ImportError as error:
        raise HsprobeError(
            f"--draft needs {error.name}, which is not installed.",
            "Install it: pip install 'hsprobe[transformers]'",
        ) from None
    return examine(trace, draft, target)


def findings_of(kind: str, draft: DraftFindings | None, said: Explanation, rank: int) -> list[Finding]:
    """The findings of one fault class; verdicts that say the same of several sites are one."""
    if draft is None:
        return []
    verdicts = [verdict for verdict in draft.verdicts if verdict.kind == kind]
    if kind == UNEXPLAINED:
        verdicts = _first(verdicts)
    joined: dict[str, Verdict] = {}
    for verdict in verdicts:
        known = joined.get(verdict.title)
        if known is None:
            joined[verdict.title] = verdict
            continue
        joined[verdict.title] = replace(
            known,
            proof=[*known.proof, *verdict.proof],
            agree=known.agree + verdict.agree,
            rows=known.rows + verdict.rows,
            confidence=min(known.confidence, verdict.confidence),
        )
    return [
        said.finding(
            verdict.title,
            rank=rank,
            confidence=verdict.confidence,
            evidence=verdict.proof,
            mend=Mend(verdict.change, verdict.steps or [said.mend]),
            agree=verdict.agree,
            rows=verdict.rows,
        )
        for verdict in joined.values()
    ]


def _first(verdicts: list[Verdict]) -> list[Verdict]:
    """Only the first stage that nothing explains; later ones are named beside it."""
    if len(verdicts) < 2:
        return verdicts
    rest = ", ".join(verdict.site for verdict in verdicts[1:])
    return [replace(verdicts[0], proof=[*verdicts[0].proof, f"further on, {rest} differ too"])]
