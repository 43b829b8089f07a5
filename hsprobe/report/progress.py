"""Progress of long work on standard error: a live line in a terminal, a line a milestone elsewhere."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.status import Status

LINE_EVERY_SECONDS = 20.0


class _Live:
    """A status line that a terminal redraws; elsewhere only what :meth:`say` is given is printed."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._status: Status | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._status = self._console.status("")
            self._status.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def show(self, text: str) -> None:
        """Show what is going on now, where that can be redrawn."""
        if self._status is not None:
            room = max(20, self._console.width - 4)
            self._status.update(text if len(text) <= room else f"{text[: room - 1]}…")

    def say(self, text: str) -> None:
        """Note a milestone."""
        if self._status is None:
            self._console.print(text, soft_wrap=True)
        else:
            self.show(text)


class CaptureProgress(_Live):
    """What a capture from a server is doing."""

    def __init__(self) -> None:
        super().__init__()
        self._said_at = -LINE_EVERY_SECONDS
        self._said_answers = 0

    def starting(self, seconds: float, line: str) -> None:
        """The server is starting; its log's last line."""
        text = f"Starting SGLang, {seconds:.0f} s"
        self.show(f"{text} · {line.strip()}" if line else text)
        if self._status is None and seconds - self._said_at >= LINE_EVERY_SECONDS:
            self._said_at = seconds
            self.say(text)

    def answered(self, done: int, total: int, bytes_written: int) -> None:
        """A prompt has been answered."""
        text = f"Capturing, {done} of {total} prompts answered, {bytes_written / 1e6:.1f} MB recorded"
        self.show(text)
        if self._status is None and (done == total or done - self._said_answers >= max(1, total // 4)):
            self._said_answers = done
            self.say(text)

    def writing(self) -> None:
        """The trace is being written."""
        self.say("Writing the trace")


class RowProgress(_Live):
    """How many of a known number of things are done."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what
        self._said_at = time.monotonic()

    def advanced_to(self, done: int, total: int) -> None:
        """So many are done."""
        text = f"{self._what}, {done:,} of {total:,}"
        self.show(text)
        if self._status is None and time.monotonic() - self._said_at >= LINE_EVERY_SECONDS:
            self._said_at = time.monotonic()
            self.say(text)


class Telling(_Live):
    """Lines about what is going on; one that names something found stays, the others are redrawn."""

    def tell(self, text: str, *, stays: bool = False) -> None:
        """Show a line, for good if it `stays`."""
        if stays:
            self._console.print(f"hsprobe: {text}", soft_wrap=True)
        else:
            self.show(text)
