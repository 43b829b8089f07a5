"""What the fault classes look at: every comparison made, beside the provenance of both sides."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hsprobe.compare.coverage import Coverage
from hsprobe.compare.direct import Lane
from hsprobe.compare.shards import Direct
from hsprobe.compare.stack import Stack
from hsprobe.diagnose.account import Part
from hsprobe.diagnose.draft.model import DraftFindings
from hsprobe.diagnose.identify import Identity, Label
from hsprobe.diagnose.model import ChunkLine, Depth, Divergence, LayerLine
from hsprobe.diagnose.producer import Producer
from hsprobe.diagnose.ranks.facts import RankFacts
from hsprobe.diagnose.tokens import Tokens
from hsprobe.diagnose.values import Difference
from hsprobe.diagnose.weights import WeightTest


@dataclass
class Serving:
    """What the capture's provenance says about the served model and its draft."""

    producer: str
    architecture: str
    num_layers: int | None
    version: str | None
    aux_depths: list[int] | None
    ids: list[int] | None
    draft_config: str | None
    draft_named: bool
    algorithm: str | None = None
    quantized: str | None = None

    @classmethod
    def of(cls, provenance: dict[str, Any]) -> Serving:
        """Read it from provenance, which may lack any of it or hold anything."""
        model, draft = _dict(provenance.get("model")), _dict(provenance.get("draft"))
        eagle, arguments = _dict(draft.get("eagle_config")), _dict(provenance.get("server_args"))
        ids = _ints(draft.get("aux_layer_ids"))
        if ids is None:
            ids = _ints(eagle.get("eagle_aux_hidden_state_layer_ids"))
        layers = model.get("num_layers")
        version = provenance.get("sglang_version")
        path = draft.get("path")
        return cls(
            producer=str(provenance.get("producer") or "unknown"),
            architecture=str(model.get("architecture") or ""),
            num_layers=layers if isinstance(layers, int) and layers > 0 else None,
            version=version if isinstance(version, str) else None,
            aux_depths=_ints(_dict(provenance.get("aux")).get("depths")),
            ids=ids,
            draft_config=f"{path}/config.json" if isinstance(path, str) and path else None,
            draft_named=bool(draft),
            algorithm=_text(arguments.get("speculative_algorithm")),
            quantized=_text(arguments.get("quantization")) or _text(model.get("quantization")),
        )


@dataclass(frozen=True)
class Leftover:
    """Two lanes that differ in a way that no reading of depth, form or rows explains.

    Attributes:
        served: the served chunk, or where that is right the server's stream at its depth.
        trained: the dump's chunk.
        handed: whether it is the served chunk that differs, from the server's own stream as well.
    """

    served: Lane
    trained: Lane
    depth: int
    handed: bool = False


@dataclass
class ChunkEvidence:
    """One chunk with the arrays' summaries still attached, for classes that need more than the line.

    Attributes:
        served, trained: what the rows of either side are that are not what they should be, by phase.
        depths: phase -> depth that most rows of the served chunk hold there; empty where all is well.
        leftover: what differs beyond that. fallen: whether some served rows are explained by nothing.
        between: such rows lie between this depth and the one before, as the stream within a layer does.
    """

    line: ChunkLine
    identity: Identity
    wanted: Label
    direct: Direct
    served: list[Part] = field(default_factory=list)
    trained: list[Part] = field(default_factory=list)
    depths: dict[int, int | None] = field(default_factory=dict)
    leftover: Leftover | None = None
    fallen: bool = False
    between: int | None = None

    @property
    def parts(self) -> list[tuple[str, Part]]:
        """("infer" or "train", part) of both sides."""
        return [*(("infer", part) for part in self.served), *(("train", part) for part in self.trained)]


@dataclass
class Evidence:
    """All that was measured.

    Attributes:
        served, trained: the stacks whose chunks were compared; `trained` is None where the training side is a
            whole model (every depth), `served` where the capture holds neither aux nor draft.input.
        has_depths: whether either side holds tensors of the stream itself.
        trained_depths: depth of every training chunk, in the dump's order.
        all_served: depth of every served chunk as found, also of those that have no training chunk.
        differences: values that differ though depth, form and rows are right.
        weights: what the served MLP says about the weights, where values differ and it can be told.
        tokens: how the prompts of both sides compare.
        trained_margins: for each training chunk whose depth was found out, how many times worse others fit.
        producer: what wrote the dump, None for a trace that was captured.
        claimed_depths: depth of every served chunk by the server's own account.
        handed: draft.input against aux, one a chunk; empty where the capture lacks either.
        divergence: where the stream first differs by more than noise; None where it does not.
        handed_widths: (aux, draft.input), None where the capture lacks either.
        draft: the served draft against its checkpoint; None where none was given.
        ranks: what is known of the ranks of the capture and of the dump.
    """

    serving: Serving
    hidden: int
    num_layers: int | None
    served: Stack | None
    trained: Stack | None
    has_depths: bool
    trained_chunks: int
    served_chunks: int
    trained_depths: list[Depth]
    claimed_depths: list[Depth]
    chunks: list[ChunkEvidence]
    layers: list[LayerLine]
    handed: list[Direct]
    handed_noise: float
    handed_widths: tuple[int, int] | None
    coverage: Coverage
    all_served: list[Depth] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    weights: WeightTest | None = None
    tokens: Tokens | None = None
    divergence: Divergence | None = None
    trained_margins: list[float | None] = field(default_factory=list)
    producer: Producer | None = None
    notes: list[str] = field(default_factory=list)
    draft: DraftFindings | None = None
    ranks: list[RankFacts] = field(default_factory=list)

    @property
    def summed_ranks(self) -> int:
        """How many ranks of the server share a sum; 1 where there is no tensor parallelism."""
        return max((facts.size for facts in self.ranks if facts.side == "infer"), default=1)

    @property
    def lines(self) -> list[ChunkLine]:
        return [chunk.line for chunk in self.chunks]

    @property
    def wanted_depths(self) -> list[int] | None:
        """Depths the draft was trained on, in the dump's order, where all are known and are ids' to give."""
        depths = [d for d in self.trained_depths if isinstance(d, int)]
        return depths if depths and len(depths) == len(self.trained_depths) else None

    @property
    def served_depths(self) -> list[Depth]:
        return [chunk.line.served for chunk in self.chunks]


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _ints(value: object) -> list[int] | None:
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        return list(value)
    return None
