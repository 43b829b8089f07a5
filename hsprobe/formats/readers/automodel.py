"""NeMo Automodel's cache for EAGLE-3: `manifest.json` and `shard-<n>.safetensors`, many samples in each.

Source: nemo-automodel 0.7.0, components/datasets/llm/eagle3_cache.py, speculative/precompute_eagle3.py and
speculative/eagle/target.py. The manifest records the layer ids, which name outputs of layers, and the chunks
lie in the order given. `input_ids` and `loss_mask` are stored shifted one to the left, the last one zero, and
the hidden states are not: row t belongs to the id before the one stored beside it, and the first id is lost.
Samples are padded on the right, as `attention_mask` tells. There is no final state.

Letters: n samples of a shard, S stored length of each, K chunks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from hsprobe.errors import HsprobeError
from hsprobe.formats.dump import (
    UNKNOWN,
    Chunks,
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
from hsprobe.formats.readers._samples import tensor
from hsprobe.formats.source import Source
from hsprobe.formats.stored import Ints, damaged

KEY = "automodel"
NAME = "NeMo Automodel"
_MANIFEST = "manifest.json"
_VERSION = 2
_SHARD = "shard-{:06d}.safetensors"
_FILE = re.compile(r"shard-\d{6}\.safetensors")
_NAME = re.compile(r"(shard-\d{6}\.safetensors)\[(\d{1,9})\]")
_NUMBERING = Numbering("aux_layer_ids", 1)


def detect(source: Source) -> Match | None:
    """By the manifest."""
    if not source.is_folder or not source.has(_MANIFEST) or not source.has(_SHARD.format(0)):
        return None
    try:
        manifest = source.load(_MANIFEST)
    except HsprobeError:
        return None
    known = isinstance(manifest, dict) and "aux_layer_ids" in manifest
    return Match(3, "its manifest names aux_layer_ids") if known else None


def open_dump(source: Source, options: Options) -> Reader:
    """See `Format`."""
    manifest = source.load(_MANIFEST)
    if not isinstance(manifest, dict):
        raise damaged(_MANIFEST, "it is no manifest of a cache")
    version = manifest.get("format_version")
    if version != _VERSION:
        raise HsprobeError(
            f"{source.path} is a cache of NeMo Automodel in format version {str(version)[:40]}, and this "
            f"hsprobe reads version {_VERSION}.",
            "Install a newer hsprobe, or write the cache again.",
        )
    return _Shards(source, manifest)


def _layout(manifest: dict[str, Any], whole: str) -> Layout:
    ids = manifest.get("aux_layer_ids")
    if not isinstance(ids, list) or not ids or not all(type(one) is int and 0 <= one < 10_000 for one in ids):
        raise damaged(_MANIFEST, "its aux_layer_ids are no list of layers")
    width = manifest.get("aux_hidden_dim")
    target = manifest.get("target_model")
    return Layout(
        hidden=width // len(ids) if type(width) is int and width > 0 else None,
        aux=Chunks(
            len(ids), _NUMBERING, tuple(_NUMBERING.depth(one) for one in ids), Sure.RECORDED, eagle3_depths
        ),
        shift=1,
        padding="attention_mask tells the padded rows",
        notes=("the id of each sample's first token is not stored", *([whole] if whole else [])),
        model={"path": target} if isinstance(target, str) else {},
    )


class _Shards:
    """See `Reader`."""

    def __init__(self, source: Source, manifest: dict[str, Any]) -> None:
        self._source = source
        sizes = [manifest.get("num_samples"), manifest.get("shard_size")]
        if not all(type(one) is int and 0 < one < 1 << 40 for one in sizes):
            raise damaged(_MANIFEST, "its num_samples or its shard_size is no number of samples")
        self._samples, self._size = int(sizes[0] or 0), int(sizes[1] or 0)
        self._shards = [name for name in source.files(".safetensors") if _FILE.fullmatch(name)]
        wanted = -(-self._samples // self._size)
        whole = f"{len(self._shards)} of {wanted} shards are there" if len(self._shards) < wanted else ""
        self.layout = _layout(manifest, whole)
        self._open: tuple[str, dict[str, Any]] | None = None

    def names(self) -> Iterator[str]:
        """See `Reader`. Each shard is opened, to know how many samples it has."""
        for file in self._shards:
            try:
                aux = tensor(file, self._load(file), "aux_hidden_states", 3)
            except HsprobeError:
                yield f"{file}[0]"
                continue
            # A shard may claim any number of samples that are nothing.
            yield from (f"{file}[{k}]" for k in range(aux.shape[0] if aux.size else 1))

    def tokens(self, name: str) -> Ints | None:
        """See `Reader`."""
        return self._ids(*self._find(name))[0]

    def sample(self, name: str) -> Sample:
        """See `Reader`."""
        shard, k = self._find(name)
        tokens, stored = self._ids(shard, k)
        aux = tensor(name, shard, "aux_hidden_states", 3)
        loss = tensor(name, shard, "loss_mask", 2).at(k).integers()
        length = len(tokens)
        return Sample(
            name,
            tokens,
            (Rows("aux", (aux.at(k).rows(0, min(length, aux.shape[1])),)),),
            padded=stored - length,
            loss_mask=np.concatenate([np.zeros(1, np.int64), loss[: length - 1]]),
        )

    def _find(self, name: str) -> tuple[dict[str, Any], int]:
        found = _NAME.fullmatch(name)
        if found is None:
            raise damaged(name, "there is no such sample")
        file, k = found[1], int(found[2])
        shard = self._load(file)
        for key, rank in (
            ("input_ids", 2),
            ("attention_mask", 2),
            ("loss_mask", 2),
            ("aux_hidden_states", 3),
        ):
            if k >= tensor(file, shard, key, rank).shape[0]:
                raise damaged(name, f"its shard ends before it, in {key}")
        return shard, k

    def _load(self, file: str) -> dict[str, Any]:
        if self._open is None or self._open[0] != file:
            content = self._source.load(file)
            if not isinstance(content, dict):
                raise damaged(file, "it is no shard of a cache")
            self._open = (file, content)
        return self._open[1]

    def _ids(self, shard: dict[str, Any], k: int) -> tuple[Ints, int]:
        """(token ids with the shift undone and without padding, the length stored)."""
        name = shard["input_ids"].name
        ids = shard["input_ids"].at(k).integers()
        real = np.flatnonzero(shard["attention_mask"].at(k).integers())
        if not len(real) or len(ids) < int(real[-1]):
            raise damaged(name, f"sample {k} is all padding")
        if len(ids) and int(ids.min()) < 0:
            raise damaged(name, f"sample {k} holds a negative token id")
        length = int(real[-1]) + 1
        return np.concatenate([np.full(1, UNKNOWN, np.int64), ids[: length - 1]]), len(ids)
