"""Does share="auto" choose well? Flat, shared and automatic plans of many batches: ``python benchmarks/sharing.py``.

The three are timed in turn. One prefix for all requests over a grid, then several groups in a batch, several query rows, and
more query heads. Needs rich.
"""

import argparse
import csv
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from cascade_fd.bench.batches import Batch, Pool, plan_of, times_us, tree_of
from cascade_fd.bench.measure import machine
from cascade_fd.bench.samples import MOST_FLAT, POOL_BYTES
from cascade_fd.hardware import H200, Hardware, hardware_of
from cascade_fd.planning.facts import facts_of, predicted
from cascade_fd.planning.worklist import Plan

PREFIXES = (16, 64, 256, 1024, 4096, 16384, 65536)
GROUPS = (2, 4, 8, 16, 64, 256)
SUFFIXES = (16, 64, 256, 1024, 4096)
LIMIT = 1.03  # of a time over the better of flat and shared, from which it counts as a mistake
Row = dict[str, Any]


def batches() -> Iterator[Batch]:
    """The sweep."""
    for prefix, group, suffix in product(PREFIXES, GROUPS, SUFFIXES):
        yield Batch((group,), prefix, suffix)
    for prefix, group, suffix in product((64, 512, 4096), (2, 8, 32), (64, 512)):
        yield Batch((group,) * (64 // group), prefix, suffix)
    for prefix, group in product((256, 2048), (4, 32)):
        yield Batch((group,), prefix, 256, q_len=4)
        yield Batch((group,), prefix, 256, num_q_heads=64)


def quick() -> list[Batch]:
    """A few small batches, to try the sweep out, on a CPU too."""
    return [Batch((2,), 16, 16), Batch((8,), 256, 16), Batch((2, 2), 64, 16), Batch((4,), 64, 16, q_len=4)]


def measure(batch: Batch, pool: Pool, hw: Hardware) -> Row:
    """Times of one batch, the plans in turn. Flat is left out where it would read too much."""
    tree = tree_of(batch, pool.device)
    shares = ["never"] * (batch.flat_tokens <= MOST_FLAT) + ["always", "auto"]
    plans = {share: plan_of(batch, tree, hw, share) for share in shares}
    times = dict(zip(shares, times_us(pool, batch, list(plans.values())), strict=True))
    flat, always, auto = times.get("never"), times["always"], times["auto"]
    best = min(always, flat or always)
    return {
        "group": max(batch.groups),
        "groups": len(batch.groups),
        "prefix": batch.prefix,
        "suffix": batch.suffix,
        "q_len": batch.q_len,
        "num_q_heads": batch.num_q_heads,
        "flat_us": flat,
        "always_us": always,
        "auto_us": auto,
        "chosen": chosen(plans["auto"]),
        "predicted_us": predicted(plans["auto"], facts_of(plans["auto"]), hw).us,
        "best_us": best,
        "ratio_to_best": auto / best,
        "ratio_to_flat": flat and auto / flat,
    }


def chosen(plan: Plan) -> str:
    """Whether a plan shares, and the rows of its tiles, by launch."""
    tiles = "+".join(str(launch.tile.block_m) for launch in plan.launches)
    return f"{'flat' if plan.choice.folded.any() else 'shared'} {tiles}"


def report(rows: list[Row], most: int = 15) -> Table:
    """The worst choices."""
    columns = ("group", "groups", "prefix", "suffix", "q_len", "num_q_heads", "flat_us", "always_us", "auto_us", "chosen")
    table = Table(*(name.removesuffix("_us").replace("num_q_heads", "Hq") for name in columns), "to best", "to flat")
    for row in sorted(rows, key=lambda row: -row["ratio_to_best"])[:most]:
        ratios = (text(row[name], 3) for name in ("ratio_to_best", "ratio_to_flat"))
        table.add_row(*(text(row[name], 1) for name in columns), *ratios)
    return table


def text(value: Any, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}" if isinstance(value, float) else str(value)


def summary(rows: list[Row]) -> str:
    """How far share="auto" is from the better of flat and shared, and from flat."""
    lines = []
    for name, other in (("ratio_to_best", "the better of flat and shared"), ("ratio_to_flat", "flat")):
        ratios = [row[name] for row in rows if row[name] is not None]
        over = sum(ratio > LIMIT for ratio in ratios)
        figures = f"{mean(ratios):.4f} on average, {max(ratios):.3f} at worst, {over} of {len(ratios)} over {LIMIT}"
        lines.append(f"auto to {other}: {figures}")
    return "\n".join(lines)


@contextmanager
def into(path: Path) -> Iterator[Callable[[Row], object]]:
    """What writes rows to a CSV file, each at once: a sweep that is cut short keeps what it has."""
    with path.open("w", newline="") as file:
        writer: csv.DictWriter | None = None

        def write(row: Row) -> None:
            nonlocal writer
            if writer is None:
                writer = csv.DictWriter(file, list(row), lineterminator="\n")
                writer.writeheader()
            writer.writerow({name: text(value, 4 if "ratio" in name else 2) for name, value in row.items()})
            file.flush()

        yield write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="a few small batches")
    parser.add_argument("--out", type=Path, help="write the rows to this CSV file")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cpu" and not options.quick:
        parser.error("--device cpu: expected --quick beside it")
    hw = hardware_of(device) if device.type == "cuda" else replace(H200, name="CPU")  # a CPU's own plans choose nothing
    pool, where, rows = Pool.of(device, POOL_BYTES), machine(device), []
    todo = [batch for batch in (quick() if options.quick else batches()) if pool.holds(batch)]
    with into(options.out) if options.out else nullcontext(lambda row: None) as write:
        for batch in track(todo, "Measuring", console=Console(file=sys.stderr)):
            rows.append(measure(batch, pool, hw) | where)
            write(rows[-1])
    console = Console(width=130)
    console.print(report(rows), f"{where['gpu']}, costs: {hw.costs.source}", summary(rows), sep="\n")


if __name__ == "__main__":
    main()
