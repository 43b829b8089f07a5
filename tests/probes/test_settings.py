import subprocess
import sys

import pytest

from hsprobe.probes.sglang.settings import SITES, from_environment, parse_numbers, parse_sites


def test_depths_are_numbers_and_ranges():
    assert parse_numbers("0, 3,5-8", "depth") == {0, 3, 5, 6, 7, 8}
    for text in ("", "a", "3-", "-1", "1,,2"):
        with pytest.raises(ValueError, match="not a depth"):
            parse_numbers(text, "depth")


def test_a_prefix_names_all_sites_below_it():
    assert parse_sites("aux, draft") == {"aux", *(site for site in SITES if site.startswith("draft."))}
    with pytest.raises(ValueError, match="'drafts' is not a site"):
        parse_sites("drafts")


def test_environment_chooses_folder_sites_depths_and_limit(tmp_path):
    everything = from_environment({"HSPROBE_CAPTURE": "1"})
    assert everything.directory is None
    assert everything.wants("layer", 99)
    assert everything.wants("draft.logits")
    chosen = from_environment(
        {
            "HSPROBE_CAPTURE": str(tmp_path),
            "HSPROBE_SITES": "layer",
            "HSPROBE_DEPTHS": "2",
            "HSPROBE_RANKS": "0,4-5",
            "HSPROBE_MAX_BYTES": "1000",
        }
    )
    assert (chosen.directory, chosen.max_bytes) == (tmp_path, 1000)
    assert (everything.ranks, chosen.ranks) == (None, {0, 4, 5})
    assert chosen.wants("layer", 2)
    assert not chosen.wants("layer", 3)
    assert not chosen.wants("aux")


def test_plugin_that_was_not_asked_for_imports_nothing():
    code = (
        "import sys; from hsprobe.probes.sglang import activate; activate(); "
        "print([name for name in ('torch', 'numpy', 'h5py', 'sglang') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PATH": ""}
    )
    assert done.stdout.strip() == "[]"
