"""ModelOpt's hidden states, by its scripts on transformers and on TensorRT-LLM: a `<conversation>.pt` each.

Source: NVIDIA Model-Optimizer a2fbac7b, examples/speculative_decoding/collect_hidden_states. An id names the
output of its layer; chunks ascend. `hidden_states` is the final state, after the norm. Nothing is shifted or
padded; layer ids are not stored. The script on TensorRT-LLM stores no `loss_mask`. Files as TensorRT-LLM
itself leaves them (a list of one mapping, `hidden_state`) are read too.

The third script, on vLLM, writes the same names and means other things: see `modelopt_vllm`.
"""

from __future__ import annotations

from typing import Any

from hsprobe.errors import HsprobeError
from hsprobe.formats.dump import (
    Chunks,
    Final,
    Layout,
    Match,
    Numbering,
    Options,
    Reader,
    Rows,
    Sample,
    Sure,
    eagle3_depths,
)
from hsprobe.formats.readers._samples import FileSamples, ids, mask, tensor
from hsprobe.formats.source import Source
from hsprobe.formats.stored import Stored, damaged

KEY = "modelopt"
NAME = "ModelOpt (transformers or TensorRT-LLM script)"
SUFFIXES = (".pt",)
_NUMBERING = Numbering("--aux-layers", 1)
_AUX = ("aux_hidden_states", "hidden_state_features")
_TRIED = 8


def detect(source: Source) -> Match | None:
    """By the names and the ranks; its tensors are stored each on its own."""
    found = first(source)
    if found is None:
        return None
    if of_vllm(found):
        return Match(1, "it has hidden_states and aux_hidden_states")
    return Match(2, "it has hidden_states and aux_hidden_states, each stored on its own")


def open_dump(source: Source, options: Options) -> Reader:
    """See `Format`."""
    return samples(source, options, _NUMBERING, Final("post", Sure.DEFAULT))


def first(source: Source) -> dict[str, Any] | None:
    """The first sample that has ModelOpt's names and ranks."""
    for name in source.peek(*SUFFIXES, count=_TRIED):
        try:
            content = unwrapped(source.load(name))
        except HsprobeError:
            continue
        final = content.get("hidden_states", content.get("hidden_state"))
        named = "hidden_states" in content or "id" in content
        aux = next((content[key] for key in _AUX if key in content), None)
        if named and isinstance(final, Stored) and final.ndim == 2 and isinstance(aux, Stored):
            return content
    return None


def of_vllm(content: dict[str, Any]) -> bool:
    """Whether the tensors are parts of one wider one, as only the script on vLLM stores them."""
    final, aux = content.get("hidden_states"), content.get("aux_hidden_states")
    if not (isinstance(final, Stored) and isinstance(aux, Stored)):
        return False
    return not final.dense or not aux.size


def unwrapped(content: Any) -> dict[str, Any]:
    """The mapping of a sample, also where TensorRT-LLM put it into a list; empty for anything else."""
    if isinstance(content, list) and len(content) == 1:
        content = content[0]
    return content if isinstance(content, dict) else {}


class _Samples(FileSamples):
    """One sample a file, in a list or not."""

    def sample(self, name: str) -> Sample:
        """See `Reader`."""
        return self._parse(name, unwrapped(self._source.load(name)))


def samples(source: Source, options: Options, numbering: Numbering, final: Final) -> Reader:
    """The samples of a folder, in the conventions given.

    Raises:
        HsprobeError: none of the first files is a sample.
    """
    found = first(source)
    if found is None:
        raise HsprobeError(
            f"{source.path} holds no sample of ModelOpt that can be read.",
            "Give the folder with its .pt files.",
        )
    width = _final(str(source.path), found).shape[1]
    aux = next(found[key] for key in _AUX if key in found)
    chunks = None
    if aux.ndim == 2 and width and aux.size:
        chunks = Chunks(aux.shape[1] // width, numbering, default=_defaults)
    layout = Layout(hidden=width or None, aux=chunks, final=final)
    vllm = of_vllm(found)

    def parse(name: str, content: dict[str, Any]) -> Sample:
        if options.format is None and of_vllm(content) != vllm:
            raise damaged(name, "another of ModelOpt's scripts wrote it than the samples before it")
        return _sample(name, content)

    return _Samples(source, layout, SUFFIXES, parse)


def _defaults(num_layers: int) -> tuple[int, ...]:
    # A set in its code: a shallow model has fewer than three.
    return tuple(sorted(set(eagle3_depths(num_layers))))


def _final(name: str, content: dict[str, Any]) -> Stored:
    return tensor(name, content, "hidden_states" if "hidden_states" in content else "hidden_state", 2)


def _sample(name: str, content: dict[str, Any]) -> Sample:
    tokens, final = ids(name, content), _final(name, content)
    rows = [Rows("final", (final,))]
    for key in _AUX:
        aux = content.get(key)
        if isinstance(aux, Stored) and aux.size:
            aux = tensor(name, content, key, 2)
            if aux.shape[0] != final.shape[0]:
                raise damaged(
                    name, f"it has {aux.shape[0]} rows of {key} and {final.shape[0]} of the final state"
                )
            rows.append(Rows("aux", (aux,)))
    return Sample(name, tokens, tuple(rows), loss_mask=mask(content))
