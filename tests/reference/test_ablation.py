"""The ablation benchmark, as far as a CPU can tell: plans made over say the same, what fails is told, rows and the table."""

import csv
import io
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("rich")
from rich.console import Console

from benchmarks.ablation import __main__ as ablation
from benchmarks.ablation import strategies as data
from benchmarks.ablation.compiling import compile_family, unreal
from benchmarks.ablation.contest import contest
from benchmarks.ablation.experiment import Switches
from benchmarks.ablation.rewrite import in_sequence, replanned, state_counts, walks, with_rows
from benchmarks.ablation.strategies import ALL, CASES_OF, DEFAULT, FAMILIES, Strategy, strategies
from cascade_fd.bench.cases import Case
from cascade_fd.bench.measure import Row, row_of
from cascade_fd.bench.workload import build
from cascade_fd.hardware import PRESETS
from cascade_fd.ops.attend import attend
from cascade_fd.planning.worklist import NODE, NUM_ROWS, Q_END, ROW0, START, STATE, STOP
from cascade_fd.testing import numerics, oracle
from cascade_fd.tiles import HOPPER_SWITCH

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
H200 = PRESETS["sm_90"]
HEADS = {"num_q_heads": 6, "num_kv_heads": 2, "head_dim": 16, "page_size": 4}
SMALL = {
    "decode": Case("decode", ((3, 21),), **HEADS),
    "skewed": Case("skewed", ((5, 50),), lens=(50, 1, 4, 7, 32), **HEADS),
    "verify": Case("verify", ((3, 21),), q_len=8, **HEADS),
    "tree": Case("tree", ((1, 8), (2, 12), (8, 7)), q_len=4, **HEADS),
}
CHANGES = {
    "in sequence": in_sequence,
    "a head per program": lambda plan: with_rows(plan, 1),
    "a row per program": lambda plan: with_rows(plan, 3),
    "two rows per program": lambda plan: with_rows(plan, 6),
    "packed rows of two rows": lambda plan: with_rows(plan, 4),
    "cut into 3": lambda plan: replanned(plan, 3),
    "cut into 3, a head per program": lambda plan: with_rows(replanned(plan, 3), 1),
    "stream_k": lambda plan: replanned(plan, "stream_k"),
}


def load_of(name, split=2):
    return build(SMALL[name], CPU, torch.float32, split)


