"""What hsprobe costs within one server, between laps of a tenth of a second: see ``plant/laps.py``."""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "plant"))
from laps import ARMED, OUT, RESTING, STATES
from servers import Server, prompts

PLANT = Path(__file__).parent / "plant"
NEW_TOKENS, LAST_TOKENS = 600, 64
LEAST_STEPS = 8
"""A round with a lap of fewer steps than this is left out."""


def measure(server: Server, batch: int, seconds: float) -> dict:
    """Send the same requests again and again for so long; laps, what was recorded, and the first answers."""
    flag, results = server.spools / "laps", server.spools / "laps.json"
    results.unlink(missing_ok=True)
    asked, answers, accept = prompts(batch), [], None
    flag.touch()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ran = server.run(asked, NEW_TOKENS, f"laps-{batch}-{len(answers)}")
        answers.append(ran.outputs)
        accept = ran.accept
    flag.unlink()
    # The scheduler looks for the file while it decodes.
    while not results.exists():
        server.run(asked[:1], LAST_TOKENS, "last-lap")
    tally = server.settle()
    server.free_disk()
    laps = json.loads(results.read_text())
    same = [sum(a == b for a, b in zip(one, answers[0], strict=True)) for one in answers]
    return {"laps": laps, "tally": tally, "answers": answers[0], "same": same, "accept": accept}


def rounds_of(laps: list[list]) -> list[dict[str, float]]:
    """Seconds a step in each state, of each round that has all of them."""
    rounds: dict[int, dict[str, float]] = {}
    for number, state, steps, seconds in laps:
        if steps >= LEAST_STEPS:
            rounds.setdefault(number, {})[state] = seconds / steps
    return [found for found in rounds.values() if len(found) == len(STATES)]


def summary(name: str, found: dict) -> str:
    """A line of the table: speeds in per cent of the server with hsprobe taken out."""
    rounds, tally = rounds_of(found["laps"]), found["tally"]
    if len(rounds) < 2:
        return f"| {name} | too few laps |"
    step = statistics.median(one[OUT] for one in rounds)
    cells = []
    for state in (RESTING, ARMED):
        ratios = [100 * one[OUT] / one[state] for one in rounds]
        low, middle, high = statistics.quantiles(ratios, n=4)
        whole = 100 * sum(one[OUT] for one in rounds) / sum(one[state] for one in rounds)
        cells.append(f"{middle:.2f} % ({low:.1f}..{high:.1f}), mean {whole:.2f}")
    passes = tally["recorded"] + tally["missing"]
    kept = 100 * tally["recorded"] / max(passes, 1)
    same, asked = sum(found["same"]), len(found["same"]) * len(found["answers"])
    return (
        f"| {name} | {len(rounds)} | {1e3 * step:.3f} ms | {' | '.join(cells)} | {kept:.1f} % of {passes} "
        f"| {same} of {asked} |"
    )
