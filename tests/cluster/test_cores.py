"""How many cores there are, by affinity and by the limits of control groups of both versions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hsprobe.cluster import cores


@pytest.mark.parametrize(
    ("mine", "limits", "shares"),
    [
        ("0::/", {"cpu.max": "250000 100000"}, [2.5]),
        ("0::/", {"cpu.max": "max 100000"}, []),
        ("0::/a/b", {"a/cpu.max": "400000 100000", "a/b/cpu.max": "max 100000"}, [4.0]),
        ("0::/not/to/be/seen", {"cpu.max": "100000 100000"}, [1.0]),
        ("4:cpu,cpuacct:/x\n1:name=y:/z", {"cpu,cpuacct/x/cpu.cfs": "300000 100000"}, [3.0]),
        ("4:cpu:/x", {"cpu/cpu.cfs": "-1 100000"}, []),
        ("", {}, []),
    ],
)
def test_the_limit_of_a_container_is_found(
    mine: str, limits: dict[str, str], shares: list[float], tmp_path: Path
) -> None:
    (tmp_path / "mine").write_text(mine)
    for name, text in limits.items():
        file = tmp_path / "root" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("cfs"):
            for kind, word in zip(("quota", "period"), text.split(), strict=True):
                file.with_name(f"cpu.cfs_{kind}_us").write_text(word)
        else:
            file.write_text(text)
    assert cores._shares(tmp_path / "root", tmp_path / "mine") == shares


def test_one_core_is_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "_shares", lambda root, mine: [0.5])
    assert cores.usable_cores() == 1
    monkeypatch.setattr(cores, "_shares", lambda root, mine: [])
    assert cores.usable_cores() == len(os.sched_getaffinity(0))
