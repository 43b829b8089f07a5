"""The server hands over more or fewer chunks than the draft was trained on."""

from __future__ import annotations

from hsprobe.diagnose.evidence import Evidence
from hsprobe.diagnose.mend import ids_mend
from hsprobe.diagnose.model import Finding
from hsprobe.diagnose.naming import listed, plural

CODE = "LAYER_SET"
RANK = 12


def diagnose(evidence: Evidence, explained: frozenset[int]) -> list[Finding]:
    """One finding if the numbers differ. It accounts for all chunks: after a gap every place is another's."""
    if evidence.served is None or evidence.trained_chunks == evidence.served_chunks:
        return []
    handed = plural(evidence.served_chunks, "chunk")
    title = f"the draft is handed {handed} and was trained on {evidence.trained_chunks}"
    known = [depth for depth in evidence.served_depths if depth is not None]
    proof = []
    if len(known) == len(evidence.served_depths):
        proof.append(f"served depths {listed(known)}, trained on {listed(evidence.trained_depths)}")
    if evidence.served_chunks == 1 and evidence.trained_chunks > 1:
        proof.append(
            "SGLang hands over one chunk when aux capture is off: --speculative-algorithm EAGLE instead of "
            'EAGLE3, or "use_aux_hidden_state": false'
        )
    return [
        Finding(
            code=CODE,
            title=title,
            rank=RANK,
            confidence=1.0,
            evidence=proof,
            mend=ids_mend(evidence),
            chunks=[line.index for line in evidence.lines],
            agree=evidence.coverage.matched,
            rows=evidence.coverage.matched,
        )
    ]
