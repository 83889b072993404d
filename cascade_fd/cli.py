"""``cascade-fd``: one subcommand per ``_add_*`` function. Heavy imports happen when a subcommand runs."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit status."""
    parser = argparse.ArgumentParser(prog="cascade-fd", description="Exact attention for batches that share context.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add in (_add_demo, _add_compile, _add_bench, _add_tune, _add_plan, _add_info):
        add(commands)
    args = parser.parse_args(argv)
    return int(args.func(args))


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value


def _need(extra: str, *packages: str) -> None:
    """Exit with a hint if a package of an optional extra is not installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        print(f'cascade-fd: needs {", ".join(missing)}; pip install "cascade_fd[{extra}]"', file=sys.stderr)
        sys.exit(2)


def _add_demo(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        help="a real model answers many questions about one long prompt; every token is compared with plain attention",
    )
    parser.add_argument(
        "--model", metavar="PATH.gguf", help="default: the file that `make demo` fetches, or an installed wheel"
    )
    parser.add_argument("--tokens", type=_positive, default=32, help="new tokens per answer (default: %(default)s)")
    parser.add_argument("--questions", type=_positive, default=16, help="how many of the 16 questions (default: all)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default: float32, must match")
    parser.add_argument("--device", help="default: cuda if there is one, else cpu")
    parser.set_defaults(func=_demo)


def _demo(args: argparse.Namespace) -> int:
    _need("hf", "transformers", "accelerate", "gguf", "rich")
    from cascade_fd.demo.run import run_demo

    return run_demo(args)


def _add_compile(commands: Any) -> None:
    parser = commands.add_parser("compile", help="compile every kernel variant ahead of time, on a machine without a GPU")
    parser.add_argument("--target", default="sm_80,sm_90,sm_100,gfx942", help="comma-separated (default: %(default)s)")
    parser.add_argument("--jobs", type=_positive, help="processes (default: one per core)")
    parser.set_defaults(func=_compile)


def _compile(args: argparse.Namespace) -> int:
    _need("bench", "rich")
    from cascade_fd.precompile import run

    return run(args.target.split(","), args.jobs)


def _add_bench(commands: Any) -> None:
    parser = commands.add_parser("bench", help="time the benchmark cases on this machine; results are checked first")
    parser.add_argument("--cases", default="", help="comma-separated names, such as d3,c4 (default: all)")
    parser.add_argument("--device", help="default: cuda if there is one, else cpu")
    parser.add_argument("--split", default="balanced", help="balanced (default), wave, fixed, stream_k, or a number of splits")
    parser.add_argument("--out", metavar="FILE.csv", help="append the rows to this file")
    parser.set_defaults(func=_bench)


def _bench(args: argparse.Namespace) -> int:
    _need("bench", "rich")
    import torch

    from cascade_fd.bench.run import run

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    names = [name for name in args.cases.split(",") if name]
    run(names, device, int(args.split) if args.split.isdigit() else args.split, Path(args.out) if args.out else None)
    return 0


def _add_tune(commands: Any) -> None:
    parser = commands.add_parser("tune", help="measure what launches and tiles cost on this GPU, for the planner")
    parser.add_argument("--device", default="cuda", help="default: cuda; cpu is a rehearsal")
    parser.add_argument("--out", metavar="FILE.json", help="save the costs here instead of where plans look for them")
    parser.add_argument("--samples", metavar="FILE.jsonl", help="save the times here; if the file exists, use it instead")
    parser.set_defaults(func=_tune)


def _tune(args: argparse.Namespace) -> int:
    _need("bench", "rich")
    from cascade_fd.bench.tune import run

    try:
        run(args.device, *(Path(name) if name else None for name in (args.out, args.samples)))
    except (OSError, ValueError) as error:
        print(f"cascade-fd tune: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def _add_plan(commands: Any) -> None:
    parser = commands.add_parser("plan", help="explain, and draw, the plan of a batch from its page ids; needs no GPU")
    parser.add_argument(
        "--block-tables", required=True, metavar="FILE", help=".npz or .json with block_tables [B, max_pages] and seq_lens [B]"
    )
    parser.add_argument("--page-size", type=_positive, required=True, help="tokens per page")
    parser.add_argument("--num-q-heads", type=_positive, default=32, help="default: %(default)s")
    parser.add_argument("--num-kv-heads", type=_positive, default=8, help="default: %(default)s")
    parser.add_argument("--head-dim", type=_positive, default=128, help="default: %(default)s")
    parser.add_argument("--q-len", type=_positive, default=1, help="query rows per request (default: %(default)s)")
    parser.add_argument("--target", default="sm_90", help="cpu, sm_80, sm_90, sm_100 or gfx942 (default: %(default)s)")
    parser.add_argument("--draw", metavar="FILE", help="draw tree and schedule: .png, .svg or .pdf")
    parser.set_defaults(func=_plan)


def _plan(args: argparse.Namespace) -> int:
    if args.draw:
        _need("bench", "matplotlib")
    from cascade_fd.checks import check_choice
    from cascade_fd.hardware import PRESETS
    from cascade_fd.planning.from_file import read_tree
    from cascade_fd.planning.planner import plan

    heads = {"num_q_heads": args.num_q_heads, "num_kv_heads": args.num_kv_heads, "head_dim": args.head_dim}
    try:
        check_choice("target", args.target, list(PRESETS))
        hardware = PRESETS[args.target]
        tree = read_tree(Path(args.block_tables), args.page_size, args.q_len)
        made = plan(tree, **heads, device="cpu", hardware=hardware)
        if args.draw:
            made.draw(args.draw, hardware)
        print(made.explain(hardware))
    except (OSError, ValueError, TypeError) as error:
        print(f"cascade-fd plan: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def _add_info(commands: Any) -> None:
    parser = commands.add_parser("info", help="versions, devices, and which backend runs on them")
    parser.set_defaults(func=_info)


def _info(args: argparse.Namespace) -> int:
    import torch

    from cascade_fd import __version__
    from cascade_fd.hardware import hardware_of

    triton = importlib.metadata.version("triton") if importlib.util.find_spec("triton") else "not installed"
    print(f"cascade_fd {__version__}, torch {torch.__version__}, triton {triton}")
    for device in ("cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))):
        hw = hardware_of(device)
        backend = "triton" if device != "cpu" else "reference"
        print(f"{device}: {hw.name}, {hw.arch}, {hw.num_sms} SMs, {hw.smem} bytes of shared memory, backend {backend}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
