"""What was asked and answered: the token ids of requests, which tell the context of every row."""

from collections.abc import Sequence
from typing import Any

from hsprobe.probes.sglang.sampling import Sampling


class Requests:
    """The requests seen since the capture was armed."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._running: dict[str, Any] = {}

    @property
    def running(self) -> int:
        """How many have begun and not ended."""
        return len(self._running)

    def forget(self) -> None:
        """Another capture begins."""
        self._known.clear()
        self._running.clear()

    def prompts(self, requests: Sequence[Any], sampling: Sampling) -> list[dict[str, Any]]:
        """Id and prompt of each request (SGLang's ``Req``) not seen before that is to be recorded."""
        found = []
        for request in requests:
            rid = request.rid
            if rid in self._known or not sampling.wants_any([rid]):
                continue
            self._known.add(rid)
            self._running[rid] = request
            found.append({"rid": rid, "origin_ids": [int(token) for token in request.origin_input_ids]})
        return found

    def finished(self) -> list[dict[str, Any]]:
        """Id and answer of each request that has ended since the last time."""
        found = []
        for rid, request in list(self._running.items()):
            if request.finished():
                del self._running[rid]
                # What was generated past a stop is not part of the answer.
                output = list(request.output_ids)[: getattr(request, "finished_len", None)]
                found.append({"rid": rid, "output_ids": [int(token) for token in output]})
        return found
