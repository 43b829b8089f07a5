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
from collections.abc import Iterator
from typing import Any

from hsprobe.errors import HsprobeError
from hsprobe.formats.dump import Final, Layout, Match, Options, Reader, Sample, Sure
from hsprobe.formats.readers import _passes
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


class _Passes:
    """See `Reader`."""

    def __init__(self, source: Source) -> None:
        self._source = source
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
        self._folder, self._files = next(iter(folders.items()))
        self._chains: dict[str, _passes.Chain] | None = None
        self._loaded: dict[str, dict[str, Stored]] = {}
        self.layout = self._layout(len(folders))

    def _layout(self, folders: int) -> Layout:
        notes = []
        if folders > 1:
            notes.append(f"of {folders} ranks, {self._folder} is read")
        if len(self._files) > _passes.MAX_PASSES:
            notes.append(f"only the first {_passes.MAX_PASSES:,} passes are read")
        for name in self._files:
            try:
                tensors = self._tensors(name)
            except HsprobeError:
                continue
            if tensors:
                hidden = next(iter(tensors.values())).shape[-1]
                final = Final("post", Sure.RECORDED) if "final" in tensors else None
                return Layout(hidden=hidden, final=final, notes=tuple(notes))
        raise HsprobeError(
            f"{self._source.path} holds no output of a layer's input norm, so none of the residual stream.",
            "Dump again without --debug-tensor-dump-layers, or with the layers to compare.",
        )

    def names(self) -> Iterator[str]:
        """See `Reader`. The batch of each pass is read for it."""
        return iter(self._requests())

    def tokens(self, name: str) -> Ints | None:
        """See `Reader`."""
        return _passes.token_ids(self._chain(name))

    def sample(self, name: str) -> Sample:
        """See `Reader`."""
        chain = self._chain(name)
        tensors = {piece.where: self._tensors(piece.where) for piece in chain.pieces}
        return _passes.sample(name, chain, tensors)

    def _chain(self, name: str) -> _passes.Chain:
        chain = self._requests().get(name)
        if chain is None:
            raise damaged(name, "there is no such request")
        return chain

    def _requests(self) -> dict[str, _passes.Chain]:
        if self._chains is None:
            chains = _passes.Chains()
            for name in self._files[: _passes.MAX_PASSES]:
                try:
                    chains.add(name, *self._batch(name), None)
                except HsprobeError as error:
                    self._source.unread.append((name, error.what))
            self._chains = {chain.name: chain for chain in chains.found}
        return self._chains

    def _batch(self, name: str) -> tuple[Ints, Ints, Ints]:
        """(ids, positions, lengths) of a pass."""
        content = self._content(name)
        found = []
        for field in ("input_ids", "positions", "seq_lens"):
            value = next((one for key, one in content.items() if str(key).endswith(_INFO + field)), None)
            if not isinstance(value, Stored):
                raise damaged(name, f"it has no {field} of its batch")
            found.append(value.integers())
        return found[0], found[1], found[2]

    def _tensors(self, name: str) -> dict[str, Stored]:
        """Name in a trace -> tensor of a pass."""
        return located({str(key): value for key, value in self._content(name).items()})

    def _content(self, name: str) -> dict[Any, Any]:
        content = self._source.load(name)
        if not isinstance(content, dict):
            raise damaged(name, "it is no pass of SGLang's debug tensor dump")
        return content
