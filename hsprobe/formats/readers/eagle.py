"""EAGLE-1 and EAGLE-2 training data ("ge_data"): one `.ckpt` a sample, the last hidden state alone.

Source: SafeAILab/EAGLE before its commit f2f2366, eagle/ge_data/ge_data_all_*.py. `hidden_state` is [S, H],
without a batch axis: transformers' hidden_states[-1], so after the final norm. Neither shifted nor padded.
Samples are numbered anew in the folder of each worker.
"""

from __future__ import annotations

from typing import Any

from hsprobe.formats.dump import Final, Layout, Match, Options, Reader, Rows, Sample, Sure
from hsprobe.formats.readers._samples import FileSamples, ids, mask, needed_sample, tensor, typical_sample
from hsprobe.formats.source import Source
from hsprobe.formats.stored import Stored

KEY = "eagle"
NAME = "EAGLE ge_data"
_SUFFIXES = (".ckpt",)


def detect(source: Source) -> Match | None:
    """By a `hidden_state` of two axes, alone."""
    content = typical_sample(source, *_SUFFIXES)
    state = content.get("hidden_state")
    if isinstance(state, Stored) and state.ndim == 2 and "target" not in content and "input_ids" in content:
        return Match(2, "its hidden_state has no batch axis")
    return None


def open_dump(source: Source, options: Options) -> Reader:
    """See `Format`."""
    hidden = tensor(*needed_sample(source, NAME, *_SUFFIXES), "hidden_state", 2).shape[1]
    return FileSamples(source, Layout(hidden=hidden, final=Final("post", Sure.DEFAULT)), _SUFFIXES, _sample)


def _sample(name: str, content: dict[str, Any]) -> Sample:
    rows = Rows("final", (tensor(name, content, "hidden_state", 2),))
    return Sample(name, ids(name, content), (rows,), loss_mask=mask(content))
