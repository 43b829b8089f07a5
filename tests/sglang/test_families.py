"""One family of those in docs/support.md, served as `make support` does; that one runs them all."""

import pytest

from hsprobe.fixtures.families import BY_NAME
from hsprobe.fixtures.support import FP32_ROUNDING, PARTS, SITES, judge, serve

FAMILY = BY_NAME["GLM4-MoE"]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return judge(FAMILY, serve(FAMILY, tmp_path_factory.mktemp("families") / "one"))


def test_every_site_is_what_transformers_computes(found):
    assert set(found) == set(SITES)
    for site in set(SITES) - {"draft.*"}:
        assert "why" not in found[site], (site, found[site]["why"])
        assert found[site]["error"] <= FP32_ROUNDING
        assert found[site]["rows"] >= 140
    assert found["draft.*"] == {"sites": len(PARTS)}
