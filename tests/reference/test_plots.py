"""Pictures of the committed results: what is drawn is what the rows say."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"


@pytest.mark.parametrize(("kind", "rows"), [("peers", "h200-2026-11-30.csv"), ("sharing", "h200-2026-11-30-sharing.csv")])
def test_committed_results_can_be_drawn(tmp_path, kind, rows):
    command = [sys.executable, "benchmarks/plots.py", kind, str(RESULTS / rows), str(tmp_path / "picture.png")]
    subprocess.run(command, cwd=ROOT, check=True)
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_the_best_of_a_family_is_its_least_time():
    from benchmarks.plots import best_over_floor

    with (RESULTS / "h200-2026-11-30.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    best = best_over_floor(rows)
    for name in ("cascade_fd", "flashinfer", "flash-attn 3", "torch sdpa"):
        times = [float(row["over_floor"]) for row in rows if row["provider"].startswith(name) and row["case"] == "d3"]
        assert best[name]["d3"] == min(times)
    assert "ceiling" not in best["cascade_fd"]
