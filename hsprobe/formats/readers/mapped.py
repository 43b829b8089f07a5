"""Files of a layout that nobody foresaw, read as `--map` says: HDF5, npz, safetensors or torch.

`--map input_ids=PATH` and so on name data sets. `{}` in the paths stands for a group of each sample;
without it the samples are stacked (token ids [n, S]), lie end to end (with offsets), or each file is one.
`PATH:bfloat16` reads 16-bit integers as bfloat16. Layer ids are depths.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from hsprobe.errors import HsprobeError
from hsprobe.formats.containers.hdf5 import Hdf5
from hsprobe.formats.dump import DEPTHS, Final, Layout, Match, Numbering, Options, Reader, Sure
from hsprobe.formats.naturally import natural
from hsprobe.formats.readers._tables import ABOUT_TOKENS, Table, TableSamples, chunks_of, width_of, with_type
from hsprobe.formats.source import HDF5_MAGIC, Source
from hsprobe.formats.stored import Stored, damaged

KEY = "mapped"
NAME = "foreign file"
_SUFFIXES = (".h5", ".hdf5", ".npz", ".safetensors", ".pt", ".pth", ".ckpt")
_STATES = re.compile(r"aux|final|embed|layer/\d{1,4}")
_HELP = "Name them as in --map input_ids=PATH --map aux=PATH (also final, embed, layer/3, lengths, offsets)."


def detect(source: Source) -> Match | None:
    """An HDF5 file that is no trace: only a map can tell what is in it."""
    for name in source.peek(".h5", ".hdf5", count=1):
        if bytes(source.bytes_of(name).read(0, 8)) == HDF5_MAGIC:
            return Match(1, "it is HDF5")
    return None


def open_dump(source: Source, options: Options) -> Reader:
    """See `Format`."""
    maps = {_layer(name): place for name, place in options.maps.items()}
    unknown = [name for name in maps if name not in ABOUT_TOKENS and not _STATES.fullmatch(name)]
    if not maps or unknown or not any(_STATES.fullmatch(name) for name in maps):
        raise HsprobeError(_what(source, unknown), _HELP)
    return _Mapped(source, maps).reader()


def _layer(name: str) -> str:
    layer = re.fullmatch(r"layer/0*(\d{1,4})", name)
    return f"layer/{int(layer[1]):03d}" if layer else name


def _what(source: Source, unknown: list[str]) -> str:
    if unknown:
        return f"--map knows no {unknown[0][:40]!r}."
    there = ""
    for name in source.peek(".h5", ".hdf5", count=1):
        found = Hdf5(source.place_of(name), name).datasets()
        there = f" It has {', '.join(found)}." if found else ""
    return f"{source.path} is no trace, and its layout is not known.{there}"


class _Mapped:
    def __init__(self, source: Source, maps: dict[str, str]) -> None:
        self.source, self.maps = source, maps
        self.states = tuple(sorted(name for name in maps if _STATES.fullmatch(name)))
        self.grouped = any("{}" in place for place in maps.values())

    def reader(self) -> Reader:
        """The dump, its widths taken from the first table that can be read."""
        states: dict[str, Stored] = {}
        trouble: HsprobeError | None = None
        for count, name in enumerate(self._names()):
            try:
                table = self._table(name)
                states = {state: one for state in self.states if (one := table.get(state)) is not None}
            except HsprobeError as error:
                trouble = error
            if states or count >= 8:
                break
        if not states:
            first = self.states[0]
            raise trouble or HsprobeError(f"{self.source.path} has no {first} at {self.maps[first]}.", _HELP)
        hidden = width_of(states)
        layout = Layout(
            hidden=hidden,
            aux=chunks_of(states, Numbering(DEPTHS, 0), hidden),
            final=Final(None, Sure.UNKNOWN) if "final" in states else None,
        )
        return TableSamples(layout, self._names, self._table)

    def _names(self) -> Iterator[str]:
        for name in self.source.files(*_SUFFIXES):
            if not self.grouped:
                yield name
                continue
            place = next(place for place in self.maps.values() if "{}" in place)
            for group in sorted(self._groups(name, place.partition("{}")[0]), key=natural):
                yield f"{name}:{group}"

    def _groups(self, name: str, before: str) -> list[str]:
        opened = self._open(name)
        if isinstance(opened, Hdf5):
            return opened.members(before or "/")
        known = {key[len(before) :].partition("/")[0] for key in opened if key.startswith(before)}
        return [one for one in known if one]

    def _open(self, name: str) -> Any:
        if bytes(self.source.bytes_of(name).read(0, 8)) == HDF5_MAGIC:
            return Hdf5(self.source.place_of(name), name)
        content = self.source.load(name)
        if not isinstance(content, dict):
            raise damaged(name, "it holds no named tensors")
        return content

    def _table(self, name: str) -> Table:
        file, _, group = name.partition(":") if self.grouped else (name, "", "")
        opened = self._open(file)
        found: dict[str, Stored | None] = {}

        def get(key: str) -> Stored | None:
            if key not in self.maps:
                return None
            if key not in found:
                place, _, dtype = self.maps[key].replace("{}", group).partition(":")
                one = opened.get(place)
                found[key] = with_type(one, dtype or None) if isinstance(one, Stored) else None
            return found[key]

        return Table(name, self.states, get)
