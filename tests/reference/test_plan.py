"""Plans as data: every key of every row covered exactly once, states numbered in order, whatever the tree."""

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cascade_fd as cf
from cascade_fd import Hardware, Level, PageTable, PrefixTree
from cascade_fd.costs import ON_CPU, Costs, TileCost
from cascade_fd.hardware import PRESETS
from cascade_fd.planning import planner
from cascade_fd.planning.choice import Choice
from cascade_fd.planning.payoff import foldable
from cascade_fd.testing import inputs, numerics, oracle
from cascade_fd.tiles import tile_rows

# Costs under which whatever can be folded is, and under which nodes of few tokens are (of the model that ``make`` plans for).
DEAR = Costs(0.0, 1e6, 0.0, 1e6, (TileCost(64, 1, 0.01, 0.0, 1.0, 1.0),))
STATES = Costs(0.0, 0.0, 0.0, 50.0, (TileCost(64, 1, 0.01, 0.0, 1.0, 1.0),))
HARDWARE = [
    PRESETS["cpu"],
    PRESETS["sm_90"],
    Hardware("every state is dear", "sm_90", 7, 232_448, 1e12, costs=DEAR),
    Hardware("states are dear", "sm_80", 7, 166_912, 1e12, costs=STATES),
]
POLICIES = ["wave", "balanced", "fixed", "stream_k", 1, 5]
SHARE = ["auto", "always", "never"]


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


def build(case, table=None):
    ptrs, lens, q_lens = case
    return PrefixTree.from_levels([Level(p, n) for p, n in zip(ptrs, lens, strict=True)], q_lens=q_lens, table=table)


def make(tree, group, split, growth, hw, share="auto"):
    return cf.plan(
        tree, num_q_heads=group, num_kv_heads=1, head_dim=16, dtype=torch.float32, device="cpu", split=split,
        max_new_tokens=growth, hardware=hw, share=share,
    )  # fmt: skip


def chains(case):
    """Per request its nodes from the root down, as (level, index in the level)."""
    ptrs, _, q_lens = case
    return [[(i, int(np.searchsorted(p, b, side="right")) - 1) for i, p in enumerate(ptrs)] for b in range(len(q_lens))]


@settings(max_examples=150, deadline=None)
@given(
    trees(),
    st.sampled_from([1, 3, 4]),
    st.sampled_from(POLICIES),
    st.integers(0, 40),
    st.sampled_from(HARDWARE),
    st.sampled_from(SHARE),
)
def test_every_key_of_every_row_is_covered_once(case, group, split, growth, hw, share):
    """Rows of their own for every node, so nothing can be folded: decode the arrays with the loop of ``Launch`` and count."""
    ptrs, lens, _ = case
    tree = build(case)
    if share == "never" and shares_tokens(case):
        with pytest.raises(ValueError, match="share: expected a tree whose shared tokens are also in the table rows of those"):
            make(tree, group, split, growth, hw, share)
        return
    made = make(tree, group, split, growth, hw, share)
    assert share == "never" or not made.choice.folded.any()
    seen = np.zeros((len(ptrs), made.num_rows, group, 200), int)
    where = {number: at for at, number in numbers(made).items()}  # number in ``lens`` -> (level, index in the level)
    for launch in made.launches:
        for row0, num_rows, table_row, start, stop, node, *_ in checked_items(made, launch):
            level, own = where[node]
            assert (level,) == launch.levels
            assert table_row == own
            for r in range(row0, row0 + num_rows):
                token, head = divmod(r, group)
                assert (level, own) in chains(case)[request_of_rows(made)[token]]
                seen[level, token, head, start:stop] += 1
    for token, b in enumerate(request_of_rows(made)):
        for level, index in chains(case)[b]:
            capacity = lens[level][index] + (growth if level == len(ptrs) - 1 else 0)
            assert (seen[level, token, :, :capacity] == 1).all()
            assert (seen[level, token, :, capacity:] == 0).all()
    check_slots(made, group)


def shares_tokens(case):
    """Whether a row reads a token of a node that is not private."""
    _, lens, q_lens = case
    return any(lens[i][n] for chain, q in zip(chains(case), q_lens, strict=True) if q for i, n in chain[:-1])


