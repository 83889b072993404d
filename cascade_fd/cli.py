"""``cascade-fd``: one subcommand per ``_add_*`` function. Heavy imports happen when a subcommand runs."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from typing import Any


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit status."""
    parser = argparse.ArgumentParser(prog="cascade-fd", description="Exact attention for batches that share context.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add in (_add_demo,):
        add(commands)
    args = parser.parse_args(argv)
    return int(args.func(args))


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value


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
    missing = [name for name in ("transformers", "accelerate", "gguf", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        print(f'cascade-fd demo: needs {", ".join(missing)}; pip install "cascade_fd[hf]"', file=sys.stderr)
        return 2
    from cascade_fd.demo.run import run_demo

    return run_demo(args)


if __name__ == "__main__":
    sys.exit(main())
