"""Two ranks: whether both record the same, bit for bit, and DP attention's rows.

    python benchmarks/gpu/ranks.py small --out results

Real tensor parallelism on two GPUs through NCCL, CUDA graphs on, EAGLE-3. `speed.py --server-arguments` with
`--tp-size=2` measures the throughput of the same servers.
"""

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import models
from exact import SITES, capture, hsprobe, say, second_reading
from servers import Kind, prompts, start_all
from speed import GPU_ARGUMENTS, arguments

from hsprobe.trace.reader import Trace

DP = ("--dp-size=2", "--enable-dp-attention")


def replicas(path: Path) -> None:
    """Rows of the same pass and place on both ranks: how many are equal to the bit, by tensor."""
    with Trace.open(path) as trace:
        for rank in trace.ranks:
            graphs = int(rank.passes["graph"].sum())
            say(f"  rank {rank.index} {rank.coords}: {len(rank.passes['id'])} passes, {graphs} from graphs")
        if len(trace.ranks) < 2:
            return
        left, right = trace.ranks[:2]
        same = {name: len(left.passes[name]) == len(right.passes[name]) for name in ("id", "phase")}
        say(f"  same number of passes {same}; gaps: {[gap['reason'] for gap in trace.gaps]}")
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


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=models.SHAPES)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", type=Path)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--probed-path")
    parser.add_argument("--start-seconds", type=float, default=300)
    parser.add_argument("--dp-attention", action="store_true", help="a server with DP attention as well")
    parser.add_argument("--server-arguments")
    args = parser.parse_args()
    extra = GPU_ARGUMENTS if args.server_arguments is None else json.loads(args.server_arguments)
    work = args.work or args.out / "work"
    work.mkdir(parents=True, exist_ok=True)
    target, draft = models.write(args.models or args.out / "models", args.model)
    base = arguments(target, draft, args.model, [*extra, "--tp-size=2"])
    kinds = [Kind("eagle-tp2", SITES)]
    if args.dp_attention:
        kinds.append(Kind("none-dp2", SITES, DP))
    began = time.monotonic()
    servers = start_all(kinds, work, base, None, args.probed_path, args.start_seconds)
    say(f"{sorted(servers)} after {time.monotonic() - began:.0f} s")
    asked = work / "prompts.jsonl"
    lines = [{"input_ids": prompts(1, length, seed)[0]} for seed, length in enumerate([9, 17, 33, 64, 5, 40])]
    asked.write_text("".join(json.dumps(line) + "\n" for line in lines))
    try:
        for name, server in servers.items():
            try:
                out = work / f"{name}.h5"
                outcome = capture(server, out, asked, args.tokens, 3)
                say(f"{name}: {outcome.summary.passes} passes on {outcome.summary.ranks} ranks")
                replicas(out)
                for spool in server.spool_files():
                    say("  second reading equal: {} of {} pieces".format(*second_reading(spool)))
                hsprobe("diff", "--between-ranks", out)
                hsprobe("diff", out)
            except Exception as error:
                say(f"!! {name}: {type(error).__name__}: {error}")
    finally:
        for server in servers.values():
            server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
