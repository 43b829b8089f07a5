"""Prompts are sent and answered, and a server that hangs does not keep a capture from ending."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from hsprobe.capture.client import Answer, answers_ok, generate_all
from hsprobe.capture.prompts import Prompt
from hsprobe.errors import HsprobeError

HANGS, REFUSED = 99, 98
SLOW_SECONDS = 6.0
PROMPTS = [Prompt(input_ids=(i, i + 1)) for i in range(5)]


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        time.sleep(SLOW_SECONDS)
        self.send_response(200)
        self.end_headers()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        first = body["input_ids"][0]
        if first == HANGS:
            self.server.let_go.wait(30)  # type: ignore[attr-defined]
        reply = json.dumps({"output_ids": [first * 10], "meta_info": {"id": body["rid"]}}).encode()
        self.send_response(400 if first == REFUSED else 200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.let_go = threading.Event()  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.let_go.set()  # type: ignore[attr-defined]
    server.shutdown()
    server.server_close()


def run(url: str, prompts: list[Prompt], **more: Any) -> list[Answer]:
    answers: list[Answer] = []
    generate_all(url, prompts, max_new_tokens=1, concurrency=2, run_id="r", on_answer=answers.append, **more)
    return answers


def test_every_prompt_is_answered_once_under_an_id_of_its_own(url: str) -> None:
    answers = run(url, PROMPTS)
    assert sorted(answer.rid for answer in answers) == [f"r-{i}" for i in range(5)]
    for answer in answers:
        assert answer.prompt_ids is not None
        assert answer.output_ids == (answer.prompt_ids[0] * 10,)


def test_the_first_failure_ends_it(url: str) -> None:
    with pytest.raises(HsprobeError, match="HTTP 400"):
        run(url, [PROMPTS[0], Prompt(input_ids=(REFUSED,)), *PROMPTS[1:]])


def test_trouble_that_a_check_finds_ends_the_waiting_for_a_server_that_hangs(url: str) -> None:
    found = HsprobeError("A rank has gone.", "Look.")
    calls = []

    def check() -> None:
        calls.append(time.monotonic())
        if len(calls) == 2:
            raise found

    began = time.monotonic()
    with pytest.raises(HsprobeError) as raised:
        run(url, [PROMPTS[0], Prompt(input_ids=(HANGS,))], check=check)
    assert raised.value is found
    assert time.monotonic() - began < 60


def test_a_server_that_is_busy_for_seconds_is_not_taken_for_none(url: str) -> None:
    assert answers_ok(f"{url}/health")
    assert not answers_ok("http://127.0.0.1:9/health"), "nothing listens there"


@pytest.fixture
def joined_to_itself(monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a port where nobody listens, and that the system gives to whoever connects to it."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]

    def connect(address: tuple[str, int], timeout: float, *_: Any) -> socket.socket:
        one = socket.socket()
        one.settimeout(timeout)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(address)
        one.connect(address)
        return one

    monkeypatch.setattr(socket, "create_connection", connect)
    return f"http://127.0.0.1:{port}"


def test_a_connection_that_was_joined_to_itself_is_no_server(joined_to_itself: str) -> None:
    assert not answers_ok(f"{joined_to_itself}/health")
    with pytest.raises(HsprobeError, match="The server stopped answering"):
        run(joined_to_itself, PROMPTS[:1])


def test_a_proxy_for_the_rest_of_the_world_is_not_asked_for_the_server(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert [answer.output_ids for answer in run(url, PROMPTS[:1])] == [(0,)]
