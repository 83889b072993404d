"""Strategies of the literature, each in turn with our default: ``python -m benchmarks.ablation --out FILE.csv``. Needs rich.

Runs with CASCADE_FD_HOPPER=0, see the package.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.ablation.compiling import compile_all
from benchmarks.ablation.contest import contest, portable
from benchmarks.ablation.strategies import ALL, CASES_OF, DEFAULT, FAMILIES, strategies
from benchmarks.peers.race import attempt, reason
from cascade_fd.bench.cases import Case
from cascade_fd.bench.measure import Row, machine
from cascade_fd.checks import check_choice
from cascade_fd.hardware import hardware_of

NAMES = tuple(dict.fromkeys(name for names in CASES_OF.values() for name in names))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ablation", description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(NAMES), help="comma-separated names (default: %(default)s)")
    parser.add_argument("--strategies", default=",".join(FAMILIES), help="families of strategies (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE.csv", help="append the rows to this file")
    options = parser.parse_args(arguments)
    cases, families = ([x for x in text.split(",") if x] for text in (options.cases, options.strategies))
    try:
        for what, given, known in (("cases", cases, ALL), ("strategies", families, FAMILIES)):
            for name in given:
                check_choice(what, name, tuple(known))
    except ValueError as fault:
        parser.error(str(fault))
    run([ALL[name] for name in cases], families, options.out)


@portable()
def run(cases: Sequence[Case], families: Sequence[str], out: Path | None = None) -> list[Row]:
    """Measure, print in a line each what failed, then a table; append the rows of every case to ``out`` as they come."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where, console, begin = machine(device), Console(stderr=True, soft_wrap=True, highlight=False), time.perf_counter()
    say = partial(console.print, markup=False)
    wanted = {case: [s for s in strategies(case) if s.family in (DEFAULT.family, *families)] for case in cases}
    wanted = {case: some for case, some in wanted.items() if len(some) > 1}
    if device.type == "cuda":
        try:
            compile_all(wanted, hardware_of(device), say)
        except Exception as fault:
            say(f"nothing compiled ahead: {reason(fault)}")
        say(f"compiled in {time.perf_counter() - begin:.0f} s")
    rows: list[Row] = []
    for case, some in track(wanted.items(), "Measuring", console=console):
        attempt(case.name, partial(contest, case, some, device, where, say), rows, out, say)
    show(rows)
    say(f"{len(wanted)} cases in {time.perf_counter() - begin:.0f} s")
    return rows


def show(rows: Sequence[Row], console: Console | None = None) -> None:
    """Strategy by case: microseconds, and the ratio to the default of the same case."""
    cases = list(dict.fromkeys(row.case for row in rows))
    times = {(row.setting, row.case): row.us for row in rows}
    table = Table("strategy", title="Median microseconds, and over the default's")
    for name in cases:
        table.add_column(name, justify="right")
    for setting in dict.fromkeys(row.setting for row in rows):
        cells = []
        for name in cases:
            us, base = times.get((setting, name)), times.get((DEFAULT.name, name))
            ratio = f" {us / base:.3f}" if us and base and setting != DEFAULT.name else ""
            cells.append(f"{us:.1f}{ratio}" if us else "")
        table.add_row(setting, *cells)
    (console or Console(width=60 + 14 * len(cases))).print(table)


if __name__ == "__main__":
    main()
