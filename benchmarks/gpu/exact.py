"""Whether what is captured inside CUDA graphs is what the kernels wrote, and a fault that graphs alone have.

    python benchmarks/gpu/exact.py small --out results

Four servers of one model: with graphs and without, with speculation and without; and one whose decode graphs
were captured with other layer ids than its configuration has. Prints one line a check.
"""

import argparse
import json
import subprocess
import sys
import time
import zlib
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import models
from servers import Kind, prompts, start_all
from speed import GPU_ARGUMENTS, arguments

from hsprobe.capture.prompts import load_prompts
from hsprobe.capture.session import Plan, capture_from_running
from hsprobe.trace.reader import Trace
from hsprobe.trace.schema import Phase, RowStatus
from hsprobe.trace.spool import SpoolReader

SITES = "embed,layer,mid,aux,logits_processor,draft.input,draft.fc,draft.layer,draft.final"
EAGER = ("--disable-cuda-graph", "--disable-prefill-cuda-graph")
PLANT = str(Path(__file__).parent / "plant")
COMMITTED = (int(RowStatus.PLAIN), int(RowStatus.ACCEPTED))


class Silent:
    """Progress shown to nobody."""

    def starting(self, seconds, line):
        """The server is starting."""

    def answered(self, done, total, bytes_written):
        """A prompt has been answered."""

    def writing(self):
        """The trace is being written."""


def kinds(halves: list[str]) -> list[Kind]:
    fault = (("GRAPH_IDS_SHIFT", "1"),)
    found = []
    for mark in halves:
        found.append(Kind(f"{mark}-graphs", SITES))
        found.append(Kind(f"{mark}-eager", SITES, EAGER))
    # Prefill runs eagerly here, and so obeys the configuration.
    if "eagle" in halves:
        found.append(Kind("eagle-fault", "layer,aux,draft.input", ("--disable-prefill-cuda-graph",), fault))
    return found


def capture(server, out: Path, asked: Path, new_tokens: int, concurrency: int, **sampling: int):
    plan = Plan(
        out=out,
        prompts=load_prompts(asked),
        max_new_tokens=new_tokens,
        concurrency=concurrency,
        sampling={"check": not sampling, "on_pressure": "block", **sampling},
    )
    outcome = capture_from_running(plan, f"http://127.0.0.1:{server.port}", server.spools, Silent())
    if outcome.trouble is not None:
        raise outcome.trouble
    return outcome


def second_reading(spool: Path) -> tuple[int, int]:
    """Pieces whose checksum is that of the second reading, and all that have one."""
    same = total = 0
    for record in SpoolReader(spool):
        for one in record.header.get("passes", []) if record.kind == "blocks" else []:
            for (first, size), second in zip(one["pieces"], one.get("second", ()), strict="second" in one):
                total += 1
                same += zlib.crc32(record.payload[first : first + size]) == second
    return same, total


def rows(path: Path):
    """tensor -> phase -> (context, position, nth row of that) -> bits of the row; and how passes ran."""
    found = defaultdict(lambda: defaultdict(dict))
    launched = defaultdict(lambda: [0, 0])
    with Trace.open(path) as trace:
        rank = trace.ranks[0]
        for phase, model, graph in zip(
            rank.passes["phase"], rank.passes["model"], rank.passes["graph"], strict=True
        ):
            launched[int(model), int(phase)][int(graph)] += 1
        for name, tensor in rank.tensors.items():
            data, index = tensor.read_raw(), tensor.row_index
            at = rank.rows["pass"][index]
            keys = zip(
                rank.rows["context"][index].tolist(),
                rank.passes["model"][at].tolist(),
                rank.passes["phase"][at].tolist(),
                rank.rows["status"][index].tolist(),
                rank.rows["token"][index].tolist(),
                data,
                strict=True,
            )
            for context, model, phase, status, token, bits in keys:
                if context and status in COMMITTED:
                    found[name][model, phase].setdefault((context, token), bits)
        gaps = [gap["reason"] for gap in trace.gaps]
    return found, dict(launched), gaps


def compare(left, right) -> list[str]:
    """Rows of each tensor and phase that are equal to the bit."""
    lines = []
    for name in sorted(set(left) | set(right)):
        for key in sorted(set(left[name]) | set(right[name])):
            a, b = left[name].get(key, {}), right[name].get(key, {})
            common = a.keys() & b.keys()
            equal = sum(bool((a[k] == b[k]).all()) for k in common)
            lines.append((name, key, len(common), equal))
    return lines


def handover(path: Path) -> tuple[int, int]:
    """draft.input rows that equal the aux rows of the same context to the bit, and all."""
    found, _, _ = rows(path)
    aux = {}
    for phases in found["aux"].values():
        aux.update({context: bits for (context, _), bits in phases.items()})
    same = total = 0
    for phases in found["draft.input"].values():
        for (context, _), bits in phases.items():
            if context in aux:
                total += 1
                same += bool((bits == aux[context]).all())
    return same, total


def say(*words) -> None:
    print(*words, flush=True)


def phase_of(key) -> str:
    return f"{'draft ' if key[0] else ''}{Phase(key[1]).name.lower()}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=models.SHAPES)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", type=Path)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--speculation", default="none,eagle")
    parser.add_argument("--wait-for", type=Path, help="do not capture before this file is there")
    parser.add_argument("--probed-path")
    parser.add_argument("--start-seconds", type=float, default=300)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--server-arguments")
    return parser.parse_args()


