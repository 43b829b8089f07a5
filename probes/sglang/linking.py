"""Whose rows a forward computes: the ids of its requests, in the order of its rows.

From 0.5.15 on a ForwardBatch says so itself (``rids``). In 0.5.9 it does not; its requests are those of the
batch that the scheduler is about to run, in the same order (``managers/schedule_batch.py:ScheduleBatch``).
Only the draft's pass over what was accepted leaves out requests that the verification before it has
finished (``speculative/eagle_info.py:EagleVerifyInput.verify``).
"""

from collections.abc import Sequence
from typing import Any

from hsprobe.probes.sglang.placing import NotRecordable

ACCEPTED_ONLY = "DRAFT_EXTEND"
"""The mode, in 0.5.9, of the draft's pass over the accepted rows: as many a request as were accepted."""


def rids_of(batch: Any, requests: Sequence[Any]) -> list[str]:
    """The ids of a ForwardBatch's requests; `requests` (SGLang's ``Req``) are those of the scheduler's batch.

    Raises:
        NotRecordable: the forward is over other requests than these.
    """
    if hasattr(batch, "rids"):
        return [str(rid) for rid in batch.rids or ()]
    mode = batch.forward_mode.name
    if mode == "IDLE":
        return []
    if mode == ACCEPTED_ONLY:
        requests = [request for request in requests if not request.finished()]
    if len(requests) != batch.batch_size:
        raise NotRecordable(
            f"a pass over {batch.batch_size} requests, where the scheduler's batch has {len(requests)}"
        )
    return [str(request.rid) for request in requests]
