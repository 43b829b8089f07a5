"""Every command in docs/large.md runs, against a real S3 server and real Ray workers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest

from hsprobe.cluster.rays import RayEngine
from hsprobe.fixtures.dumps import specforge
from hsprobe.fixtures.dumps.states import Request
from tests.remote.conftest import S3, TRAINED

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/large.md").read_text()
REFERENCE = ROOT / "tests/formats/data/reference.h5"


def _commands() -> list[str]:
    blocks = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
    return [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ ")]


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a running cluster, which `auto` stands for."""
    with RayEngine(workers=2) as engine:
        yield str(engine._ray.get_runtime_context().gcs_address)


@pytest.fixture(scope="module")
def folder(s3_server: S3, requests: list[Request], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the page's names stand for."""
    folder = tmp_path_factory.mktemp("page")
    shutil.copy(str(files("hsprobe.data") / "right.h5"), folder / "infer.h5")
    shutil.copy(REFERENCE, folder / "reference.h5")
    specforge.write(folder / "dump/hidden_states", requests, TRAINED)
    s3_server.client().create_bucket(Bucket="bucket")
    s3_server.put(folder / "dump", "", "bucket")
    s3_server.put(folder / "reference.h5", "", "bucket")
    return folder


@pytest.mark.parametrize("command", [one for one in _commands() if not one.startswith("pip ")])
def test_the_command_runs(command: str, folder: Path, request: pytest.FixtureRequest) -> None:
    joins = "--ray-address auto" in command
    cluster = {"RAY_ADDRESS": request.getfixturevalue("cluster")} if joins else {}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # After the cluster was started, which sets how Ray sees loopback addresses.
    environment = {**os.environ, **cluster, "PATH": path}
    done = subprocess.run(
        ["bash", "-e", "-c", command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, f"$ {command}\n{done.stdout}{done.stderr}"
    assert done.stdout
    # The journal was begun by an earlier command, without Ray.
    assert ("done before" in done.stderr) == ("ray" in command and "--journal" in command)


def test_what_is_to_be_installed_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    installs = [one for one in _commands() if one.startswith("pip ")]
    assert len(installs) == 2
    for name in re.findall(r"hsprobe\[(\w+)\]", " ".join(installs)):
        assert name in extras
