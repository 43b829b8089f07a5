"""Find the reader of a dump by what is in it. A new producer is a new module in `readers`, nothing else."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import replace
from functools import cache
from typing import cast

from hsprobe.errors import HsprobeError
from hsprobe.formats import readers
from hsprobe.formats.dump import Chunks, Dump, Final, Format, Layout, Match, Options, Sure
from hsprobe.formats.guarded import Guarded, sensible
from hsprobe.formats.source import HDF5_MAGIC, Source
from hsprobe.remote.location import Location

_FLAG = "--train-format"


@cache
def formats() -> dict[str, Format]:
    """All readers by key, in the order of their keys."""
    modules = [
        cast(Format, importlib.import_module(f"{readers.__name__}.{info.name}"))
        for info in pkgutil.iter_modules(readers.__path__)
        if not info.name.startswith("_")
    ]
    return {module.KEY: module for module in sorted(modules, key=lambda module: module.KEY)}


def is_trace(path: Location) -> bool:
    """Whether a path is better left to the reader of traces: an HDF5 file that says so, or no dump at all."""
    if not path.is_file():
        return not path.exists()
    try:
        with path.open("rb") as file:
            if file.read(8) != HDF5_MAGIC:
                return path.suffix in (".h5", ".partial")
    except OSError:
        return True
    from hsprobe.remote.stream import open_hdf5

    try:
        with open_hdf5(path) as found:
            return "format" in found.attrs and "schema_version" in found.attrs
    except (OSError, RuntimeError, ValueError):
        return True


def open_dump(path: Location, options: Options | None = None) -> Dump:
    """Open a training dump, whoever wrote it.

    Raises:
        HsprobeError: nobody known wrote it, or more than one may have and a flag has to settle it.
    """
    options = options or Options()
    source = Source(path)
    known = formats()
    if options.format is not None and options.format not in known:
        raise HsprobeError(f"There is no dump format {options.format!r}.", f"Known are {', '.join(known)}.")
    key = options.format or ("mapped" if options.maps else _detected(source, known))
    with sensible(source, str(path)):
        reader = Guarded(known[key].open_dump(source, options), source)
    layout = _with_options(reader.layout, options)
    return Dump(path, key, known[key].NAME, reader, source, layout, options.first_token)


def in_words(dump: Dump) -> str:
    """`SpecForge offline, 1,204 samples, layer ids not recorded`"""
    count = sum(1 for _ in dump.reader.names())
    words = [dump.name, "1 sample" if count == 1 else f"{count:,} samples"]
    aux = dump.layout.aux
    if aux is not None:
        ids = [aux.numbering.id_of(d) if isinstance(d, int) else d for d in aux.depths or ()]
        words.append(f"layer ids {aux.sure.value}" + (f" ({', '.join(map(str, ids))})" if ids else ""))
    return ", ".join(words)


def _detected(source: Source, known: dict[str, Format]) -> str:
    claims: dict[str, Match] = {}
    for key, module in known.items():
        try:
            with sensible(source, str(source.path)):
                claim = module.detect(source)
        except HsprobeError:
            # Damaged where this format would have looked; another one may know better.
            continue
        if claim is not None:
            claims[key] = claim
    source.check()
    if not claims:
        raise HsprobeError(
            f"{source.path} is neither a trace nor a training dump known here.",
            f"Say what it is with {_FLAG} ({', '.join(known)}), or map a foreign file with --map.",
        )
    best = max(claim.strength for claim in claims.values())
    first = [key for key, claim in claims.items() if claim.strength == best]
    if len(first) > 1:
        names = " or ".join(f"{known[key].NAME} ({claims[key].why})" for key in first)
        raise HsprobeError(f"{source.path} may be {names}.", f"Say which with {_FLAG} {' or '.join(first)}.")
    return first[0]


def _with_options(layout: Layout, options: Options) -> Layout:
    """The conventions with what the user said of them."""
    if options.final is not None:
        if layout.final is None:
            raise HsprobeError(
                "--train-final is for a dump with a final state, and this has none.", "Leave it out."
            )
        layout = replace(layout, final=Final(options.final, Sure.GIVEN))
    if options.layers is not None:
        layout = replace(layout, aux=_named(layout.aux, options.layers))
    return layout


def _named(aux: Chunks | None, layers: tuple[int, ...]) -> Chunks:
    if aux is None:
        raise HsprobeError(
            "--train-layers is for a dump with aux chunks, and this has none.", "Leave it out."
        )
    # Some producers store one wide vector and nothing that tells how many chunks it is made of.
    if aux.count and len(layers) != aux.count:
        raise HsprobeError(
            f"--train-layers names {len(layers)} layers, and the dump's aux vector has {aux.count} chunks.",
            "Name one layer for each chunk, in the order in which they were stored.",
        )
    depths = tuple(aux.numbering.depth(one) for one in layers)
    return replace(aux, count=len(layers), depths=depths, sure=Sure.GIVEN)
