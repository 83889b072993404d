"""The benchmark cases: the traffic model by hand, and input sets that share their plan."""

import numpy as np
import pytest
import torch

from cascade_fd.bench.cases import CASES, CONTEXT_BYTES, CONTEXT_CASES, MATMUL_RATE, READ_RATE
from cascade_fd.bench.measure import input_sets
from cascade_fd.bench.workload import build, build_sets
from tests.reference.peer_cases import CPU, SMALL, every_row, load_of

TOKEN = 8 * 128 * 2 * 2  # bytes of keys and values of a token with 8 heads
PAIR = 4 * 32 * 128  # FLOPs of a query row, 32 heads, and a key


# Tokens that must be read, pairs of a row and a key that it reads, and the floor in microseconds: all worked out by hand.
@pytest.mark.parametrize(
    ("name", "tokens", "pairs", "floor"),
    [
        ("d1", 131_072, 131_072, 116.71),
        ("d2", 131_072, 131_072, 116.71),
        ("d3", 131_072, 131_072, 116.71),
        ("d4", 262_144, 262_144, 233.42),
        ("d6", 262_144, 262_144, 233.42),
        ("v1", 131_072, 524_288, 116.71),
        ("v2", 131_072, 1_048_576, 116.71),
        ("c1", 12_288, 135_168, 10.94),
        ("c2", 24_576, 540_672, 21.88),
        ("c3", 98_304, 2_162_688, 87.53),
        ("c4", 139_264, 2_228_224, 124.00),
        ("c5", 65_536, 8_421_376, 179.19),  # products take longer from here on, where the read takes 58.35
        ("c6", 133_120, 2_228_224, 118.53),  # and not here: 47.41
        ("c7", 135_168, 1_052_672, 120.36),
        ("t1", 53_248, 425_984, 47.41),
        ("t2", 73_728, 1_736_704, 65.65),
        ("s1", 40_960, 2_228_224, 47.41),  # 36.47 to read
    ],
)
def test_traffic_by_hand(name, tokens, pairs, floor):
    case = CASES[name]
    assert case.kv_bytes == tokens * TOKEN and case.flops == pairs * PAIR
    assert case.floor_us == pytest.approx(floor, abs=0.01)


def test_traffic_with_one_kv_head():
    case = CASES["d7"]  # 131,072 tokens of 512 bytes
    assert case.kv_bytes == 67_108_864 and case.flops == 4 * 8 * 128 * 131_072
    assert case.floor_us == pytest.approx(14.589, abs=0.001)


def test_every_case_has_its_traffic_checked():
    here = test_traffic_by_hand.pytestmark[0].args[1]
    assert {name for name, *_ in here} | {"d5", "d7"} == set(CASES)
    assert (READ_RATE, MATMUL_RATE) == (4.6e12, 770e12)


def test_the_skewed_case():
    case = CASES["d5"]
    lens = np.random.default_rng(0).integers(128, 8192, 128, endpoint=True)
    lens[0] = 131072
    assert case.lens == tuple(lens) and case.levels == ((128, 131072),)
    assert case.kv_bytes == lens.sum() * TOKEN and case.flops == PAIR * lens.sum()
    assert case.floor_us == pytest.approx(case.kv_bytes / READ_RATE * 1e6) and 590 < case.floor_us < 600
    assert case.seq_lens.tolist() == lens.tolist()


def test_counts_of_cases_by_their_levels():
    case = SMALL["skewed cascade"]
    assert case.seq_lens.tolist() == [36, 18, 21, 24]
    assert case.kv_bytes == (16 + 35) * 2 * 16 * 4 and case.flops == 4 * 2 * 4 * 16 * 99


def test_cases_of_the_context_sweep():
    lengths = {B: [case.levels[0][1] for case in CONTEXT_CASES.values() if case.requests == B] for B in (1, 16, 128)}
    powers = [512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072]
    assert lengths == {1: powers, 16: powers, 128: powers[:-1]}  # 68.7 GB would be more than CONTEXT_BYTES
    assert CONTEXT_CASES["b128t65536"].kv_bytes == 2**35 < CONTEXT_BYTES and not set(CONTEXT_CASES) & set(CASES)


def test_a_table_of_unequal_lengths_names_each_page_once():
    load = load_of("skewed")
    pages = [-(-length // 4) for length in load.case.lens]
    used = torch.cat([row[:n] for row, n in zip(load.table, pages, strict=True)])
    assert sorted(used.tolist()) == list(range(sum(pages))) == list(range(load.kv.num_rows))
    assert all((row[n:] == 0).all() for row, n in zip(load.table, pages, strict=True))


def test_input_sets_share_table_and_plan_and_nothing_else():
    loads = build_sets(SMALL["speculative tree"], CPU, torch.float32, 3)
    first = loads[0]
    assert all(load.table is first.table and load.plan is first.plan and load.case is first.case for load in loads)
    for pick in (lambda x: x.q, lambda x: x.kv.k, lambda x: x.kv.v, lambda x: x.out.o, lambda x: x.out.lse):
        assert len({pick(load).data_ptr() for load in loads}) == 3
    for pick in (lambda x: x.q, lambda x: x.kv.k, lambda x: x.kv.v):
        assert not torch.equal(pick(loads[0]), pick(loads[1])) and not torch.equal(pick(loads[1]), pick(loads[2]))
    for load in loads:
        assert load.error() < 1e-6
        torch.testing.assert_close(load.out.o, every_row(load), rtol=1e-5, atol=1e-5)
    one = build(first.case, CPU, torch.float32)
    assert torch.equal(one.table, first.table) and torch.equal(one.q, first.q) and torch.equal(one.kv.k, first.kv.k)


def test_pages_are_in_random_order():
    table = load_of("one request").table[0]
    assert table.tolist() != sorted(table.tolist()) and sorted(table.tolist()) == list(range(10))


def test_a_cpu_needs_one_input_set():
    assert len(input_sets(SMALL["decode"], CPU)) == 1
