"""The benchmark of other libraries, as far as a CPU can tell: what they are asked for, checks, their files, the table."""

import csv
import io
import json
import math
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

pytest.importorskip("rich")
from rich.console import Console

from benchmarks.peers import fa3, race
from benchmarks.peers.__main__ import run, show
from benchmarks.peers.flashinfer_file import flashinfer_rows
from benchmarks.peers.provider import Provider, SkipError, sdpa
from cascade_fd.bench.cases import CASES, READ_RATE, Case
from cascade_fd.bench.measure import MAX_ERROR, Row, measure, medians_us, row_of
from cascade_fd.bench.workload import build

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
HEADS = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16, "page_size": 4}
SMALL = {
    "decode": Case("decode", ((3, 21),), **HEADS),
    "one request": Case("one request", ((1, 40),), **HEADS | {"num_kv_heads": 1}),
    "verify": Case("verify", ((3, 21),), q_len=4, **HEADS),
    "skewed": Case("skewed", ((5, 50),), lens=(50, 1, 4, 7, 32), **HEADS),
    "cascade": Case("cascade", ((1, 32), (6, 9)), **HEADS),
    "cascade of 2 groups": Case("cascade of 2 groups", ((2, 16), (6, 9)), **HEADS),
    "tree": Case("tree", ((1, 8), (2, 12), (4, 4), (12, 7)), **HEADS),
    "speculative": Case("speculative", ((1, 16), (3, 9)), q_len=4, **HEADS),
    "speculative tree": Case("speculative tree", ((1, 8), (2, 16), (4, 9)), q_len=2, **HEADS),
    "skewed cascade": Case("skewed cascade", ((1, 16), (4, 20)), q_len=2, lens=(20, 2, 5, 8), **HEADS),
}
SETTINGS = {str(setting): setting for setting in fa3.FLAT + fa3.LEVELS}


