"""SGLang's dumper (`DUMPER_ENABLE=1`): a `.pt` for each tensor and step, described by its name.

Source: SGLang 0.5.23, debug_utils/dumper.py and dump_loader.py, and a run of it. Names are `step=..___rank=..
___dump_index=..___name=..` and more tags; a step is a forward pass, warm-up and decode included. Without
`DUMPER_NON_INTRUSIVE_MODE=all` only the batch is dumped and no hidden state. The stream is what the norms
hand on, as in `sglang_passes`; the outputs of whole layers are left out, since SGLang dumps them before the
ranks' parts are added up. A step is a flat batch; `rids` tell its requests apart.
"""

from __future__ import annotations

import re
from typing import Any

from hsprobe.errors import HsprobeError
from hsprobe.formats.dump import Match, Options, Reader
from hsprobe.formats.readers._passes import Chain, PassReader
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


def detect(source: Source) -> Match | None:
    """By the files' names."""
    if any(_NAME.fullmatch(name) for name in source.peek(".pt")):
        return Match(2, "its files are named step=..___rank=..___dump_index=..")
    return None


def open_dump(source: Source, options: Options) -> Reader:
    """See `Format`."""
    return _Steps(source)


class _Steps(PassReader):
    """See `Reader`. A pass is called "step 12"."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        # Step -> name of a value -> file.
        self._steps: dict[int, dict[str, str]] = {}
        self._layers: set[int] = set()
        runs, ranks = self._index()
        if not self._steps:
            raise HsprobeError(f"{source.path} holds no file of SGLang's dumper.", "Check the path.")
        self.passes = [f"step {number}" for number in sorted(self._steps)]
        notes = []
        if len(runs) > 1:
            notes.append(f"of {len(runs)} runs, the first is read")
        if len(ranks) > 1:
            notes.append(f"of {len(ranks)} ranks, rank {min(ranks)} is read")
        self.layout = self.described(notes, "Dump again with DUMPER_NON_INTRUSIVE_MODE=all.")

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

    def wanted(self, chain: Chain) -> bool:
        """Not the server's own checks of its health."""
        return not chain.name.startswith(HEALTH_CHECK_PREFIX)

    def batch(self, where: str) -> tuple[Ints, Ints, Ints, list[str] | None]:
        """See `PassReader`."""
        found = []
        for field in _BATCH[:3]:
            value = self._value(where, field)
            if not isinstance(value, Stored):
                raise damaged(where, f"it has no {field}")
            found.append(value.integers())
        rids = self._value(where, "rids") if "rids" in self._files(where) else None
        known = isinstance(rids, list) and all(isinstance(one, str) for one in rids)
        return found[0], found[1], found[2], rids if known else None

    def tensors(self, where: str) -> dict[str, Stored]:
        """See `PassReader`."""
        outputs: dict[str, Any] = {}
        for name in self._files(where):
            match = _OUTPUT.fullmatch(name)
            if match is None:
                continue
            module = match["module"]
            if match["number"] is None:
                outputs[module] = self._value(where, name)
            else:
                pair = outputs.setdefault(module, [None, None])
                if isinstance(pair, list):
                    pair[int(match["number"])] = self._value(where, name)
        if self._layers == set(range(len(self._layers))):
            # So that the last depth can be named, also where of most layers only other outputs were kept.
            model = next((name.split(".layers.")[0] for name in outputs if ".layers." in name), "model")
            outputs |= {f"{model}.layers.{k}.seen": None for k in self._layers}
        return located(outputs)

    def _files(self, where: str) -> dict[str, str]:
        return self._steps[int(where.removeprefix("step "))]

    def _value(self, where: str, name: str) -> Any:
        file = self._files(where).get(name)
        if file is None:
            raise damaged(where, f"it has no {name}")
        content = self._source.load(file)
        return content["value"] if isinstance(content, dict) and "value" in content else content
