import json

import pytest

from hsprobe.capture.prompts import Prompt, load_prompts
from hsprobe.errors import HsprobeError


def test_lines_with_ids_and_text_are_read_in_order(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"input_ids": [1, 2, 3]}\n\n{"text": "hello"}\n')
    assert load_prompts(path) == [Prompt(input_ids=(1, 2, 3)), Prompt(text="hello")]
    assert load_prompts(path, limit=1) == [Prompt(input_ids=(1, 2, 3))]


@pytest.mark.parametrize(
    "line", ["[1, 2]", "{}", '{"input_ids": []}', '{"input_ids": [1.5]}', '{"input_ids": [-1]}', "{not json"]
)
def test_line_that_is_no_prompt_is_named_by_number(tmp_path, line):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"text": "fine"}) + "\n" + line + "\n")
    with pytest.raises(HsprobeError, match=r"line 2 of .*prompts\.jsonl"):
        load_prompts(path)


@pytest.mark.parametrize("content", [b"", b"\n\n"])
def test_file_without_prompts_is_refused(tmp_path, content):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    with pytest.raises(HsprobeError, match="holds no prompts"):
        load_prompts(path)


def test_missing_file_folder_and_binary_are_refused(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x01")
    for name, words in (("missing", "no file"), (".", "nor a training dump"), ("binary", "neither a trace")):
        with pytest.raises(HsprobeError, match=words):
            load_prompts(tmp_path / name)
