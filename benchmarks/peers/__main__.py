"""Our times beside those of other libraries: ``python -m benchmarks.peers --cases d1,c4 --out FILE.csv``. Needs rich.

Each library is timed if it can be imported: flashinfer, flash_attn_interface, vllm (or the library with its operators that
``VLLM_FA3_LIBRARY`` names). flex_attention of torch is compiled for each case and takes its time: ``--providers flex,ours``.
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

from benchmarks.peers import fa3, flashinfer, vllm_fa3
from benchmarks.peers.provider import OURS, PORTABLE, Provider
from benchmarks.peers.race import PROVIDERS, USUAL, Wanted, attempt, ceilings, race
from benchmarks.peers.sweeps import SWEEPS
from cascade_fd.bench.cases import CASES, Case
from cascade_fd.bench.measure import Row, machine
from cascade_fd.checks import check_choice

# How names of providers start, and what their column is called.
LIBRARIES = {
    PORTABLE: "portable",
    OURS: "ours",
    flashinfer.NAME: "FlashInfer",
    fa3.NAME: "FA3",
    vllm_fa3.NAME: "vLLM's FA3",
    "": "other",
}


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    sweep = SWEEPS.get(options.sweep)
    known = CASES if sweep is None else sweep.cases
    cases = _listed(options.cases) or [*known]
    names = _listed(options.providers) or [*(USUAL if sweep is None else sweep.providers)]
    try:
        for what, given, choices in (("cases", cases, known), ("providers", names, PROVIDERS)):
            for name in given:
                check_choice(what, name, tuple(choices))
    except ValueError as fault:
        parser().error(str(fault))

    def wanted(each: Provider) -> bool:
        left_out = any(text in f"{each.name}, {each.setting}" for text in options.without)
        return not left_out and (sweep is None or sweep.wants(each))

    run([known[name] for name in cases], names, options.out, wanted)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__.splitlines()[0])
    made.add_argument("--cases", default="", help="comma-separated names (default: all)")
    made.add_argument(
        "--sweep",
        choices=SWEEPS,
        help="instead of the usual cases; context: B requests of T keys, few settings; shapes: other heads",
    )
    usual = f"comma-separated, of {', '.join(PROVIDERS)} (default: {','.join(USUAL)}, or those of the sweep)"
    made.add_argument("--providers", default="", help=usual)
    without = "leave out what has TEXT in 'name, setting' as a row has them; may be repeated"
    made.add_argument("--without", action="append", default=[], metavar="TEXT", help=without)
    made.add_argument("--out", type=Path, metavar="FILE.csv", help="append the rows to this file, case by case")
    return made


def _listed(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def run(cases: Sequence[Case], names: Sequence[str], out: Path | None = None, wanted: Wanted = lambda each: True) -> list[Row]:
    """Measure ``cases`` with the providers in ``names``, print what was left out and a table, append all rows to ``out``.

    What fails is told in a line; what was measured until then is in the file.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where, console, begin = machine(device), Console(stderr=True, soft_wrap=True, highlight=False), time.perf_counter()
    say = partial(console.print, markup=False)
    rows: list[Row] = []
    if device.type == "cuda":
        attempt("ceilings", partial(ceilings, device, where), rows, out, say)
    for case in track(cases, "Measuring", console=console):
        attempt(case.name, partial(race, case, names, device, where, say, wanted), rows, out, say)
    show(cases, rows)
    say(f"{len(cases)} cases in {time.perf_counter() - begin:.0f} s")
    return rows


def show(cases: Sequence[Case], rows: Sequence[Row], console: Console | None = None) -> None:
    """The best time of each library, and ours over the best of the others."""
    table = Table("case", title="Median microseconds, the best of each")
    for title in ("floor", *LIBRARIES.values(), "ours / best peer"):
        table.add_column(title, justify="right")
    for case in cases:
        best: dict[str, float] = {}
        for row in rows:
            if row.case == case.name:
                library = next(name for name in LIBRARIES if row.provider.startswith(name))
                best[library] = min(row.us, best.get(library, row.us))
        peers = [us for library, us in best.items() if library not in (OURS, PORTABLE)]
        ratio = f"{best[OURS] / min(peers):.3f}" if OURS in best and peers else ""
        times = (f"{best[name]:.1f}" if name in best else "" for name in LIBRARIES)
        table.add_row(case.name, f"{case.floor_us:.1f}", *times, ratio)
    console = console or Console(width=110)
    console.print(table)
    for row in rows:
        if row.case == "ceiling":
            console.print(f"{row.setting}: {row.us:.0f} us, {row.gbs:.0f} GB/s, {row.over_floor:.2f} of what floors assume")


if __name__ == "__main__":
    main()