def numbers(made):
    """(level, index in the level) of every node -> where its length is in ``lens``: private nodes first."""
    level, B, shared = made.tree.nodes.level, made.tree.num_requests, made.tree.num_shared
    index = [int(np.count_nonzero(level[:i] == level[i])) for i in range(len(level))]
    return {(int(x), n): B + i if i < shared else i - shared for i, (x, n) in enumerate(zip(level, index, strict=True))}


def request_of_rows(made):
    """Request of every row in tree order, from the tree alone."""
    tree = made.tree
    order = np.arange(tree.num_requests) if tree.order is None else tree.order
    return np.repeat(order, tree.q_lens).tolist()


def checked_items(made, launch):
    """Items as lists, after what holds for each by itself."""
    assert launch.count == len(launch.items)
    B, ends = made.num_private, dict(enumerate(np.cumsum(made.tree.q_lens).tolist()))
    position = {b: p for p, b in enumerate(range(B) if made.tree.order is None else made.tree.order.tolist())}
    for item in launch.items.tolist():
        _, num_rows, _, start, stop, node, q_end, _ = item
        assert 0 < num_rows <= launch.tile.block_m
        assert start < stop
        assert stop - start <= launch.max_tokens
        assert q_end == (ends[position[node]] if node < B else 0)  # only private keys are causal
        assert node < B or stop <= made.lens[node]
    return launch.items.tolist()


def check_slots(made, group):
    """Every workspace slot has one writer per head; a row is either direct, or merged, and never both."""
    slots = []
    for launch in made.launches:
        for row0, num_rows, *_, state in launch.items.tolist():
            for token, head in (divmod(r, group) for r in range(row0, row0 + num_rows)):
                slots.append((token, head, int(made.rows[token, 1]) + state if state >= 0 else -1))
    via = [(slot, head) for _, head, slot in slots if slot >= 0]
    assert sorted(via) == [(s, h) for s in range(made.num_slots) for h in range(group)]
    assert made.slots_used == made.num_slots
    direct = {int(made.rows[token, 0]) for token, _, slot in slots if slot < 0}
    merged = set(made.merge.rows.tolist())
    assert direct | merged == set(range(made.num_rows))
    assert not direct & merged
    assert made.merge.indptr[-1] == made.num_slots


def check_cover(made, content, capacity, group):
    """Over one request table: every row sees each token of its request once, wherever the item finds it.

    ``content [B, tokens]`` names what is at a position of a table row, ``capacity [B]`` says how many are a request's.
    """
    request = request_of_rows(made)
    seen = np.zeros((made.num_rows, group, content.shape[1]), int)
    for launch in made.launches:
        for row0, num_rows, table_row, start, stop, *_ in checked_items(made, launch):
            for r in range(row0, row0 + num_rows):
                token, head = divmod(r, group)
                assert (content[table_row, start:stop] == content[request[token], start:stop]).all()
                seen[token, head, start:stop] += 1
    for token, b in enumerate(request):
        assert (seen[token, :, : capacity[b]] == 1).all()
        assert (seen[token, :, capacity[b] :] == 0).all()
    check_slots(made, group)


def fold_any(bits):
    """Instead of the cost model: fold those nodes that can be and whose bit is set."""

    def choose(tree, work, frame):
        can = foldable(tree)
        folded = np.zeros(len(tree.nodes), bool)
        folded[: len(can)] = can & (bits >> np.arange(len(can)) & 1 > 0)
        return Choice(folded, tile_rows(frame.hardware, frame.shape.dtype, frame.shape.head_dims))

    return patch.object(planner, "choose", choose)


def made_somehow(tree, group, split, growth, hw, share):
    """``share`` as the planner knows it, or bits of the nodes to fold."""
    if isinstance(share, str):
        return make(tree, group, split, growth, hw, share)
    with fold_any(share):
        return make(tree, group, split, growth, hw)


def possible(share, lens, q_lens):
    """What several rows without keys of their own share cannot be folded."""
    keyless = any(n > 1 and lens[-1][b] < n for b, n in enumerate(q_lens))
    return "auto" if share == "never" and keyless else share


some_share = st.sampled_from(SHARE) | st.integers(0, 2**18 - 1)


