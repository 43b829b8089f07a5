"""Rows that hold NaN or Inf."""

from __future__ import annotations

from hsprobe.diagnose.evidence import Evidence
from hsprobe.diagnose.explanation import Explanation
from hsprobe.diagnose.model import Finding, Mend
from hsprobe.diagnose.naming import depth_name, plural

RANK = 10
EXPLANATION = Explanation(
    code="HS502",
    name="NONFINITE",
    summary="rows hold NaN or Inf",
    symptom="Acceptance is 1.00 in the requests concerned, or sampling fails.",
    cause=(
        "Rows written to the wrong cache slots, padding rows that were never masked, an overflow of fp16."
    ),
    evidence=(
        "The rows are counted on each side and the first is named; all comparisons go on without them. A "
        "capture of every depth shows where they begin."
    ),
    mend="Find the first depth that has them; on the training side drop or recompute the rows.",
)


def diagnose(evidence: Evidence, explained: frozenset[int]) -> list[Finding]:
    """One finding a side. It accounts only for chunks that have no finite row left."""
    found = []
    for side, word in (("infer", "capture"), ("train", "training dump")):
        counts = {
            line.index: line.nonfinite_infer if side == "infer" else line.nonfinite_train
            for line in evidence.lines
        }
        bad = {index: count for index, count in counts.items() if count}
        layers = [line for line in evidence.layers if line.nonfinite]
        if not bad and not (layers and side == "infer"):
            continue
        if bad:
            compared = max(line.compared for line in evidence.lines)
            title = (
                f"{plural(max(bad.values()), 'row')} of the {word} hold NaN or Inf, of {compared:,} compared"
            )
        else:
            title = f"{plural(layers[0].nonfinite, 'row')} hold NaN or Inf at {depth_name(layers[0].depth)}"
        proof = [
            f"aux chunk {line.index}: {plural(bad[line.index], 'row')}, the first at {line.nonfinite_at}"
            for line in evidence.lines
            if line.index in bad
        ]
        if layers and side == "infer":
            proof.append(f"first at {depth_name(layers[0].depth)}")
        found.append(
            EXPLANATION.finding(
                title,
                rank=RANK,
                confidence=1.0,
                evidence=[*proof, "all other rows were compared without them"],
                mend=Mend(steps=_steps(side)),
                chunks=[
                    line.index
                    for line in evidence.lines
                    if line.compared and not _finite(evidence, line.index)
                ],
                agree=max(bad.values(), default=0),
                rows=max((line.compared for line in evidence.lines), default=0),
                tally="rows affected",
            )
        )
    return found


def _finite(evidence: Evidence, index: int) -> int:
    return next(chunk.direct.total.finite for chunk in evidence.chunks if chunk.line.index == index)


def _steps(side: str) -> list[str]:
    if side == "train":
        return ["The draft was trained on these rows: drop or recompute them."]
    return ["A capture of every depth ('--sites aux,layer') shows the first depth at which they appear."]
