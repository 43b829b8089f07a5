"""Two ranks on two GPUs through NCCL, CUDA graphs on, EAGLE-3: what each rank records.

    python benchmarks/gpu/ranks.py small --out results
    python benchmarks/gpu/ranks.py glm --out results                       # sums fused with norms, and not
    python benchmarks/gpu/ranks.py glm-dense --out results --dp-attention  # DP attention too

Prints which rows are equal to the bit on both ranks, and where they are not, whether a rank's rows are its
own part of a sum. `speed.py --server-arguments` with `--tp-size=2` measures the throughput of such servers.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import fused_models
import models
from exact import SITES, capture, hsprobe, say, second_reading
from servers import Kind, prompts, start_all
from speed import GPU_ARGUMENTS, arguments

from hsprobe.trace.reader import Trace
from hsprobe.trace.schema import Phase

DP = ("--dp-size=2", "--enable-dp-attention")
UNFUSED = ("--enforce-disable-flashinfer-allreduce-fusion",)
# Its other backend, mnnvl, uses NVLink multicast.
FUSED = ("--flashinfer-allreduce-fusion-backend=trtllm",)
LONG = 2100
"""Tokens of a prompt that SGLang does not fuse the sums of: it does so up to 2048 rows."""


CHUNK = 4096
FEW_GRAPHS = ("--cuda-graph-max-bs-decode=4", "--cuda-graph-bs-prefill", "16", "64", "2304")
"""So that a server starts soon."""


def kinds(model: str, dp_attention: bool) -> list[Kind]:
    """The servers that are compared."""
    found = [Kind("eagle-tp2", SITES)]
    if model in fused_models.KINDS:
        found = [Kind("eagle-fused", SITES, FUSED), Kind("eagle-unfused", SITES, UNFUSED)]
    if dp_attention:
        found += [Kind("none-dp2", SITES, DP), Kind("eagle-dp2", SITES, DP)]
    return found


def replicas(path: Path) -> None:
    """Rows of the same pass and place on both ranks: how many are equal to the bit, by tensor."""
    with Trace.open(path) as trace:
        describe(trace)
        if len(trace.ranks) < 2:
            return
        left, right = trace.ranks[:2]
        same = {name: len(left.passes[name]) == len(right.passes[name]) for name in ("id", "phase")}
        say(f"  same number of passes {same}")
        totals = {}
        for name in sorted(left.tensors.keys() & right.tensors.keys()):
            a, b = left.tensors[name].read_raw(), right.tensors[name].read_raw()
            equal = int((a == b).all(axis=1).sum()) if a.shape == b.shape else -1
            kind = name.split("/")[0]
            known = totals.setdefault(kind, [0, 0])
            known[0] += equal
            known[1] += len(a)
        for kind, (equal, rows) in totals.items():
            say(f"  {kind}: {equal} of {rows} rows equal to the bit on both ranks")
        parts(trace)


def describe(trace: Trace) -> None:
    """What each rank ran, and what is missing."""
    for rank in trace.ranks:
        graphs = int(rank.passes["graph"].sum())
        ran = {Phase(phase).name.lower(): int((rank.passes["phase"] == phase).sum()) for phase in Phase}
        requests = len(np.unique(rank.rows["request"]))
        say(
            f"  rank {rank.index} {rank.coords}: {len(rank.passes['id'])} passes, {graphs} from graphs; "
            f"{ {name: count for name, count in ran.items() if count} }; {requests} requests"
        )
    say(f"  gaps: {[gap['reason'] for gap in trace.gaps]}")


def parts(trace: Trace) -> None:
    """Of each aux chunk, by phase: how far the ranks are apart, and whether their rows are parts of a sum.

    With a part p of the MLP's output on each rank, aux is mid + p there, and the aux of both ranks together
    are mid + layer.
    """
    left, right = trace.ranks[:2]
    if "aux" not in left.tensors or left.tensors["aux"].depths is None:
        return
    first = left.tensors["aux"]
    if first.shape != right.tensors["aux"].shape:
        return
    phases = left.passes["phase"][left.rows["pass"][first.row_index]]
    for chunk, depth in enumerate(first.depths):
        a, b = (rank.tensors["aux"].read(chunk=chunk) for rank in (left, right))
        whole, middle = left.tensors.get(f"layer/{depth:03d}"), left.tensors.get(f"mid/{depth - 1:03d}")
        for phase in np.unique(phases):
            at = phases == phase
            say(
                f"  aux chunk {chunk} (depth {depth}), {Phase(phase).name.lower()}, {at.sum()} rows: "
                f"{int((a == b).all(axis=1)[at].sum())} equal on both ranks; "
                f"apart by {_relative(a[at], b[at]):.4f} (median, relative)"
            )
            if whole is None or middle is None or not whole.shape == middle.shape == a.shape:
                continue
            state, before = whole.read()[at], middle.read()[at]
            say(
                f"    from the state after the layer: {_relative(a[at], state):.4f} on rank 0, "
                f"{_relative(b[at], state):.4f} on rank 1; their sum from mid + layer: "
                f"{_relative(a[at] + b[at], state + before):.5f}"
            )


def _relative(values: np.ndarray, expected: np.ndarray) -> float:
    """Median over rows of the distance, in parts of the expected row's length."""
    length = np.linalg.norm(expected, axis=1)
    return float(np.median(np.linalg.norm(values - expected, axis=1) / np.maximum(length, 1e-12)))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=[*models.SHAPES, *fused_models.KINDS])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", type=Path)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--probed-path")
    parser.add_argument("--start-seconds", type=float, default=300)
    parser.add_argument("--dp-attention", action="store_true", help="servers with DP attention as well")
    parser.add_argument("--only", help="names of servers, with commas between")
    parser.add_argument("--no-diff", action="store_true", help="write the traces only")
    parser.add_argument("--server-arguments")
    args = parser.parse_args()
    extra = GPU_ARGUMENTS if args.server_arguments is None else json.loads(args.server_arguments)
    work = args.work or args.out / "work"
    work.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    writer = fused_models if args.model in fused_models.KINDS else models
    target, draft = writer.write(args.models or args.out / "models", args.model)
    say(f"{args.model}: weights {fused_models.digest(target)}")
    shape = fused_models.SHAPE if writer is fused_models else models.SHAPES[args.model]
    base = arguments(target, draft, shape, [*extra, "--tp-size=2", *FEW_GRAPHS], context=2 * CHUNK)
    began = time.monotonic()
    wanted = [
        kind
        for kind in kinds(args.model, args.dp_attention)
        if args.only is None or kind.name in args.only.split(",")
    ]
    servers = start_all(wanted, work, base, None, args.probed_path, args.start_seconds)
    say(f"{sorted(servers)} after {time.monotonic() - began:.0f} s")
    asked = [prompts(1, length, seed)[0] for seed, length in enumerate([9, 17, 33, 5, 64, 40])][
        : args.prompts
    ]
    try:
        for name, server in servers.items():
            try:
                look_at(server, args, _written(work / "prompts.jsonl", asked), args.out / f"{name}.h5")
                if name.startswith("eagle-fused"):
                    long = _written(work / "long.jsonl", prompts(1, LONG, 7))
                    look_at(server, args, long, args.out / f"{name}-long.h5", rows=64)
            except Exception as error:
                say(f"!! {name}: {type(error).__name__}: {error}")
    finally:
        for server in servers.values():
            server.stop()
    return 0


def look_at(server, args, asked: Path, out: Path, **sampling: int) -> None:
    """Capture, and say what the trace holds."""
    outcome = capture(server, out, asked, args.tokens if not sampling else 2, 3, **sampling)
    say(f"{args.model} {out.stem}: {outcome.summary.passes} passes on {outcome.summary.ranks} ranks")
    replicas(out)
    for spool in server.spool_files():
        say("  second reading equal: {} of {} pieces".format(*second_reading(spool)))
    if not args.no_diff:
        hsprobe("diff", "--between-ranks", out)
        hsprobe("diff", out)


def _written(path: Path, asked: list[list[int]]) -> Path:
    path.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in asked))
    return path


if __name__ == "__main__":
    sys.exit(main())
