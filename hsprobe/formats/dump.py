"""What a reader says of a training dump: its conventions, and its samples one by one.

Letters: S tokens of a sample, n rows of a tensor, W width, K chunks, L layers of the target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal, Protocol

import numpy as np

from hsprobe.errors import HsprobeError
from hsprobe.formats.source import Source
from hsprobe.formats.stored import Array, Floats, Ints, Stored, as_floats, damaged
from hsprobe.remote.location import Location
from hsprobe.remote.trouble import RemoteError
from hsprobe.trace.schema import Phase

Depth = int | Literal["final"] | None
Norm = Literal["pre", "post"]
DEPTHS = "depth"
"""The setting of a `Numbering` whose ids are depths."""
UNKNOWN = -1
"""The token id of a token that the dump has lost."""


class Sure(Enum):
    """How a convention of a dump is known."""

    RECORDED = "recorded"
    GIVEN = "given by a flag"
    DEFAULT = "the producer's default"
    INFERRED = "inferred"
    UNKNOWN = "not recorded"


def eagle3_depths(num_layers: int) -> tuple[int, ...]:
    """The depths that nearly every producer captures by default: 2, L/2, L-3."""
    return (2, num_layers // 2, num_layers - 3)


@dataclass(frozen=True)
class Numbering:
    """How the producer numbers layers.

    Attributes:
        setting: the name of the option or field that holds the ids, such as "--aux-layers".
        offset: depth minus id: 1 where an id names a layer's output, 0 where it names its input.
    """

    setting: str
    offset: int = 1

    def depth(self, layer_id: int) -> int:
        """The depth that an id asks for."""
        return layer_id + self.offset

    def id_of(self, depth: int) -> int:
        """The id that asks for a depth."""
        return depth - self.offset


@dataclass(frozen=True)
class Chunks:
    """The aux vector of a dump.

    Attributes:
        count: K.
        numbering: how the producer numbers layers.
        depths: the depth of each chunk, in stored order, None where it is not known.
        sure: how `depths` are known.
        default: (L) -> the depths that the producer takes when it is not told; None without a default.
    """

    count: int
    numbering: Numbering
    depths: tuple[Depth, ...] | None = None
    sure: Sure = Sure.UNKNOWN
    default: Callable[[int], tuple[int, ...]] | None = None


@dataclass(frozen=True)
class Final:
    """The last state of a dump: whether it was taken before or after the final norm, None where not known."""

    norm: Norm | None
    sure: Sure


@dataclass(frozen=True)
class Layout:
    """The conventions of a dump, the same for all its samples.

    Attributes:
        hidden: H, where it is known or follows.
        aux: the aux vector, None where there is none.
        final: the last state, None where there is none.
        shift: how far the stored token ids are shifted to the left of the rows (the reader undoes it).
        padding: how rows beyond the end of a sample are told; "" where there are none.
        notes: what else a user should know, sentences.
        model: what is known of the target: path, num_layers, dtype, architecture.
    """

    hidden: int | None = None
    aux: Chunks | None = None
    final: Final | None = None
    shift: int = 0
    padding: str = ""
    notes: tuple[str, ...] = ()
    model: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Rows:
    """A tensor of one sample.

    Attributes:
        name: "aux", "final" (the last state, whichever side of the norm), or as in a trace ("layer/003").
        parts: [n, W] each; put side by side they are the tensor.
        start: the token that the first row belongs to. May be beyond 0: rows that were never computed.
        phase: the pass that computed it.
    """

    name: str
    parts: tuple[Stored, ...]
    start: int = 0
    phase: Phase = Phase.PREFILL

    @property
    def count(self) -> int:
        return min(part.shape[0] for part in self.parts)

    @property
    def width(self) -> int:
        return sum(part.shape[1] for part in self.parts)

    @property
    def dtype(self) -> str:
        return self.parts[0].dtype

    def read(self, start: int = 0, stop: int | None = None) -> Array:
        """Rows start..stop. -> [n, W], bit for bit."""
        stop = self.count if stop is None else min(stop, self.count)
        found = [part.read(start, stop) for part in self.parts]
        return found[0] if len(found) == 1 else np.concatenate(found, axis=1)

    def floats(self, start: int = 0, stop: int | None = None) -> Floats:
        """As `read`, as float32."""
        return as_floats(self.read(start, stop), self.dtype)


@dataclass(frozen=True)
class Sample:
    """One sample.

    Attributes:
        name: such as "rows_0-2000/data_17.ckpt", as the user would find it.
        tokens: [S] int64 token ids: row i of a tensor belongs to tokens[start + i]. Unshifted, without
            padding, UNKNOWN where the dump has lost an id; None where it holds no ids at all.
        rows: its tensors. Rows beyond the last token are ignored.
        padded: how many rows were left out as padding.
        loss_mask: [S], where there is one.
    """

    name: str
    tokens: Ints | None
    rows: tuple[Rows, ...]
    padded: int = 0
    loss_mask: Ints | None = None


class Reader(Protocol):
    """An open dump, as a module in `hsprobe.formats.readers` gives it."""

    layout: Layout

    def names(self) -> Iterator[str]:
        """Names of the samples, in the dump's own order; no sample is opened for it."""
        ...

    def tokens(self, name: str) -> Ints | None:
        """The token ids of one sample, as `Sample.tokens`, reading as little else as can be.

        Raises:
            HsprobeError: the sample is damaged.
        """
        ...

    def sample(self, name: str) -> Sample:
        """One sample; its tensors are not read yet.

        Raises:
            HsprobeError: the sample is damaged; the message names it.
        """
        ...


