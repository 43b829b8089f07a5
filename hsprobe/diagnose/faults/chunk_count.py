"""The server hands over more or fewer chunks than the draft was trained on."""

from __future__ import annotations

from collections.abc import Sequence

from hsprobe.diagnose.evidence import Evidence
from hsprobe.diagnose.explanation import Explanation
from hsprobe.diagnose.mend import ids_mend
from hsprobe.diagnose.model import Depth, Finding
from hsprobe.diagnose.naming import depth_name, listed, plural

RANK = 12
EXPLANATION = Explanation(
    code="HS103",
    name="CHUNK_COUNT",
    summary="the draft is handed more or fewer chunks than it was trained on",
    symptom=(
        "A shape error in the draft's fc, or none at all where a check is missing and widths happen to agree."
    ),
    cause=(
        "A model class that captures the input of layers never captures the output of the last one, so "
        "that an id of L-1 is dropped in silence; pipeline stages drop the ids of others; equal ids "
        "collapse to one chunk; a dump lacks a layer."
    ),
    evidence=(
        "The widths of the two tensors, each over the hidden size. The chunks that are there are "
        "identified one by one, which tells the ones that are missing."
    ),
    mend="Ask for depths that the model can capture, and train on those.",
)


def diagnose(evidence: Evidence, explained: frozenset[int]) -> list[Finding]:
    """One finding if the numbers differ. It accounts for all chunks: after a gap every place is another's."""
    if evidence.served is None or evidence.trained_chunks == evidence.served_chunks:
        return []
    lines = [line.index for line in evidence.lines]
    if explained.issuperset(lines) and lines:
        return []
    handed = plural(evidence.served_chunks, "chunk")
    proof = []
    known = [depth for depth in evidence.all_served if depth is not None]
    if len(known) == len(evidence.all_served):
        proof.append(f"served depths {listed(known)}, trained on {listed(evidence.trained_depths)}")
        proof += _missing(known, evidence.trained_depths)
    return [
        EXPLANATION.finding(
            f"the draft is handed {handed} and was trained on {evidence.trained_chunks}",
            rank=RANK,
            confidence=1.0,
            evidence=proof,
            mend=ids_mend(evidence),
            chunks=lines,
            agree=evidence.coverage.matched,
            rows=evidence.coverage.matched,
        )
    ]


def _missing(served: Sequence[Depth], trained: Sequence[Depth]) -> list[str]:
    lost = [depth for depth in trained if depth not in served and depth is not None]
    more = [depth for depth in served if depth not in trained]
    found = []
    if lost and len(lost) == len(trained) - len(served):
        found.append(f"not served: {', '.join(depth_name(depth) for depth in lost)}")
    if more and None not in trained and len(more) == len(served) - len(trained):
        found.append(f"not trained on: {', '.join(depth_name(depth) for depth in more)}")
    return found
