"""Measure this GPU's costs for the planner: ``cascade-fd tune``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from cascade_fd.bench.fit import CALL, COMMON, OWN, Sample, fit, log_errors, regrets
from cascade_fd.bench.samples import Measured, measure
from cascade_fd.costs import Costs, measured_path
from cascade_fd.hardware import Hardware


def run(device: str, out: Path | None = None, samples: Path | None = None) -> Costs:
    """Fit the constants of ``device`` to measured times, report them, and save them where ``hardware_of`` looks, or in ``out``.

    ``samples``: a file of samples to use instead of the device; if there is none, it is written.
    """
    if samples is not None and samples.exists():
        measured = Measured.load(samples)
    else:
        if device != "cpu" and not torch.cuda.is_available():
            raise ValueError(f"device: expected cpu, or a GPU, on this machine without one, got {device!r}")
        measured = measure(torch.device(device))
        if samples is not None:
            measured.save(samples)
    hw = measured.hardware
    source = f"measured on {hw.name}, {measured.date}, triton {measured.triton}"
    costs = replace(fit(measured.samples, hw), source=source)
    console = Console(width=110)
    console.print(constants(hw.costs, costs), errors(measured.samples, hw, costs))
    path = out or (None if hw.name == "CPU" else measured_path(hw.name))
    if path is None:
        console.print("Not saved: nothing plans by a CPU's times. Name a file with --out to keep them.")
    else:
        costs.save(path)
        console.print(f"Saved as {path}{'' if out else '; plans use it from the next process on'}", soft_wrap=True)
    return costs


def constants(old: Costs, new: Costs) -> Table:
    """Every constant, before and after."""
    table = Table("microseconds of", *OWN, *COMMON, title=new.source, caption=f"before: {old.source}")
    for before, after in zip(old.tiles, new.tiles, strict=True):
        figures = [_change(getattr(before, field), getattr(after, field)) for field in (*OWN, *COMMON)]
        kernel = "" if after.kernel == "attend" else f", {after.kernel}"
        table.add_row(f"{after.rows} rows, {after.per_sm} per SM{kernel}", *figures)
    table.add_section()
    for field in CALL:
        table.add_row(f"{field}{' (per MB)' if field == 'state' else ''}", _change(getattr(old, field), getattr(new, field)))
    return table


def _change(old: float, new: float) -> str:
    return f"{old:.3g} → {new:.3g}"


def errors(samples: Sequence[Sample], hw: Hardware, new: Costs) -> Table:
    """How far predictions are from the samples, before and after; from which they are farthest; and what that costs.

    Whoever plans by them takes the plan that should be the fastest of its batch: its time over that of the one that was.
    """
    table = Table("error", "mean", "90 %", "worst", "of", "taken / fastest", title=f"{len(samples)} samples")
    for name, costs in (("before", hw.costs), ("after", new)):
        off = np.abs(log_errors(samples, hw, costs))
        figures = (off.mean(), np.quantile(off, 0.9), off.max())
        paid = regrets(samples, hw, costs)
        most = f"{paid.mean():.3f}, at worst {paid.max():.2f}"
        table.add_row(name, *(f"{100 * figure:.1f} %" for figure in figures), samples[int(off.argmax())].label, most)
    return table
