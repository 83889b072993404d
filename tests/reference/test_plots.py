"""Pictures of the committed results: what is drawn is what the rows say."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
from benchmarks.plots import best_over_floor, best_rates, context
from cascade_fd.bench.cases import CONTEXT_CASES
from cascade_fd.bench.measure import row_of, write_csv
from tests.reference.peer_cases import WHERE

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"


@pytest.mark.parametrize(("kind", "rows"), [("peers", "h200-2026-11-30.csv"), ("sharing", "h200-2026-11-30-sharing.csv")])
def test_committed_results_can_be_drawn(tmp_path, kind, rows):
    command = [sys.executable, "benchmarks/plots.py", kind, str(RESULTS / rows), str(tmp_path / "picture.png")]
    subprocess.run(command, cwd=ROOT, check=True)
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_the_best_of_a_family_is_its_least_time():
    with (RESULTS / "h200-2026-11-30.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    best = best_over_floor(rows)
    for name in ("cascade_fd", "flashinfer", "flash-attn 3", "torch sdpa"):
        times = [float(row["over_floor"]) for row in rows if row["provider"].startswith(name) and row["case"] == "d3"]
        assert best[name]["d3"] == min(times)
    assert "ceiling" not in best["cascade_fd"] and "torch flex" not in best  # which has no rows


def swept(tmp_path):
    """Rows of a sweep over two batch sizes, as the benchmark writes them."""
    rows = [
        row_of(CONTEXT_CASES[name], provider, setting, us, 1e-3, WHERE | {"gpu": "GPU", "triton": "3"})
        for name, provider, setting, us in (
            ("b1t512", "cascade_fd", "", 4.0),
            ("b1t512", "flashinfer 0.6", "decode", 8.0),
            ("b1t512", "flashinfer 0.6", "tensor-core decode", 5.0),
            ("b1t131072", "cascade_fd", "", 125.0),
            ("b16t512", "vllm fa3", "flat", 20.0),
        )
    ]
    write_csv(tmp_path / "rows.csv", rows)
    return tmp_path / "rows.csv"


def test_a_context_sweep_has_a_panel_per_batch_and_a_line_per_library(tmp_path):
    with swept(tmp_path).open(newline="") as file:
        rows = list(csv.DictReader(file))
    rows.append(rows[0] | {"case": "d1"})  # no case of the sweep
    rates = {
        1: {"cascade_fd": {512: 524.0, 131072: 4295.0}, "flashinfer": {512: 419.0}},  # 4,096 bytes a key
        16: {"vllm fa3": {512: 1678.0}},
    }
    assert best_rates(rows) == rates
    one, sixteen = context(rows).axes
    drawn = {axes.get_title(): {line.get_label(): line.get_xydata().tolist() for line in axes.lines} for axes in (one, sixteen)}
    assert drawn == {
        "1 request": {"cascade_fd": [[512, 524], [131072, 4295]], "FlashInfer, best": [[512, 419]]},
        "16 requests": {"vLLM's FlashAttention-3, best": [[512, 1678]]},
    }
    assert one.get_ylim() == sixteen.get_ylim() and one.get_ylim()[0] == 0 and one.get_ylim()[1] > 4295


def test_a_context_sweep_can_be_drawn(tmp_path):
    command = [sys.executable, "benchmarks/plots.py", "context", str(swept(tmp_path)), str(tmp_path / "picture.png")]
    subprocess.run(command, cwd=ROOT, check=True)
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
