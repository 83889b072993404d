"""Pictures of result files: ``python benchmarks/plots.py peers FILE.csv PICTURE``, or ``sharing``, or ``context``."""

import argparse
import csv
import re
from collections import defaultdict
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

from cascade_fd.bench.cases import CASES

Rows = list[dict[str, str]]
# Okabe and Ito's colours, which colour-blind people can tell apart; by how a provider's name begins.
FAMILIES = {
    "cascade_fd portable": ("cascade_fd, portable kernels", "#999999"),
    "cascade_fd": ("cascade_fd", "#0072B2"),
    "flashinfer": ("FlashInfer, best", "#E69F00"),
    "flash-attn 3": ("FlashAttention-3, best", "#009E73"),
    "vllm fa3": ("vLLM's FlashAttention-3, best", "#56B4E9"),
    "torch sdpa": ("SDPA on contiguous keys, best", "#CC79A7"),
    "torch flex": ("flex_attention on contiguous keys", "#D55E00"),
}
SWEPT = re.compile(r"b(\d+)t(\d+)")  # names of the cases of the context sweep


def best_over_floor(rows: Rows) -> dict[str, dict[str, float]]:
    """Per family that has rows, per case, the least time over the floor."""
    best: dict[str, dict[str, float]] = {name: {} for name in FAMILIES}
    for row in rows:
        name = _family(row)
        if name is not None and row["case"] != "ceiling":
            mine = best[name]
            mine[row["case"]] = min(mine.get(row["case"], np.inf), float(row["over_floor"]))
    return {name: cases for name, cases in best.items() if cases}


def _family(row: dict[str, str]) -> str | None:
    return next((name for name in FAMILIES if row["provider"].startswith(name)), None)


def best_rates(rows: Rows) -> dict[int, dict[str, dict[int, float]]]:
    """Of the context sweep: per batch size, per family, GB/s of its best setting by keys of each request."""
    best: dict[int, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        name, swept = _family(row), SWEPT.fullmatch(row["case"])
        if name is not None and swept:
            mine, keys = best[int(swept[1])][name], int(swept[2])
            mine[keys] = max(mine.get(keys, 0.0), float(row["gbs"]))
    return best


def peers(rows: Rows) -> Figure:
    """Time over the floor, case by case, against the best of every peer."""
    best = best_over_floor(rows)
    cases = sorted(best["cascade_fd"], key=list(CASES).index)
    figure = Figure((11, 3.6), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(best)
    for i, (name, times) in enumerate(best.items()):
        label, colour = FAMILIES[name]
        at = [j + (i - (len(best) - 1) / 2) * width for j, case in enumerate(cases) if case in times]
        axes.bar(at, [times[case] for case in cases if case in times], width, label=label, color=colour)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set(ylabel="time over the floor", title=_where(rows), ylim=(0.9, 3.6), xlim=(-0.6, len(cases) - 0.4))
    axes.set_xticks(range(len(cases)), cases)
    axes.legend(frameon=False, ncols=3, fontsize=8, loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def context(rows: Rows) -> Figure:
    """How fast keys and values are read, by the length of requests: one panel per batch size, one line per library."""
    best = best_rates(rows)
    figure = Figure((11, 3.6), layout="constrained")
    grid = figure.subplots(1, len(best), sharey=True, squeeze=False)[0]
    for axes, (requests, families) in zip(grid, sorted(best.items()), strict=True):
        for name, (label, colour) in FAMILIES.items():
            rates = sorted(families.get(name, {}).items())
            if rates:
                axes.plot(*zip(*rates, strict=True), marker=".", label=label, color=colour)
        axes.set_xscale("log", base=2)
        keys = sorted({n for rates in families.values() for n in rates})
        axes.set_xticks(keys, [_short(n) for n in keys], fontsize=7)
        axes.minorticks_off()
        axes.set(xlabel="keys of each request", title=f"{requests} request{'s' * (requests > 1)}")
        axes.spines[["top", "right"]].set_visible(False)
    grid[0].set_ylim(bottom=0)  # of all panels, once all lines are there
    grid[0].set_ylabel("GB/s of keys and values")
    grid[0].legend(frameon=False, fontsize=7)
    figure.suptitle(_where(rows), fontsize=10)
    return figure


def sharing(rows: Rows) -> Figure:
    """How much faster than nothing shared: requests against shared tokens, one panel for each length of their own."""
    panels: dict[int, dict[tuple[int, int], float]] = defaultdict(dict)
    for row in rows:
        if row["flat_us"] and row["groups"] == "1" and row["q_len"] == "1" and row["num_q_heads"] == "32":
            place = int(row["group"]), int(row["prefix"])
            panels[int(row["suffix"])][place] = float(row["flat_us"]) / float(row["auto_us"])
    figure = Figure((11, 2.9), layout="constrained")
    grid = figure.subplots(1, len(panels), sharey=True)
    for axes, (suffix, gains) in zip(grid, sorted(panels.items()), strict=True):
        _panel(axes, suffix, gains)
    grid[0].set_ylabel("requests")
    figure.suptitle(f'Times faster than nothing shared, share="auto"; {_where(rows)}', fontsize=10)
    return figure


def _panel(axes: Axes, suffix: int, gains: dict[tuple[int, int], float]) -> None:
    groups, prefixes = (sorted({place[i] for place in gains}) for i in (0, 1))
    values = np.array([[gains.get((group, prefix), np.nan) for prefix in prefixes] for group in groups])
    axes.imshow(np.log2(values), norm=TwoSlopeNorm(0, -0.5, 4), cmap="RdBu", aspect="auto", origin="lower")  # white: equal
    for (i, j), value in np.ndenumerate(values):
        if np.isfinite(value):
            axes.text(j, i, f"{value:.2g}", ha="center", va="center", fontsize=7, color="white" if value > 6 else "black")
    axes.set_xticks(range(len(prefixes)), [_short(n) for n in prefixes], fontsize=7)
    axes.set_yticks(range(len(groups)), [str(n) for n in groups], fontsize=7)
    axes.set(xlabel="shared tokens", title=f"{suffix:,} of their own")
    axes.title.set_fontsize(9)


def _short(n: int) -> str:
    return f"{n // 1024}k" if n >= 1024 else str(n)


def _where(rows: Rows) -> str:
    row = next(row for row in rows if row.get("triton"))
    return f"{row['gpu']}, bf16, page 16, {row['date']}"


KINDS = {"peers": peers, "sharing": sharing, "context": context}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("rows", type=Path)
    parser.add_argument("picture", type=Path)
    args = parser.parse_args()
    with args.rows.open(newline="") as file:
        rows = list(csv.DictReader(file))
    KINDS[args.kind](rows).savefig(args.picture, dpi=130)


if __name__ == "__main__":
    main()
