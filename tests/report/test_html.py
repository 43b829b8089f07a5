"""The HTML report in a real browser without a network: read, clicked, filtered, seen in both themes."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import Select, WebDriverWait

from hsprobe.cli import main
from hsprobe.diagnose import Report, diff
from hsprobe.fixtures import screenshots
from hsprobe.fixtures.screenshots import open_report
from tests.synthetic import L, write_infer, write_train

Browser = webdriver.Chrome


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = screenshots.browser()
    yield found
    found.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train.h5, all.h5 (every depth), good and bad captures, and reports of them."""
    folder = tmp_path_factory.mktemp("html")
    write_train(folder / "train.h5", (3, 6, 8))
    write_train(folder / "all.h5", every=True)
    write_infer(folder / "good.h5", (3, 6, 8))
    write_infer(folder / "bad.h5", (0, 6, 8))
    for train, infer, code in (("train", "good", 0), ("train", "bad", 1), ("all", "good", 0)):
        out = folder / f"{train}-{infer}.html"
        command = ["diff", f"{folder}/{train}.h5", f"{folder}/{infer}.h5", "--format", "html", "-o", str(out)]
        assert main(command) == code
    return folder


def _by(browser: Browser, name: str) -> WebElement:
    return browser.find_element(By.ID, name)


def _shown_rows(browser: Browser, table: str) -> list[str]:
    rows = browser.find_elements(By.CSS_SELECTOR, f"#{table} tbody tr")
    return [row.text for row in rows if row.is_displayed()]


def _traces(browser: Browser, chart: str) -> list[str]:
    found: list[str] = browser.execute_script(
        f"return document.getElementById('{chart}').data.map(t => t.name || t.type)"
    )
    return found


def test_the_file_is_whole_small_and_asks_for_nothing(pages: Path, browser: Browser) -> None:
    page = pages / "train-bad.html"
    assert page.stat().st_size < 5_000_000
    open_report(browser, page)
    loaded: list[str] = browser.execute_script(
        "return performance.getEntriesByType('resource').map(entry => entry.name)"
    )
    assert [name for name in loaded if not name.startswith(("blob:", "data:"))] == []
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_the_finding_is_the_first_thing_to_read(pages: Path, browser: Browser) -> None:
    open_report(browser, pages / "train-bad.html")
    first = browser.find_element(By.CSS_SELECTOR, "main .finding")
    assert first.text.startswith("HS102 LAYER_SET aux chunk 0 carries the embedding output (depth 0)")
    assert "[-1, 5, 7]  ->  [2, 5, 7]" in first.find_element(By.TAG_NAME, "pre").text
    assert browser.find_element(By.CSS_SELECTOR, "h1 .verdict").text == "different"
    open_report(browser, pages / "train-good.html")
    assert browser.find_element(By.CSS_SELECTOR, "h1 .verdict").text == "same"
    assert "3 aux chunks as trained" in browser.find_element(By.CSS_SELECTOR, ".finding.clear").text


def test_the_page_holds_the_report_that_json_holds(pages: Path, browser: Browser) -> None:
    open_report(browser, pages / "train-bad.html")
    facts: Any = json.loads(browser.execute_script("return document.getElementById('facts').textContent"))
    report: Report = diff(pages / "train.h5", pages / "bad.h5")
    assert [found["title"] for found in facts["report"]["findings"]] == [f.title for f in report.findings]
    assert [chunk["served"] for chunk in facts["report"]["chunks"]] == [0, 6, 8]


def test_a_click_on_the_heatmap_reads_out_the_cell(pages: Path, browser: Browser) -> None:
    open_report(browser, pages / "train-bad.html")
    browser.execute_script("document.getElementById('heat-chart').scrollIntoView({block: 'center'})")
    # Where the cell of served chunk 0 and depth 0 is on the screen.
    x, y = browser.execute_script(
        """const chart = document.getElementById("heat-chart"), box = chart.getBoundingClientRect();
        const { xaxis, yaxis } = chart._fullLayout;
        return [box.left + xaxis._offset + xaxis.d2p("0 (embedding)"),
                box.top + yaxis._offset + yaxis.d2p("served chunk 0")];"""
    )
    action = webdriver.ActionChains(browser)
    action.w3c_actions.pointer_action.move_to_location(int(x), int(y))
    action.pause(0.3).click().perform()
    WebDriverWait(browser, 10).until(lambda b: "served chunk 0" in _by(b, "heat-cell").text)
    said = _by(browser, "heat-cell").text
    assert said.startswith("served chunk 0 against depth 0 (embedding): error ")
    assert "the best of its row" in said


