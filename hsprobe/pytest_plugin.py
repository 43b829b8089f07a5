"""pytest plugin: a real server and captures as fixtures, baselines, and the report of a failure as a file."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hsprobe.testing import DifferentError, assert_matches_baseline

if TYPE_CHECKING:
    from hsprobe.capture.hold import HeldServer

MARKER = "hsprobe_server"
REPORTS = "hsprobe-reports"
BASELINES = "hsprobe_baselines"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options and settings."""
    group = parser.getgroup("hsprobe")
    group.addoption(
        "--hsprobe-update",
        action="store_true",
        help="write hsprobe's baselines instead of checking them",
    )
    group.addoption(
        "--hsprobe-reports",
        metavar="DIR",
        default=REPORTS,
        help="where the report of a failed assertion goes (default: %(default)s)",
    )
    parser.addini("hsprobe_server_args", "arguments of sglang.launch_server for hsprobe_server", default="")
    parser.addini(
        "hsprobe_server_env", "NAME=VALUE lines to add to its environment", type="linelist", default=[]
    )
    parser.addini("hsprobe_start_timeout", "seconds that hsprobe_server may take to start", default="1800")


def pytest_configure(config: pytest.Config) -> None:
    """The marker."""
    config.addinivalue_line(
        "markers",
        f"{MARKER}(*arguments, env={{}}): arguments of sglang.launch_server, in place of hsprobe_server_args",
    )


class Servers:
    """The servers of a session: one at a time, kept for as long as tests ask for the same arguments."""

    def __init__(self, folder: Path, start_seconds: float) -> None:
        self._folder = folder
        self._start_seconds = start_seconds
        self._count = 0
        self._key: object = None
        self._server: HeldServer | None = None

    def get(self, arguments: tuple[str, ...], environment: Mapping[str, str]) -> HeldServer:
        """A server with these arguments; another one is stopped first."""
        from hsprobe.capture.hold import HeldServer

        key = (arguments, tuple(sorted(environment.items())))
        if self._server is None or self._key != key:
            self.stop()
            self._count += 1
            folder = self._folder / str(self._count)
            folder.mkdir(mode=0o700)
            self._server = HeldServer(arguments, folder, environment, self._start_seconds)
            self._key = key
        return self._server

    def stop(self) -> None:
        """End the server there is."""
        if self._server is not None:
            self._server.stop()
        self._server = None


@pytest.fixture(scope="session")
def hsprobe_servers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Servers]:
    """The servers of this session, by their arguments."""
    seconds = float(request.config.getini("hsprobe_start_timeout"))
    servers = Servers(tmp_path_factory.mktemp("hsprobe-servers"), seconds)
    yield servers
    servers.stop()


@pytest.fixture
def hsprobe_server(request: pytest.FixtureRequest, hsprobe_servers: Servers) -> HeldServer:
    """A real SGLang server with probes, started once and kept for the session.

    Its arguments are those of the marker `hsprobe_server`, else of the setting `hsprobe_server_args`.
    """
    marker = request.node.get_closest_marker(MARKER)
    lines = request.config.getini("hsprobe_server_env")
    environment = dict(line.split("=", 1) for line in lines)
    if marker is not None:
        arguments = tuple(map(str, marker.args))
        environment |= marker.kwargs.get("env", {})
    else:
        arguments = tuple(shlex.split(request.config.getini("hsprobe_server_args")))
    if not arguments:
        raise pytest.UsageError(
            "hsprobe_server needs arguments of sglang.launch_server: set hsprobe_server_args in the pytest "
            "configuration, or mark the test with @pytest.mark.hsprobe_server('--model-path=...')"
        )
    return hsprobe_servers.get(arguments, environment)


@pytest.fixture
def hsprobe_capture(hsprobe_server: HeldServer, tmp_path: Path) -> Callable[..., Path]:
    """`hsprobe_capture(prompts, max_new_tokens=16, concurrency=4)`: a trace of `hsprobe_server`."""
    made: list[Path] = []

    def capture(prompts: Path | str, **options: Any) -> Path:
        made.append(hsprobe_server.capture(tmp_path / f"infer-{len(made)}.h5", prompts, **options))
        return made[-1]

    return capture


@pytest.fixture
def hsprobe_baseline(request: pytest.FixtureRequest) -> Callable[..., None]:
    """`hsprobe_baseline(trace, name="")`: check against the baseline of this test.

    With --hsprobe-update it is written instead. Baselines are in `hsprobe_baselines` beside the test's file.
    """
    folder = request.path.parent / BASELINES

    def check(infer: Path | str, name: str = "") -> None:
        __tracebackhide__ = True
        label = "-".join(part for part in (request.path.stem, request.node.name, name) if part)
        update = bool(request.config.getoption("--hsprobe-update"))
        assert_matches_baseline(infer, folder / f"{_safe(label)}.npz", update=update)

    return check


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Write the report of a failed assertion to a file, and name the file in the output."""
    outcome: Any = yield
    error = call.excinfo.value if call.excinfo is not None else None
    if isinstance(error, DifferentError):
        path = _write(item, error)
        outcome.sections.append(("hsprobe report", str(path)))
        item.user_properties.append(("hsprobe_report", str(path)))
    return outcome


def _write(item: pytest.Item, error: DifferentError) -> Path:
    """JSON of a whole report, else the message."""
    folder = item.config.invocation_params.dir / str(item.config.getoption("--hsprobe-reports"))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{_safe(item.nodeid)}.{'json' if error.report else 'txt'}"
    with path.open("w", encoding="utf-8") as stream:
        if error.report is None:
            stream.write(f"{error}\n")
        else:
            from hsprobe.report import json

            json.write(error.report, stream)
    return path


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-")