@dataclass
class Captured:
    """Traces and answers of all captures, by the name of the server and how many requests ran at once."""

    traces: dict[str, Path] = field(default_factory=dict)
    answers: dict[str, list] = field(default_factory=dict)


def capture_all(servers, work: Path, new_tokens: int) -> Captured:
    """Two captures from each server; says what ran, and what a second reading found."""
    asked, captured = work / "prompts.jsonl", Captured()
    lengths = [9, 17, 33, 64, 5, 40]
    lines = [{"input_ids": prompts(1, length, seed)[0]} for seed, length in enumerate(lengths)]
    asked.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, server in servers.items():
        for concurrency in (1, 3):
            key = f"{name}-{concurrency}"
            try:
                outcome = capture(server, work / f"{key}.h5", asked, new_tokens, concurrency)
                captured.traces[key] = work / f"{key}.h5"
                captured.answers[key] = [a.output_ids for a in sorted(outcome.answers, key=_rid)]
                describe(key, outcome, captured.traces[key])
            except Exception as error:
                say(f"!! {key}: {type(error).__name__}: {error}")
        for spool in server.spool_files():
            say("  second reading equal: {} of {} pieces".format(*second_reading(spool)))
    return captured


def describe(key: str, outcome, path: Path) -> None:
    """What ran, eagerly and from graphs."""
    found, launched, gaps = rows(path)
    ran = ", ".join(f"{phase_of(k)} {e} eager {g} graph" for k, (e, g) in sorted(launched.items()))
    say(
        f"{key}: {outcome.summary.passes} passes ({ran}); accept {outcome.accept_length}; "
        f"{len(found)} tensors; gaps: {gaps}"
    )


def against_eager(captured: Captured) -> None:
    """What graphs recorded against what the eager server did."""
    for mark in ("none", "eagle"):
        for concurrency in (1, 3):
            left, right = f"{mark}-graphs-{concurrency}", f"{mark}-eager-{concurrency}"
            if left not in captured.traces or right not in captured.traces:
                continue
            say(f"{left} against {right}: same answers {captured.answers[left] == captured.answers[right]}")
            totals = defaultdict(lambda: [0, 0])
            both = rows(captured.traces[left])[0], rows(captured.traces[right])[0]
            for name, key, common, equal in compare(*both):
                totals[name.split("/")[0], key][0] += equal
                totals[name.split("/")[0], key][1] += common
            for (name, key), (equal, common) in sorted(totals.items()):
                say(f"  {name} in {phase_of(key)}: {equal} of {common} rows equal to the bit")


def main() -> int:
    args = parse()
    extra = GPU_ARGUMENTS if args.server_arguments is None else json.loads(args.server_arguments)
    work = args.work or args.out / "work"
    work.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    target, draft = models.write(args.models or args.out / "models", args.model)
    base = arguments(target, draft, models.SHAPES[args.model], extra)
    began = time.monotonic()
    path = None if args.probed_path is None else f"{PLANT}:{args.probed_path}"
    servers = start_all(kinds(args.speculation.split(",")), work, base, None, path, args.start_seconds)
    say(f"{sorted(servers)} after {time.monotonic() - began:.0f} s")
    try:
        while args.wait_for and not args.wait_for.exists():
            time.sleep(0.5)
        captured = capture_all(servers, work, args.tokens)
        against_eager(captured)
        for key in ("eagle-graphs-1", "eagle-graphs-3"):
            if key in captured.traces:
                counts = handover(captured.traces[key])
                say("{}: draft.input equals aux to the bit in {} of {} rows".format(key, *counts))
        for key in ("eagle-fault-3", "eagle-graphs-3"):
            if key in captured.traces:
                fault(target, captured.traces[key], models.SHAPES[args.model].ids, args, work)
    finally:
        for server in servers.values():
            server.stop()
    return 0


def _rid(answer) -> tuple[int, str]:
    return (len(answer.rid), answer.rid)


def fault(target: Path, infer: Path, ids: list[int], args, work: Path) -> None:
    """What `hsprobe diff` says of a server with the planted fault (or without)."""
    train, whole = work / f"train-{infer.stem}.h5", work / f"whole-{infer.stem}.jsonl"
    with Trace.open(infer) as trace:
        ids_of = [trace.requests.tokens(i).tolist() for i in range(len(trace.requests))]
    # Prompts and answers, so that the reference has the rows that decode and verify passes computed.
    whole.write_text("".join(json.dumps({"input_ids": tokens}) + "\n" for tokens in ids_of))
    kept = ["--layers", ",".join(map(str, ids)), "--device", args.device, "--dtype", "bfloat16"]
    hsprobe("capture", "--model", target, "-o", train, "--prompts", whole, *kept)
    hsprobe("diff", train, infer)
    hsprobe("diff", infer)


def hsprobe(*words) -> None:
    """Run the command as a person would, and show what it says."""
    line = [sys.executable, "-m", "hsprobe", *map(str, words)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=200)
    say(f"$ hsprobe {' '.join(map(str, words))}: exit {done.returncode}")
    say(done.stdout[-6000:], done.stderr[-1000:])


if __name__ == "__main__":
    sys.exit(main())
