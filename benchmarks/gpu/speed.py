"""Decode throughput with and without hsprobe: two tables a model.

    python benchmarks/gpu/speed.py small --out results      # 16 x 1024
    python benchmarks/gpu/speed.py large --out results      # 32 x 4096

Servers wait side by side on one GPU, and one at a time is given requests, in turns whose order is random:
each round gives one figure for each configuration, all within seconds of each other. A server without hsprobe
is measured beside them, or two of them, which shows how far equal servers are apart: that may be more than
hsprobe costs. So the second table compares each server with itself, hsprobe taken out of it, between steps
of the same answers (`within.py`). One that is not given requests sleeps (``--sleep-on-idle``), and with
``--cores`` all servers share the same cores; what asks them runs on others.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import models
import pressing
import within
from servers import Kind, Server, prompts, start_all

from hsprobe.probes.sglang.settings import parse_numbers

SITES = {"handed": "aux,draft.input", "depths": "layer,aux,draft.input"}
PLAIN, CONTROL = "without hsprobe", "another without hsprobe"
PROBED = {"handed": "aux + draft.input", "depths": "every depth"}


def kinds(mark: str, names: list[str], folder: Path) -> list[Kind]:
    """The servers of one half of a table: plain, control (another plain one), handed, depths, dump."""
    found = [Kind(f"{mark}-{name}") for name in names if name in ("plain", "control")]
    found += [Kind(f"{mark}-{name}", sites) for name, sites in SITES.items() if name in names]
    if "dump" in names and mark == "none":
        # With EAGLE-3 it fails at start (0.5.15.post1): its hook expects no list among what a layer returns.
        found.append(Kind(f"{mark}-dump", None, (f"--debug-tensor-dump-output-folder={folder / 'dump'}",)))
    return found


def arguments(target: Path, draft: Path, shape: models.Shape, extra: list[str], context: int = 2048):
    """Server arguments of a kind; a prompt of half the context is one pass."""
    base = [
        f"--model-path={target}",
        "--skip-tokenizer-init",
        "--sleep-on-idle",
        "--disable-radix-cache",
        "--max-total-tokens=12288",
        f"--context-length={context}",
        f"--chunked-prefill-size={context // 2}",
        *extra,
    ]
    if not shape.weights:
        base.append("--load-format=dummy")

    def of(kind: Kind) -> list[str]:
        spec = [
            "--speculative-algorithm=EAGLE3",
            f"--speculative-draft-model-path={draft}",
            "--speculative-num-steps=3",
            "--speculative-eagle-topk=1",
            "--speculative-num-draft-tokens=4",
        ]
        return [*base, *(spec if kind.name.startswith("eagle") else [])]

    return of


GPU_ARGUMENTS = [
    "--attention-backend=triton",
    "--sampling-backend=pytorch",
    "--grammar-backend=none",
    "--mem-fraction-static=0.93",
    "--max-running-requests=8",
    "--disable-custom-all-reduce",
    "--dtype=bfloat16",
]


@dataclass(frozen=True)
class Turn:
    """One configuration of a server."""

    name: str
    server: Server
    armed: bool


def turns_of(servers: dict[str, Server], mark: str) -> list[Turn]:
    """The rows of one half of a table; the first is what the others are compared with."""
    turns = []
    for kind, name in (("plain", PLAIN), ("control", CONTROL)):
        if f"{mark}-{kind}" in servers:
            turns.append(Turn(name, servers[f"{mark}-{kind}"], False))
    for kind, name in PROBED.items():
        if f"{mark}-{kind}" in servers:
            server = servers[f"{mark}-{kind}"]
            turns += [
                Turn(f"{name}: {'' if armed else 'not '}armed", server, armed) for armed in (False, True)
            ]
    return turns


def take_turn(turn: Turn, asked: list[list[int]], new_tokens: int, tag: str, row: dict) -> list[list[int]]:
    """Send the requests once; the figures go to the row. Returns the answers."""
    server = turn.server
    if turn.armed:
        server.arm()
    ran = server.run(asked, new_tokens, tag)
    if turn.armed:
        tally = server.settle()
        server.disarm()
        server.free_disk()
        for key, value in tally.items():
            row[key] += value
    row["speed"].append(ran.speed)
    row["accept"] = ran.accept
    return ran.outputs


def measure(servers: dict[str, Server], mark: str, batch: int, rounds: int, new_tokens: int, deadline: float):
    """Rows of one half of a table: configuration -> figures of each round."""
    turns = turns_of(servers, mark)
    empty = {"recorded": 0, "missing": 0, "bytes": 0, "gaps": 0}
    found = {turn.name: {"speed": [], **empty} for turn in turns}
    asked = prompts(batch)
    for turn in turns:
        # The first pass of an armed graph is slower than all others.
        take_turn(turn, asked, new_tokens // 4, "warm", {"speed": [], **empty})
    outputs: dict[str, list[list[list[int]]]] = {name: [] for name in found}
    for number in range(rounds):
        # In no fixed order: what follows a pause is faster.
        for turn in random.Random(number).sample(turns, len(turns)):
            tag = f"{mark}-{batch}-{number}"
            outputs[turn.name].append(take_turn(turn, asked, new_tokens, tag, found[turn.name]))
        if time.monotonic() > deadline:
            break
    first = turns[0].name
    same = {name: agreeing(outputs[name], outputs[first]) for name in found}
    several = {name: [len({tuple(one[i]) for one in outputs[name]}) for i in range(batch)] for name in found}
    return {"rows": found, "same": same, "compared": batch * (number + 1), "several": several}


def agreeing(left: list[list[list[int]]], right: list[list[list[int]]]) -> int:
    """Answers that are the same in the same round."""
    return sum(
        a == b for one, other in zip(left, right, strict=True) for a, b in zip(one, other, strict=True)
    )


def soak(server: Server, seconds: float) -> list[tuple[float, int, int, int]]:
    """Every depth recorded without a pause: (seconds, resident MB, device MB, passes so far)."""
    import torch

    began, seen, passes = time.monotonic(), [], 0
    server.arm()
    while (now := time.monotonic() - began) < seconds:
        server.run(prompts(8, seed=int(now * 10)), 150, f"soak-{now:.1f}")
        tally = server.settle(0.01)
        passes += tally["recorded"] + tally["missing"]
        server.free_disk()
        free, total = torch.cuda.mem_get_info()
        seen.append((round(now, 1), server.memory() >> 20, (total - free) >> 20, passes))
    server.disarm()
    first, last = seen[len(seen) // 10], seen[-1]
    print(
        f"soak of {server.kind.name}: {last[0]:.0f} s, {passes} passes; resident {first[1]} -> {last[1]} MB, "
        f"device {first[2]} -> {last[2]} MB",
        flush=True,
    )
    return seen


def summary(half) -> list[str]:
    """Lines of the table."""
    rows, lines = half["rows"], []
    for name, row in rows.items():
        base = next(iter(rows.values()))["speed"]
        ratios = [100 * a / b for a, b in zip(row["speed"], base, strict=True)]
        share = row["recorded"] + row["missing"]
        kept = f"{100 * row['recorded'] / share:.1f} %" if share else ""
        rate = row["bytes"] / max(len(row["speed"]), 1) / 1e6
        lines.append(
            f"| {name} | {statistics.median(row['speed']):.0f} | {statistics.median(ratios):.2f} % "
            f"| {min(ratios):.1f}..{max(ratios):.1f} | {kept} | {rate:.0f} MB |"
        )
    same = ", ".join(f"{name} {count}" for name, count in half["same"].items())
    lines.append(f"  answers as the first row's, of {half['compared']}: {same}")
    lines.append(f"  different answers to each prompt, by row: {list(half['several'].values())}")
    return lines


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=models.SHAPES)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", type=Path, help="where models are written (default: OUT/models)")
    parser.add_argument("--work", type=Path, help="where logs and spools go (default: OUT/work)")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each configuration")
    parser.add_argument("--tokens", type=int, default=400, help="new tokens a request")
    parser.add_argument("--batches", default="1,4,8")
    parser.add_argument("--speculation", default="none,eagle")
    parser.add_argument("--plain-path", help="PYTHONPATH of servers without hsprobe")
    parser.add_argument("--probed-path", help="PYTHONPATH of servers with hsprobe")
    parser.add_argument(
        "--cores", help="the cores of all servers, once they run; the others are left for all else"
    )
    parser.add_argument("--start-seconds", type=float, default=300)
    parser.add_argument("--wait-for", type=Path, help="do not measure before this file is there")
    parser.add_argument("--seconds", type=float, default=3600, help="stop measuring after this time")
    parser.add_argument("--servers", default="plain,control,handed,depths", help="also: dump, SGLang's own")
    parser.add_argument("--laps", type=float, default=10, help="seconds of laps for each server and batch")
    parser.add_argument("--pressure", type=float, default=0, help="seconds for which the writer stands still")
    parser.add_argument("--soak", type=float, default=0, help="seconds of traffic to watch memory under")
    parser.add_argument("--server-arguments", help="JSON list in place of those for a GPU")
    return parser.parse_args()


def start(args: argparse.Namespace, work: Path) -> dict[str, Server]:
    """Start the servers that are asked for."""
    extra = GPU_ARGUMENTS if args.server_arguments is None else json.loads(args.server_arguments)
    target, draft = models.write(args.models or args.out / "models", args.model)
    halves = args.speculation.split(",")
    wanted = [kind for mark in halves for kind in kinds(mark, args.servers.split(","), work)]
    began = time.monotonic()
    base = arguments(target, draft, models.SHAPES[args.model], extra)
    probed = [str(within.PLANT), *filter(None, [args.probed_path or os.environ.get("PYTHONPATH")])]
    servers = start_all(wanted, work, base, args.plain_path, ":".join(probed), args.start_seconds)
    print(f"{len(servers)} of {len(wanted)} servers after {time.monotonic() - began:.0f} s", flush=True)
    if args.cores:
        chosen = set(parse_numbers(args.cores, "core"))
        for server in servers.values():
            server.pin(chosen)
        os.sched_setaffinity(0, os.sched_getaffinity(0) - chosen)
    return servers


def tables(args: argparse.Namespace, servers: dict[str, Server], results: dict) -> None:
    """Measure, and print each part as soon as it is known."""
    deadline = time.monotonic() + args.seconds
    halves, batches = args.speculation.split(","), [int(batch) for batch in args.batches.split(",")]
    cells = [(mark, batch) for mark in halves if turns_of(servers, mark) for batch in batches]
    for mark, batch in cells if args.laps else ():
        for kind, name in PROBED.items():
            server = servers.get(f"{mark}-{kind}")
            if server is not None and time.monotonic() < deadline:
                found = within.measure(server, batch, args.laps)
                results[f"{mark} batch {batch} {kind} laps"] = found
                print(within.summary(f"{args.model}, {mark}, {batch}, {name}", found), flush=True)
    for mark, batch in cells if args.rounds else ():
        if time.monotonic() < deadline:
            half = measure(servers, mark, batch, args.rounds, args.tokens, deadline)
            results[f"{mark} batch {batch}"] = half
            print(f"\n{args.model}, {mark}, batch {batch}", *summary(half), sep="\n", flush=True)
    dump = servers.get("none-dump")
    for batch in batches if dump else ():
        speeds = [dump.run(prompts(batch), 12).speed for _ in range(3)]
        results[f"none batch {batch} dump"] = speeds
        print(f"{args.model}, batch {batch}: SGLang's dump {statistics.median(speeds):.1f}", flush=True)
    for mark in halves:
        server = servers.get(f"{mark}-depths")
        if server is not None and args.pressure:
            lines = pressing.measure(server, args.pressure)
            results[f"{mark} pressure"] = lines
            print(f"\n{args.model}, {mark}: the writer stands still", *lines, sep="\n", flush=True)
        if server is not None and args.soak:
            results[f"{mark} soak"] = soak(server, args.soak)


def main() -> int:
    args = parse()
    work = args.work or args.out / "work"
    work.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    servers, results = start(args, work), {}
    try:
        while args.wait_for and not args.wait_for.exists():
            time.sleep(0.5)
        tables(args, servers, results)
    finally:
        (args.out / f"speed-{args.model}.json").write_text(json.dumps(results, indent=1))
        for server in servers.values():
            server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
