"""Plans as data: every key of every row covered exactly once, states numbered in order, whatever the tree."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cascade_fd as cf
from cascade_fd import Level, PrefixTree
from cascade_fd.hardware import PRESETS
from cascade_fd.testing import inputs, numerics, oracle

HARDWARE = [PRESETS["cpu"], PRESETS["sm_90"]]


@st.composite
def trees(draw):
    """A random tree of up to three levels with ragged lengths and rows; returns what the planner is told, and the truth."""
    B = draw(st.integers(0, 6))
    depth = draw(st.integers(1, 3))
    ptrs = [list(range(B + 1))]
    for _ in range(depth - 1):  # coarser and coarser, root last
        inner = [p for p in ptrs[-1][1:-1] if draw(st.booleans())]
        ptrs.append([0, *inner, B] if B else [0])
    ptrs.reverse()
    lens = [[draw(st.integers(0, 70)) for _ in ptr[1:]] for ptr in ptrs]
    q_lens = [draw(st.integers(0, 3)) for _ in range(B)]
    lens[-1] = [0 if n == 0 else max(n, q) for n, q in zip(lens[-1], q_lens, strict=True)]
    return ptrs, lens, q_lens


def build(case):
    ptrs, lens, q_lens = case
    return PrefixTree.from_levels([Level(p, n) for p, n in zip(ptrs, lens, strict=True)], q_lens=q_lens)


def make(tree, group, split, growth, hw):
    return cf.plan(
        tree, num_q_heads=group, num_kv_heads=1, head_dim=16, dtype=torch.float32, device="cpu", split=split,
        max_new_tokens=growth, hardware=hw,
    )  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    trees(),
    st.sampled_from([1, 3, 4]),
    st.sampled_from(["wave", "balanced", "fixed", 1, 5]),
    st.integers(0, 40),
    st.sampled_from(HARDWARE),
)
def test_every_key_of_every_row_is_covered_once(case, group, split, growth, hw):
    """Decode the arrays with the loop of ``Launch``'s docstring and count."""
    ptrs, lens, q_lens = case
    tree = build(case)
    made = make(tree, group, split, growth, hw)
    rows = made.num_rows
    request = np.repeat(np.arange(len(q_lens)), q_lens)
    width = 200
    seen = np.zeros((len(ptrs), rows, group, width), int)
    slots = []
    by_node = [(i, j) for i, n in enumerate(lens) for j in range(len(n))]  # nodes are numbered level by level
    for launch in made.launches:
        for row0, num_rows, table_row, start, stop, node, _, state in launch.items.tolist():
            assert 0 < num_rows <= launch.tile.block_m
            assert start < stop
            level, own = by_node[node]
            assert (level,) == launch.levels
            assert table_row == own
            for r in range(row0, row0 + num_rows):
                token, head = divmod(r, group)
                seen[level, token, head, start:stop] += 1
                slots.append((token, head, int(made.rows[token, 1]) + state if state >= 0 else -1))
    for level, (ptr, n) in enumerate(zip(ptrs, lens, strict=True)):
        for token in range(rows):
            node = int(np.searchsorted(ptr, request[token], side="right")) - 1
            capacity = n[node] + (growth if level == len(ptrs) - 1 else 0)
            assert (seen[level, token, :, :capacity] == 1).all()
            assert (seen[level, token, :, capacity:] == 0).all()
    check_slots(made, slots, group)


def check_slots(made, slots, group):
    """Every workspace slot has one writer per head; a row is either direct, or merged, and never both."""
    via = [(slot, head) for _, head, slot in slots if slot >= 0]
    assert sorted(via) == [(s, h) for s in range(made.num_slots) for h in range(group)]
    direct = {token for token, _, slot in slots if slot < 0}
    merged = set(made.merge.rows.tolist())
    assert direct | merged == set(range(made.num_rows))
    assert not direct & merged
    assert made.merge.indptr[-1] == made.num_slots