@settings(max_examples=300, deadline=None)
@given(
    trees(),
    st.sampled_from([1, 3, 4]),
    st.sampled_from(POLICIES),
    st.integers(0, 40),
    st.sampled_from(HARDWARE),
    some_share,
    st.sampled_from([1, 4, 16, 48]),
)
def test_every_key_is_covered_once_whatever_is_folded(case, group, split, growth, hw, share, page):
    """A table row per request: a folded node's tokens are found in the rows of its children."""
    _, lens, q_lens = case
    B = len(q_lens)
    content, capacity = np.full((B, 300), -1), np.zeros(B, int)
    for b, chain in enumerate(chains(case)):
        tokens = [lens[level][i] for level, i in chain]
        tokens[-1] += growth
        names = [10_000 * level + 1000 * i + t for (level, i), n in zip(chain, tokens, strict=True) for t in range(n)]
        capacity[b] = len(names)
        content[b, : len(names)] = names
    table = PageTable.from_block_table(np.arange(B * 300, dtype=np.int32).reshape(B, 300), page)
    made = made_somehow(build(case, table), group, split, growth, hw, possible(share, lens, q_lens))
    check_cover(made, content, capacity, group)
    check_pages(made, split, page)
    if share == "always":
        assert not made.choice.folded.any()
    if share == "never" and possible(share, lens, q_lens) == share:
        assert all(made.splits[: made.tree.num_shared] == 0)


