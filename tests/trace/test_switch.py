"""The switch between a capture and a server's probes."""

import pytest

from hsprobe.errors import HsprobeError
from hsprobe.trace.switch import NAME, SIZE, Switch


def test_two_processes_share_it_through_its_file(tmp_path):
    server, capture = Switch(tmp_path), Switch(tmp_path)
    assert server.number == 0
    capture.turn_on('{"every": 2}')
    assert server.number != 0
    assert server.asked() == '{"every": 2}'
    capture.turn_off()
    assert server.number == 0


def test_every_capture_has_a_number_of_its_own(tmp_path):
    server = Switch(tmp_path)
    numbers = []
    for text in ("", "x" * 1000, "y"):
        # Each by a process of its own, which ends.
        Switch(tmp_path).turn_on(text)
        numbers.append(server.number)
        assert server.asked() == text
        Switch(tmp_path).turn_off()
    assert len(set(numbers)) == 3
    assert 0 not in numbers


def test_what_is_not_all_there_is_not_read(tmp_path):
    switch = Switch(tmp_path)
    switch.turn_on('{"every": 2}')
    file = tmp_path / NAME
    data = bytearray(file.read_bytes())
    data[35] ^= 1
    file.write_bytes(data)
    assert switch.asked() is None


def test_more_than_there_is_room_for_is_refused_and_nothing_is_recorded(tmp_path):
    switch = Switch(tmp_path)
    with pytest.raises(HsprobeError, match="Say it in"):
        switch.turn_on("x" * SIZE)
    assert switch.number == 0


def test_a_link_in_its_place_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").write_bytes(b"")
    (tmp_path / NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        Switch(tmp_path)
    assert (tmp_path / "elsewhere").stat().st_size == 0
