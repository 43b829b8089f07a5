"""SGLang's debug tensor dump (`--debug-tensor-dump-output-folder`): `PassNNNNN.pt`, leaf modules' outputs.

Source: SGLang 0.5.23, debug_utils/tensor_dump_forward_hook.py, and a run of it. Of a Llama's decoder layer k
the second output of `input_layernorm` is the residual stream that enters it (depth k), complete also with
tensor parallelism; `norm` gives the final state and, second, the stream after the last layer. `model` and
`logits_processor` are written after the file of their own pass was: they stand in the *next* file and are
left out. A pass is a flat batch; its requests are told apart by positions and lengths, and followed from pass
to pass.
"""

from __future__ import annotations

import re
from typing import Any

from hsprobe.errors import HsprobeError
from hsprobe.formats.dump import Match, Options, Reader
from hsprobe.formats.readers._passes import MAX_PASSES, PassReader
from hsprobe.formats.readers._streams import located
from hsprobe.formats.source import Source
from hsprobe.formats.stored import Ints, Stored, damaged

KEY = "sglang-passes"
NAME = "SGLang debug tensor dump"
_FILE = re.compile(r"(?:(.*)/)?Pass\d{5,}\.pt")
_INFO = ".forward_batch_info."


def detect(source: Source) -> Match | None:
    """By the files' names and the batch in the first."""
    for name in source.peek(".pt"):
        if _FILE.fullmatch(name):
            try:
                content = source.load(name)
            except HsprobeError:
                continue
            if isinstance(content, dict) and any(".layers." in str(key) for key in content):
                return Match(2, "its files are called PassNNNNN.pt")
    return None


def open_dump(source: Source, options: Options) -> Reader:
    """See `Format`."""
    return _Passes(source)


class _Passes(PassReader):
    """See `Reader`."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        folders: dict[str, list[str]] = {}
        for name in source.files(".pt"):
            found = _FILE.fullmatch(name)
            if found and "draft" not in (found[1] or "").split("/"):
                folders.setdefault(found[1] or "", []).append(name)
        if not folders:
            raise HsprobeError(
                f"{source.path} holds no PassNNNNN.pt of a target model.",
                "Give the folder that --debug-tensor-dump-output-folder named.",
            )
        folder, self.passes = next(iter(folders.items()))
        notes = []
        if len(folders) > 1:
            notes.append(f"of {len(folders)} ranks, {folder} is read")
        if len(self.passes) > MAX_PASSES:
            notes.append(f"only the first {MAX_PASSES:,} passes are read")
        self.layout = self.described(
            notes, "Dump again without --debug-tensor-dump-layers, or with the layers to compare."
        )

    def batch(self, where: str) -> tuple[Ints, Ints, Ints, list[str] | None]:
        """See `PassReader`. Requests have no ids here."""
        content = self._content(where)
        found = []
        for field in ("input_ids", "positions", "seq_lens"):
            value = next((one for key, one in content.items() if str(key).endswith(_INFO + field)), None)
            if not isinstance(value, Stored):
                raise damaged(where, f"it has no {field} of its batch")
            found.append(value.integers())
        return found[0], found[1], found[2], None

    def tensors(self, where: str) -> dict[str, Stored]:
        """See `PassReader`."""
        return located({str(key): value for key, value in self._content(where).items()})

    def _content(self, where: str) -> dict[Any, Any]:
        content = self._source.load(where)
        if not isinstance(content, dict):
            raise damaged(where, "it is no pass of SGLang's debug tensor dump")
        return content
