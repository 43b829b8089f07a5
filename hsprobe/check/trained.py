"""What a training trace or a training dump says of the depths that the draft was trained on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hsprobe.check.config import as_ids
from hsprobe.remote.location import Location

if TYPE_CHECKING:
    from hsprobe.formats.dump import Options


@dataclass(frozen=True)
class Trained:
    """What is known of the training.

    Attributes:
        depths: of the aux chunks, in stored order; None where they are not known.
        sure: whether the depths are recorded or given; else they are what the producer takes by default.
        whole: whether it is a reference of the whole model, which fits any ids.
        model: what it says of the target.
    """

    path: str
    producer: str
    depths: list[int] | None
    sure: bool = True
    whole: bool = False
    model: Mapping[str, Any] = field(default_factory=dict)


def trained(path: Location, options: Options | None, num_layers: int | None) -> Trained:
    """Look at a trace, or at a dump of any producer; no states are read.

    Args:
        options: what the user says about a dump.
        num_layers: L of the target, for a producer's default.

    Raises:
        HsprobeError: it is neither, or damaged.
    """
    from hsprobe.formats.registry import is_trace

    return _of_trace(path) if is_trace(path) else _of_dump(path, options, num_layers)


def _of_trace(path: Location) -> Trained:
    from hsprobe.trace.reader import Trace

    with Trace.open(path) as trace:
        model, producer = trace.provenance.get("model"), trace.provenance.get("producer")
        tensors = [tensor for rank in trace.ranks for tensor in rank.tensors.values()]
        aux = next((t for t in tensors if t.site in ("aux", "draft.input")), None)
        return Trained(
            path=str(path),
            producer=producer if isinstance(producer, str) and producer.isprintable() else "unknown",
            depths=None if aux is None else as_ids(aux.depths),
            whole=aux is None and any(t.site == "layer" for t in tensors),
            model=model if isinstance(model, dict) else {},
        )


def _of_dump(path: Location, options: Options | None, num_layers: int | None) -> Trained:
    from hsprobe.formats.dump import Sure
    from hsprobe.formats.registry import open_dump

    dump = open_dump(path, options)
    aux, layout = dump.layout.aux, dump.layout
    depths = None if aux is None or aux.depths is None else as_ids(list(aux.depths))
    sure = aux is not None and depths is not None and aux.sure in (Sure.RECORDED, Sure.GIVEN)
    if aux is not None and depths is None and aux.default is not None and num_layers is not None:
        usual = list(aux.default(num_layers))
        depths = usual if aux.count in (0, len(usual)) else None
    model = {**layout.model, **({"hidden_size": layout.hidden} if layout.hidden else {})}
    return Trained(str(path), dump.name, depths, sure, False, model)
