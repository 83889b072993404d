"""Our times beside those of other libraries: ``python -m benchmarks.peers --cases d1,c4 --out FILE.csv``. Needs rich.

FlashAttention-3 is timed if its flash_attn_interface can be imported. flex_attention of torch is left out: pages in random
order need a mask function and a compilation per case.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.peers.fa3 import NAME as FA3
from benchmarks.peers.flashinfer_file import flashinfer_rows
from benchmarks.peers.race import PROVIDERS, ceilings, race, reason
from cascade_fd.bench.cases import CASES, Case
from cascade_fd.bench.measure import Row, machine, write_csv
from cascade_fd.checks import check_choice

OURS, FLASHINFER = "cascade_fd", "flashinfer"  # how names of providers start


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated names (default: all)")
    parser.add_argument("--providers", default=",".join(PROVIDERS), help="default: %(default)s")
    parser.add_argument("--flashinfer", type=Path, metavar="FILE.jsonl", help="take FlashInfer's times from this result file")
    parser.add_argument("--out", type=Path, metavar="FILE.csv", help="append the rows to this file")
    options = parser.parse_args(arguments)
    cases, names = ([x for x in text.split(",") if x] for text in (options.cases, options.providers))
    try:
        for what, given, known in (("cases", cases, CASES), ("providers", names, PROVIDERS)):
            for name in given:
                check_choice(what, name, tuple(known))
    except ValueError as fault:
        parser.error(str(fault))
    run([CASES[name] for name in cases], names, options.flashinfer, options.out)


def run(cases: Sequence[Case], names: Sequence[str], flashinfer: Path | None = None, out: Path | None = None) -> list[Row]:
    """Measure ``cases`` with the providers in ``names``, print what was left out and a table, append all rows to ``out``.

    What fails is told in a line; what was measured until then is in the file.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where, console, begin = machine(device), Console(stderr=True, soft_wrap=True, highlight=False), time.perf_counter()
    say = partial(console.print, markup=False)
    rows: list[Row] = []

    def attempt(what: str, make: Callable[[], list[Row]]) -> None:
        try:
            new = make()
            rows.extend(new)
            if out is not None and new:
                write_csv(out, new)
            if device.type == "cuda":
                torch.cuda.empty_cache()
        except Exception as fault:
            say(f"{what}: {reason(fault)}")

    if flashinfer is not None:
        attempt("flashinfer", partial(flashinfer_rows, flashinfer, cases))
    if device.type == "cuda":
        attempt("ceilings", partial(ceilings, device, where))
    for case in track(cases, "Measuring", console=console):
        attempt(case.name, partial(race, case, names, device, where, say))
    show(cases, rows)
    say(f"{len(cases)} cases in {time.perf_counter() - begin:.0f} s")
    return rows


def show(cases: Sequence[Case], rows: Sequence[Row], console: Console | None = None) -> None:
    """The best time of each library, and ours over the best of the others."""
    table = Table("case", title="Median microseconds")
    for title in ("floor", "ours", "best FlashInfer", "best FA3", "best other", "ours / best peer"):
        table.add_column(title, justify="right")
    for case in cases:
        best: dict[str, float] = {}
        for row in rows:
            if row.case == case.name:
                library = next((name for name in (OURS, FLASHINFER, FA3) if row.provider.startswith(name)), "other")
                best[library] = min(row.us, best.get(library, row.us))
        peers = [us for library, us in best.items() if library != OURS]
        ratio = f"{best[OURS] / min(peers):.3f}" if OURS in best and peers else ""
        times = (f"{best[name]:.1f}" if name in best else "" for name in (OURS, FLASHINFER, FA3, "other"))
        table.add_row(case.name, f"{case.floor_us:.1f}", *times, ratio)
    console = console or Console(width=110)
    console.print(table)
    for row in rows:
        if row.case == "ceiling":
            console.print(f"{row.setting}: {row.us:.0f} us, {row.gbs:.0f} GB/s, {row.over_floor:.2f} of what floors assume")


if __name__ == "__main__":
    main()
