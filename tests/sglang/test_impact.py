"""What the real server accepts is what `hsprobe impact` predicts, for right and for wrong states."""

import re
from pathlib import Path

import pytest
import release

from hsprobe.fixtures.acceptance import CASES, measure
from hsprobe.fixtures.faults.kitchen import Kitchen

pytestmark = release.plants_faults

PAGE = Path(__file__).parents[2] / "docs" / "impact.md"
# All on one server: what is planted changes while it runs.
RUN = ("right", "late", "early", "embedding", "reversed", "rows", "two")
CHOSEN = [served for served in CASES if served.name in RUN]


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    kitchen = Kitchen(tmp_path_factory.mktemp("impact"))
    found = {}

    def report(served):
        if served.name not in found:
            found[served.name] = measure(kitchen, served)
        return found[served.name]

    yield report
    kitchen.stop()


@pytest.mark.parametrize("served", CHOSEN, ids=lambda served: served.name)
def test_prediction_is_within_a_tenth_of_what_the_server_accepts(reports, served):
    report = reports(served)
    assert report.reported is not None
    assert report.reported.requests == report.requests == 6
    assert report.reported.server.tokens >= 200
    assert abs(report.reported.error) < 0.1
    assert sorted(code.split()[0] for cost in report.costs for code in cost.codes) == sorted(served.codes)
    assert not report.draft_costs


def test_right_states_cost_nothing_and_wrong_ones_do(reports):
    for served in CHOSEN:
        report = reports(served)
        assert report.lost == bool(served.codes), served.name
        assert (report.loses > 0.1) == bool(served.codes), served.name


def test_undoing_one_of_two_findings_gives_back_what_it_cost(reports):
    report = reports(next(served for served in CHOSEN if served.name == "two"))
    alone = reports(next(served for served in CHOSEN if served.name == "embedding"))
    embedding, norm = (
        next(cost for cost in report.costs if cost.codes[0].startswith(code)) for code in ("HS102", "HS201")
    )
    # What is predicted for this finding alone is what a server with this fault alone came to.
    assert embedding.alone.length == pytest.approx(alone.reported.server.length, rel=0.1)
    assert embedding.gains > 0.5
    # Undone, it leaves what the other costs alone.
    assert embedding.mended == norm.alone
    assert norm.mended == embedding.alone


def test_the_page_has_figures_of_cases_and_none_is_off_by_a_tenth():
    table = PAGE.read_text().partition("<!-- acceptance:begin -->")[2]
    words = re.findall(r"^\| ([^|]+) \| [\d.]+ \|", table, re.MULTILINE)
    offs = [float(off) for off in re.findall(r"\| ([+-][\d.]+)% \|", table)]
    assert words == [served.words for served in CASES]
    assert len(offs) == len(CASES)
    assert max(map(abs, offs)) < 10
