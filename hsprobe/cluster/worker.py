"""What a worker process of this machine is: it reads tasks from its standard input until that ends."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from typing import Any

# Where modules are found is told by whoever starts it: nothing may be imported from the folder it stands in.
_PROGRAM = """\
import pickle, sys
try:
    sys.path[:] = pickle.load(sys.stdin.buffer)
except EOFError:
    sys.exit()
from hsprobe.cluster.worker import serve
serve()
"""
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class Ended(Exception):
    """A worker ended before it answered; the text says how."""


@dataclass(frozen=True)
class Failed:
    """What went wrong in a worker, as Python shows it: a fault of the program."""

    shown: str


class Worker:
    """A process that is started when it is first asked, and anew when it has died."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._over = False
        self._lock = Lock()

    def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The value of a function of a module there.

        Raises:
            Ended: the process has ended meanwhile.
            RuntimeError: the function failed.
        """
        process = self.start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            pickle.dump((function, arguments), process.stdin, pickle.HIGHEST_PROTOCOL)
            process.stdin.flush()
            answer = pickle.load(process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            self.end()
            raise Ended(_how(process.returncode)) from error
        except BaseException:
            self.end()
            raise
        if isinstance(answer, Failed):
            raise RuntimeError(f"in a worker process:\n{answer.shown}")
        return answer

    def start(self) -> subprocess.Popen[bytes]:
        """The process, a new one unless it runs already.

        Raises:
            Ended: it cannot be started, or is not to be.
        """
        with self._lock:
            if self._over:
                raise Ended("it was stopped")
            if self._process is None:
                try:
                    self._process = _started()
                except OSError as error:
                    raise Ended(str(error)) from error
            return self._process

    def stop(self) -> None:
        """Kill it, from another thread than the one that asks, and let it not be started again."""
        with self._lock:
            self._over = True
            if self._process is not None:
                self._process.kill()

    def end(self) -> None:
        """Kill it, and leave nothing of it behind."""
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            # What was on its way to it is lost.
            with suppress(OSError):
                pipe.close()


def _started() -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-I" if sys.flags.isolated else "-P", "-c", _PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # In a process group of its own no Ctrl-C reaches it: it ends with its standard input.
        process_group=0,
        env=os.environ | _ONE_THREAD,
    )
    assert process.stdin is not None
    # Less than a pipe holds: this does not wait for the worker to have started.
    pickle.dump(sys.path, process.stdin)
    process.stdin.flush()
    return process


def _how(code: int | None) -> str:
    return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"


def serve() -> None:
    """Answer until nothing more comes, or nobody is there to take an answer."""
    tasks, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    # Whatever is printed must not get among the answers.
    os.dup2(2, 1)
    while True:
        try:
            function, arguments = pickle.load(tasks)
        except (EOFError, pickle.UnpicklingError):
            os._exit(0)
        except Exception:
            answer = Failed(traceback.format_exc())
        else:
            try:
                answer = function(*arguments)
            except Exception:
                answer = Failed(traceback.format_exc())
        try:
            pickle.dump(answer, answers, pickle.HIGHEST_PROTOCOL)
            answers.flush()
        except BrokenPipeError:
            os._exit(0)
