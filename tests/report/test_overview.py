"""What `hsprobe inspect` shows."""

import io
from pathlib import Path

import pytest

from hsprobe.report import overview
from hsprobe.trace.reader import Trace
from hsprobe.trace.writer import TraceWriter
from tests.synthetic import L, prompts, write_infer, write_train


def _shown(path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    with Trace.open(path) as trace:
        facts = overview.facts(trace)
    stream = io.StringIO()
    overview.write(facts, stream)
    return stream.getvalue()


def test_one_screen_says_what_is_in_a_capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = _shown(write_infer(tmp_path / "i.h5", (3, 6, 8)), monkeypatch)
    lines = text.splitlines()
    assert len(lines) <= 24
    assert max(len(line) for line in lines) <= 80
    assert "sglang 0.5.23" in text
    assert "LlamaForCausalLM, 9 layers of 64, float32" in text
    assert "aux layer ids [2, 5, 7], depths 3, 6, 8" in " ".join(text.split())
    assert f"layer/000..{L:03d}" in text
    assert "3 chunks: 3, 6, 8" in text
    passes = {tuple(line.split()) for line in lines}
    assert ("target", "prefill", "FULL", "4", "80") in passes


def test_facts_count_what_was_written(tmp_path: Path) -> None:
    with Trace.open(write_train(tmp_path / "t.h5", (3, 6))) as trace:
        facts = overview.facts(trace)
    total = sum(len(r) for r in prompts())
    assert facts["requests"] == {"count": 4, "prompt_tokens": 80, "tokens": total}
    assert facts["rows"] == {"plain": total}
    (tensor,) = facts["tensors"]
    assert (tensor["name"], tensor["depths"], tensor["rows"], tensor["width"]) == ("aux", [3, 6], total, 128)


def test_an_empty_trace_is_shown_as_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with TraceWriter(tmp_path / "e.h5", {}) as writer:
        writer.set_gaps([{"rank": 0, "site": "aux", "depth": None, "pass": 3, "reason": "buffer full"}])
    text = _shown(tmp_path / "e.h5", monkeypatch)
    assert "no tensors were recorded" in text
    assert "1 gap" in text
    assert "rank 0, site aux, pass 3: buffer full" in text


def test_what_the_probes_showed_of_themselves_takes_a_line_a_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = {
        "aux": {"state": "proven"},
        "embed": {"state": "proven"},
        "layer": {"state": "disarmed", "why": "nothing came by for depth 2", "ranks": [1]},
        "draft.qkv": {"state": "unproven", "why": "LlamaModel has no qkv"},
    }
    with TraceWriter(tmp_path / "e.h5", {"self_test": shown}):
        pass
    text = " ".join(_shown(tmp_path / "e.h5", monkeypatch).split())
    assert (
        "self-test disarmed on rank 1 layer: nothing came by for depth 2 "
        "unproven draft.qkv: LlamaModel has no qkv proven aux, embed"
    ) in text
