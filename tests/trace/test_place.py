import os
import stat
import subprocess
import sys

import pytest

from hsprobe.trace.place import directory_for_port, make_private, remove_leftovers


def test_folder_is_made_for_its_owner_alone(tmp_path):
    folder = tmp_path / "spools"
    make_private(folder)
    make_private(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_folder_that_others_can_write_to_and_link_are_refused(tmp_path):
    shared, link = tmp_path / "shared", tmp_path / "link"
    shared.mkdir()
    shared.chmod(0o777)
    link.symlink_to(tmp_path)
    for folder in (shared, link):
        with pytest.raises(PermissionError, match="not a folder private"):
            make_private(folder)


def test_each_port_has_a_folder_below_one_of_the_users_own():
    assert directory_for_port(1).parent == directory_for_port(2).parent
    assert directory_for_port(1) != directory_for_port(2)
    assert str(os.getuid()) in directory_for_port(1).parent.name


def test_spools_of_ended_processes_go_and_those_of_running_ones_stay(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    old, live, other = (tmp_path / f"pp0-dp0-tp0-{pid}.spool" for pid in (ended.pid, os.getpid(), "strange"))
    for spool in (old, live, other):
        spool.touch()
    remove_leftovers(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([live, other])