def check_pages(made, split, page):
    """A split ends where a page does, unless that takes one more split."""
    if split in ("fixed", 1, 5):
        return
    nodes, cuts = made.nodes, made.cuts
    stop = nodes.stop + made.max_new_tokens * (np.arange(len(nodes)) >= made.tree.num_shared)
    for i in np.flatnonzero(made.splits):
        ends = nodes.start[i] + (np.arange(made.splits[i] - 1) + 1) * cuts.chunk[i] - cuts.lead[i]
        assert (ends > nodes.start[i]).all() and (ends < stop[i]).all()
        assert cuts.chunk[i] % page == 0
        if (ends % page).any():
            assert -(-(stop[i] - nodes.start[i] // page * page) // cuts.chunk[i]) > made.splits[i] or split == "stream_k"


@st.composite
def tables(draw):
    """Block tables of requests that branch off one another at random pages, and how many tokens and query rows they have."""
    page, q_len, growth = draw(st.sampled_from([1, 4, 16, 48])), draw(st.integers(1, 2)), draw(st.integers(0, 40))
    fresh = iter(range(10**6))
    rows, lens = [], []
    for _ in range(draw(st.integers(0, 6))):
        base = rows[draw(st.integers(0, len(rows) - 1))] if rows and draw(st.booleans()) else []
        row = base[: draw(st.integers(0, len(base)))] + [next(fresh) for _ in range(draw(st.integers(0, 4)))]
        rows.append(row)
        n = draw(st.integers(0, len(row) * page)) if draw(st.booleans()) else len(row) * page
        lens.append(0 if n < q_len else n)
    width = max([1, *map(len, rows)]) - (-growth // page) if rows else 1
    table = [row + [next(fresh) for _ in range(width - len(row))] for row in rows]
    return np.array(table, np.int32).reshape(len(rows), width), lens, q_len, growth, page


@settings(max_examples=150, deadline=None)
@given(tables(), st.sampled_from([1, 3, 4]), st.sampled_from(POLICIES), st.sampled_from(HARDWARE), some_share)
def test_every_key_of_a_discovered_tree_is_covered_once(batch, group, split, hw, share):
    """In terms of page ids, with requests in any order."""
    table, lens, q_len, growth, page = batch
    tree = PrefixTree.from_block_tables(table, lens, page, q_lens=q_len)
    made = made_somehow(tree, group, split, growth, hw, share)
    content = np.repeat(table, page, 1) * page + np.tile(np.arange(page), table.shape[1])
    check_cover(made, content, np.array(lens, int) + growth, group)
    check_pages(made, split, page)


def test_the_hardware_of_these_tests_folds_all_some_and_none():
    """So that the laws above are not only about what is never folded."""
    found = {hw.name: set() for hw in HARDWARE}
    for n in (8, 40, 64):
        tree = nested(n)
        for hw in HARDWARE:
            found[hw.name].add(tuple(make(tree, 4, "balanced", 0, hw).choice.folded[:3].tolist()))
    assert found["CPU"] == {(False,) * 3}
    assert found["every state is dear"] == {(True,) * 3}
    assert any(0 < sum(folded) < 3 for folded in found["states are dear"])


def nested(tokens):
    """A root of four requests, and two branches of 64 and few tokens."""
    table = PageTable.from_block_table(np.arange(4 * 40, dtype=np.int32).reshape(4, 40), 16)
    return PrefixTree.from_levels([Level([0, 4], [64]), Level([0, 2, 4], [64, tokens]), Level(range(5), [9] * 4)], table=table)


@settings(max_examples=60, deadline=None)
@given(trees(), st.sampled_from(["wave", "balanced", "stream_k", 3]), st.integers(0, 30), st.sampled_from(HARDWARE), st.data())
def test_plan_equals_flat(case, split, growth, hw, data):
    """Attention over any tree, at any live lengths within the capacity, is attention over the joined contexts."""
    ptrs, lens, q_lens = case
    made = make(build(case), 2, split, growth, hw)
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


@settings(max_examples=80, deadline=None)
@given(
    trees(),
    st.sampled_from(["wave", "balanced", "stream_k", 3]),
    st.integers(0, 30),
    st.sampled_from(HARDWARE),
    some_share,
    st.sampled_from([1, 4, 16, 48]),
    st.data(),
)
def test_plan_over_one_request_table_equals_flat(case, split, growth, hw, share, page, data):
    """The same, whatever is folded: lengths count a request's whole row, and below its private tokens it is finished."""
    _, lens, q_lens = case
    if not q_lens:
        return
    m = inputs.Model(2, 1, 16, 16)
    full = [*lens[:-1], [n + growth for n in lens[-1]]]
    parts = [inputs.contexts(m, n, seed=i) for i, n in enumerate(full)]
    whole = [tuple(torch.cat([parts[i][n][x] for i, n in chain]) for x in (0, 1)) for chain in chains(case)]
    store, table = inputs.paged(whole, page)
    tree = build(case, PageTable.from_block_table(table, page))
    made = made_somehow(tree, 2, split, growth, hw, possible(share, lens, q_lens))
    live, contexts = [], []
    for (k, v), q, n in zip(whole, q_lens, lens[-1], strict=True):
        start = len(k) - n - growth
        none = [-1] * (start > 0) + [0] * (q <= 1 or start == 0)  # finished, or without a token of its own
        own = data.draw(st.sampled_from([*none, *range(max(q, 1), n + growth + 1)]))
        live.append(start + own)
        contexts.append((k[: start + own], v[: start + own]) if own >= 0 else (k[:0], v[:0]))
    made.set_lengths(torch.tensor(live))
    q = inputs.queries(m, sum(q_lens))
    state = cf.attend(q, store, made)
    numerics.assert_state(
        state, oracle.attention(q, contexts, q_lens=q_lens), numerics.torch_attention(q, contexts, q_lens=q_lens)
    )


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


def test_rows_without_private_keys_see_all_that_is_shared():
    """Three rows of a request that has no token of its own, and three of one that has nine: the prefix cannot be folded."""
    m = inputs.Model(2, 1, 16, 16)
    prefix, *own = inputs.contexts(m, [32, 0, 9])
    contexts = inputs.join(prefix, own)
    store, table = inputs.paged(contexts, 16)
    levels = [Level([0, 2], [32]), Level([0, 1, 2], [0, 9])]
    tree = PrefixTree.from_levels(levels, q_lens=3, table=PageTable.from_block_table(table, 16))
    q = inputs.queries(m, 6)
    with pytest.raises(ValueError, match="rows without keys"):
        make(tree, 2, 1, 0, PRESETS["cpu"], "never")
    folding = replace(PRESETS["cpu"], costs=replace(ON_CPU, state=1e9))
    always = cf.attend(q, store, make(tree, 2, 1, 0, PRESETS["cpu"], "always"))
    auto = cf.attend(q, store, make(tree, 2, 1, 0, folding))
    torch.testing.assert_close(auto.lse, always.lse, rtol=1e-5, atol=1e-5)
    one_row = PrefixTree.from_levels(levels, q_lens=1, table=PageTable.from_block_table(table, 16))
    assert make(one_row, 2, 1, 0, folding, "auto").choice.folded[0]