@dataclass(frozen=True)
class Options:
    """What the user says about a dump.

    Attributes:
        format: key of a reader, or None to look.
        layers: ids of the chunks, in the producer's numbering and stored order.
        final: which side of the final norm the last state is from.
        first_token: the first token of every sample, for dumps that have lost it.
        maps: for foreign files: name in a trace ("aux", "final", "input_ids") -> path of the data set.
    """

    format: str | None = None
    layers: tuple[int, ...] | None = None
    final: Norm | None = None
    first_token: int | None = None
    maps: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Match:
    """A reader's claim to a dump.

    Attributes:
        strength: 3 the dump says so itself (a manifest); 2 nobody else writes such names; 1 it fits.
        why: what it was told by, for the message where several claim it.
    """

    strength: int
    why: str


class Format(Protocol):
    """What a module in `hsprobe.formats.readers` provides."""

    KEY: str
    """For --train-format, such as "specforge"."""
    NAME: str
    """As told to people, such as "SpecForge offline"."""

    def detect(self, source: Source) -> Match | None:
        """Whether this is a dump of this producer; looks at names and at most a few samples."""
        ...

    def open_dump(self, source: Source, options: Options) -> Reader:
        """Open it. Raises HsprobeError where it is not readable in this format."""
        ...


@dataclass
class Dump:
    """An open dump.

    Attributes:
        key, name: of its format.
        skipped: (sample, why) for samples that could not be read so far.
    """

    path: Location
    key: str
    name: str
    reader: Reader
    source: Source
    layout: Layout
    first_token: int | None = None
    skipped: list[tuple[str, str]] = field(default_factory=list)

    def samples(self) -> Iterator[Sample]:
        """All samples that can be read; what cannot is noted in `skipped`."""
        for name in self.reader.names():
            sample = self.sample(name)
            if sample is not None:
                yield sample

    def sample(self, name: str) -> Sample | None:
        """One sample, None (and noted) if it cannot be read."""
        try:
            return self._checked(self.reader.sample(name))
        except HsprobeError as error:
            self.skip(name, error)
            return None

    def tokens(self, name: str) -> Ints | None:
        """The token ids of one sample, None if it has none or cannot be read."""
        try:
            return self._whole(self.reader.tokens(name))
        except HsprobeError as error:
            self.skip(name, error)
            return None

    def skip(self, name: str, error: HsprobeError) -> None:
        """Note a sample as unreadable, once; a lost connection is raised instead."""
        if isinstance(error, RemoteError):
            raise error
        if not self.skipped or self.skipped[-1][0] != name:
            self.skipped.append((name, error.what))

    def _checked(self, sample: Sample) -> Sample:
        """The sample, its rows cut to its tokens."""
        if not sample.rows:
            raise damaged(sample.name, "it holds no hidden states")
        rows = []
        for one in sample.rows:
            if any(part.ndim != 2 or not part.is_float for part in one.parts) or not one.width:
                raise damaged(sample.name, f"its {one.name} is not a table of floating-point rows")
            if len({(part.shape[0], part.dtype) for part in one.parts}) != 1:
                raise damaged(sample.name, f"the chunks of its {one.name} differ in length or type")
            count = one.count if sample.tokens is None else min(one.count, len(sample.tokens) - one.start)
            if count > 0:
                rows.append(replace(one, parts=tuple(part.rows(0, count) for part in one.parts)))
        return replace(sample, tokens=self._whole(sample.tokens), rows=tuple(rows))

    def _whole(self, tokens: Ints | None) -> Ints | None:
        """The ids, the first one put in where the dump has lost it and the user knows it."""
        if self.first_token is None or tokens is None or not len(tokens) or int(tokens[0]) != UNKNOWN:
            return tokens
        whole = tokens.copy()
        whole[0] = self.first_token
        return whole


def squeezed(tensor: Stored, ndim: int) -> Stored:
    """Without leading axes of length 1, down to `ndim` axes; other axes stay, also of length 1.

    Raises:
        HsprobeError: it has other axes than that.
    """
    shape = tensor.shape
    while len(shape) > ndim and shape[0] == 1:
        shape = shape[1:]
    if len(shape) != ndim:
        raise damaged(tensor.name, f"its shape {list(tensor.shape)} is not understood")
    return tensor.reshape(shape)