@settings(max_examples=60, deadline=None)
@given(trees(), st.sampled_from(["wave", "balanced", 3]), st.integers(0, 30), st.data())
def test_plan_equals_flat(case, split, growth, data):
    """Attention over any tree, at any live lengths within the capacity, is attention over the joined contexts."""
    ptrs, lens, q_lens = case
    made = make(build(case), 2, split, growth, PRESETS["cpu"])
    live = [
        data.draw(st.integers(max(q, 1), max(n + growth, q, 1)) | st.just(0)) for n, q in zip(lens[-1], q_lens, strict=True)
    ]
    live = [min(t, n + growth) for t, n in zip(live, lens[-1], strict=True)]
    live = [0 if t < q else t for t, q in zip(live, q_lens, strict=True)]
    m = inputs.Model(2, 1, 16, 16)
    full = [*lens[:-1], [n + growth for n in lens[-1]]]
    parts = [inputs.contexts(m, n, seed=i) for i, n in enumerate(full)]
    stores = [cf.DenseKV(*inputs.dense(p, max([1, *map(len, (k for k, _ in p))]))) if p else empty_store(m) for p in parts]
    if live:
        made.set_lengths(torch.tensor(live))
    contexts = []
    for b, t in enumerate(live):
        nodes = [int(np.searchsorted(p, b, side="right")) - 1 for p in ptrs]
        chain = [parts[i][node] for i, node in enumerate(nodes[:-1])] + [tuple(x[:t] for x in parts[-1][b])]
        contexts.append(tuple(torch.cat([c[i] for c in chain]) for i in (0, 1)))
    q = inputs.queries(m, sum(q_lens))
    state = cf.attend(q, stores, made)
    if contexts:
        # A padded request (no private keys) still sees what is above it, without a causal limit.
        exact, plain = (
            expected(oracle.attention, q, contexts, q_lens, live),
            expected(numerics.torch_attention, q, contexts, q_lens, live),
        )
        numerics.assert_state(state, exact, plain)


def empty_store(m):
    return cf.DenseKV(torch.zeros(0, 1, 1, m.head_dim), torch.zeros(0, 1, 1, m.v_head_dim))


def expected(attention, q, contexts, q_lens, live):
    """Row by row, so that padded requests can go without the causal limit."""
    o, lse, at = [], [], 0
    for context, n, t in zip(contexts, q_lens, live, strict=True):
        part = attention(q[at : at + n], [context], q_lens=n, causal=t > 0)
        o.append(part[0])
        lse.append(part[1])
        at += n
    return torch.cat(o), torch.cat(lse)


def test_the_example_of_the_launch_docstring():
    tree = PrefixTree.from_levels([Level([0, 1, 2], [1, 9])])
    hw = PRESETS["cpu"]
    made = cf.plan(tree, num_q_heads=4, num_kv_heads=1, head_dim=16, dtype=torch.float32, device="cpu", split=2, hardware=hw)
    items = [[4, 4, 1, 0, 5, 1, 2, 0], [4, 4, 1, 5, 9, 1, 2, 1], [0, 4, 0, 0, 1, 0, 1, -1]]
    assert made.launches[0].items.tolist() == items
    assert made.rows.tolist() == [[0, 0, 0, 0], [1, 0, 1, 0]]
    assert made.merge.rows.tolist() == [1]
    assert made.merge.indptr.tolist() == [0, 2]


def test_row_tiles_of_one_range_are_neighbours():
    """So that they run side by side and the range is read once from memory."""
    tree = PrefixTree.from_levels([Level([0, 64], [4096])], causal=False)
    made = cf.plan(tree, num_q_heads=32, num_kv_heads=8, head_dim=128, device="cpu", hardware=PRESETS["sm_90"], split=2)
    starts = made.launches[0].items[:, 3].tolist()
    assert starts == sorted(starts)
    assert made.launches[0].tile.block_m == 128
    assert made.num_items == 2 * 64 * 4 // 128


@pytest.mark.parametrize("hw", PRESETS.values(), ids=lambda hw: hw.arch)
def test_page_ids_are_not_copied(hw):
    table = torch.arange(12, dtype=torch.int32).view(2, 6)
    tree = PrefixTree.from_levels([Level([0, 1, 2], [30, 40])], table=cf.PageTable.from_block_table(table, 8))
    made = cf.plan(tree, num_q_heads=2, num_kv_heads=1, head_dim=16, device="cpu", hardware=hw)
    assert made.launches[0].ids.data_ptr() == table.data_ptr()
