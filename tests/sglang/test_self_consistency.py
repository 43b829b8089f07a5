"""A real server against itself: the same tokens in verify and, sent again with their answers, in prefill."""

import json
from pathlib import Path

import pytest
from serving import CAPTURE_SECONDS, Configuration, Kitchen, run_hsprobe

from hsprobe.fixtures import cpu
from hsprobe.trace.reader import Trace


@pytest.fixture(scope="module")
def twice(kitchen: Kitchen, tmp_path_factory) -> Path:
    """A capture of four prompts, and of each with its answer appended."""
    folder = tmp_path_factory.mktemp("twice")
    configuration = Configuration()
    with Trace.open(kitchen.capture(configuration).trace) as trace:
        requests = trace.requests
        whole = [requests.tokens(r).tolist() for r in range(len(requests))]
        prompts = [ids[: int(n)] for ids, n in zip(whole, requests.prompt_len, strict=True)]
    lines = [json.dumps({"input_ids": ids}) for ids in (*prompts, *whole)]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    done = run_hsprobe(
        "capture", "--server", "-o", folder / "infer.h5", "--prompts", folder / "prompts.jsonl",
        *configuration.options, "--", *kitchen.server_arguments(configuration), "--disable-radix-cache",
        environment=cpu.environment(), seconds=CAPTURE_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "infer.h5"


def test_verify_agrees_with_prefill_and_the_draft_is_handed_what_was_computed(twice: Path) -> None:
    done = run_hsprobe("diff", twice, "--format", "json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    compared = {(c["left"], c["right"]): c for c in report["comparisons"]}
    verify = compared["verify", "prefill"]
    assert verify["rows"] >= 40
    assert {"aux chunk 0", "layer/000", "layer/008", "logits_processor.input"} <= {
        site["site"] for site in verify["sites"]
    }
    assert ("draft.input", "aux") in compared
    assert report["repeated_contexts"] >= 40


def test_an_ordinary_capture_says_what_it_could_not_compare(kitchen: Kitchen) -> None:
    done = run_hsprobe("diff", kitchen.capture(Configuration()).trace)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "draft.input vs aux" in done.stdout
    assert "verify vs prefill" not in done.stdout
