"""The draft run offline, on traces of the trained pair made without a server."""

import json
import subprocess
import sys

import pytest
import torch

from hsprobe.capture.prompts import load_prompts
from hsprobe.draft.reference import load
from hsprobe.errors import HsprobeError
from hsprobe.fixtures.demo import TRAINED
from hsprobe.impact import impact
from hsprobe.impact.chains import Chains
from hsprobe.impact.texts import Text
from hsprobe.impact.walk import walk
from hsprobe.trace.reader import Trace

NEW_TOKENS, STEPS = 40, 3


def run(train, infer, **options):
    return impact(train, infer, draft=TRAINED / "draft", **{"steps": STEPS, **options})


def test_chains_and_walk_equal_drafting_token_by_token(trace):
    draft = load(TRAINED / "target", TRAINED / "draft")
    with Trace.open(trace([2, 5, 8])) as reader:
        tokens, prompt_len = reader.requests.tokens(0), int(reader.requests.prompt_len[0])
        states_TA = reader.ranks[0].tensors["aux"].read(slice(0, len(tokens)))
    text = Text(0, "r0", tokens, prompt_len)
    newest, passes = prompt_len, 0
    while newest + 1 < len(tokens):
        # A server knows the states up to `newest - 1` and the tokens up to `newest`, no more.
        with torch.no_grad():
            fed = torch.from_numpy(tokens[1 : newest + 1])
            chain = draft.draft_chain(draft.forward(torch.from_numpy(states_TA[:newest]), fed), STEPS)
        while chain and newest + 1 < len(tokens) and chain[0] == tokens[newest + 1]:
            chain, newest = chain[1:], newest + 1
        newest, passes = newest + 1, passes + 1
    heads = range(prompt_len - 1, len(tokens) - 1)
    found = walk(Chains(draft, STEPS, "cpu").hits(states_TA, text, heads), text.completion)
    assert (found.tokens, found.passes) == (NEW_TOKENS, passes)


def test_the_same_states_cost_nothing(trace):
    report = run(trace([2, 5, 8]), trace([2, 5, 8], "again"))
    assert not report.lost
    assert report.costs == []
    assert report.loses == 0.0
    assert report.trained.length > 3.0
    assert report.reported is None


def test_one_finding_accounts_for_the_whole_loss(trace):
    report = run(trace([2, 5, 8]), trace([-1, 5, 8]))
    (cost,) = report.costs
    assert report.lost
    assert report.states_cost
    assert cost.codes == ["HS102 LAYER_SET"]
    assert cost.loses == cost.gains == pytest.approx(report.loses)
    assert report.loses > 0.8


def test_a_reference_of_every_depth_stands_in_for_a_dump_by_the_ids_of_the_draft(trace):
    report = run(trace(None), trace([-1, 5, 8]))
    dumped = run(trace([2, 5, 8]), trace([-1, 5, 8]))
    assert report.trained == dumped.trained
    assert report.served == dumped.served
    assert any("3, 6, 9" in note for note in report.notes)


def test_prompts_that_the_dump_lacks_are_left_out_and_said(trace):
    some = load_prompts(TRAINED / "prompts.jsonl", 2)
    report = run(trace([2, 5, 8], "some", prompts=some), trace([2, 5, 8]))
    assert report.requests == 2
    assert report.left_out == {"without training states of what was generated": 2}


def test_a_dump_without_completions_is_refused_with_what_to_do(trace):
    with pytest.raises(HsprobeError, match="as many --max-new-tokens"):
        run(trace([2, 5, 8], "prompts", new_tokens=0), trace([2, 5, 8]))


def test_a_capture_without_completions_is_refused_with_what_to_do(trace):
    with pytest.raises(HsprobeError, match="no request with generated tokens"):
        run(trace([2, 5, 8]), trace([2, 5, 8], "prompts", new_tokens=0))


def test_requests_are_compared_as_far_as_both_sides_go(trace):
    report = run(trace([2, 5, 8], "short", new_tokens=20), trace([2, 5, 8]))
    assert report.requests == 4
    # The dump's last token has states too, the capture's one generated after it does not count.
    assert report.heads == 4 * 21
    assert any("rough figures" in note for note in report.notes)


def test_states_of_another_width_are_refused(trace):
    with pytest.raises(HsprobeError, match="256 wide, the draft takes 384"):
        run(trace([2, 5]), trace([2, 5], "again"))


def test_without_steps_anywhere_they_are_asked_for(trace):
    with pytest.raises(HsprobeError, match="Give --steps"):
        run(trace([2, 5, 8]), trace([2, 5, 8]), steps=None)


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "hsprobe", "impact", *map(str, arguments)], capture_output=True, text=True
    )


def test_command_says_the_cost_in_text_and_json_and_exits_1(trace):
    told = (trace([2, 5, 8]), trace([-1, 5, 8]), "--draft", TRAINED / "draft", "--steps", "3")
    done = command(*told)
    assert done.returncode == 1, done.stderr
    assert "LOSS" in done.stdout
    assert "HS102 LAYER_SET: aux chunk 0 carries the embedding" in done.stdout
    found = json.loads(command(*told, "--format", "json").stdout)
    assert found["verdict"] == "loses"
    assert found["costs"][0]["loses"] == pytest.approx(found["trained"]["length"] - found["served"]["length"])
    assert len(found["served"]["steps"]) == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--draft", "nowhere", "--steps", "3"), "nowhere"),
        (("--draft", TRAINED / "draft", "--steps", "3", "--target", "nowhere"), "nowhere"),
        (("--draft", TRAINED / "draft", "--steps", "3", "--device", "warp"), "--device warp"),
    ],
)
def test_trouble_is_one_sentence_and_exits_2(trace, arguments, said):
    done = command(trace([2, 5, 8]), trace([2, 5, 8], "again"), *arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1
