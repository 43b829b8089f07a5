"""What is recorded of the server's arguments, in whichever kind of record SGLang keeps them."""

import dataclasses
from types import SimpleNamespace

import msgspec
import pytest

from hsprobe.probes.sglang import provenance
from hsprobe.probes.sglang.provenance import arguments_of


@dataclasses.dataclass
class Plain:
    model_path: str = "target"
    speculative_num_steps: int = 3
    revision: str | None = None
    api_key: str = "secret"


class Struct(msgspec.Struct):
    model_path: str = "target"
    speculative_num_steps: int = 3
    revision: str | None = None
    api_key: str = "secret"


@pytest.mark.parametrize("arguments", [Plain(), Struct()], ids=["dataclass", "struct"])
def test_arguments_are_recorded_without_secrets(arguments):
    assert arguments_of(arguments) == {"model_path": "target", "speculative_num_steps": 3}


@pytest.mark.parametrize(
    "scheduler",
    [SimpleNamespace(dp_rank=1), SimpleNamespace(ps=SimpleNamespace(dp_rank=1))],
    ids=["0.5.9", "0.5.15"],
)
def test_whole_replicas_are_ranks_of_their_own_where_the_scheduler_alone_knows(scheduler, monkeypatch):
    asked = {"tp_rank": 1, "tp_size": 2}
    monkeypatch.setattr(provenance.places, "runtime_context", lambda: False)
    monkeypatch.setattr(provenance, "_asked", lambda: asked.__getitem__)
    place = provenance.coordinates(provenance.replica_of(scheduler), 2)
    assert (place["dp"], place["dp_size"], place["rank"], place["world_size"]) == (1, 2, 3, 4)
    assert provenance.replica_of(SimpleNamespace(dp_rank=None)) == 0
