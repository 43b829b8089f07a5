"""What was captured of a draft, by site and row.

Shapes: T rows of the draft, n rows asked for, W width of a site.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hsprobe.draft.positions import due, steps_late
from hsprobe.draft.stages import DraftReference
from hsprobe.draft.timeline import Ints, Timeline, timeline
from hsprobe.trace.reader import Rank, Trace
from hsprobe.trace.schema import Model
from hsprobe.trace.tensor import Tensor as Stored

Mask = npt.NDArray[np.bool_]
_LATE = (
    "SGLang {} gives the steps of a chain RoPE positions one past their place, whatever the draft (from "
    "0.5.12.post1 on it no longer does); the steps were computed with these."
)
_SHARED = ("draft.qkv", "draft.context", "draft.gate_up")


def widths(ref: DraftReference) -> dict[str, int]:
    """Width of every site that a draft has."""
    config = ref.config
    return {
        "draft.fc": config.hidden,
        "draft.embed": config.hidden,
        "draft.mixed": 2 * config.hidden,
        "draft.qkv": (config.heads + 2 * config.kv_heads) * config.head_dim,
        "draft.context": config.heads * config.head_dim,
        "draft.attention": config.hidden,
        "draft.gate_up": 2 * ref.weights["layers.0.mlp.gate_proj.weight"].shape[0],
        "draft.layer": config.hidden,
        "draft.final": config.hidden,
        "draft.logits": len(ref.head),
        "draft.recycled": config.hidden,
    }


@dataclass
class Material:
    """One rank's draft rows and what was recorded of them.

    Attributes:
        served_folder: of the draft that was served, as the capture names it.
        target: folder of the target, where one is known.
        late: by how many positions this release of the server puts the steps of a chain past their place.
        ready: site -> rows for which it can be computed, kept by `compute.computable`.
        notes: sites that were left out, and why.
    """

    rank: Rank
    rows: Timeline
    ref: DraftReference
    served_folder: str
    target: str | None = None
    late: int = 0
    stored: dict[str, Stored] = field(default_factory=dict)
    place: dict[str, Ints] = field(default_factory=dict)
    ready: dict[str, Mask] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, trace: Trace, ref: DraftReference, target: str | None = None) -> Material | None:
        """What a trace holds of its draft; None where no rank recorded one."""
        for rank in trace.ranks:
            if (rank.passes["model"] == int(Model.DRAFT)).any():
                draft = trace.provenance.get("draft")
                served = draft.get("path") if isinstance(draft, dict) else None
                folder = served if isinstance(served, str) and served else str(ref.config.folder)
                version = trace.provenance.get("sglang_version")
                late = steps_late(version if isinstance(version, str) else None)
                found = cls(rank, timeline(trace, rank), ref, folder, target, late)
                found._open()
                if late and (found.rows.step > 0).any():
                    found.notes.append(_LATE.format(version))
                return found
        return None

    def _open(self) -> None:
        expected = widths(self.ref)
        back = np.full(len(self.rank.rows["pass"]), -1, np.int64)
        for name, tensor in self.rank.tensors.items():
            if not name.startswith("draft.") or not len(tensor):
                continue
            wanted = expected.get(name, tensor.shape[1])
            if tensor.shape[1] != wanted:
                share = " of this rank" if name in _SHARED else ""
                self.notes.append(
                    f"{name}{share} is {tensor.shape[1]} wide, the whole draft's {wanted}: not compared."
                )
                continue
            back[:] = -1
            back[tensor.row_index] = np.arange(len(tensor))
            self.stored[name] = tensor
            self.place[name] = back[self.rows.row]

    @cached_property
    def positions(self) -> Ints:
        """[T] the RoPE position that each row is to have with this server, below 0 where it is not known."""
        return due(self.rows, self.late)

    @property
    def served_config(self) -> str:
        """The configuration that the served draft was loaded with."""
        return f"{self.served_folder}/config.json"

    @property
    def dtype(self) -> str:
        """The precision in which the server stored its states."""
        return next((t.dtype for name, t in self.stored.items() if name != "draft.logits"), "float32")

    def holds(self, site: str) -> Mask:
        """[T] which rows were recorded at a site."""
        if site not in self.place:
            return np.zeros(len(self.rows), np.bool_)
        mask: Mask = self.place[site] >= 0
        return mask

    def read(self, site: str, index: Ints) -> Tensor:
        """[n] rows of the draft -> [n, W] float32; every one must have been recorded."""
        return torch.from_numpy(self.stored[site].read(self.place[site][index]))

    def span(self, site: str) -> Mapping[str, slice]:
        """Parts of a site that stand side by side."""
        config = self.ref.config
        if site == "draft.mixed":
            return {"embedding": slice(0, config.hidden), "state": slice(config.hidden, 2 * config.hidden)}
        if site == "draft.qkv":
            q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
            return {"q": slice(0, q), "k": slice(q, q + kv), "v": slice(q + kv, q + 2 * kv)}
        if site == "draft.gate_up":
            width = widths(self.ref)["draft.gate_up"] // 2
            return {"gate": slice(0, width), "up": slice(width, 2 * width)}
        return {}
