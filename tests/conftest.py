"""What holds for every test."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples every time, so that a red build has a cause in its change. HYPOTHESIS_PROFILE=search looks
# further, with other examples in each run.
settings.register_profile("same", derandomize=True, database=None)
settings.register_profile("search", print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

_SERVERS = (Path(__file__).parent / "sglang", Path(__file__).parent / "plugin")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start servers come first: a run over several processes then does not end with one alone."""
    items.sort(key=lambda item: item.path.parent not in _SERVERS)
