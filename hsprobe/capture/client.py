"""Sends prompts to a running SGLang server and keeps what it answers."""

import http.client
import json
import queue
import threading
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hsprobe.capture.prompts import Prompt
from hsprobe.errors import HsprobeError

REQUEST_SECONDS = 600
CHECK_SECONDS = 0.25
# SGLang answers /health by generating a token, behind what else it has to do, and gives itself 20 s.
ANSWER_SECONDS = 30.0

# The server is on this machine: a proxy that the environment names for the rest of the world is not asked.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
# What is no answer: nobody there, half a reply, or no HTTP at all. (A connection to a port that nobody
# listens on yet can be joined to itself, and then hears its own request.)
_NO_ANSWER = (OSError, ValueError, http.client.HTTPException)


@dataclass(frozen=True)
class Answer:
    """What the server said about one prompt.

    Attributes:
        rid: the request's id, the same that the probes record.
        prompt_ids: the prompt's token ids, ``None`` when it was sent as text.
        output_ids: the generated token ids.
        facts: the server's ``meta_info``.
    """

    rid: str
    prompt_ids: tuple[int, ...] | None
    output_ids: tuple[int, ...]
    facts: dict[str, Any]


def answers_ok(url: str) -> bool:
    """Does a GET of this address succeed?"""
    try:
        with _DIRECT.open(url, timeout=ANSWER_SECONDS) as reply:
            return bool(reply.status == 200)
    except _NO_ANSWER:
        return False


def _post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        url, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    try:
        with _DIRECT.open(request, timeout=REQUEST_SECONDS) as reply:
            return json.loads(reply.read())
    except urllib.error.HTTPError as error:
        said = error.read(500).decode("utf-8", "replace").strip()
        raise HsprobeError(
            f"The server refused a prompt: HTTP {error.code} {said}",
            "Check that the prompts fit the model (a server without a tokenizer takes input_ids only).",
        ) from None
    except _NO_ANSWER as error:
        raise HsprobeError(
            f"The server stopped answering: {error}.", "Its log says why; start the capture again."
        ) from None


def generate(url: str, rid: str, prompt: Prompt, max_new_tokens: int) -> Answer:
    """Run one prompt greedily to its end.

    Raises:
        HsprobeError: the server refused it or went away.
    """
    body = {
        **prompt.payload(),
        "rid": rid,
        "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True},
    }
    reply = _post(f"{url}/generate", body)
    return Answer(
        rid=rid,
        prompt_ids=prompt.input_ids,
        output_ids=tuple(int(token) for token in reply.get("output_ids") or ()),
        facts=dict(reply.get("meta_info") or {}),
    )


def generate_all(
    url: str,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    concurrency: int,
    run_id: str,
    on_answer: Callable[[Answer], None],
    check: Callable[[], None] = lambda: None,
) -> None:
    """Run all prompts, ``concurrency`` at a time; hands each answer on as it comes.

    Args:
        check: called every now and then; what it raises ends the waiting.

    Raises:
        HsprobeError: the first failure; requests not yet sent are then left out.
    """
    waiting = deque(enumerate(prompts))
    done: queue.SimpleQueue[Answer | BaseException] = queue.SimpleQueue()

    def work() -> None:
        while True:
            try:
                i, prompt = waiting.popleft()
            except IndexError:
                return
            try:
                done.put(generate(url, f"{run_id}-{i}", prompt, max_new_tokens))
            except BaseException as error:
                done.put(error)

    # Daemons: a server that hangs must not keep this process from ending.
    for number in range(min(concurrency, len(prompts))):
        threading.Thread(target=work, name=f"hsprobe-request-{number}", daemon=True).start()
    try:
        for _ in prompts:
            answer = _next(done, check)
            if isinstance(answer, BaseException):
                raise answer
            on_answer(answer)
    finally:
        waiting.clear()


def _next(
    done: queue.SimpleQueue[Answer | BaseException], check: Callable[[], None]
) -> Answer | BaseException:
    while True:
        try:
            return done.get(timeout=CHECK_SECONDS)
        except queue.Empty:
            check()


def accept_length(answers: Sequence[Answer]) -> float | None:
    """Tokens generated for each verify pass over all answers, from the server's own counters.

    ``None`` when the server did not speculate. SGLang reports the same ratio for each request as
    ``spec_accept_length`` (``managers/tokenizer_manager.py``).
    """
    passes = sum(int(answer.facts.get("spec_verify_ct") or 0) for answer in answers)
    tokens = sum(
        int(answer.facts.get("completion_tokens") or 0)
        for answer in answers
        if answer.facts.get("spec_verify_ct")
    )
    return tokens / passes if passes else None
