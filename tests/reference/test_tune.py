"""``cascade-fd tune`` finds constants that explain the times; its batches, files and the sweep of choices, on a CPU."""

import csv
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from cascade_fd import cli, costs
from cascade_fd.bench.batches import Batch, Pool, plan_of, times_us, tree_of
from cascade_fd.bench.fit import COMMON, NUDGE, Sample, _get, _Problem, fit, log_errors, regrets
from cascade_fd.bench.samples import FLAT, GRID, SEVERAL, Measured, plans_of, sample_of
from cascade_fd.costs import Costs
from cascade_fd.hardware import A100, H200
from cascade_fd.planning.cost import Load, predict
from cascade_fd.planning.facts import facts_of, predicted

CPU = torch.device("cpu")
SMALL = Batch((2, 3), 32, 16)


@pytest.fixture(scope="module")
def designed():
    """Samples of every plan that would be timed on an H200, without times."""
    batches = [(batch, plans_of(batch, CPU, H200)) for batch in (*GRID, *SEVERAL, *FLAT)]
    return [sample_of(f"{share}: {batch}", plan, 1.0) for batch, plans in batches for share, plan in plans.items()]


@pytest.fixture(scope="module")
def pool():
    return Pool.of(CPU, 1e6)


def timed(samples, hw, made_up):
    """The same samples on a device with made-up costs."""
    return [replace(s, us=predict(s.loads, s.state_bytes, hw, made_up).us) for s in samples]


def made_up(hw, seed):
    """Costs that differ from the device's by factors between 0.6 and 1.6."""
    problem = _Problem([], hw)
    return problem.costs(problem.first + np.random.default_rng(seed).uniform(np.log(0.6), np.log(1.6), len(problem.first)))


@pytest.mark.parametrize("hw", [H200, A100], ids=lambda hw: hw.name)
@pytest.mark.parametrize("seed", range(3))
def test_fit_recovers_made_up_costs(designed, hw, seed):
    truth = made_up(hw, seed)
    samples = timed(designed, hw, truth)
    found = fit(samples, hw)
    assert np.abs(log_errors(samples, hw, truth)).max() < 1e-9
    assert np.abs(log_errors(samples, hw, found)).mean() < 2e-3
    problem = _Problem(samples, replace(hw, costs=truth))
    for name, unit in zip(problem.names, np.eye(len(problem.names)), strict=True):
        effect = np.abs(problem.errors(problem.first + NUDGE * unit)).mean() / NUDGE
        if effect > 2e-3:  # a tenth more of this constant is 0.02 % more of the time
            assert _get(found, name) == pytest.approx(_get(truth, name), rel=0.05), (name, effect)


def test_fit_is_not_led_astray_by_noise_and_by_a_few_bad_times(designed):
    truth, noise = made_up(H200, 3), np.random.default_rng(0).normal(0, 0.02, len(designed))
    noise[::40] = 1.0
    samples = [replace(s, us=s.us * np.exp(n)) for s, n in zip(timed(designed, H200, truth), noise, strict=True)]
    found = fit(samples, H200)
    clean = timed(designed, H200, truth)
    assert np.abs(log_errors(clean, H200, found)).mean() < 0.015 < np.abs(log_errors(clean, H200, H200.costs)).mean()


@pytest.mark.parametrize("count", [1, 2, 5])
def test_fit_of_few_samples_leaves_what_they_do_not_show(designed, count):
    samples = [replace(s, us=50.0) for s in designed[:count]]
    found = fit(samples, H200)
    problem = _Problem(samples, H200)
    assert all(0 < _get(found, name) < 100 for name in problem.names)
    assert found.tile(128, 1) == replace(
        H200.costs.tile(128, 1), **{f: float(f"{_get(found, (f, 128, 0, 'attend')):.3g}") for f in COMMON}
    )
    assert found.tile(64, 1) == H200.costs.tile(64, 1)


def test_fitted_constants_have_three_digits_and_one_price_per_block_and_rows(designed):
    found = fit(timed(designed, H200, made_up(H200, 5)), H200)
    assert found == fit(timed(designed, H200, made_up(H200, 5)), H200)
    assert all(_get(found, name) == float(f"{_get(found, name):.3g}") for name in _Problem([], H200).names)
    for rows in (16, 32):
        assert {(t.warm, t.cold) for t in found.tiles if t.rows == rows} == {
            (found.tile(rows, 2).warm, found.tile(rows, 2).cold)
        }
    with pytest.raises(ValueError, match="samples: expected at least one"):
        fit([], H200)


def test_what_the_plans_that_are_taken_cost():
    """Two plans of one batch, of which the slower should be faster; the only plan of another."""
    slow, fast = (
        Sample(f"always {name}: some", (Load(16, 2, 8, ((n, 1),), n),), 0.0, us)
        for name, n, us in (("a", 1, 9.0), ("b", 9, 6.0))
    )
    other = Sample("never: others", slow.loads, 0.0, 3.0)
    assert regrets([slow, fast, other], H200, H200.costs).tolist() == [1.5, 1.0]
    assert regrets([fast, other], H200, H200.costs).tolist() == [1.0, 1.0]


def test_designed_plans_use_every_tile_and_stay_few(designed):
    assert 60 <= len(designed) <= 260
    used = {(load.rows, load.per_sm, load.kernel) for s in designed for load in s.loads}
    assert used == {(t.rows, t.per_sm, t.kernel) for t in H200.costs.tiles}
    assert {bool(s.state_bytes) for s in designed} == {True, False} and max(len(s.loads) for s in designed) == 2


