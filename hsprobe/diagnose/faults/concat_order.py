"""The right chunks in another order than the draft was trained with."""

from __future__ import annotations

from hsprobe.diagnose.evidence import Evidence
from hsprobe.diagnose.mend import permutation_steps
from hsprobe.diagnose.model import Finding, Mend, State
from hsprobe.diagnose.naming import listed, numbers
from hsprobe.diagnose.wording import declared_sentence, strength

CODE = "CONCAT"
RANK = 15


def diagnose(evidence: Evidence, explained: frozenset[int]) -> list[Finding]:
    """One finding if the served chunks are the training chunks, permuted."""
    order = _order(evidence)
    if order is None or order == list(range(len(order))):
        return []
    moved = [line for line in evidence.lines if line.state is State.WRONG]
    if not moved or explained & {line.index for line in moved}:
        return []
    trained = [line.trained for line in evidence.lines]
    served = [trained[j] for j in order]
    known = all(depth is not None for depth in trained)
    how = (
        f"trained on depths {listed(trained)}, served {listed(served)}"
        if known
        else f"served chunk {', '.join(f'{k} is training chunk {j}' for k, j in enumerate(order) if k != j)}"
    )
    confidence, agree, rows = strength(moved)
    depths = [d for d in served if isinstance(d, int)] if known else None
    return [
        Finding(
            code=CODE,
            title=f"aux chunks {numbers([line.index for line in moved])} come in another order: {how}",
            rank=RANK,
            confidence=confidence,
            evidence=declared_sentence(evidence.lines),
            mend=Mend(
                f"order of the training chunks: {list(range(len(order)))}  ->  {order}",
                permutation_steps(order, depths, sglang=evidence.serving.producer == "sglang"),
            ),
            chunks=[line.index for line in moved],
            agree=agree,
            rows=rows,
        )
    ]


def _order(evidence: Evidence) -> list[int] | None:
    """Served position -> training chunk, if that is a permutation."""
    lines = evidence.lines
    if len(lines) != evidence.trained_chunks or len(lines) != evidence.served_chunks:
        return None
    trained = [line.trained for line in lines]
    order = []
    for line in lines:
        if line.state is State.OK:
            order.append(line.index)
        elif line.served_chunk is not None:
            order.append(line.served_chunk)
        elif line.served is not None and trained.count(line.served) == 1:
            order.append(trained.index(line.served))
    return order if sorted(order) == list(range(len(lines))) else None
