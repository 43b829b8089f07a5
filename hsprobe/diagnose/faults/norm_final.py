"""The final norm applied where the stream before it was trained on, or the other way round."""

from __future__ import annotations

from hsprobe.diagnose.aspects import form_findings
from hsprobe.diagnose.evidence import Evidence
from hsprobe.diagnose.explanation import Explanation
from hsprobe.diagnose.model import ChunkLine, Finding, Mend, State
from hsprobe.diagnose.naming import depth_name, numbers
from hsprobe.diagnose.wording import figure

RANK = 22
NORM = "final"
EXPLANATION = Explanation(
    code="HS201",
    name="NORM_FINAL",
    summary="the final norm is applied on one side and not on the other",
    symptom=(
        "Acceptance is several to tens of per cent down, though the states look alike: the cosine stays "
        "above 0.9 while row sizes differ."
    ),
    cause=(
        "The last entry of transformers' hidden_states is after the final norm, all others are before it; "
        "SGLang hands over the stream before it. A serving path that takes what goes into the logits "
        "hands over the normed state."
    ),
    evidence=(
        "One side equals the other's state, RMS-normed, times one gain per channel; fitted on half of the "
        "rows, the gain holds on the other half and is the weight of the final norm."
    ),
    mend=(
        "Take the state on the same side of the final norm in both places: in a dump from transformers, "
        "take the last layer's output by a hook rather than hidden_states[-1]."
    ),
)


def diagnose(evidence: Evidence, explained: frozenset[int]) -> list[Finding]:
    """Chunks that were found normed, and chunks whose depth is `final` on one side alone."""
    if evidence.served_chunks == 1 < evidence.trained_chunks:
        # The final state in place of the chunks is the algorithm's fault, not a norm's.
        return []
    found = form_findings(evidence, EXPLANATION, RANK)
    known = {index for finding in found for index in finding.chunks}
    plain = [line for line in evidence.lines if line.index not in known and _one_sided(line)]
    if evidence.trained_chunks != evidence.served_chunks or not plain:
        return found
    line = plain[0]
    side, other = ("served", "trained") if line.served == "final" else ("trained", "served")
    state = line.served if side == "trained" else line.trained
    noun = "chunk" if len(plain) == 1 else "chunks"
    title = (
        f"aux {noun} {numbers([one.index for one in plain])}: {side} after the final norm,"
        f" {other} before it ({depth_name(state)})"
    )
    return [
        *found,
        EXPLANATION.finding(
            title,
            rank=RANK,
            confidence=min(one.confidence for one in plain),
            evidence=[
                f"chunk {one.index} against the output of the final norm: error {figure(one.best_error)}"
                for one in plain
            ],
            mend=Mend(steps=[EXPLANATION.mend]),
            chunks=[one.index for one in plain],
            agree=min(one.agree for one in plain),
            rows=min(one.rows for one in plain),
        ),
    ]


def _one_sided(line: ChunkLine) -> bool:
    if line.state not in (State.WRONG, State.FORM) or None in (line.served, line.trained):
        return False
    return (line.served == "final") != (line.trained == "final")
