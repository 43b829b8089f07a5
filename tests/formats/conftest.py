"""A reference with every depth of the fixture's target, and a real server's capture of the same tokens."""

from pathlib import Path

import pytest

from hsprobe import data
from hsprobe.fixtures.dumps.states import Request, read_reference

DATA = Path(__file__).parent / "data"
TRAINED = (3, 6, 9)
"""Depths that the captured server hands to its draft."""


@pytest.fixture(scope="session")
def requests() -> list[Request]:
    return read_reference(DATA / "reference.h5")


@pytest.fixture(scope="session")
def served() -> Path:
    """A capture of a real server that serves depths 3, 6, 9, with every depth."""
    return Path(str(data.__file__)).parent / "right.h5"


@pytest.fixture(scope="session")
def served_with_final() -> Path:
    """As `served`, with the state after the final norm as well."""
    return DATA / "served.h5"