class Fake(ModuleType):
    """FlashAttention-3's flash_attn_interface in plain torch, as far as its docstring says what it does."""

    def __init__(self):
        super().__init__("flash_attn_interface")
        self.calls = []

    def get_scheduler_metadata(
        self, batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens,
        qkv_dtype=torch.bfloat16, cu_seqlens_q=None, page_size=None, causal=False, num_splits=0, pack_gqa=None,
    ):  # fmt: skip
        assert cache_seqlens.shape == (batch_size,) and cache_seqlens.dtype == torch.int32
        shape = (batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim)
        return *shape, qkv_dtype, cu_seqlens_q is not None, page_size, causal, num_splits, pack_gqa

    def flash_attn_with_kvcache(
        self, q, k_cache, v_cache, cache_seqlens=None, page_table=None, cu_seqlens_q=None, max_seqlen_q=None,
        causal=False, scheduler_metadata=None, num_splits=0, pack_gqa=None, return_softmax_lse=False,
    ):  # fmt: skip
        B, pages = page_table.shape
        assert page_table.dtype == cache_seqlens.dtype == torch.int32 and page_table.is_contiguous()
        assert cache_seqlens.shape == (B,) and (cu_seqlens_q is None) == (max_seqlen_q is None)
        packed = cu_seqlens_q is not None
        if packed:
            assert cu_seqlens_q.dtype == torch.int32 and set(cu_seqlens_q.diff().tolist()) == {max_seqlen_q}
            q = q.unflatten(0, (B, max_seqlen_q))
        _, Q, Hq, D = q.shape
        _, page, Hkv, _ = k_cache.shape
        if scheduler_metadata is not None:
            want = (B, Q, pages * page, Hq, Hkv, D, q.dtype, packed, page, causal, num_splits, pack_gqa)
            assert scheduler_metadata == want
        self.calls.append({"tokens": int(cache_seqlens.sum()), "rows": B * Q, "causal": causal, "packed": packed})
        o, lse = torch.empty_like(q), q.new_empty(B, Hq, Q, dtype=torch.float32)
        for b in range(B):
            T = int(cache_seqlens[b])
            k, v = (x[page_table[b].long()].flatten(0, 1)[:T].repeat_interleave(Hq // Hkv, 1) for x in (k_cache, v_cache))
            scores = torch.einsum("qhd,thd->hqt", q[b], k) / math.sqrt(D)
            if causal:
                keep = torch.arange(T) <= T - Q + torch.arange(Q)[:, None]
                scores = scores.masked_fill(~keep, -math.inf)
            o[b], lse[b] = torch.einsum("hqt,thd->qhd", scores.softmax(-1), v), scores.logsumexp(-1)
        if packed:
            o, lse = o.flatten(0, 1), lse.transpose(0, 1).flatten(1, 2)  # [Hq, total_q]
        return (o, lse, None, None) if return_softmax_lse else o


@pytest.fixture
def fake(monkeypatch):
    module = Fake()
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    return module


def load_of(name):
    return build(SMALL[name], CPU, torch.float32)


def every_row(load):
    return torch.cat([load._attend(b) for b in range(load.case.requests)])


@pytest.mark.parametrize("name", SMALL)
def test_our_plan_and_the_check_agree(name):
    load = load_of(name)
    assert load.error() < 1e-6
    assert load.error_of(load.out.o + 0.01) > 1e-3
    assert load.error_of(torch.full_like(load.q, torch.nan)) == math.inf
    torch.testing.assert_close(load.run().o, every_row(load), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("setting", [name for name, s in SETTINGS.items() if not s.streams])
def test_flash_attention_3_computes_the_same(name, setting, fake):
    load, setting = load_of(name), SETTINGS[setting]
    call = fa3.prepare(setting, load)
    for _ in range(2):  # a second call starts from the same state
        torch.testing.assert_close(call(), every_row(load), rtol=1e-5, atol=1e-5)
    case, calls = load.case, fake.calls[: len(fake.calls) // 2]
    assert all(made["rows"] == case.rows for made in calls)
    if setting.by_level:
        assert [made["tokens"] for made in calls] == [int(lens.sum()) for lens in case.node_lens]
        assert [made["causal"] for made in calls] == [False] * (len(calls) - 1) + [case.q_len > 1]
    else:
        assert calls == [{"tokens": int(case.seq_lens.sum()), "rows": case.rows, "causal": case.q_len > 1, "packed": False}]


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("cascade", [False, False]),
        ("speculative", [False, True]),
        ("tree", [False, True, True, False]),
        ("cascade of 2 groups", [True, False]),
    ],
)
def test_no_lse_is_copied_to_be_merged(name, want, fake, monkeypatch):
    load, seen = load_of(name), []
    importer = fa3.from_flash_attention_3

    def spy(o, lse):
        state = importer(o, lse)
        seen.append(state.lse.data_ptr() == lse.data_ptr() and state.o.data_ptr() == o.data_ptr())
        return state

    monkeypatch.setattr(fa3, "from_flash_attention_3", spy)
    fa3.prepare(fa3.Setting(by_level=True), load)()
    assert [made["packed"] for made in fake.calls] == want
    assert seen == [True] * len(want)


class Stream:
    log: tuple = ()

    def __init__(self, name=None):
        self.name = name or f"side {len(Stream.made)}"
        Stream.made.append(self)

    def wait_stream(self, other):
        Stream.log.append((self.name, other.name))


def test_levels_on_streams_fork_and_join(fake, monkeypatch):
    Stream.made, Stream.log = [], []
    main = Stream("main")
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    load = load_of("tree")
    call = fa3.prepare(fa3.Setting(by_level=True, streams=True), load)
    torch.testing.assert_close(call(), every_row(load), rtol=1e-5, atol=1e-5)
    sides = ["side 1", "side 2", "side 3"]
    assert Stream.log == [(side, "main") for side in sides] + [("main", side) for side in sides]


def test_settings_have_names_of_their_own_and_fill_the_device(fake, monkeypatch):
    for settings in (fa3.FLAT, fa3.LEVELS):
        assert len({str(setting) for setting in settings}) == len(settings)
    assert str(fa3.LEVELS[4]) == "per level + merge, num_splits=auto, schedule ahead, streams"
    h200 = type("Device", (), {"num_sms": 132})
    monkeypatch.setattr(fa3, "hardware_of", lambda device: h200)
    d1, _ = load_of("one request"), fa3.Setting(num_splits=None)
    assert [fa3._splits(fa3.Setting(num_splits=None, fill=n), d1, fa3.whole(d1)) for n in (1, 2)] == [128, 128]
    tree = load_of("tree")
    assert [fa3._splits(fa3.Setting(num_splits=None), tree, part) for part in fa3.levels(tree)] == [66, 33, 16, 5]


def test_sdpa_is_for_flat_decode(monkeypatch):
    load = load_of("decode")
    flash, cudnn = sdpa(load)
    assert (flash.setting, cudnn.setting) == ("flash, contiguous KV", "cudnn, contiguous KV")
    load = build(Case("whole pages", ((3, 24),), **HEADS), CPU, torch.float32)
    torch.testing.assert_close(flash.prepare(load)(), every_row(load), rtol=1e-5, atol=1e-5)
    for name in ("verify", "skewed", "cascade"):
        with pytest.raises(SkipError, match="only for one row per request, one length and nothing shared"):
            sdpa(load_of(name))


def test_what_is_wrong_or_fails_is_told_and_not_timed(monkeypatch):
    load, told = load_of("cascade"), []

    def fails(load):
        raise RuntimeError("no\nsuch kernel")

    offers = [
        Provider("good", "", lambda load: lambda: load.run().o),
        Provider("off", "by 1 %", lambda load: lambda: load.run().o * 1.01),
        Provider("lazy", "leaves its memory as it was", lambda load: lambda: torch.empty_like(load.q)),
        Provider("bad", "raises", fails),
        Provider("late", "raises", lambda load: lambda: fails(load)),
    ]
    monkeypatch.setitem(race.PROVIDERS, "several", lambda load: offers)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    rows = race.race(load.case, ["several", "fa3", "sdpa"], CPU, dict.fromkeys(WHERE, ""), told.append)
    assert [row.provider for row in rows] == ["good"] and rows[0].us > 0 and rows[0].err < 1e-6
    assert told[0].startswith("cascade, fa3: flash_attn_interface cannot be imported (")
    assert told[1] == "cascade, sdpa: only for one row per request, one length and nothing shared"
    assert told[2] == "cascade, off, by 1 %: relative error 1.00e-02 exceeds 5e-03; not timed"
    assert "exceeds" in told[3] and told[3].startswith("cascade, lazy")
    assert told[4:] == [f"cascade, {name}, raises: RuntimeError: no such kernel" for name in ("bad", "late")]


WHERE = ("gpu", "driver", "torch", "triton", "commit", "date")
RESULTS = [
    {"info": {"flashinfer": "0.6", "gpu": "NVIDIA H200", "driver": "580.1, 1980 MHz, 3201 MHz", "torch": "2.11"}},
    {"ceilings": {"read_gbps": 4600.0}},
    {"workload": "d1", "setting": "flat_a", "kind": "full", "us": 140.0, "err": 2e-3},
    {"workload": "d1", "setting": "flat_b", "kind": "full", "us": 120.0, "err": 2e-3},
    {"workload": "d1", "setting": "flat_b", "kind": "full", "us": 131.0, "err": 3e-3},  # measured again
    {"workload": "d1", "setting": "flat_c", "kind": "full", "us": 90.0, "err": 0.3},
    {"workload": "d1", "setting": "flat_d", "kind": "full", "error": "no"},
    {"workload": "d1", "setting": "flat_e", "error": "no"},
    {"workload": "c1", "setting": "mlc_auto", "kind": "full", "us": 150.0, "err": 2e-3},
    {"workload": "c1", "setting": "mlc_fa2", "kind": "full", "us": 41.0, "err": 2e-3},
    {"workload": "c1", "setting": "man_best_streams", "kind": "full", "us": 35.0, "err": 2e-3, "note": "x"},
    {"workload": "c1", "setting": "L0_fa3", "kind": "level", "us": 10.0, "err": None},
    {"workload": "c2", "setting": "mlc_auto", "kind": "full", "us": 60.0, "err": 2e-3},
    {"wl_done": "c1", "seconds": 3},
]


@pytest.fixture
def results(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in RESULTS))
    return path


def test_flashinfers_file(results):
    rows = flashinfer_rows(results, [CASES[name] for name in ("d1", "c1", "c2", "c3")])
    want = [("d1", "flat_b", 131.0), ("c1", "mlc_auto", 150.0), ("c1", "man_best_streams", 35.0), ("c2", "mlc_auto", 60.0)]
    assert [(row.case, row.setting, row.us) for row in rows] == want
    first = rows[0]
    assert (first.provider, first.gpu, first.driver, first.torch) == ("flashinfer 0.6", "NVIDIA H200", "580.1", "2.11")
    assert first.err == 3e-3 and first.over_floor == pytest.approx(131 / CASES["d1"].floor_us)
    assert first.gbs == pytest.approx(CASES["d1"].kv_bytes / 131 / 1e3)
    results.write_text(results.read_text() + '{"workload": "d1", "set')
    with pytest.raises(ValueError, match="line 15: expected a JSON object, got '"):
        flashinfer_rows(results, [])


def test_a_run_writes_all_rows_and_a_table(results, tmp_path, fake, capsys):
    out = tmp_path / "rows.csv"
    names = ["decode", "speculative tree"]
    rows = run([SMALL[name] for name in names], ["fa3", "sdpa", "ours"], tmp_path / "missing.jsonl", out)
    told = capsys.readouterr()
    assert "flashinfer: FileNotFoundError" in told.err and "2 cases in" in told.err
    assert "speculative tree, sdpa: only for one row per request, one length and nothing shared" in told.err
    with out.open() as file:
        read = list(csv.DictReader(file))
    assert list(read[0]) == list(Row.__dataclass_fields__) and len(read) == len(rows)
    providers = {name: {row["provider"] for row in read if row["case"] == name} for name in names}
    assert {"cascade_fd", "flash-attn 3"} <= providers["decode"] and providers[names[1]] == {"cascade_fd", "flash-attn 3"}
    ours = next(row for row in read if row["provider"] == "cascade_fd")
    assert ours["setting"] == measure(SMALL["decode"], CPU).setting
    assert all(float(row["us"]) > 0 and float(row["err"]) < MAX_ERROR for row in read)
    assert "ours / best peer" in told.out and "speculative tree" in told.out


def test_the_table_compares_with_the_best_of_each_library(results):
    cases = [CASES[name] for name in ("d1", "c1", "c3")]
    made = [("d1", "cascade_fd", 125.0), ("d1", fa3.NAME, 136.0), ("d1", fa3.NAME, 133.0), ("d1", "torch sdpa", 127.0)]
    rows = [row_of(CASES[name], provider, "", us, 1e-3, dict.fromkeys(WHERE, "")) for name, provider, us in made]
    rows += flashinfer_rows(results, cases)
    rows.append(race._ceiling("sum", 1000.0, 2**32, 2**32 / READ_RATE, dict.fromkeys(WHERE, "")))
    text = io.StringIO()
    show(cases, rows, Console(file=text, width=110))
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in text.getvalue().splitlines() if "│" in line]
    assert cells == [
        ["d1", "116.7", "125.0", "131.0", "133.0", "127.0", "0.984"],
        ["c1", f"{CASES['c1'].floor_us:.1f}", "", "35.0", "", "", ""],
        ["c3", f"{CASES['c3'].floor_us:.1f}", "", "", "", "", ""],
    ]
    assert "sum: 1000 us, 4295 GB/s, 1.07 of what floors assume" in text.getvalue()


