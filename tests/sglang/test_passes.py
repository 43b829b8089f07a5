"""Plain decoding, chunked prefill and prefix-cache hits on a server without a draft."""

import json
import shutil

import numpy as np
import pytest
import release
from serving import CAPTURE_SECONDS, Configuration, run_hsprobe
from states import Phase, by_context, names_of, rows_of, worst_relative_error

from hsprobe.fixtures import cpu
from hsprobe.trace.reader import Trace


@pytest.fixture(scope="module")
def served(kitchen):
    captured = kitchen.capture(Configuration(ids=None, arguments=("--chunked-prefill-size=16",)))
    assert captured.returncode == 0, captured.stderr
    return captured


def test_decode_and_chunked_prefill_rows_equal_the_reference(kitchen, served):
    for depth in range(9):
        name = f"layer/{depth:03d}"
        expected = by_context(rows_of(kitchen.reference("llama"), name))
        for phase in (Phase.PREFILL, Phase.DECODE):
            error, count = worst_relative_error(rows_of(served.trace, name), expected, phase)
            assert count >= 70, phase
            assert error < 5e-6, (name, phase)


def test_long_prompts_came_in_several_passes(served):
    rows = rows_of(served.trace, "layer/000")
    with Trace.open(served.trace) as trace:
        prefill = trace.ranks[0].passes["phase"] == int(Phase.PREFILL)
        assert trace.ranks[0].passes["n_rows"][prefill].max() <= 16
        longest = max(int(n) for n in trace.requests.prompt_len)
    assert longest > 16
    assert rows.position.max() >= longest


def test_nothing_is_said_of_a_draft(served):
    assert not any(name.startswith("draft") or name == "aux" for name in names_of(served.trace))
    assert np.isfinite(rows_of(served.trace, "logits_processor.input").values_NW).all()


def test_prompts_given_as_text_are_read_by_the_servers_tokenizer(kitchen, tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    target = tmp_path / "target"
    shutil.copytree(kitchen.target("llama"), target)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=bytewise).save_pretrained(target)
    texts = ["Hello, draft", "and a longer second prompt"]
    prompts, infer, reference = (tmp_path / name for name in ("p.jsonl", "infer.h5", "reference.h5"))
    prompts.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    arguments = [argument for argument in cpu.SERVER_ARGUMENTS if argument != "--skip-tokenizer-init"]
    for command in (
        ["--model", target, "-o", reference, "--dtype", "float32", "--max-new-tokens", "3"],
        ["--server", "-o", infer, "--max-new-tokens", "3", "--", f"--model-path={target}", *arguments],
    ):
        split = command.index("--") if "--" in command else len(command)
        done = run_hsprobe(
            "capture", *command[:split], "--prompts", prompts, *command[split:],
            environment=cpu.environment(), seconds=CAPTURE_SECONDS,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    expected = by_context(rows_of(reference, "layer/004"))
    # Overlap scheduling up to 0.5.15 runs a request's next pass before it knows that the request has ended.
    decoded = {2 * 2} if release.NEWER else {2 * 2, 2 * 3}
    for phase, rows in ((Phase.PREFILL, {sum(map(len, texts))}), (Phase.DECODE, decoded)):
        error, count = worst_relative_error(rows_of(infer, "layer/004"), expected, phase)
        assert count in rows
        assert error < 5e-6
