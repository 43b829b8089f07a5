"""One chunk, the final state, where several were trained on: the wrong algorithm was chosen."""

from __future__ import annotations

from hsprobe.diagnose.evidence import Evidence
from hsprobe.diagnose.explanation import Explanation
from hsprobe.diagnose.model import Finding, Mend

RANK = 11
EXPLANATION = Explanation(
    code="HS105",
    name="ALGO",
    summary="the draft is handed the target's final state where aux chunks were trained on",
    symptom=(
        "The acceptance length is exactly 1.00, and nothing warns: the draft skips its fc because the "
        "widths agree."
    ),
    cause=(
        '--speculative-algorithm EAGLE with an EAGLE-3 draft, or "use_aux_hidden_state": false: aux '
        "capture is off."
    ),
    evidence=(
        "One chunk of the hidden size is handed over, it equals the output of the final norm up to "
        "rounding, and the dump holds several chunks."
    ),
    mend="Serve with --speculative-algorithm EAGLE3 and leave use_aux_hidden_state on.",
)
_ONLY_EAGLE3 = "--speculative-algorithm: EAGLE  ->  EAGLE3"


def diagnose(evidence: Evidence, explained: frozenset[int]) -> list[Finding]:
    """One finding if the only chunk served is the final state."""
    if evidence.served is None or evidence.served_chunks != 1 or evidence.trained_chunks < 2:
        return []
    final = evidence.all_served == ["final"]
    algorithm = evidence.serving.algorithm
    # Without the final state in the capture, the server's own arguments are the evidence.
    argued = algorithm == "EAGLE" and evidence.all_served == [None]
    if not final and not argued:
        return []
    proof = []
    if final:
        proof.append(f"{evidence.served.name} equals the output of the final norm in every phase")
    if algorithm:
        proof.append(f"the server runs --speculative-algorithm {algorithm}")
    return [
        EXPLANATION.finding(
            f"the draft is handed the target's final state, one chunk, and was trained on "
            f"{evidence.trained_chunks} aux chunks",
            rank=RANK,
            confidence=1.0 if final else 0.8,
            evidence=proof,
            mend=Mend(_ONLY_EAGLE3 if algorithm == "EAGLE" else None, [EXPLANATION.mend]),
            chunks=[line.index for line in evidence.lines],
            agree=evidence.coverage.matched,
            rows=evidence.coverage.matched,
        )
    ]
