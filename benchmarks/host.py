"""Host time of ``plan`` and ``attend``, outside CUDA graphs: ``python benchmarks/host.py``. Needs rich.

Without a GPU only ``plan`` is timed, for an H200 and page tables that are not on the host.
"""

import argparse
import csv
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from rich.console import Console
from rich.table import Table

import cascade_fd as cf
from cascade_fd.bench.cases import CASES, Case
from cascade_fd.bench.measure import machine
from cascade_fd.bench.workload import build, tree_of
from cascade_fd.checks import check_choice
from cascade_fd.hardware import PRESETS

NAMES = ("d1", "d2", "d3", "d4", "d6", "t2", "c1", "c4", "c6")
QUEUE = 4  # calls between two synchronisations: a full queue would make the host wait for the GPU


def microseconds(call: Callable[[], object], repeats: int) -> float:
    """Median of single calls after some that warm up."""
    times = []
    for i in range(repeats + 20):
        if torch.cuda.is_available() and i % QUEUE == 0:
            torch.cuda.synchronize()
        begin = perf_counter()
        call()
        times.append(perf_counter() - begin)
    return median(times[20:]) * 1e6


def plan_call(case: Case, tree: cf.PrefixTree, device: torch.device) -> Callable[[], cf.Plan]:
    options = {"device": device} if device.type == "cuda" else {"device": device, "hardware": PRESETS["sm_90"]}
    heads = {"num_q_heads": case.num_q_heads, "num_kv_heads": case.num_kv_heads, "head_dim": case.head_dim}
    return lambda: cf.plan(tree, **heads, **options)


def calls(case: Case, device: torch.device) -> list[Callable[[], object]]:
    """plan, attend into given memory, attend into new memory; without a GPU only the first."""
    if device.type == "cuda":
        load = build(case, device, torch.bfloat16)
        return [plan_call(case, load.plan.tree, device), load.run, lambda: cf.attend(load.q, load.kv, load.plan)]
    pages = sum(-(-tokens // case.page_size) for _, tokens in case.levels)
    table = torch.empty(case.requests, pages, dtype=torch.int32, device=device)
    return [plan_call(case, tree_of(case, table), device)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help=f"default: {' '.join(NAMES)}")
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--out", type=Path, help="write the rows to this CSV file")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "meta")
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    report = Table(title=f"us of host time, median of {args.repeats} calls, {where}")
    report.add_column("case")
    for column in ("launches", "plan", "attend, out=", "attend"):
        report.add_column(column, justify="right")
    rows = []
    for name in args.cases or NAMES:
        check_choice("cases", name, tuple(CASES))
        timed = calls(CASES[name], device)
        made = timed[0]()
        launches = f"{len(made.launches)}{' + merge' if len(made.merge) else ''}"
        rows.append([name, launches, *(f"{microseconds(call, args.repeats):.1f}" for call in timed)])
        report.add_row(*rows[-1])
    Console().print(report)
    if args.out:
        machine_columns = machine(device)
        with args.out.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["case", "launches", "plan_us", "attend_out_us", "attend_us", *machine_columns])
            for row in rows:
                writer.writerow([*row, *[""] * (5 - len(row)), *machine_columns.values()])


if __name__ == "__main__":
    main()
