"""Faults of ranks planted in one real server of two ranks; ``make gallery`` runs all of them."""

import pytest
import release

from hsprobe.fixtures.faults.gallery import in_order, run_case
from hsprobe.fixtures.faults.kitchen import Kitchen
from hsprobe.fixtures.faults.rank_cases import RANK_CASES

pytestmark = release.plants_faults

NAMES = (
    "nothing/llama-float32-tp2",
    "replica_perturbed/llama-float32-tp2",
    "width_shard_swapped/llama-float32-tp2",
    "mlp_part_unreduced/llama-float32-tp2",
    "mlp_summed_twice/llama-float32-tp2",
    "token_slices_interleaved/llama-float32-tp2",
    "two_captures/llama-float32-tp2",
    "two_captures_one_unreduced/llama-float32-tp2",
    "unreduced_in_verify/llama-float32-tp2",
)
CHOSEN = [case for case in in_order(RANK_CASES) if case.name in NAMES]


@pytest.fixture(scope="module")
def gallery(tmp_path_factory):
    kitchen = Kitchen(tmp_path_factory.mktemp("ranks-gallery"))
    yield kitchen
    kitchen.stop()


def test_names_are_of_cases():
    assert len(CHOSEN) == len(NAMES)
    assert len({case.serving for case in CHOSEN}) == 1


@pytest.mark.parametrize("case", CHOSEN, ids=lambda case: case.name)
def test_planted_codes_are_named_and_no_others(gallery, case):
    outcome = run_case(gallery, case)
    assert outcome.codes == case.codes, outcome.said
