"""Which layers a capture's chunks carry, told from the capture alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hsprobe.compare.noise import Level, Noise
from hsprobe.compare.stack import spread
from hsprobe.diagnose.evidence import Serving
from hsprobe.diagnose.identify import identify, matrix
from hsprobe.diagnose.model import Depth
from hsprobe.diagnose.naming import depth_name, listed
from hsprobe.diagnose.sides import chunk_lanes, depth_candidates, dtypes_between, open_side
from hsprobe.errors import HsprobeError
from hsprobe.formats.sglang_ids import depths_of
from hsprobe.remote.location import Location
from hsprobe.trace.reader import Trace

_ROWS = 512


@dataclass(frozen=True)
class Served:
    """One chunk: the depth it carries (None where it is none of those captured), and the rows that agree."""

    chunk: int
    depth: Depth
    agree: int
    rows: int

    @property
    def sentence(self) -> str:
        """It in a sentence."""
        return f"chunk {self.chunk} carries {depth_name(self.depth)} ({self.agree}/{self.rows} rows agree)"


def served_layers(infer: Location | str) -> tuple[list[Served], Serving]:
    """The depth of every chunk of a capture, compared with the depths captured beside it.

    Raises:
        HsprobeError: the capture lacks the chunks or the depths.
    """
    with Trace.open(infer) as trace:
        side = open_side(trace, "infer")
        stack, candidates = side.chunked(), depth_candidates(side)
        if stack is None or not candidates:
            raise HsprobeError(
                f"{infer} does not hold both what the draft is handed and the depths of the model.",
                "Capture with '--sites aux,layer'.",
            )
        lanes = chunk_lanes(stack, side.hidden)
        table = matrix(lanes, candidates, spread(stack.keys.usable, stack.keys, _ROWS))
        noise = Noise(side.num_layers or 32)
        levels = noise.levels(None, dtypes_between(side, side, stack), np.unique(table.phases).tolist())
        found = []
        for k, errors in enumerate(table.errors):
            identity = identify(errors, table.labels(), Level.widest(levels.values()))
            best = identity.best
            fits = best is not None and identity.clear and identity.fits
            depth: Depth = (best.depth if best.kind == "depth" else "final") if best and fits else None
            found.append(Served(k, depth, identity.agree, identity.rows))
        return found, Serving.of(trace.provenance)


def check_layers(infer: Location | str, ids: Sequence[int]) -> list[str]:
    """What contradicts that a capture's chunks are what these ids ask for; empty where nothing does.

    Args:
        ids: as written in `eagle_aux_hidden_state_layer_ids`.

    Raises:
        HsprobeError: as `served_layers`, or the number of layers is not recorded.
    """
    found, serving = served_layers(infer)
    if serving.num_layers is None:
        raise HsprobeError(f"{infer} does not say how many layers its model has.", "Capture it again.")
    wanted = depths_of(serving.architecture, ids, serving.num_layers, serving.version)
    served = [line.depth for line in found]
    if served == wanted:
        return []
    head = f"the draft is handed depths {listed(served)}; ids {list(ids)} mean depths {listed(wanted)}"
    return [head, *(line.sentence for line in found)]
