"""What the server counted is read out of provenance, whatever is in it, and held against the prediction."""

import json

import h5py
import numpy as np
import pytest

from hsprobe.fixtures.demo import TRAINED
from hsprobe.impact import impact
from hsprobe.impact.counters import by_request
from hsprobe.impact.model import Acceptance

HOSTILE = [None, 3, "x", [], {}, {"requests": 3}, {"requests": [None, 7, {"rid": 4}]},
           {"requests": [{"rid": "a", "completion_tokens": True, "spec_verify_ct": 2}]},
           {"requests": [{"rid": "a", "completion_tokens": 5, "spec_verify_ct": -2}]}]  # fmt: skip


@pytest.mark.parametrize("provenance", HOSTILE, ids=repr)
def test_counters_that_are_none_are_none(provenance):
    assert by_request(provenance if isinstance(provenance, dict) else {"requests": provenance}, 3) == {}


@pytest.mark.parametrize("name", ["spec_correct_drafts_histogram", "spec_accept_histogram"])
def test_counters_of_every_version_are_read(name):
    facts = {"rid": "a", "completion_tokens": 9, "spec_verify_ct": 4, name: [2, 1, 1]}
    assert by_request({"requests": [facts]}, 3) == {"a": Acceptance(9, 4, [2, 1, 1, 0])}


def counted(path, out, share: float):
    """A copy of a trace whose server counted `share` of the accept length that the right draft reaches."""
    report = impact(path, path, draft=TRAINED / "draft", steps=3)
    passes = report.trained.passes / share / report.requests
    out.write_bytes(path.read_bytes())
    with h5py.File(out, "r+") as file:
        facts = json.loads(bytes(file["provenance"][()]))
        lengths = np.diff(file["requests/offset"][:]) - file["requests/prompt_len"][:]
        facts["requests"] = [
            {"rid": rid.decode(), "completion_tokens": int(length), "spec_verify_ct": round(passes)}
            for rid, length in zip(file["requests/id"][:], lengths, strict=True)
        ]
        text = json.dumps(facts).encode()
        del file["provenance"]
        file.create_dataset("provenance", data=text, dtype=h5py.string_dtype("utf-8", len(text)))
    return out


@pytest.mark.parametrize(("share", "lost"), [(1.0, False), (0.6, True)])
def test_a_server_that_accepts_less_on_the_same_states_runs_another_draft(trace, tmp_path, share, lost):
    right = trace([2, 5, 8])
    report = impact(right, counted(right, tmp_path / "i.h5", share), draft=TRAINED / "draft", steps=3)
    assert report.reported.requests == report.requests
    assert not report.states_cost
    assert (report.lost, report.draft_costs) == (lost, lost)
    assert report.reported.error == pytest.approx(1 / share - 1, abs=0.05)
