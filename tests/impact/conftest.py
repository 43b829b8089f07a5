from pathlib import Path

import pytest
import torch

from hsprobe.capture.prompts import load_prompts
from hsprobe.fixtures.demo import TRAINED
from hsprobe.probes.transformers.reference import ReferencePlan, capture_reference

NEW_TOKENS = 40


@pytest.fixture(scope="session")
def trace(tmp_path_factory):
    """A function that gives a trace of the target's states at the outputs of layers."""
    folder = tmp_path_factory.mktemp("impact")
    prompts = load_prompts(TRAINED / "prompts.jsonl", 4)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def make(layers, name="", new_tokens=NEW_TOKENS, prompts=prompts) -> Path:
        path = folder / f"{name or 'layers'}-{layers}.h5"
        if not path.exists():
            plan = ReferencePlan(
                model=TRAINED / "target", out=path, layers=layers, max_new_tokens=new_tokens, dtype="float32"
            )
            capture_reference(plan, prompts, lambda done, total: None)
        return path

    yield make
    torch.set_num_threads(threads)
