"""A representative dozen of the planted faults, on two servers; ``make gallery`` runs all of them."""

from xml.etree import ElementTree

import jsonschema
import pytest
import release

from hsprobe.fixtures.faults.cases import CASES
from hsprobe.fixtures.faults.gallery import in_order, run_case
from hsprobe.fixtures.faults.kitchen import Kitchen
from hsprobe.report import json, junit, schema
from hsprobe.trace.reader import Trace

pytestmark = release.plants_faults

NAMES = (
    "nothing/llama-float32",
    "next_block/llama-float32",
    "final_norm_last/llama-float32",
    "block_only/llama-float32",
    "input_norm_alias/llama-float32",
    "mlp_missing/llama-float32",
    "previous_row/llama-float32",
    "verify_defaults/llama-float32",
    "nan_rows/llama-float32",
    "int4_weights/llama-float32",
    "shift_and_rows/llama-float32",
    "dump_swapped/llama-float32",
    "dump_other_token/llama-float32",
    "ids_used_as_is/deepseek-bfloat16",
)
CHOSEN = [case for case in in_order(CASES) if case.name in NAMES]


@pytest.fixture(scope="module")
def gallery(tmp_path_factory):
    kitchen = Kitchen(tmp_path_factory.mktemp("gallery"))
    yield kitchen
    kitchen.stop()


def test_names_are_of_cases():
    assert len(CHOSEN) == len(NAMES)
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CHOSEN, ids=lambda case: case.name)
def test_planted_codes_are_named_and_no_others(gallery, case):
    outcome = run_case(gallery, case)
    assert outcome.codes == case.codes, outcome.said
    assert outcome.report is not None
    # A fault of the server is not held against the probes that show it.
    with Trace.open(gallery.capture(case)) as trace:
        assert "disarmed" not in [one["state"] for one in trace.provenance["self_test"].values()]
    jsonschema.validate(json.document(outcome.report), schema.published())
    failed = ElementTree.fromstring(junit.document(outcome.report)).findall(".//failure")
    assert bool(failed) == bool(case.codes)
