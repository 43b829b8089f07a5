"""Faults planted in the draft of a real server are named by stage; `make gallery` plants all of them."""

import shutil

import jsonschema
import pytest
import release

from hsprobe.diagnose.consistency import consistency
from hsprobe.fixtures.faults import draft_folders
from hsprobe.fixtures.faults.draft_cases import DRAFT_CASES, PLAIN
from hsprobe.fixtures.faults.gallery import in_order, run_case
from hsprobe.fixtures.faults.kitchen import Kitchen
from hsprobe.report import json, schema

pytestmark = release.plants_faults

NAMES = (
    "right_shared_prefixes",
    "fc_skipped",
    "hidden_norm_missing",
    "recycled_normed",
    "embedding_other",
    "ids_unshifted",
    "rope_base",
    "positions_late",
    "d2t_ignored",
    "o_proj_transposed",
    "kv_zero",
    "window",
    "three_at_once",
)
CHOSEN = [
    case
    for case in in_order(DRAFT_CASES)
    if case.serving == PLAIN and case.name.removeprefix("draft_").split("/")[0] in NAMES
]


@pytest.fixture(scope="module")
def gallery(tmp_path_factory):
    kitchen = Kitchen(tmp_path_factory.mktemp("draft-gallery"))
    yield kitchen
    kitchen.stop()


def test_names_are_of_cases():
    assert len(CHOSEN) == len(NAMES)


@pytest.mark.parametrize("case", CHOSEN, ids=lambda case: case.name)
def test_planted_codes_are_named_and_no_others(gallery, case):
    outcome = run_case(gallery, case)
    assert outcome.codes == case.codes, outcome.said
    jsonschema.validate(json.document(outcome.report), schema.published())


def test_a_capture_alone_is_held_against_the_draft(gallery):
    (case,) = (case for case in CHOSEN if case.name.startswith("draft_rope_base"))
    report = consistency(gallery.capture(case), draft=gallery.trained_draft(case.serving))
    assert [finding.code for finding in report.findings] == ["HS806"]
    (finding,) = report.findings
    assert finding.mend.change == "rope_theta: 1e+06  ->  10000"
    assert {line.site for line in report.draft.stages if not line.ok} == {"draft.context"}


@pytest.mark.parametrize(
    ("edit", "code", "words"),
    [
        ('set: {"rope_theta": 500000.0}', "HS806", "rotates with base 10000"),
        ('set: {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}', "HS806", "no scaling"),
        ('set: {"norm_output": true}', "HS803", "given the state before the draft's norm"),
        ("norm before fc", "HS802", "input_norm) is not applied"),
        ("fc norm", "HS802", "fc_norm) are not applied"),
        ("transposed: midlayer.self_attn.o_proj.weight", "HS809", "o_proj is transposed"),
        ("absolute d2t", "HS808", "mapped"),
        ("own embedding", "HS804", "holds another of its own"),
    ],
    ids=lambda value: str(value).split(":")[0] if isinstance(value, str) else None,
)
def test_a_right_server_differs_from_another_checkpoint(gallery, tmp_path, edit, code, words):
    """The other way round: the folder is changed, not the server."""
    case = next(case for case in CHOSEN if not case.codes)
    shutil.copytree(gallery.trained_draft(case.serving), tmp_path / "draft")
    draft_folders.edit(tmp_path / "draft", [edit])
    report = consistency(gallery.capture(case), draft=tmp_path / "draft")
    assert [finding.code for finding in report.findings] == [code]
    assert words in report.findings[0].title
