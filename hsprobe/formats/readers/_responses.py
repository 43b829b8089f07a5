"""Answers of SGLang's `/generate` with hidden states, kept as JSON or JSON lines.

Source: SGLang 0.5.23, managers/scheduler_components/batch_result_processor.py, and a run of it.
`meta_info.hidden_states` is a list: first the rows of the prefill, then one row for each decode step; N
tokens answered have N - 1 decode rows, as the last never ran. In mode "last" it is a single row. An answer
holds the ids it generated (`output_ids`), not those it was sent: whoever keeps it has to add them, as
`input_ids`. Rows that a prefix cache or an earlier chunk spared are missing in front, so rows are laid at the
end of the prompt. Numbers are text, exact, and tell no type: they are read as float32.

Letters: S tokens of a prompt, N answered, n rows, W width.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from hsprobe.errors import HsprobeError
from hsprobe.formats.dump import Layout, Rows, Sample
from hsprobe.formats.source import Source
from hsprobe.formats.stored import Array, Ints, damaged, stored_array
from hsprobe.trace.schema import Phase

SUFFIXES = (".json", ".jsonl")
_NAME = re.compile(r"(.+)\[(\d{1,9})\]")
_MAX_FILES = 8


def found_in(source: Source) -> bool:
    """Whether the first files hold an answer with hidden states."""
    return first(source) is not None


def first(source: Source) -> dict[str, Any] | None:
    """The first answer with hidden states."""
    for name in source.peek(*SUFFIXES, count=_MAX_FILES):
        try:
            for answer in answers(source, name):
                if _states(answer):
                    return answer
        except HsprobeError:
            continue
    return None


def answers(source: Source, name: str) -> list[dict[str, Any]]:
    """The answers in a file: one, a list, or one a line."""
    content = source.load(name)
    found = content if isinstance(content, list) else [content]
    return [one for one in found if isinstance(one, dict)]


def width(answer: dict[str, Any]) -> int:
    """W of an answer's rows."""
    return int(_table("the first answer", _states(answer))[0].shape[1])


class Answers:
    """See `Reader`.

    Args:
        place: what the rows are, "aux" or "final".
    """

    def __init__(self, source: Source, layout: Layout, place: str) -> None:
        self.layout = layout
        self._source, self._place = source, place
        self._open: tuple[str, list[dict[str, Any]]] | None = None

    def names(self) -> Iterator[str]:
        """See `Reader`. Each file is read for it."""
        for file in self._source.files(*SUFFIXES):
            try:
                count = len(self._load(file))
            except HsprobeError:
                yield file
                continue
            yield from (f"{file}[{k}]" for k in range(count))

    def tokens(self, name: str) -> Ints | None:
        """See `Reader`."""
        sent, answered = _ids(name, self._answer(name))
        return np.concatenate([sent, answered])

    def sample(self, name: str) -> Sample:
        """See `Reader`."""
        answer = self._answer(name)
        sent, answered = _ids(name, answer)
        prefill, decode = _table(name, _states(answer))
        if len(prefill) > len(sent) or len(decode) > max(0, len(answered)):
            raise damaged(
                name, f"it has more rows than the {len(sent)} ids sent and {len(answered)} answered"
            )
        start = len(sent) - len(prefill)
        if not isinstance(_states(answer)[0], list):
            # Mode "last": the row of the last token that ran.
            start = len(sent) + max(0, len(answered) - 1) - 1
        rows = [Rows(self._place, (stored_array(name, prefill, "float32"),), start)]
        if len(decode):
            table = stored_array(name, decode, "float32")
            rows.append(Rows(self._place, (table,), len(sent), Phase.DECODE))
        return Sample(name, np.concatenate([sent, answered]), tuple(rows))

    def _answer(self, name: str) -> dict[str, Any]:
        found = _NAME.fullmatch(name)
        answers_ = self._load(found[1] if found else name)
        k = int(found[2]) if found else 0
        if k >= len(answers_):
            raise damaged(name, "there is no such answer")
        return answers_[k]

    def _load(self, file: str) -> list[dict[str, Any]]:
        if self._open is None or self._open[0] != file:
            self._open = (file, answers(self._source, file))
        return self._open[1]


def _states(answer: dict[str, Any]) -> list[Any]:
    meta = answer.get("meta_info")
    found = meta.get("hidden_states") if isinstance(meta, dict) else None
    return found if isinstance(found, list) else []


def _ids(name: str, answer: dict[str, Any]) -> tuple[Ints, Ints]:
    """(ids sent [S], ids answered [N])."""
    sent = answer.get("input_ids", answer.get("prompt_token_ids"))
    if sent is None:
        raise damaged(name, "it does not hold the ids that were sent; add them to it as input_ids")
    answered = answer.get("output_ids", answer.get("output_token_ids"))
    found = []
    for ids in (sent, answered if answered is not None else []):
        if not isinstance(ids, list) or not all(type(one) is int and 0 <= one < 1 << 31 for one in ids):
            raise damaged(name, "its token ids are no list of ids")
        found.append(np.array(ids, np.int64))
    if not len(found[0]):
        raise damaged(name, "no ids were sent")
    return found[0], found[1]


def _table(name: str, states: list[Any]) -> tuple[Array, Array]:
    """(rows of the prefill [n, W], rows of the decode steps [m, W]), float32."""
    if not states:
        raise damaged(name, "it has no hidden states")
    prefill = states[0] if isinstance(states[0], list) else [states]
    if prefill and not isinstance(prefill[0], list):
        # Nothing was prefilled here: all rows are those of decode steps.
        prefill, states = [], [None, *states]
    decode = states[1:] if isinstance(states[0], list) or states[0] is None else []
    found = []
    for rows in (prefill, decode):
        try:
            with np.errstate(over="ignore"):
                table = np.array(rows, np.float32)
        except (TypeError, ValueError, OverflowError) as error:
            raise damaged(name, "its hidden states are no rows of numbers of one width") from error
        found.append(table if len(rows) else np.zeros((0, 0), np.float32))
    shapes = {one.shape[1] for one in found if one.ndim == 2 and len(one)}
    if any(one.ndim != 2 for one in found) or len(shapes) != 1 or 0 in shapes:
        raise damaged(name, "its hidden states are no rows of numbers of one width")
    wide = shapes.pop()
    return (found[0] if len(found[0]) else np.zeros((0, wide), np.float32)), found[1]
