"""The prompts to send: token ids out of a trace or a training dump, or lines of JSON."""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hsprobe.errors import HsprobeError
from hsprobe.remote.location import Location

if TYPE_CHECKING:
    from hsprobe.formats.dump import Options


@dataclass(frozen=True)
class Prompt:
    """One prompt, as token ids or as text that the server's own tokenizer will read."""

    input_ids: tuple[int, ...] | None = None
    text: str | None = None

    def payload(self) -> dict[str, Any]:
        """The prompt's part of a ``/generate`` request."""
        return {"text": self.text} if self.input_ids is None else {"input_ids": list(self.input_ids)}


def load_prompts(path: Location, limit: int | None = None, options: "Options | None" = None) -> list[Prompt]:
    """Read prompts from a trace (its requests' prompts), a training dump (its samples) or a JSONL file.

    Args:
        path: a trace, a dump, or a file whose lines are ``{"input_ids": [...]}`` or ``{"text": "..."}``.
        limit: keep the first so many; no more samples of a dump are read.
        options: what is known of a dump that it does not say itself.

    Raises:
        HsprobeError: the file is neither, or holds no prompt.
    """
    if not path.exists():
        raise HsprobeError(
            f"There is no file {path}.",
            "Give --prompts a trace, a dump, or a JSONL file of input_ids or text.",
        )
    prompts = _from_lines(path) if _is_text(path) else _from_states(path, limit, options)
    if not prompts:
        raise HsprobeError(f"{path} holds no prompts.", "Give a file with at least one prompt.")
    return prompts[:limit]


def _is_text(path: Location) -> bool:
    """Whether it may be JSONL: no folder, and no byte at its beginning that text does not have."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return all(byte >= 0x20 or byte in b"\t\r\n" for byte in file.read(8)) or path.suffix == ".jsonl"


def _from_states(path: Location, limit: int | None, options: "Options | None") -> list[Prompt]:
    from hsprobe.formats.registry import is_trace

    return _from_trace(path) if is_trace(path) else _from_dump(path, limit, options)


def _from_dump(path: Location, limit: int | None, options: "Options | None") -> list[Prompt]:
    from hsprobe.formats.registry import open_dump

    dump = open_dump(path, options)
    prompts: list[Prompt] = []
    for name in dump.reader.names():
        if limit is not None and len(prompts) >= limit:
            break
        tokens = dump.tokens(name)
        if tokens is None or not len(tokens):
            continue
        if int(tokens.min()) < 0:
            raise HsprobeError(
                f"{path} ({dump.name}) has lost the first token of its samples.",
                "Give its id with --train-first-token.",
            )
        prompts.append(Prompt(tuple(tokens.tolist())))
    if not prompts and dump.skipped:
        raise HsprobeError(f"No sample of {path} can be read; the first: {dump.skipped[0][1]}",
                           "Fetch a sound copy of the dump.")  # fmt: skip
    return prompts


def _from_trace(path: Location) -> list[Prompt]:
    from hsprobe.trace.reader import Trace

    with Trace.open(path) as trace:
        requests = trace.requests
        return [
            Prompt(tuple(int(token) for token in requests.tokens(i)[: int(requests.prompt_len[i])]))
            for i in range(len(requests.ids))
        ]


def _from_lines(path: Location) -> list[Prompt]:
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
