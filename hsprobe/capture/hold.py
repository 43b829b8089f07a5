"""A server that is kept while several captures are made from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hsprobe.capture.prompts import load_prompts
from hsprobe.capture.server import LaunchedServer
from hsprobe.capture.session import Plan, capture_from_running
from hsprobe.remote.location import Location, locate


class _Silent:
    """Progress shown to nobody."""

    def starting(self, seconds: float, line: str) -> None:
        """See `hsprobe.capture.session.Progress`."""

    def answered(self, done: int, total: int, bytes_written: int) -> None:
        """See `hsprobe.capture.session.Progress`."""

    def writing(self) -> None:
        """See `hsprobe.capture.session.Progress`."""


class HeldServer:
    """A real SGLang server with probes.

    Args:
        arguments: as for ``python -m sglang.launch_server``.
        folder: for its spools and its log.
        environment: variables to add to this process's own, such as ``HSPROBE_SITES``.
        start_seconds: how long it may take to become healthy.

    Attributes:
        url: its address. arguments: as given.

    Raises:
        HsprobeError: it did not start; the message ends with its log.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path,
        environment: Mapping[str, str] | None = None,
        start_seconds: float = 1800.0,
    ) -> None:
        self.arguments = tuple(arguments)
        spools = folder / "spools"
        spools.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._server = LaunchedServer(arguments, spools, folder / "server.log", environment or {})
        self.url = self._server.url
        self._spools = spools
        try:
            self._server.wait_until_healthy(start_seconds, lambda seconds, line: None)
        except BaseException:
            self.stop()
            raise

    def capture(
        self, out: Path, prompts: Location | str, *, max_new_tokens: int = 16, concurrency: int = 4
    ) -> Path:
        """Send prompts and write what the server computed for them.

        Args:
            out: the trace to write.
            prompts: a trace, or JSONL with input_ids or text on each line.

        Raises:
            HsprobeError: the capture is not whole.
        """
        return capture_running(
            self.url,
            out,
            prompts,
            max_new_tokens=max_new_tokens,
            concurrency=concurrency,
            spools=self._spools,
        )

    def stop(self) -> None:
        """End every process of the server."""
        self._server.stop()


def capture_running(
    url: str,
    out: Path,
    prompts: Location | str,
    *,
    max_new_tokens: int = 16,
    concurrency: int = 4,
    spools: Path | None = None,
) -> Path:
    """Capture from a server that runs with ``HSPROBE_CAPTURE`` on this machine; `out` is returned.

    Args:
        spools: its spool folder; None means the one that belongs to its port.

    Raises:
        HsprobeError: it cannot be reached, has no probes, or the capture is not whole.
    """
    plan = Plan(
        out=out,
        prompts=load_prompts(locate(prompts)),
        max_new_tokens=max_new_tokens,
        concurrency=concurrency,
    )
    outcome = capture_from_running(plan, url, spools, _Silent())
    if outcome.interrupted:
        raise KeyboardInterrupt
    if outcome.trouble is not None:
        raise outcome.trouble
    return out
