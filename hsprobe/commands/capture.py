"""``hsprobe capture``: record a trace from a serving SGLang, or a reference with transformers."""

import argparse
import sys
import time
from typing import TYPE_CHECKING

from hsprobe.commands.arguments import local, positive, readable
from hsprobe.commands.dumps import add_options, options_of
from hsprobe.errors import HsprobeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hsprobe.capture.prompts import Prompt
    from hsprobe.capture.session import Outcome, Plan

DESCRIPTION = """\
Record hidden states into a trace.

With --server, hsprobe records what a real SGLang server computes and hands to its draft. Give the server's
own arguments after --, and hsprobe starts it, sends the prompts and stops it; give a URL instead, and it
records from a server that you started with HSPROBE_CAPTURE=1 on this machine.

With --model, transformers runs the target and every depth is kept: the reference. With --layers, only the
chunks that a training run would keep are.
"""

EPILOG = """\
examples:
  record what the draft sees, with the prompts of the training dump
    hsprobe capture --server -o infer.h5 --prompts train.h5 -- --model-path TARGET \\
        --speculative-algorithm EAGLE3 --speculative-draft-model-path DRAFT \\
        --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4

  of a server with several ranks, the first one only
    hsprobe capture --server -o infer.h5 --prompts train.h5 --ranks 0 -- --model-path TARGET --tp-size 4

  the same from a server that is already running (started with HSPROBE_CAPTURE=1)
    hsprobe capture --server http://127.0.0.1:30000 -o infer.h5 --prompts train.h5

  a reference with every depth, and one with just the chunks of a draft's training
    hsprobe capture --model TARGET -o reference.h5 --prompts prompts.jsonl
    hsprobe capture --model TARGET -o train.h5 --prompts prompts.jsonl --layers 2,30,58
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "capture",
        help="record a trace from a server, or a reference from the model",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--server", nargs="?", const="", metavar="URL", help="record from SGLang; without a URL, start one"
    )
    source.add_argument("--model", type=local, metavar="DIR", help="record from transformers")
    parser.add_argument("-o", "--output", type=local, required=True, metavar="FILE", help="trace to write")
    parser.add_argument(
        "--prompts",
        type=readable,
        required=True,
        metavar="FILE",
        help="a trace, a training dump, or JSONL with input_ids or text on each line",
    )
    parser.add_argument("--limit", type=positive, metavar="N", help="use the first N prompts only")
    parser.add_argument(
        "--max-new-tokens",
        type=_count,
        metavar="N",
        help="tokens to generate for each prompt, greedily (default: 1 with --server, 0 with --model)",
    )
    _add_server_options(parser.add_argument_group("with --server"))
    _add_model_options(parser.add_argument_group("with --model"))
    add_options(parser)
    parser.set_defaults(run=run)


def _add_server_options(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--sites",
        metavar="NAMES",
        help="sites to record, e.g. aux,draft.input (default: all; layer is every depth)",
    )
    group.add_argument("--depths", metavar="LIST", help="depths to record at site layer, e.g. 0,3,5-8")
    group.add_argument(
        "--ranks",
        metavar="LIST",
        help="ranks to record, e.g. 0 or 0,3 (default: all; of tensor parallelism, one holds it all)",
    )
    group.add_argument(
        "--concurrency",
        type=positive,
        default=4,
        metavar="N",
        help="requests under way at once (default: 4)",
    )
    group.add_argument(
        "--every", type=positive, metavar="N", help="record every Nth step of the scheduler only"
    )
    group.add_argument(
        "--requests", metavar="PATTERN", help="record requests with such ids only, e.g. 'vip-*'"
    )
    group.add_argument("--rows", type=positive, metavar="N", help="of a prompt, record the last N rows only")
    group.add_argument(
        "--on-pressure",
        choices=("drop", "block", "sample"),
        help="when writing falls behind: drop passes, hold the server up, or record fewer steps "
        "(default: as the server was started, which is drop; block for a server that hsprobe starts)",
    )
    group.add_argument(
        "--memory", metavar="SIZE", help="host memory for what waits to be written (default: 256M)"
    )
    group.add_argument("--disk", metavar="SIZE", help="disk at which recording stops (default: 16G)")
    group.add_argument(
        "--spools",
        type=local,
        metavar="DIR",
        help="with a URL: the folder named in the server's HSPROBE_CAPTURE",
    )
    group.add_argument(
        "--start-timeout", type=positive, default=1800, metavar="S", help="seconds to wait for the server"
    )
    group.add_argument(
        "server_arguments", nargs="*", metavar="-- ARGS", help="arguments of sglang.launch_server"
    )


def _add_model_options(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--layers",
        type=_ids,
        metavar="IDS",
        help="keep the outputs of these layers only, as aux chunks in this order; -1 is the embedding",
    )
    group.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    group.add_argument("--device", default="cpu", metavar="NAME", help="torch device (default: cpu)")


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError("must not be negative")
    return number


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of layer ids like 2,30,58") from None


def run(args: argparse.Namespace) -> int:
    """Capture as asked; 0 when the trace is whole, 2 on trouble, 130 when interrupted."""
    from hsprobe.capture.prompts import load_prompts

    _check(args)
    prompts = load_prompts(args.prompts, args.limit, options_of(args))
    if args.model is not None:
        return _run_model(args, prompts)
    from hsprobe.capture.session import Plan, capture_from_launched, capture_from_running

    plan = Plan(
        out=args.output,
        prompts=prompts,
        max_new_tokens=1 if args.max_new_tokens is None else args.max_new_tokens,
        concurrency=args.concurrency,
        sites=args.sites,
        depths=args.depths,
        ranks=args.ranks,
        memory=args.memory,
        disk=args.disk,
        sampling=_sampling(args),
        start_seconds=args.start_timeout,
    )
    from hsprobe.report.progress import CaptureProgress

    with CaptureProgress() as progress:
        if args.server:
            outcome = capture_from_running(plan, args.server, args.spools, progress)
        else:
            outcome = capture_from_launched(plan, args.server_arguments, progress)
    return _finish(plan, outcome)


def _sampling(args: argparse.Namespace) -> dict[str, object]:
    # A server that hsprobe starts serves nobody else: there it is worth waiting for every row.
    pressure = args.on_pressure or (None if args.server else "block")
    chosen = {"every": args.every, "requests": args.requests, "rows": args.rows, "on_pressure": pressure}
    return {name: value for name, value in chosen.items() if value is not None}


def _check(args: argparse.Namespace) -> None:
    if args.server == "" and not args.server_arguments:
        raise HsprobeError(
            "--server without a URL starts a server, and needs its arguments.",
            "Write them after --, as in: capture --server -o infer.h5 --prompts p.jsonl -- --model-path DIR",
        )
    if args.server_arguments and args.server != "":
        raise HsprobeError(
            "Arguments after -- are for a server that hsprobe starts.",
            "Leave them out, or leave out the URL.",
        )
    if args.server and (args.sites or args.depths or args.ranks or args.memory or args.disk):
        raise HsprobeError(
            "A running server already chose what it records, and the room for it.",
            "Set HSPROBE_SITES, HSPROBE_DEPTHS, HSPROBE_RANKS, HSPROBE_MEMORY or HSPROBE_MAX_BYTES in its "
            "environment when you start it.",
        )
    if args.sites or args.depths or args.ranks or args.memory or args.disk:
        from hsprobe.probes.sglang.settings import parse_numbers, parse_sites, parse_size

        try:
            parse_sites(args.sites or "aux")
            parse_numbers(args.depths or "0", "depth")
            parse_numbers(args.ranks or "0", "rank")
            parse_size(args.memory or "0")
            parse_size(args.disk or "0")
        except ValueError as error:
            raise HsprobeError(f"{error}.", "See hsprobe capture --help.") from None


def _run_model(args: argparse.Namespace, prompts: "Sequence[Prompt]") -> int:
    from hsprobe.report.progress import RowProgress

    try:
        from hsprobe.probes.transformers.reference import ReferencePlan, capture_reference
    except ImportError as error:
        raise HsprobeError(
            f"--model needs {error.name}, which is not installed.",
            "Install it: pip install 'hsprobe[transformers]'",
        ) from None
    plan = ReferencePlan(
        model=args.model,
        out=args.output,
        layers=args.layers,
        max_new_tokens=args.max_new_tokens or 0,
        dtype=args.dtype,
        device=args.device,
    )
    began = time.monotonic()
    with RowProgress("Running the model") as progress:
        n_rows = capture_reference(plan, prompts, progress.advanced_to)
    kept = "every depth" if args.layers is None else f"layers {','.join(map(str, args.layers))}"
    print(
        f"{args.output}: {n_rows} rows of {len(prompts)} requests, {kept}, {time.monotonic() - began:.1f} s"
    )
    return 0


def _finish(plan: "Plan", outcome: "Outcome") -> int:
    print(_describe(plan, outcome))
    if outcome.interrupted:
        print("hsprobe: interrupted; the trace holds what was recorded until then", file=sys.stderr)
        return 130
    if outcome.trouble is not None:
        print(f"hsprobe: {outcome.trouble}", file=sys.stderr)
        return 2
    return 0


def _describe(plan: "Plan", outcome: "Outcome") -> str:
    summary = outcome.summary
    assert summary is not None
    lines = [
        f"{plan.out}: {summary.rows} rows in {summary.passes} passes on "
        f"{summary.ranks} rank{'s' if summary.ranks != 1 else ''}, "
        f"{len(outcome.answers)} of {len(plan.prompts)} prompts answered"
    ]
    if outcome.accept_length is not None:
        lines.append(f"acceptance length reported by the server: {outcome.accept_length:.2f}")
    if summary.gaps:
        lines.append(f"{summary.gaps} gaps were recorded: hsprobe inspect {plan.out} lists them")
    return "\n".join(lines)
