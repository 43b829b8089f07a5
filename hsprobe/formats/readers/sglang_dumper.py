"""SGLang's dumper (`DUMPER_ENABLE=1`): a `.pt` for each tensor and step, described by its name.

Source: SGLang 0.5.23, debug_utils/dumper.py and dump_loader.py, and a run of it. Names are `step=..___rank=..
___dump_index=..___name=..` and more tags; a step is a forward pass, warm-up and decode included. Without
`DUMPER_NON_INTRUSIVE_MODE=all` only the batch is dumped and no hidden state. The stream is what the norms
hand on, as in `sglang_passes`; the outputs of whole layers are left out, since SGLang dumps them before the
ranks' parts are added up. A step is a flat batch; `rids` tell its requests apart.
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
from hsprobe.trace.schema import HEALTH_CHECK_PREFIX

KEY = "sglang-dumper"
NAME = "SGLang dumper"
_NAME = re.compile(
    r"(?:(?P<folder>.*)/)?step=(?P<step>\d{1,12})___rank=(?P<rank>\d{1,6})___dump_index=\d+___"
    r"name=(?P<name>.+?)(?P<tags>___.*)?\.pt"
)
_BATCH = ("input_ids", "positions", "seq_lens", "rids")
_OUTPUT = re.compile(
    r"non_intrusive__(?P<module>.+\.(?:embed_tokens|norm|layers\.\d{1,4}\.input_layernorm))"
    r"\.output(?:\.(?P<number>[01]))?"
)
_LAYER = re.compile(r"non_intrusive__.+\.layers\.(\d{1,4})\..*")
_Step = dict[str, str]


def detect(source: Source) -> Match | None:
    """By the files' names."""
    if any(_NAME.fullmatch(name) for name in source.peek(".pt")):
        return Match(2, "its files are named step=..___rank=..___dump_index=..")
    return None


def open_dump(source: Source, options: Options) -> Reader:
    """See `Format`."""
    return _Steps(source)


class _Steps:
    """See `Reader`."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._steps: dict[int, _Step] = {}
        self._chains: dict[str, _passes.Chain] | None = None
        self._layers: set[int] = set()
        runs, ranks = self._index()
        if not self._steps:
            raise HsprobeError(f"{source.path} holds no file of SGLang's dumper.", "Check the path.")
        self.layout = self._layout(runs, ranks)

    def _index(self) -> tuple[set[str], set[int]]:
        """Which file has what of each step, of the first run and rank; the runs and ranks there are."""
        runs: set[str] = set()
        ranks: set[int] = set()
        kept: tuple[str, int] | None = None
        for file in self._source.files(".pt"):
            found = _NAME.fullmatch(file)
            if found is None:
                continue
            place = (found["folder"] or "", int(found["rank"]))
            runs.add(place[0])
            ranks.add(place[1])
            if kept is None or place < kept:
                kept = place
                self._steps.clear()
                self._layers.clear()
            if place == kept:
                self._note(file, int(found["step"]), found["name"], found["tags"] or "")
        return runs, ranks

    def _note(self, file: str, step: int, name: str, tags: str) -> None:
        layer = _LAYER.fullmatch(name)
        if layer:
            self._layers.add(int(layer[1]))
        whole_batch = name in _BATCH and "layer_id=" not in tags
        if whole_batch or _OUTPUT.fullmatch(name):
            self._steps.setdefault(step, {})[name] = file

    def _layout(self, runs: set[str], ranks: set[int]) -> Layout:
        notes = []
        if len(runs) > 1:
            notes.append(f"of {len(runs)} runs, the first is read")
        if len(ranks) > 1:
            notes.append(f"of {len(ranks)} ranks, rank {min(ranks)} is read")
        for step in sorted(self._steps):
            try:
                tensors = self._tensors(str(step))
            except HsprobeError:
                continue
            if tensors:
                hidden = next(iter(tensors.values())).shape[-1]
                final = Final("post", Sure.RECORDED) if "final" in tensors else None
                return Layout(hidden=hidden, final=final, notes=tuple(notes))
        raise HsprobeError(
            f"{self._source.path} holds no output of a layer's input norm, so none of the residual stream.",
            "Dump again with DUMPER_NON_INTRUSIVE_MODE=all.",
        )

    def names(self) -> Iterator[str]:
        """See `Reader`. The batch of each step is read for it."""
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
            for step in sorted(self._steps)[: _passes.MAX_PASSES]:
                try:
                    chains.add(str(step), *self._batch(step))
                except HsprobeError as error:
                    self._source.unread.append((f"step {step}", error.what))
            self._chains = {
                chain.name: chain for chain in chains.found if not chain.name.startswith(HEALTH_CHECK_PREFIX)
            }
        return self._chains

    def _batch(self, step: int) -> tuple[Ints, Ints, Ints, list[str] | None]:
        """(ids, positions, lengths, ids of the requests) of a step."""
        found = []
        for field in _BATCH[:3]:
            value = self._value(step, field)
            if not isinstance(value, Stored):
                raise damaged(f"step {step}", f"it has no {field}")
            found.append(value.integers())
        rids = self._value(step, "rids") if "rids" in self._steps[step] else None
        known = isinstance(rids, list) and all(isinstance(one, str) for one in rids)
        return found[0], found[1], found[2], rids if known else None

    def _tensors(self, step: str) -> dict[str, Stored]:
        """Name in a trace -> tensor of a step."""
        outputs: dict[str, Any] = {}
        number = int(step)
        for name in self._steps[number]:
            match = _OUTPUT.fullmatch(name)
            if match is None:
                continue
            module = match["module"]
            if match["number"] is None:
                outputs[module] = self._value(number, name)
            else:
                pair = outputs.setdefault(module, [None, None])
                if isinstance(pair, list):
                    pair[int(match["number"])] = self._value(number, name)
        if self._layers == set(range(len(self._layers))):
            # So that the last depth can be named, also where of most layers only other outputs were kept.
            model = next((name.split(".layers.")[0] for name in outputs if ".layers." in name), "model")
            outputs |= {f"{model}.layers.{k}.seen": None for k in self._layers}
        return located(outputs)

    def _value(self, step: int, name: str) -> Any:
        file = self._steps[step].get(name)
        if file is None:
            raise damaged(f"step {step}", f"it has no {name}")
        content = self._source.load(file)
        return content["value"] if isinstance(content, dict) and "value" in content else content
