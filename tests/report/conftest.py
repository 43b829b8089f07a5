"""Traces with and without a fault, shared by the tests of the reports."""

from pathlib import Path

import pytest

from hsprobe.diagnose import Report, diff
from tests.synthetic import World, prompts, write_infer, write_train


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="session")
def good(folder: Path) -> Report:
    return diff(write_train(folder / "train.h5", (3, 6, 8)), write_infer(folder / "good.h5", (3, 6, 8)))


@pytest.fixture(scope="session")
def bad(folder: Path, good: Report) -> Report:
    """The embedding in a chunk, a request that drifts, and a few rows not generated."""
    requests = prompts()
    requests[1][20] = (requests[1][20] + 1) % 61
    requests[3] = requests[3][:-4]
    infer = write_infer(folder / "bad.h5", (0, 3, 6), world=World(requests=requests))
    return diff(folder / "train.h5", infer)
