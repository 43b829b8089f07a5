import pytest
from serving import Kitchen


@pytest.fixture(scope="session")
def kitchen(tmp_path_factory) -> Kitchen:
    return Kitchen(tmp_path_factory.mktemp("sglang"))
