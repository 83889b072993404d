"""The benchmark of other libraries: who takes part, what is checked, the files and the table."""

import csv
import io
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("rich")
from rich.console import Console

from benchmarks.peers import __main__ as command
from benchmarks.peers import fa3, flashinfer, flex, race, vllm_fa3
from benchmarks.peers.__main__ import main, run, show
from benchmarks.peers.provider import OURS, PORTABLE, Provider, over, sdpa
from benchmarks.peers.sweeps import CONTIGUOUS
from benchmarks.peers.ways import flat_ways
from cascade_fd.bench.cases import CASES, CONTEXT_CASES, READ_RATE
from cascade_fd.bench.measure import MAX_ERROR, Row, measure, medians_us, row_of
from tests.reference.peer_cases import CPU, SMALL, WHERE, every_row, load_of
from tests.reference.test_peers_fa3 import Fake

ROOT = Path(__file__).parents[2]
NOT_FOR_SDPA = "only for one row per request, one length and nothing shared"


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """A CPU, and no library that this machine may have."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv(vllm_fa3.LIBRARY, raising=False)
    for name in ("flashinfer", "flash_attn_interface", "vllm"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize("name", SMALL)
def test_our_plan_and_the_check_agree(name):
    load = load_of(name)
    assert load.error() < 1e-6
    assert load.error_of(load.out.o + 0.01) > 1e-3
    assert load.error_of(torch.full_like(load.q, torch.nan)) == math.inf
    torch.testing.assert_close(load.run().o, every_row(load), rtol=1e-5, atol=1e-5)


def offer(name, setting, make):
    return Provider(name, setting, lambda loads: over(loads, make))


def fails(load):
    raise RuntimeError("no\nsuch kernel")


OFFERS = [
    offer("good", "", lambda load: load.run().o),
    offer("off", "by 1 %", lambda load: load.run().o * 1.01),
    offer("lazy", "leaves its memory as it was", lambda load: torch.empty_like(load.q)),
    Provider("bad", "raises", fails),
    offer("late", "raises", fails),
]


def test_what_is_wrong_or_fails_is_told_and_not_timed(monkeypatch):
    case, told = SMALL["cascade"], []
    monkeypatch.setitem(race.PROVIDERS, "several", lambda load: OFFERS)
    rows = race.race(case, ["several", "flashinfer", "fa3", "vllm", "sdpa"], CPU, WHERE, told.append)
    assert [row.provider for row in rows] == ["good"] and rows[0].us > 0 and rows[0].err < 1e-6
    assert told[0].startswith("cascade, flashinfer: flashinfer cannot be imported (ModuleNotFoundError")
    assert told[1].startswith("cascade, fa3: flash_attn_interface cannot be imported (")
    assert told[2].startswith("cascade, vllm: neither VLLM_FA3_LIBRARY names a library that loads nor is vllm installed (")
    assert told[3] == f"cascade, sdpa: {NOT_FOR_SDPA}"
    assert told[4] == "cascade, off, by 1 %: relative error 1.00e-02 exceeds 5e-03; not timed"
    assert "exceeds" in told[5] and told[5].startswith("cascade, lazy")
    assert told[6:] == [f"cascade, {name}, raises: RuntimeError: no such kernel" for name in ("bad", "late")]


def test_only_what_is_wanted_is_prepared(monkeypatch):
    told = []
    monkeypatch.setitem(race.PROVIDERS, "several", lambda load: OFFERS)
    rows = race.race(SMALL["decode"], ["several"], CPU, WHERE, told.append, lambda each: each.name in ("good", "off"))
    assert [row.provider for row in rows] == ["good"] and len(told) == 1 and told[0].startswith("decode, off")


def test_a_run_writes_all_rows_and_a_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "flash_attn_interface", Fake())
    out = tmp_path / "rows.csv"
    names = ["decode", "speculative tree"]
    rows = run([SMALL[name] for name in names], ["fa3", "sdpa", "flashinfer", "ours"], out)
    told = capsys.readouterr()
    assert "2 cases in" in told.err and "decode, flashinfer: flashinfer cannot be imported" in told.err
    assert f"speculative tree, sdpa: {NOT_FOR_SDPA}" in told.err
    with out.open() as file:
        read = list(csv.DictReader(file))
    assert list(read[0]) == list(Row.__dataclass_fields__) and len(read) == len(rows)
    providers = {name: {row["provider"] for row in read if row["case"] == name} for name in names}
    assert {"cascade_fd", "flash-attn 3"} <= providers["decode"] and providers[names[1]] == {"cascade_fd", "flash-attn 3"}
    ours = next(row for row in read if row["provider"] == "cascade_fd")
    assert ours["setting"] == measure(SMALL["decode"], CPU).setting
    assert all(float(row["us"]) > 0 and float(row["err"]) < MAX_ERROR for row in read)
    assert "ours / best peer" in told.out and "speculative tree" in told.out


def test_the_table_compares_with_the_best_of_each_library():
    cases = [CASES[name] for name in ("d1", "c1", "c3")]
    made = [
        ("d1", OURS, 125.0),
        ("d1", PORTABLE, 126.0),
        ("d1", fa3.NAME, 136.0),
        ("d1", fa3.NAME, 133.0),
        ("d1", "torch sdpa", 127.0),
    ]
    made += [("d1", "flashinfer 0.6", 131.0), ("d1", vllm_fa3.NAME, 129.0), ("d1", vllm_fa3.NAME, 130.0)]
    made += [("c1", "flashinfer 0.6", 41.0), ("c1", "flashinfer 0.6", 35.0)]
    rows = [row_of(CASES[name], provider, "", us, 1e-3, WHERE) for name, provider, us in made]
    rows.append(race._ceiling("sum", 1000.0, 2**32, 2**32 / READ_RATE, WHERE))
    text = io.StringIO()
    show(cases, rows, Console(file=text, width=110))
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in text.getvalue().splitlines() if "│" in line]
    assert cells == [
        ["d1", "116.7", "126.0", "125.0", "131.0", "133.0", "129.0", "127.0", "0.984"],
        ["c1", f"{CASES['c1'].floor_us:.1f}", "", "", "35.0", "", "", "", ""],
        ["c3", f"{CASES['c3'].floor_us:.1f}", "", "", "", "", "", "", ""],
    ]
    assert "sum: 1000 us, 4295 GB/s, 1.07 of what floors assume" in text.getvalue()
    assert flashinfer.NAME in command.LIBRARIES and list(command.LIBRARIES.values())[2:6] == [
        "FlashInfer", "FA3", "vLLM's FA3", "other",
    ]  # fmt: skip


def test_timers_take_turns():
    asked, figures = [], {"a": iter([90, 80, 3, 1, 2]), "b": iter([9, 9, 5, 5, 7])}
    timers = [lambda name=name: (asked.append(name), float(next(figures[name])))[1] for name in "ab"]
    assert medians_us(timers, 3) == [2.0, 5.0] and asked == ["a", "b"] * 5  # two rounds warm up
    assert medians_us([], 3) == []


def test_ceilings():
    *sums, product = race.ceilings(CPU, WHERE, gib=2**-10, side=64)
    assert [row.setting for row in sums] == ["sum of 0.000976562 GiB bfloat16", "sum of 0.000976562 GiB float32"]
    assert product.setting.startswith("64^3 bf16 matmul, ") and {row.case for row in (*sums, product)} == {"ceiling"}
    assert all(row.gbs == pytest.approx(2**20 / row.us / 1e3) for row in sums)


@pytest.fixture
def asked(monkeypatch):
    """What the command is asked to run, instead of running it."""
    made = []
    monkeypatch.setattr(command, "run", lambda cases, names, out, wanted: made.append((cases, names, out, wanted)))
    return made


def test_the_command_runs_everything_but_what_is_slow(asked):
    main([])
    main(["--cases", "d1,c4", "--providers", "flex,ours", "--out", "rows.csv", "--without", "fa2, split", "--without", "Batch"])
    (cases, names, out, wanted), (some, two, path, fewer) = asked
    assert cases == list(CASES.values()) and out is None and wanted(Provider("x", "y", fails))
    assert names == ["flashinfer", "fa3", "vllm", "sdpa", "ours"] and set(race.PROVIDERS) == {*names, "flex"}
    assert some == [CASES["d1"], CASES["c4"]] and two == ["flex", "ours"] and path == Path("rows.csv")
    kept = [("flashinfer", "fa2"), ("flashinfer", "fa3 x 2"), ("flashinfer", "BatchAttention"), ("x", "fa2, split 3")]
    assert [fewer(Provider(*each, fails)) for each in kept] == [True, True, False, False]


def test_the_context_sweep_takes_few_settings_that_exist(asked):
    main(["--sweep", "context"])
    main(["--sweep", "context", "--cases", "b1t512"])
    (cases, names, _, wanted), (one, *_) = asked
    assert cases == list(CONTEXT_CASES.values()) and one == [CONTEXT_CASES["b1t512"]]
    assert names == ["flashinfer", "fa3", "vllm", "ours"]
    settings = [*map(str, fa3.FLAT), *(str(way) for way in flat_ways(CONTEXT_CASES["b1t131072"]))]
    assert sum(wanted(Provider("x", setting, fails)) for setting in settings) == 4
    assert sum(wanted(Provider("x", str(setting), fails)) for setting in vllm_fa3.FLAT) == 2
    assert wanted(Provider(OURS, "whatever", fails))
    others = [*sdpa(load_of("decode")), *flex.providers(load_of("decode"))]
    assert {each.setting for each in others if wanted(each)} == set(CONTIGUOUS)


@pytest.mark.parametrize(
    ("arguments", "want"),
    [
        (["--help"], "--providers"),
        (["--cases", "d1,x9"], "cases: expected"),
        (["--sweep", "context", "--cases", "d1"], "cases: expected"),
        (["--providers", "fa4"], "providers: expected"),
    ],
)
def test_the_command(arguments, want):
    made = subprocess.run([sys.executable, "-m", "benchmarks.peers", *arguments], capture_output=True, text=True, cwd=ROOT)
    assert want in made.stdout + made.stderr and made.returncode == (0 if arguments == ["--help"] else 2)
