"""What the installed SGLang's own classes do, asked once in a process in which it can be imported."""

import json
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hsprobe.fixtures import cpu

_MARK = "outcomes: "


def installed(what: str) -> Any:
    """ "setters" (tests.formats.installed_setters); of the newest "drafts" (tests.check.installed_draft)."""
    return _outcomes()[what]


@cache
def _outcomes() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.installed"],
        cwd=Path(__file__).parents[1],
        env=cpu.environment(),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    found: dict[str, Any] = json.loads(line.removeprefix(_MARK))
    return found


def _ask() -> None:
    from tests.check import installed_draft
    from tests.formats import installed_setters

    # The setters come last: they run without the process's parallel groups, which the drafts need.
    drafts = installed_draft.outcomes() if find_spec("sglang.test.layer_ut_utils") else {}
    print(_MARK + json.dumps({"drafts": drafts, "setters": installed_setters.outcomes()}))


if __name__ == "__main__":
    _ask()
