"""The port of a server that hsprobe starts."""

import socket
from pathlib import Path

import pytest

from hsprobe.capture import server


def test_port_leaves_room_for_those_that_sglang_derives_from_it():
    """0.5.15 refuses to start where 10,000 above its own port is beyond 65535."""
    assert all(1024 < server.free_port() <= 65535 - 10_000 for _ in range(200))


def test_port_is_none_that_a_connection_could_be_given():
    """A connection from the port it goes to is joined to itself: no server can then listen there."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    if lowest < 32_768:
        pytest.skip(f"this machine gives connections ports from {lowest} on")
    assert all(server.free_port() < lowest for _ in range(200))


def test_port_in_use_is_not_taken(monkeypatch):
    with socket.socket() as taken, socket.socket() as other:
        for one in (taken, other):
            one.bind(("127.0.0.1", 0))
        busy = taken.getsockname()[1]
        drawn = [busy, other.getsockname()[1]]
        other.close()
        free = drawn[1]
        monkeypatch.setattr(server.random, "randrange", lambda *_: drawn.pop(0))
        assert server.free_port() == free
