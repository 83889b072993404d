"""Run benchmark cases with a progress bar, print a table, append to a result file. ``cascade-fd bench``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from cascade_fd.bench.cases import CASES
from cascade_fd.bench.measure import Row, measure, write_csv
from cascade_fd.checks import check_choice


def run(names: Sequence[str], device: str, split: str | int = "balanced", out: Path | None = None) -> list[Row]:
    """Measure ``names`` (all cases if empty) on ``device`` and report them."""
    for name in names:
        check_choice("cases", name, tuple(CASES))
    rows = []
    for name in track(names or tuple(CASES), "Measuring", console=Console(stderr=True)):
        rows.append(measure(CASES[name], torch.device(device), split))
        if device != "cpu":
            torch.cuda.empty_cache()
    show(rows)
    if out is not None:
        write_csv(out, rows)
    return rows


def show(rows: Sequence[Row]) -> None:
    """One line per row; times in microseconds."""
    table = Table("case", "setting", "us", "GB/s", "over floor", "error", title=f"{rows[0].gpu}, {rows[0].date}")
    for row in rows:
        figures = (f"{row.us:.1f}", f"{row.gbs:.0f}", f"{row.over_floor:.2f}", f"{row.err:.1e}")
        table.add_row(row.case, row.setting, *figures)
    Console(width=110).print(table)