def test_timers_take_turns():
    asked, figures = [], {"a": iter([90, 80, 3, 1, 2]), "b": iter([9, 9, 5, 5, 7])}
    timers = [lambda name=name: (asked.append(name), float(next(figures[name])))[1] for name in "ab"]
    assert medians_us(timers, 3) == [2.0, 5.0] and asked == ["a", "b"] * 5  # two rounds warm up
    assert medians_us([], 3) == []


def test_ceilings():
    *sums, product = race.ceilings(CPU, dict.fromkeys(WHERE, ""), gib=2**-10, side=64)
    assert [row.setting for row in sums] == ["sum of 0.000976562 GiB bfloat16", "sum of 0.000976562 GiB float32"]
    assert product.setting.startswith("64^3 bf16 matmul, ") and {row.case for row in (*sums, product)} == {"ceiling"}
    assert all(row.gbs == pytest.approx(2**20 / row.us / 1e3) for row in sums)


def test_the_skewed_case():
    case = CASES["d5"]
    lens = np.random.default_rng(0).integers(128, 8192, 128, endpoint=True)
    lens[0] = 131072
    assert case.lens == tuple(lens) and case.levels == ((128, 131072),)
    assert case.kv_bytes == lens.sum() * 8 * 128 * 2 * 2 and case.flops == 4 * 32 * 128 * lens.sum()
    assert case.floor_us == pytest.approx(case.kv_bytes / READ_RATE * 1e6) and 590 < case.floor_us < 600
    assert case.seq_lens.tolist() == lens.tolist()