def contexts(load):
    lens, size = load.case.seq_lens.tolist(), load.case.page_size
    pages = [load.table[b, : -(-n // size)].long() for b, n in enumerate(lens)]
    return [tuple(x[p].flatten(0, 1)[:n] for x in (load.kv.k, load.kv.v)) for p, n in zip(pages, lens, strict=True)]


def coverage(plan):
    """How often each packed row of a KV head sees each token of its request, by the loop of ``Launch``; and its states."""
    G, lens = plan.shape.group, plan.lens.tolist()
    seen = np.zeros((plan.num_rows * G, max(lens)), int)
    states = [[] for _ in seen]
    for launch in plan.launches:
        for item in launch.items.tolist():
            stop = min(item[STOP], lens[item[NODE]])
            for r in range(item[ROW0], item[ROW0] + item[NUM_ROWS]):
                limit = min(stop, lens[item[NODE]] - item[Q_END] + r // G + 1) if item[Q_END] else stop
                seen[r, item[START] : limit] += 1
                states[r].append(item[STATE])
    return seen, states


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("change", CHANGES)
def test_a_plan_made_over_computes_the_same(name, change):
    load = load_of(name)
    case, made = load.case, CHANGES[change](load.plan)
    state = attend(load.q, load.kv, made)
    q_lens = {"q_lens": case.q_len}
    exact = oracle.attention(load.q, contexts(load), **q_lens)
    numerics.assert_state(state, exact, numerics.torch_attention(load.q, contexts(load), **q_lens))
    seen, states = coverage(made)
    keys = np.repeat(case.seq_lens, case.q_len) - np.tile(np.arange(case.q_len)[::-1], case.requests)
    want = np.arange(seen.shape[1]) < np.repeat(keys, made.shape.group)[:, None]
    assert (seen == want).all()  # every key of every row once
    assert all(launch.direct == bool((launch.items[:, STATE] < 0).any()) for launch in made.launches)
    counts = np.repeat(state_counts(made).numpy(), made.shape.group)
    assert all(sorted(mine) == (list(range(n)) if n else [-1]) for mine, n in zip(states, counts, strict=True))


def test_input_sets_share_the_plan_made_over():
    load = load_of("decode")
    first, second = Strategy("heads: x", lambda plan: with_rows(plan, 1)).prepare([load, replace(load, q=load.q.clone())])
    assert first.keywords["plan"] is second.keywords["plan"] is not load.plan and first.args[0] is not second.args[0]
    first, second = Strategy("merge: x", in_sequence, Switches(fused=True)).prepare([load, replace(load, q=load.q.clone())])
    assert first.arrived is second.arrived and first.plan is second.plan and first.load is not second.load


@pytest.mark.parametrize("most", [1, 3, 4, 12])
def test_items_have_no_more_rows_than_asked(most):
    load = load_of("tree")
    for before, after in zip(load.plan.launches, with_rows(load.plan, most).launches, strict=True):
        assert after.items[:, NUM_ROWS].max() <= most <= after.tile.block_m
        assert after.items[:, NUM_ROWS].sum() == before.items[:, NUM_ROWS].sum()
        assert after.count == len(after.items) and after.items.dtype == torch.int32
        assert (after is before) == (before.items[:, NUM_ROWS].max() <= most)


@pytest.fixture(autouse=True)
def portable(monkeypatch):
    """As a run of the ablation has it."""
    monkeypatch.setenv(HOPPER_SWITCH, "0")


@pytest.mark.parametrize("name", ["d1", "d3", "d5", "d6", "t1"])
def test_walks_fill_slots_of_stream_k(name):
    made = replanned(unreal(ALL[name], H200).plan, "stream_k")
    for i, launch in enumerate(made.launches):
        walk, blocks = walks(made, i), -(-(launch.items[:, STOP] - launch.items[:, START]) // launch.tile.block_n)
        assert walk[0] == 0 and walk[-1] == len(blocks) and (walk.diff() > 0).all()
        work = [int(blocks[a:b].sum()) for a, b in pairwise(walk)]
        programs, slots = (len(walk) - 1) * made.shape.num_kv_heads, H200.num_sms * launch.tile.per_sm
        assert programs <= slots and sum(work) >= 0.9 * max(work) * len(work)


def test_strategies_have_names_of_their_own_and_fit_their_cases():
    assert set(CASES_OF) == set(FAMILIES) and set(ablation.NAMES) <= set(ALL)
    for name in ablation.NAMES:
        some = strategies(ALL[name])
        assert some[0] is DEFAULT and len({strategy.name for strategy in some}) == len(some) > 1
        assert {strategy.family for strategy in some[1:]} == {f for f, names in CASES_OF.items() if name in names}


@pytest.mark.slow
def test_a_family_compiles_for_a_gpu_that_is_not_there():
    kernels = compile_family("t1", "merge", H200)
    assert kernels.count("attend_kernel") == kernels.count("ablation_kernel") == 2 and kernels.count("merge_rows_kernel") == 1


def made(case, start):
    load = unreal(ALL[case], H200)
    return [(s.name, s.plan(load.plan)) for s in strategies(load.case) if s.name.startswith(start)]


def test_what_the_strategies_plan():
    per_split = {name: int(plan.cuts.chunk[0]) for name, plan in made("d3", "split")}
    assert [per_split[f"split: {n} tokens"] for n in (128, 256, 512)] == [128, 256, 512]
    assert [plan.merge.max_states for _, plan in made("d1", "num_splits")] == [1 << i for i in range(11)]
    assert [plan.merge.max_states for _, plan in made("d3", "num_splits")] == [1 << i for i in range(10)]
    programs = {name: plan.launches[0].items.shape[0] * 8 for name, plan in made("d1", "heads")}
    assert list(programs.values()) == [264 * 4, 8 * 8 * 4]  # 33 splits, or 33 // 4
    tiles = {name: plan.launches[0].tile.block_m for name, plan in made("v2", "rows")}
    assert list(tiles.values()) == [16] * 6
    assert [plan.chained for _, plan in made("d1", "merge")] == [False, True]


def test_what_is_wrong_or_fails_is_told_and_not_timed():
    def fails(plan):
        raise RuntimeError("no\nsuch plan")

    def shorter(plan):
        return replace(plan, lens=plan.lens - 3)

    class Louder(Strategy):
        def prepare(self, loads):
            return [partial(self.run, load, call) for load, call in zip(loads, super().prepare(loads), strict=True)]

        def run(self, load, call):
            call()
            load.out.lse.add_(0.01)

    told = []
    some = [
        DEFAULT,
        Louder("bad: lse", in_sequence),
        Strategy("bad: plan", fails),
        Strategy("bad: keys", shorter),
        Strategy("kernel: x", lambda p: p, Switches()),
    ]
    rows = contest(SMALL["decode"], some, CPU, dict.fromkeys(WHERE, ""), told.append)
    assert [row.setting for row in rows] == ["default"] and rows[0].us > 0 and rows[0].err < 1e-6
    assert told[0] == "decode, bad: lse: RuntimeError: relative error inf exceeds 5e-03; not timed"
    assert told[1] == "decode, bad: plan: RuntimeError: no such plan"
    assert told[2].startswith("decode, bad: keys: RuntimeError: relative error ") and told[2].endswith("; not timed")
    assert told[3].startswith("decode, kernel: x: ") and len(told) == 4


WHERE = ("gpu", "driver", "torch", "triton", "commit", "date")


def test_a_run_writes_all_rows_and_a_table(tmp_path, monkeypatch, capsys):
    cases = [SMALL["decode"], SMALL["verify"], SMALL["tree"]]
    monkeypatch.setattr(
        data, "CASES_OF", CASES_OF | {"num_splits": ("decode",), "rows": ("verify", "tree"), "merge": ("decode",)}
    )
    out = tmp_path / "rows.csv"
    rows = ablation.run(cases, ["num_splits", "rows"], out)
    told = capsys.readouterr()
    with out.open() as file:
        read = list(csv.DictReader(file))
    assert list(read[0]) == list(Row.__dataclass_fields__) and len(read) == len(rows)
    assert {row["provider"] for row in read} == {"cascade_fd"}
    assert [row["setting"] for row in read if row["case"] == "decode"] == ["default", *(f"num_splits: {n}" for n in (1, 2, 4))]
    assert sum(row["case"] == "verify" for row in read) == 7
    assert all(float(row["us"]) > 0 and float(row["err"]) < 1e-5 for row in read)
    assert "3 cases in" in told.err and "rows: 2 per program, same splits" in told.out


def test_a_run_keeps_to_the_portable_kernel(monkeypatch):
    seen = []
    monkeypatch.setattr(ablation, "contest", lambda *_: seen.append(os.environ[HOPPER_SWITCH]) or [])
    monkeypatch.delenv(HOPPER_SWITCH, raising=False)
    assert ablation.run([ALL["c1"]], ["maximum"]) == [] and seen == ["0"] and HOPPER_SWITCH not in os.environ
    monkeypatch.setenv(HOPPER_SWITCH, "1")
    ablation.run([ALL["c1"]], ["maximum"])
    assert seen == ["0", "0"] and os.environ[HOPPER_SWITCH] == "1"


def test_the_table_compares_with_the_default_of_the_case():
    made = [("d1", "default", 120.0), ("d1", "a: b", 126.0), ("d3", "a: b", 100.0)]
    rows = [row_of(ALL[case], "cascade_fd", setting, us, 1e-3, dict.fromkeys(WHERE, "")) for case, setting, us in made]
    text = io.StringIO()
    ablation.show(rows, Console(file=text, width=80))
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in text.getvalue().splitlines() if "│" in line]
    assert cells == [["default", "120.0", ""], ["a: b", "126.0 1.050", "100.0"]]


@pytest.mark.parametrize(
    ("arguments", "want"),
    [(["--help"], "--strategies"), (["--cases", "x9"], "cases: expected"), (["--strategies", "magic"], "strategies: expected")],
)
def test_the_command(arguments, want):
    ran = subprocess.run([sys.executable, "-m", "benchmarks.ablation", *arguments], capture_output=True, text=True, cwd=ROOT)
    assert want in ran.stdout + ran.stderr and ran.returncode == (0 if arguments == ["--help"] else 2)
