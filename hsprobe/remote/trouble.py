"""What goes wrong with files behind a URL, in sentences a person can act on."""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from hsprobe.errors import HsprobeError

_PACKAGES = (
    "s3fs",
    "gcsfs",
    "adlfs",
    "huggingface_hub",
    "ossfs",
    "paramiko",
    "aiohttp",
    "requests",
    "fsspec",
)
_OURS = ("aiohttp", "requests", "fsspec")
_DENIED = (401, 403)
_GONE = (404, 410)


class RemoteError(HsprobeError):
    """A place behind a URL cannot be reached: trouble of the whole run, not of one sample.

    Args:
        final: whether trying again is of no use.
    """

    def __init__(self, what: str, fix: str, *, final: bool = False) -> None:
        super().__init__(what, fix)
        self.final = final


def missing_package(place: str, words: str) -> HsprobeError:
    """The error for a place whose protocol needs a package that is not installed; `words` name it."""
    needed = next((name for name in _PACKAGES if name in words), "")
    if needed in _OURS:
        return HsprobeError(
            f"Reading {place} needs {needed}, which is not installed.", "Run: pip install 'hsprobe[remote]'"
        )
    if not needed:
        return HsprobeError(
            f"Reading {place} needs a package that is not installed.", f"fsspec says: {words[:160]}"
        )
    return HsprobeError(
        f"Reading {place} needs {needed}, which is not installed.",
        f"Run: pip install 'hsprobe[remote]' {needed}",
    )


@contextmanager
def explained(place: str, done: str) -> Iterator[None]:
    """Turn what fsspec and its packages raise into errors that say what to do; FileNotFoundError stays.

    Args:
        place: what is being read. done: the verb of the sentence, such as "listed".

    Raises:
        RemoteError: the place cannot be reached.
    """
    try:
        yield
    except (HsprobeError, MemoryError):
        raise
    except FileNotFoundError as error:
        # fsspec says of a web server that cannot be reached that it has no such file.
        cause = error.__cause__
        if cause is None or not type(cause).__module__.startswith("aiohttp") or _status(cause) in _GONE:
            raise
        raise _sentence(place, done, cause) from error
    except Exception as error:
        # Each protocol's package has exceptions of its own, with no base in common.
        raise _sentence(place, done, error) from error


def _sentence(place: str, done: str, error: BaseException) -> RemoteError:
    kind = type(error).__name__
    if isinstance(error, PermissionError) or _status(error) in _DENIED or "Credential" in kind:
        return RemoteError(
            f"{place} could not be {done}: no permission ({_words(error)}).",
            "Check the credentials, as the protocol's package takes them from the environment.",
            final=True,
        )
    if isinstance(error, FileExistsError | IsADirectoryError | NotADirectoryError):
        return RemoteError(f"{place} could not be {done}: {_words(error)}.", "Check the URL.", final=True)
    return RemoteError(
        f"{place} could not be {done}: the connection failed ({_words(error)}).",
        "Check the URL and the network, and run the command again.",
    )


def _status(error: BaseException | None) -> int | None:
    status = getattr(error, "status", None)
    return status if isinstance(status, int) else None


def _words(error: BaseException) -> str:
    """What an error says, on one line, without the query of a URL, which may hold a secret."""
    text = re.sub(r"\?\S+", "", " ".join(str(error).split()))
    return f"{type(error).__name__}: {text[:160]}" if text else type(error).__name__


class _Collector:
    waiting = 0
    stopped = False
    lock = threading.Lock()


@contextmanager
def uncollected() -> Iterator[None]:
    """No cyclic garbage is collected while a thread of fsspec works for this one.

    HDF5's objects take HDF5's lock when they go, which this thread may hold while it waits: a collection in
    the other thread would wait for it for ever.
    """
    with _Collector.lock:
        if not _Collector.waiting and gc.isenabled():
            gc.disable()
            _Collector.stopped = True
        _Collector.waiting += 1
    try:
        yield
    finally:
        with _Collector.lock:
            _Collector.waiting -= 1
            if not _Collector.waiting and _Collector.stopped:
                _Collector.stopped = False
                gc.enable()