def test_counts_of_cases_by_their_levels():
    case = SMALL["skewed cascade"]
    assert case.seq_lens.tolist() == [36, 18, 21, 24]
    assert case.kv_bytes == (16 + 35) * 2 * 16 * 4 and case.flops == 4 * 2 * 4 * 16 * 99
    t1 = CASES["t1"]
    assert t1.kv_bytes == (4096 + 8 * 2048 + 64 * 512) * 4096 and t1.flops == 4 * 64 * 32 * 128 * (4096 + 2048 + 512)


def test_a_table_of_unequal_lengths_names_each_page_once():
    load = load_of("skewed")
    pages = [-(-length // 4) for length in load.case.lens]
    used = torch.cat([row[:n] for row, n in zip(load.table, pages, strict=True)])
    assert sorted(used.tolist()) == list(range(sum(pages))) == list(range(load.kv.num_rows))
    assert all((row[n:] == 0).all() for row, n in zip(load.table, pages, strict=True))


@pytest.mark.parametrize(
    ("arguments", "want"),
    [
        (["--help"], "--providers"),
        (["--cases", "d1,x9"], "cases: expected"),
        (["--providers", "fa4"], "providers: expected"),
    ],
)
def test_the_command(arguments, want):
    made = subprocess.run([sys.executable, "-m", "benchmarks.peers", *arguments], capture_output=True, text=True, cwd=ROOT)
    assert want in made.stdout + made.stderr and made.returncode == (0 if arguments == ["--help"] else 2)