def test_the_heatmap_obeys_the_keyboard_and_its_filter(pages: Path, browser: Browser) -> None:
    open_report(browser, pages / "train-good.html")
    chart = _by(browser, "heat-chart")
    chart.send_keys(Keys.ARROW_RIGHT)
    for _ in range(3):
        chart.send_keys(Keys.ARROW_RIGHT)
    said = _by(browser, "heat-cell").text
    assert said.startswith("trained chunk 0 against depth 3 (layer 2)")
    assert said.endswith("the best of its row; the depth it should be.")
    Select(_by(browser, "heat-group")).select_by_value("served")
    names = browser.execute_script("return document.getElementById('heat-chart').data[0].y")
    assert names == ["served chunk 0", "served chunk 1", "served chunk 2"]


def test_filters_choose_chunk_and_phase(pages: Path, browser: Browser) -> None:
    open_report(browser, pages / "train-bad.html")
    everything = _traces(browser, "position-chart")
    assert "chunk 0, prefill" in everything
    assert "chunk 2, verify" in everything
    Select(_by(browser, "position-chunk")).select_by_value("0")
    Select(_by(browser, "position-phase")).select_by_value("verify")
    assert _traces(browser, "position-chart") == ["chunk 0, verify"]
    before = _shown_rows(browser, "worst-table")
    Select(_by(browser, "worst-chunk")).select_by_value("0")
    after = _shown_rows(browser, "worst-table")
    assert 0 < len(after) < len(before)
    assert all(row.startswith("0 ") for row in after)
    assert re.search(r"\[\d+\]", after[0]), "the row's own token is marked among its neighbours"
    assert _by(browser, "worst-count").text == f"{len(after)} of {len(before)} rows shown"


def test_differences_of_origin_can_be_looked_at_alone(pages: Path, browser: Browser) -> None:
    open_report(browser, pages / "train-bad.html")
    before = _shown_rows(browser, "origin-table")
    _by(browser, "origin-differs").send_keys(Keys.SPACE)
    after = _shown_rows(browser, "origin-table")
    assert len(after) < len(before)
    assert all(row.endswith(("differs", "one side")) for row in after)
    assert any(row.startswith("producer transformers sglang") for row in after)


def test_a_whole_model_shows_growth_and_every_depth(pages: Path, browser: Browser) -> None:
    open_report(browser, pages / "all-good.html")
    assert _traces(browser, "growth-chart") == ["prefill", "decode", "verify", "expected noise"]
    names = browser.execute_script("return document.getElementById('heat-chart').data[0].y")
    assert names[-2:] == [f"trained depth {L}", "trained depth final"]
    assert (
        browser.execute_script("return document.getElementById('heat-chart').data[0].x").pop() == "final norm"
    )


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_both_themes_can_be_read(theme: str, pages: Path, browser: Browser, tmp_path: Path) -> None:
    open_report(browser, pages / "train-bad.html", theme)
    assert browser.save_screenshot(str(tmp_path / f"{theme}.png"))
    for selector in ("body", ".finding h3", ".finding pre", "caption", "tr.bad th", ".code", "summary"):
        element = browser.find_element(By.CSS_SELECTOR, selector)
        text, back = browser.execute_script(_COLOURS, element)
        assert _contrast(text, back) >= 4.5, f"{selector} in {theme}: {text} on {back}"


_COLOURS = """
let at = arguments[0], back = "rgba(0, 0, 0, 0)";
const text = getComputedStyle(at).color;
for (; at && back === "rgba(0, 0, 0, 0)"; at = at.parentElement) back = getComputedStyle(at).backgroundColor;
return [text, back];
"""


def _contrast(one: str, two: str) -> float:
    """As WCAG defines it, of two `rgb(r, g, b)`."""
    bright, dark = sorted((_luminance(one), _luminance(two)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_one_capture_alone_has_no_page(pages: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", f"{pages}/good.h5", "--format", "html"]) == 2
    assert "Give a training dump too" in capsys.readouterr().err


def test_without_plotly_it_says_what_to_install(
    pages: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from hsprobe.report import html

    html._plotly.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "plotly", None)
    assert main(["diff", f"{pages}/train.h5", f"{pages}/good.h5", "--format", "html"]) == 2
    assert "pip install 'hsprobe[html]'" in capsys.readouterr().err
