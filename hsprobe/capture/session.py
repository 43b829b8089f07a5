"""One capture from a server: arm, send prompts, collect the ranks, write the trace."""

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from hsprobe.capture.assemble import AssembleSummary, RequestTokens, assemble
from hsprobe.capture.client import Answer, accept_length, generate_all
from hsprobe.capture.processes import RankProcesses, RankTrouble, ended
from hsprobe.capture.prompts import Prompt
from hsprobe.capture.server import AttachedServer, LaunchedServer
from hsprobe.capture.spools import SpoolFolder
from hsprobe.errors import HsprobeError
from hsprobe.trace.spool import wait_until_closed

WRITE_SECONDS = 120.0
END_SECONDS = 5.0
"""How long a server may take to end after one of its ranks has."""


@dataclass(frozen=True)
class Plan:
    """What to capture.

    Attributes:
        out: the trace to write.
        prompts: what to send, in this order.
        max_new_tokens: tokens to generate for each prompt.
        concurrency: requests under way at once.
        sites: as ``HSPROBE_SITES``; ``None`` records all.
        depths: as ``HSPROBE_DEPTHS``; ``None`` records all.
        ranks: as ``HSPROBE_RANKS``; ``None`` records all.
        memory, disk: as ``HSPROBE_MEMORY`` and ``HSPROBE_MAX_BYTES``; ``None`` leaves the server's defaults.
        sampling: which steps, requests and rows to record and what to do when the writer falls behind, as
            ``hsprobe.probes.sglang.sampling.Sampling`` names it; what is not in it is as the server was
            started.
        start_seconds: how long a launched server may take to become healthy.
    """

    out: Path
    prompts: Sequence[Prompt]
    max_new_tokens: int = 1
    concurrency: int = 4
    sites: str | None = None
    depths: str | None = None
    ranks: str | None = None
    memory: str | None = None
    disk: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    start_seconds: float = 1800.0


@dataclass
class Outcome:
    """What came of a capture.

    Attributes:
        answers: the requests that were answered.
        summary: what the trace holds.
        accept_length: as the server counted it, ``None`` without speculation.
        trouble: why the capture ended early, ``None`` when it did not.
        interrupted: a person stopped it.
    """

    answers: list[Answer] = field(default_factory=list)
    summary: AssembleSummary | None = None
    accept_length: float | None = None
    trouble: HsprobeError | None = None
    interrupted: bool = False


class Progress(Protocol):
    """Receives what happens, to show it to a person."""

    def starting(self, seconds: float, line: str) -> None:
        """The server is starting; its log's last line."""

    def answered(self, done: int, total: int, bytes_written: int) -> None:
        """A prompt has been answered."""

    def writing(self) -> None:
        """The trace is being written."""


def capture_from_launched(plan: Plan, arguments: Sequence[str], progress: Progress) -> Outcome:
    """Start a server with these ``sglang.launch_server`` arguments, capture from it, stop it.

    Raises:
        HsprobeError: it did not start, or nothing at all was recorded.
    """
    log = plan.out.with_suffix(".server.log")
    chosen = {
        "HSPROBE_SITES": plan.sites,
        "HSPROBE_DEPTHS": plan.depths,
        "HSPROBE_RANKS": plan.ranks,
        "HSPROBE_MEMORY": plan.memory,
        "HSPROBE_MAX_BYTES": plan.disk,
    }
    environment = {name: value for name, value in chosen.items() if value}
    with ExitStack() as stack:
        stack.enter_context(_terminate_as_interrupt())
        spools = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="hsprobe-", dir=_scratch(plan.out)))
        )
        server = LaunchedServer(arguments, spools, log, environment)
        stack.callback(server.stop)
        server.wait_until_healthy(plan.start_seconds, progress.starting)
        outcome = _capture(plan, server, progress)
        server.stop()
    if outcome.trouble is None:
        log.unlink(missing_ok=True)
    return outcome


def capture_from_running(plan: Plan, url: str, spools: Path | None, progress: Progress) -> Outcome:
    """Capture from a server that runs with ``HSPROBE_CAPTURE=1`` on this machine.

    Raises:
        HsprobeError: it cannot be reached, has no probes, or nothing at all was recorded.
    """
    with _terminate_as_interrupt():
        return _capture(plan, AttachedServer(url, spools), progress)


def _capture(plan: Plan, server: LaunchedServer | AttachedServer, progress: Progress) -> Outcome:
    outcome = Outcome()
    folder = SpoolFolder(server.spools)
    processes = RankProcesses(server.spools)

    def on_answer(answer: Answer) -> None:
        outcome.answers.append(answer)
        progress.answered(len(outcome.answers), len(plan.prompts), folder.bytes_written())

    with folder.armed(plan.sampling):
        try:
            generate_all(
                server.url,
                plan.prompts,
                max_new_tokens=plan.max_new_tokens,
                concurrency=plan.concurrency,
                run_id=f"hsprobe-{os.getpid()}",
                on_answer=on_answer,
                check=processes.check,
            )
            # The draft may still be at work on what the last answers ended with.
            folder.wait_until_written(WRITE_SECONDS)
        except KeyboardInterrupt:
            outcome.interrupted = True
        except HsprobeError as error:
            outcome.trouble = _cause(server, error)
    if outcome.trouble is None and not outcome.interrupted and not folder.wait_until_written(WRITE_SECONDS):
        outcome.trouble = HsprobeError(
            "The server did not finish writing what it recorded.", "The trace holds what was written in time."
        )
    progress.writing()
    outcome.accept_length = accept_length(outcome.answers)
    outcome.summary = _write(plan, folder, outcome)
    return outcome


def _cause(server: LaunchedServer | AttachedServer, error: HsprobeError) -> HsprobeError:
    """A request fails when its server dies: the server's own end is then the thing to show."""
    deadline = time.monotonic() + (END_SECONDS if isinstance(error, RankTrouble) else 0)
    while True:
        try:
            server.check()
        except HsprobeError as end:
            # One rank's end is what ended the others.
            return HsprobeError(error.what, end.fix) if isinstance(error, RankTrouble) else end
        if time.monotonic() >= deadline:
            return error
        time.sleep(0.2)


def _write(plan: Plan, folder: SpoolFolder, outcome: Outcome) -> AssembleSummary:
    if not folder.paths():
        fix = "Check that hsprobe is installed in the Python environment that runs SGLang."
        if plan.ranks:
            fix = f"Check that the server has a rank {plan.ranks}; they count from 0."
        raise outcome.trouble or HsprobeError("The server recorded nothing: its probes left no spool.", fix)
    for path in folder.paths():
        if ended(path):
            # What a server that has ended left in memory is still being written.
            wait_until_closed(path, END_SECONDS)
    requests = {answer.rid: RequestTokens(answer.prompt_ids, answer.output_ids) for answer in outcome.answers}
    facts: Mapping[str, Any] = {
        "accept_length": outcome.accept_length,
        "requests": [{"rid": answer.rid, **answer.facts} for answer in outcome.answers],
        "prompts_sent": len(plan.prompts),
        "max_new_tokens": plan.max_new_tokens,
    }
    return assemble(
        folder.paths(), plan.out, provenance=dict(facts), requests=requests, start_offsets=folder.starts()
    )


def _scratch(out: Path) -> Path:
    """Spools go beside the trace: the same disk, and the room that the person chose."""
    out.parent.mkdir(parents=True, exist_ok=True)
    return out.parent


@contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """Let SIGTERM end a capture the way Ctrl-C does, so that no server is left behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before: Callable[[int, FrameType | None], Any] | int | None = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
