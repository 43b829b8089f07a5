"""Real servers on this machine that count what they send: S3 (moto's), and HTTP with and without ranges."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

from hsprobe import data
from hsprobe.fixtures.dumps.states import Request, read_reference

TRAINED = (3, 6, 9)
BUCKET = "states"


class S3:
    """A bucket on moto's server."""

    def __init__(self) -> None:
        self.sent = self.requests = 0
        application = DomainDispatcherApplication(create_backend_app)

        def counted(environ: Any, start: Any) -> Iterator[bytes]:
            self.requests += 1
            body: Iterable[bytes] = application(environ, start)
            for piece in body:
                self.sent += len(piece)
                yield piece

        self.server = make_server("127.0.0.1", 0, counted, threaded=True)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self._thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self._thread.start()

    def client(self) -> Any:
        return boto3.client("s3", endpoint_url=self.url, region_name="us-east-1")

    def put(self, folder: Path, prefix: str, bucket: str = BUCKET) -> str:
        """Upload a folder or a file. -> its URL."""
        client = self.client()
        for path in [folder] if folder.is_file() else folder.rglob("*"):
            if path.is_file():
                key = f"{prefix}/{path.name if path == folder else path.relative_to(folder)}"
                client.put_object(Bucket=bucket, Key=key.lstrip("/"), Body=path.read_bytes())
        return f"s3://{bucket}/{prefix}" + (f"/{folder.name}" if folder.is_file() else "")

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()


@pytest.fixture(scope="package")
def s3_server() -> Iterator[S3]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            ("AWS_ACCESS_KEY_ID", "testing"),
            ("AWS_SECRET_ACCESS_KEY", "testing"),
            ("AWS_DEFAULT_REGION", "us-east-1"),
            ("AWS_EC2_METADATA_DISABLED", "true"),
        ):
            patch.setenv(name, value)
        server = S3()
        patch.setenv("AWS_ENDPOINT_URL", server.url)
        server.client().create_bucket(Bucket=BUCKET)
        yield server
        server.stop()


@pytest.fixture
def s3(s3_server: S3) -> S3:
    """The server, its counts at zero."""
    s3_server.sent = s3_server.requests = 0
    return s3_server


class Web:
    """Files over HTTP.

    Attributes:
        ranges: whether parts of files are sent. fails_after: requests after which connections are cut.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.ranges = True
        self.fails_after: int | None = None
        self.sent = self.requests = 0
        self.asked: list[str] = []
        web = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                web.requests += 1
                web.asked.append(self.path)
                if web.fails_after is not None and web.requests > web.fails_after:
                    self.close_connection = True
                    self.connection.close()
                    return
                body = web.files.get(self.path)
                if body is None:
                    self.send_error(404)
                    return
                asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
                part = body
                if asked and web.ranges:
                    start, stop = int(asked[1]), int(asked[2]) + 1
                    part = body[start:stop]
                    self.send_response(206)
                    self.send_header("Content-Range", f"bytes {start}-{start + len(part) - 1}/{len(body)}")
                else:
                    self.send_response(200)
                self.send_header("Content-Length", str(len(part)))
                self.end_headers()
                if self.command == "GET":
                    web.sent += len(part)
                    self.wfile.write(part)

            def log_message(self, *words: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def web() -> Iterator[Web]:
    server = Web()
    yield server
    server.server.shutdown()
    server.server.server_close()


@pytest.fixture(scope="package")
def requests() -> list[Request]:
    return read_reference(Path(__file__).parents[1] / "formats/data/reference.h5")


@pytest.fixture(scope="package")
def served() -> Path:
    """A capture of a real server that serves depths 3, 6, 9, with every depth."""
    return Path(str(data.__file__)).parent / "right.h5"
