"""speculators 0.3 and 0.4: `data_<i>.pt` with a list of hidden states, and `data_config.json` beside them.

Source: speculators 0.3.0, scripts/data_generation_offline.py, data_generation/*.py and train/data.py.
`hidden_states` is a list of [S, H]: the chunks, then the state that the trainer takes for the last, before
the final norm. An id names the output of its layer here (one deeper than with the same id in 0.5 and
later); `data_config.json` records them. The older research format has `hidden_state` (the chunks side by
side) and `target` (the last state, after the norm) instead, and records nothing. Nothing is shifted, nothing
is padded.

Letters: S tokens, H hidden width.
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
)
from hsprobe.formats.readers._samples import FileSamples, first_samples, ids, mask, tensor
from hsprobe.formats.source import Source
from hsprobe.formats.stored import Stored, damaged

KEY = "speculators-old"
NAME = "speculators before 0.5"
_SUFFIXES = (".pt",)
_CONFIG = "data_config.json"
_NUMBERING = Numbering("--layer-ids", 1)


def detect(source: Source) -> Match | None:
    """By the list of hidden states, or the research format's names and ranks."""
    found = _first(source)
    if found is None:
        return None
    if "target" in found[1]:
        return Match(2, "it has hidden_state and target without a batch axis")
    return Match(2, "its hidden_states are a list")


def open_dump(source: Source, options: Options) -> Reader:
    """See `Format`."""
    found = _first(source)
    if found is None:
        raise HsprobeError(
            f"{source.path} holds no sample of speculators that can be read.",
            "Give the folder with its .pt files.",
        )
    return FileSamples(source, _layout(source, *found), _SUFFIXES, _sample)


def _first(source: Source) -> tuple[str, dict[str, Any]] | None:
    for name, content in first_samples(source, *_SUFFIXES):
        if not isinstance(content.get("input_ids"), Stored):
            continue
        states = content.get("hidden_states")
        if isinstance(states, list) and states and all(_table(one) for one in states):
            return name, content
        if _table(content.get("hidden_state")) and _table(content.get("target")):
            return name, content
    return None


def _table(found: object) -> bool:
    return isinstance(found, Stored) and found.ndim == 2 and found.shape[1] > 0


def _layout(source: Source, name: str, content: dict[str, Any]) -> Layout:
    if "target" in content:
        hidden = content["target"].shape[1]
        count = content["hidden_state"].shape[1] // hidden
        # The research format's scripts took the states from transformers, whose last one is after the norm.
        return Layout(hidden, Chunks(count, _NUMBERING), Final("post", Sure.DEFAULT))
    states = content["hidden_states"]
    chunks = None
    recorded, model = _recorded(source)
    if len(states) > 1:
        chunks = Chunks(len(states) - 1, _NUMBERING, default=_defaults)
        if len(recorded) == len(states):
            depths = tuple(_NUMBERING.depth(one) for one in recorded[:-1])
            chunks = Chunks(len(depths), _NUMBERING, depths, Sure.RECORDED, _defaults)
    return Layout(states[0].shape[1], chunks, Final("pre", Sure.DEFAULT), model=model)


def _defaults(num_layers: int) -> tuple[int, ...]:
    """Its default ids 2, L/2, L-3 name outputs of layers: one deeper than everybody else's."""
    return (3, num_layers // 2 + 1, num_layers - 2)


def _recorded(source: Source) -> tuple[list[int], dict[str, Any]]:
    """(layer ids, what is known of the model), as far as the configuration beside the samples has them."""
    if not source.has(_CONFIG):
        return [], {}
    try:
        config = source.load(_CONFIG)
    except HsprobeError:
        return [], {}
    found: list[int] = []
    model: dict[str, Any] = {}
    if isinstance(config, dict):
        states, target = config.get("hidden_states"), config.get("model")
        ids_ = states.get("layer_ids") if isinstance(states, dict) else None
        if isinstance(ids_, list) and all(type(one) is int and 0 <= one < 10_000 for one in ids_):
            found = ids_
        if isinstance(target, dict) and isinstance(target.get("target_model_path"), str):
            model["path"] = target["target_model_path"]
    return found, model


def _sample(name: str, content: dict[str, Any]) -> Sample:
    tokens, loss = ids(name, content), mask(content)
    if "target" in content:
        rows = (
            Rows("aux", (tensor(name, content, "hidden_state", 2),)),
            Rows("final", (tensor(name, content, "target", 2),)),
        )
        return Sample(name, tokens, rows, loss_mask=loss)
    states = content.get("hidden_states")
    if not isinstance(states, list) or not states or not all(_table(one) for one in states):
        raise damaged(name, "its hidden_states are no list of tables")
    found = [Rows("final", (states[-1],))]
    if len(states) > 1:
        found.append(Rows("aux", tuple(states[:-1])))
    return Sample(name, tokens, tuple(found), loss_mask=loss)
