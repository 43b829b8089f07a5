"""The dumps under ``data``, written by the producers' own code: which is which, and how its producer numbers.

See ``data/README.md``. All are of the trained fixture, told to capture the outputs of layers 2, 5 and 8.
"""

from dataclasses import dataclass
from pathlib import Path

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Real:
    """One dump.

    Attributes:
        key: of the reader that should claim it.
        trained: the depths that its chunks hold.
        ids: what its producer calls them.
        setting: what its producer's ids are called.
        final: which side of the norm its last state is from, None without one.
        said: the format to name, where nothing in the dump tells.
    """

    key: str
    path: str
    trained: tuple[int, ...] = (3, 6, 9)
    ids: tuple[int, ...] = (2, 5, 8)
    setting: str = ""
    final: str | None = "post"
    said: str | None = None

    @property
    def folder(self) -> Path:
        return DATA / self.path


REAL = [
    Real("modelopt", "modelopt/hf", setting="--aux-layers"),
    Real("modelopt", "modelopt/trtllm", setting="--aux-layers"),
    Real("modelopt-vllm", "modelopt/vllm", (2, 5, 8), setting="--aux-layers", final="pre"),
    Real("speculators", "speculators/current", ids=(3, 6, 9), setting="--target-layer-ids", final="pre"),
    Real("speculators", "speculators/fp8", ids=(3, 6, 9), setting="--target-layer-ids", final="pre"),
    Real("speculators-old", "speculators/old", setting="--layer-ids", final="pre"),
    Real("automodel", "automodel", setting="aux_layer_ids", final=None),
    Real("torchspec", "torchspec", setting="aux_hidden_states_layers"),
    Real("specforge", "specforge/plain", setting="aux_hidden_state_layer_ids"),
    Real("specforge", "specforge/packed", setting="aux_hidden_state_layer_ids"),
    Real(
        "sglang-aux-responses", "sglang/responses-aux.json",
        setting="--return-aux-hidden-state-layer-ids", final=None, said="sglang-aux-responses",
    ),
]  # fmt: skip
WITHOUT_CHUNKS = [
    Real("sglang-passes", "sglang/passes"),
    Real("sglang-dumper", "sglang/dumper"),
    Real("sglang-responses", "sglang/responses-final.json", said="sglang-responses"),
]


def named(one: Real) -> str:
    """For the name of a test."""
    return one.path.removesuffix(".json")
