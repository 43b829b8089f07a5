"""The prompts to send: token ids out of a trace, or lines of JSON."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hsprobe.errors import HsprobeError


@dataclass(frozen=True)
class Prompt:
    """One prompt, as token ids or as text that the server's own tokenizer will read."""

    input_ids: tuple[int, ...] | None = None
    text: str | None = None

    def payload(self) -> dict[str, Any]:
        """The prompt's part of a ``/generate`` request."""
        return {"text": self.text} if self.input_ids is None else {"input_ids": list(self.input_ids)}


def load_prompts(path: Path, limit: int | None = None) -> list[Prompt]:
    """Read prompts from a trace (its requests' prompts) or a JSONL file.

    Args:
        path: a trace, or a file whose lines are ``{"input_ids": [...]}`` or ``{"text": "..."}``.
        limit: keep the first so many.

    Raises:
        HsprobeError: the file is neither, or holds no prompt.
    """
    if not path.exists():
        raise HsprobeError(
            f"There is no file {path}.", "Give --prompts a trace or a JSONL file with input_ids or text."
        )
    prompts = _from_trace(path) if _is_hdf5(path) else _from_lines(path)
    if not prompts:
        raise HsprobeError(f"{path} holds no prompts.", "Give a file with at least one prompt.")
    return prompts[:limit]


def _is_hdf5(path: Path) -> bool:
    if path.is_dir():
        raise HsprobeError(f"{path} is a folder.", "Give --prompts a trace or a JSONL file.")
    with path.open("rb") as file:
        return file.read(8) == b"\x89HDF\r\n\x1a\n"


def _from_trace(path: Path) -> list[Prompt]:
    from hsprobe.trace.reader import Trace

    with Trace.open(path) as trace:
        requests = trace.requests
        return [
            Prompt(tuple(int(token) for token in requests.tokens(i)[: int(requests.prompt_len[i])]))
            for i in range(len(requests.ids))
        ]


def _from_lines(path: Path) -> list[Prompt]:
    prompts = []
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise HsprobeError(
            f"{path} is neither a trace nor text.", "Give --prompts a trace or a JSONL file."
        ) from None
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            prompts.append(_from_line(line, f"line {number} of {path}"))
    return prompts


def _from_line(line: str, where: str) -> Prompt:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError:
        entry = None
    if isinstance(entry, dict):
        ids, text = entry.get("input_ids"), entry.get("text")
        if isinstance(ids, list) and ids and all(isinstance(i, int) and i >= 0 for i in ids):
            return Prompt(input_ids=tuple(ids))
        if isinstance(text, str) and text:
            return Prompt(text=text)
    raise HsprobeError(
        f"Prompt {where} cannot be read.",
        'Write each line as {"input_ids": [1, 2, 3]} or {"text": "..."}.',
    )
