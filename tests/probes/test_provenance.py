"""What is recorded of the server's arguments, in whichever kind of record SGLang keeps them."""

import dataclasses

import msgspec
import pytest

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
