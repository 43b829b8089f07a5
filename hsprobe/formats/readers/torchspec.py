"""TorchSpec's debug dumps of training batches: a torch file a step, several samples in each.

Source: TorchSpec 6f21829c, torchspec/utils/train_dump.py, training/eagle3_trainer.py and data/utils.py. The
batch is dumped as it was loaded, before the trainer shifts ids and target, padded on the right to a multiple
of 256 rows with `attention_mask` telling. All was cast to bfloat16 on the way. An id names the output of its
layer. `last_hidden_states` is from after the final norm with the engines on transformers and SGLang, from
before it with the one on vLLM, and nothing tells which.

Letters: B samples of a batch, S stored length, K chunks, H hidden width.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

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
from hsprobe.formats.readers._samples import first_samples, tensor
from hsprobe.formats.source import Source
from hsprobe.formats.stored import Ints, Stored, damaged

KEY = "torchspec"
NAME = "TorchSpec debug dump"
_SUFFIXES = (".pt",)
_NAME = re.compile(r"(.+)\[(\d{1,9})\]")


def detect(source: Source) -> Match | None:
    """By a batch beside the step and the rank that dumped it."""
    return Match(2, "it has step, rank and batch") if _first(source) else None


def open_dump(source: Source, options: Options) -> Reader:
    """See `Format`."""
    found = _first(source)
    if found is None:
        raise HsprobeError(
            f"{source.path} holds no batch of TorchSpec that can be read.",
            "Give the folder with its .pt files.",
        )
    return _Batches(source, *found)


def _first(source: Source) -> tuple[str, dict[str, Any]] | None:
    for name, content in first_samples(source, *_SUFFIXES):
        if {"step", "batch_idx", "rank"} <= content.keys():
            batch = _batch(content)
            if isinstance(batch.get("hidden_states"), Stored) and isinstance(batch.get("input_ids"), Stored):
                return name, batch
    return None


def _batch(content: dict[str, Any]) -> dict[str, Any]:
    """The tensors of the batch; hidden states may lie beside it."""
    batch = content.get("batch")
    found = dict(batch) if isinstance(batch, dict) else {}
    for key in ("hidden_states", "last_hidden_states"):
        if not isinstance(found.get(key), Stored) and isinstance(content.get(key), Stored):
            found[key] = content[key]
    return found


class _Batches:
    """See `Reader`."""

    def __init__(self, source: Source, name: str, batch: dict[str, Any]) -> None:
        self._source = source
        self._open = (name, batch)
        aux, last = tensor(name, batch, "hidden_states", 3), batch.get("last_hidden_states")
        hidden = last.shape[-1] if isinstance(last, Stored) and last.ndim == 3 else None
        count = aux.shape[2] // hidden if hidden else 3
        self.layout = Layout(
            hidden=hidden or aux.shape[2] // 3 or None,
            aux=Chunks(count, Numbering("aux_hidden_states_layers", 1), default=eagle3_depths),
            final=Final(None, Sure.UNKNOWN) if hidden else None,
            padding="attention_mask tells the padded rows",
            notes=("the token ids are those of the batch before the trainer shifts them",),
        )

    def names(self) -> Iterator[str]:
        """See `Reader`. Each batch is opened, to know how many samples it has."""
        for file in self._source.files(*_SUFFIXES):
            try:
                aux = tensor(file, self._load(file), "hidden_states", 3)
            except HsprobeError:
                yield file
                continue
            # A batch may claim any number of samples that are nothing.
            yield from (f"{file}[{k}]" for k in range(aux.shape[0] if aux.size else 1))

    def tokens(self, name: str) -> Ints | None:
        """See `Reader`."""
        return self._ids(*self._find(name))[0]

    def sample(self, name: str) -> Sample:
        """See `Reader`."""
        batch, k = self._find(name)
        tokens, stored = self._ids(batch, k)
        rows = []
        for key, place in (("hidden_states", "aux"), ("last_hidden_states", "final")):
            if isinstance(batch.get(key), Stored):
                found = tensor(name, batch, key, 3)
                if k < found.shape[0]:
                    rows.append(Rows(place, (found.at(k),)))
        loss = batch.get("loss_mask")
        kept = None
        if isinstance(loss, Stored) and not loss.is_float and loss.ndim >= 2 and k < loss.shape[0]:
            kept = loss.at(k).integers()[: len(tokens)]
        return Sample(name, tokens, tuple(rows), padded=stored - len(tokens), loss_mask=kept)

    def _find(self, name: str) -> tuple[dict[str, Any], int]:
        found = _NAME.fullmatch(name)
        file, k = (found[1], int(found[2])) if found else (name, 0)
        batch = self._load(file)
        if k >= tensor(name, batch, "hidden_states", 3).shape[0]:
            raise damaged(name, "there is no such sample")
        return batch, k

    def _load(self, file: str) -> dict[str, Any]:
        if self._open[0] != file:
            content = self._source.load(file)
            if not isinstance(content, dict):
                raise damaged(file, "it is no batch of TorchSpec")
            self._open = (file, _batch(content))
        return self._open[1]

    def _ids(self, batch: dict[str, Any], k: int) -> tuple[Ints, int]:
        """(token ids without padding, the length stored)."""
        name = self._open[0]
        found = tensor(name, batch, "input_ids", 2)
        if k >= found.shape[0]:
            raise damaged(name, "it has more hidden states than token ids")
        ids = found.at(k).integers()
        mask = batch.get("attention_mask")
        length = len(ids)
        if isinstance(mask, Stored) and not mask.is_float and mask.shape == found.shape:
            real = np.flatnonzero(mask.at(k).integers())
            length = int(real[-1]) + 1 if len(real) else 0
        if not length or int(ids[:length].min()) < 0:
            raise damaged(f"{name}[{k}]", "it holds no token ids")
        return ids[:length], len(ids)