@pytest.mark.parametrize("batch", [SMALL, Batch((64,), 4096, 16), Batch((1,) * 3, 0, 40), Batch((2,), 256, 64, q_len=4)])
def test_a_sample_says_what_its_plan_does(batch):
    """Merging blocks with equally many readers changes nothing that the model sees."""
    for plan in plans_of(batch, CPU, H200).values():
        sample = sample_of("", plan, 1.0)
        assert predict(sample.loads, sample.state_bytes, H200).us == pytest.approx(predicted(plan, facts_of(plan), H200).us)


def test_batch_shares_pages_of_its_prefixes_only():
    ids = tree_of(SMALL, CPU).tables[0].ids.view(5, 3)
    assert sorted(ids.unique().tolist()) == list(range(SMALL.pages)) == list(range(9))
    assert [ids[:, i].unique().numel() for i in range(3)] == [2, 2, 5]
    assert (ids[0, :2] == ids[1, :2]).all() and (ids[2, :2] == ids[4, :2]).all()
    with pytest.raises(ValueError, match="prefix: expected a multiple of page_size=16, got 40"):
        Batch((2,), 40, 16)


@pytest.mark.parametrize("sizes", [(16,), (16, 32), (16, 64), (16, 128)])
def test_plans_keep_to_the_tiles_one_wants(sizes):
    batch = Batch((64,), 4096, 16)
    plan = plan_of(batch, tree_of(batch, CPU), H200, sizes=sizes)
    assert {launch.tile.block_m for launch in plan.launches} == set(sizes) and not plan.choice.folded.any()


def test_times_are_of_plans_that_agree(pool):
    tree = tree_of(SMALL, CPU)
    plans = [plan_of(SMALL, tree, H200, share) for share in ("never", "always")]
    assert all(us > 0 for us in times_us(pool, SMALL, plans))
    other = Batch(SMALL.groups, 16, 16)  # of other tokens
    with pytest.raises(RuntimeError, match="5 requests in groups of 2, 3, 32 \\+ 16 tokens: two plans differ"):
        times_us(pool, SMALL, [plans[0], plan_of(other, tree_of(other, CPU), H200)])


def test_samples_survive_their_file(tmp_path, designed):
    kept = Measured(H200, "3.9.0", "2026-11-30", tuple(designed))
    kept.save(tmp_path / "new" / "samples.jsonl")
    assert Measured.load(tmp_path / "new" / "samples.jsonl") == kept


def run(capsys, *options):
    status = cli.main(["tune", *map(str, options)])
    return status, *capsys.readouterr()


def test_command_rehearses_on_a_cpu_and_takes_samples_from_a_file(tmp_path, capsys):
    out, samples = tmp_path / "costs.json", tmp_path / "samples.jsonl"
    status, text, _ = run(capsys, "--device", "cpu", "--samples", samples)
    assert status == 0 and "Not saved" in text and not out.exists()
    status, text, _ = run(capsys, "--out", out, "--samples", samples)
    assert status == 0 and "16 rows, 2 per SM" in text and "before" in text and str(out) in text
    assert Costs.load(out).source.startswith("measured on CPU, 20")


def test_command_saves_where_plans_look(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CASCADE_FD_COSTS", str(tmp_path))
    load = Load(16, 2, 264, ((1000.0, 1),), 4.0)
    gpu = replace(H200, name="NVIDIA Made-Up/1")
    Measured(gpu, "3.9.0", "2026-11-30", (Sample("one", (load,), 0.0, 20.0),)).save(tmp_path / "samples.jsonl")
    status, text, _ = run(capsys, "--samples", tmp_path / "samples.jsonl")
    found = costs.measured(gpu.name)
    assert status == 0 and "plans use it from the next process on" in text
    assert found.source == "measured on NVIDIA Made-Up/1, 2026-11-30, triton 3.9.0"
    assert predict([load], 0.0, gpu, found).us == pytest.approx(20.0, rel=0.02)


@pytest.mark.parametrize("content", ["", "{}", "[1]", "nonsense", json.dumps({"hardware": {}, "triton": "", "date": ""})])
def test_command_names_a_file_without_samples(tmp_path, capsys, content):
    path = tmp_path / "samples.jsonl"
    path.write_text(content)
    status, out, err = run(capsys, "--samples", path)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"cascade-fd tune: samples: expected a file that cascade-fd tune wrote, got {path}")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_command_wants_a_gpu(capsys):
    status, _, err = run(capsys)
    assert status == 2 and "expected cpu, or a GPU" in err


def test_sweep_of_choices_runs(tmp_path):
    script = Path(__file__).parents[2] / "benchmarks" / "sharing.py"
    command = [sys.executable, script, "--device", "cpu", "--quick", "--out", tmp_path / "x.csv"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    with (tmp_path / "x.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4 and "auto to the better of flat and shared" in said
    for row in rows:
        assert float(row["best_us"]) == min(float(row["flat_us"]), float(row["always_us"]))
        assert float(row["ratio_to_best"]) == pytest.approx(float(row["auto_us"]) / float(row["best_us"]), rel=1e-3)
        assert row["chosen"].split()[0] in ("flat", "shared") and row["gpu"] == "CPU"
