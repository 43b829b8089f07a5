import os

import pytest
from serving import Kitchen


@pytest.fixture(scope="session")
def kitchen(tmp_path_factory: pytest.TempPathFactory) -> Kitchen:
    """Shared by the processes over which pytest-xdist spreads a run."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "sglang"
    folder.mkdir(exist_ok=True)
    return Kitchen(folder)
