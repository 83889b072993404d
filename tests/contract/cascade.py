"""Shared ranges and several rows per request: cascade equals flat, trees equal flat, verify is causal."""

import pytest
import torch

import cascade_fd as cf
from cascade_fd import Level, PageTable, PrefixTree
from cascade_fd.testing import inputs


@pytest.mark.parametrize("num_splits", [None, 1, 3])
@pytest.mark.parametrize("prefix_len", [0, 1, 50, 64])
def test_cascade_equals_flat(target, prefix_len, num_splits):
    m = target.model()
    lens = [5, 0, 33, 40]
    suffixes = inputs.contexts(m, lens)
    prefix = inputs.contexts(m, [prefix_len], seed=9)[0]
    q = target.queries(m, 4)
    state = cf.cascade_decode(
        q, target.put(prefix), target.put(inputs.dense(suffixes)), suffix_lens=lens, num_splits=num_splits,
        backend=target.backend,
    )  # fmt: skip
    target.check(state, q, inputs.join(prefix, suffixes))


def test_cascade_in_one_paged_pool(target):
    """Prefix pages and suffix pages of one pool; suffixes empty for some; many rows, so several row tiles."""
    m = target.model(num_q_heads=14, num_kv_heads=2)
    lens = [17, 0, 3] * 5
    prefix, *suffixes = inputs.contexts(m, [41, *lens])
    store, table = inputs.paged([prefix, *suffixes], 8)
    q = target.queries(m, 15)
    store, table = target.put(store), target.put(table)
    state = cf.cascade_decode(
        q, store, store, prefix_table=table[0], prefix_len=41, suffix_table=table[1:], suffix_lens=lens,
        backend=target.backend,
    )  # fmt: skip
    target.check(state, q, inputs.join(prefix, suffixes))


@pytest.mark.parametrize("num_splits", [None, 1, 2])
@pytest.mark.parametrize("q_len", [1, 2, 5, 8])
def test_verify(target, q_len, num_splits):
    m = target.model(num_q_heads=6)
    lens = [q_len, q_len + 1, 32, 33, 0, 70]
    contexts = inputs.contexts(m, lens)
    store, table = inputs.paged(contexts, 4)
    q = target.queries(m, 6 * q_len)
    state = cf.verify(
        q.view(6, q_len, 6, m.head_dim), target.put(store), block_table=target.put(table), seq_lens=lens,
        num_splits=num_splits, backend=target.backend,
    )  # fmt: skip
    target.check(state, q, contexts, q_lens=q_len)


@pytest.mark.parametrize("num_splits", [None, 2])
def test_verify_over_a_shared_prefix(target, num_splits):
    m = target.model()
    lens = [4, 40, 9]
    suffixes = inputs.contexts(m, lens)
    prefix = inputs.contexts(m, [35], seed=9)[0]
    q = target.queries(m, 12)
    k, v = target.put(inputs.dense(suffixes))
    state = cf.verify(
        q.view(3, 4, 4, m.head_dim), k, v, seq_lens=lens, prefix=target.put(prefix), num_splits=num_splits,
        backend=target.backend,
    )  # fmt: skip
    target.check(state, q, inputs.join(prefix, suffixes), q_lens=4)


def test_ragged_rows_and_lengths(target):
    """Rows and lengths of every mixture in one batch; offsets of later requests must not come from earlier ones."""
    m = target.model()
    q_lens, lens = [1, 5, 2, 0, 3], [0, 150, 3, 7, 33]
    contexts = inputs.contexts(m, lens)
    store, table = inputs.paged(contexts, 8)
    pages = PageTable.from_block_table(target.put(table), 8)
    tree = PrefixTree.from_levels([Level(range(6), lens)], q_lens=q_lens, table=pages)
    q = target.queries(m, sum(q_lens))
    for split in ("wave", "balanced", "stream_k", 1, 4):
        state = cf.attend(q, target.put(store), make_plan(target, tree, m, split=split), backend=target.backend)
        target.check(state, q, contexts, q_lens=q_lens)


def make_plan(target, tree, m, **options):
    shape = {"num_q_heads": m.num_q_heads, "num_kv_heads": m.num_kv_heads, "head_dim": (m.head_dim, m.v_head_dim)}
    return cf.plan(tree, **shape | {"dtype": m.dtype, "device": target.device} | options)


def three_levels(target, m, q_len=1):
    """Root of 20 tokens, branches of 9 and 16, leaves of mixed length; 5 requests."""
    root, left, right, *leaves = inputs.contexts(m, [20, 9, 16, 3, 0, 40, 8, 1 + q_len])
    branch = [left, left, right, right, right]
    contexts = [tuple(torch.cat([root[i], b[i], leaf[i]]) for i in (0, 1)) for b, leaf in zip(branch, leaves, strict=True)]
    return [root, left, right, *leaves], contexts


def three_levels_in_one_table(target, m):
    """``three_levels`` with whole contexts in each request's pages: contexts, store and tree."""
    _, contexts = three_levels(target, m)
    levels = [Level([0, 5], [20]), Level([0, 2, 5], [9, 16]), Level(range(6), [3, 0, 40, 8, 2])]
    return contexts, *in_one_table(target, contexts, levels)


def prefix_in_one_table(target, m, prefix_len, lens, q_lens=1):
    """A prefix that all share, before ``lens`` tokens of their own, whole contexts in each request's pages: likewise."""
    prefix, *suffixes = inputs.contexts(m, [prefix_len, *lens])
    contexts = inputs.join(prefix, suffixes)
    levels = [Level([0, len(lens)], [prefix_len]), Level(range(len(lens) + 1), lens)]
    return contexts, *in_one_table(target, contexts, levels, q_lens)


def in_one_table(target, contexts, levels, q_lens=1):
    store, table = inputs.paged(contexts, 8)
    pages = PageTable.from_block_table(target.put(table), 8)
    return target.put(store), PrefixTree.from_levels(levels, q_lens=q_lens, table=pages)


@pytest.mark.parametrize("split", ["wave", 1, 3])
def test_tree_with_a_table_per_level(target, split):
    m = target.model()
    parts, contexts = three_levels(target, m)
    store, table = inputs.paged(parts, 4)
    table = target.put(table)
    rows = [table[:1], table[1:3], table[3:]]
    lens = [[20], [9, 16], [3, 0, 40, 8, 2]]
    indptrs = [[0, 5], [0, 2, 5], range(6)]
    levels = [Level(p, t, PageTable.from_block_table(r, 4)) for p, t, r in zip(indptrs, lens, rows, strict=True)]
    q = target.queries(m, 5)
    plan = make_plan(target, PrefixTree.from_levels(levels), m, split=split)
    target.check(cf.attend(q, target.put(store), plan, backend=target.backend), q, contexts)


@pytest.mark.parametrize("split", ["balanced", 3])
def test_tree_over_one_request_table(target, split):
    """Whole contexts in each request's pages; shared nodes read the first request's row, starting inside a page."""
    m = target.model()
    contexts, store, tree = three_levels_in_one_table(target, m)
    q = target.queries(m, 5)
    plan = make_plan(target, tree, m, split=split)
    target.check(cf.attend(q, store, plan, backend=target.backend), q, contexts)


def test_one_plan_serves_growing_and_shrinking_lengths(target):
    """Capacity plan: lengths live on the device; a request may finish (0) or grow to the capacity, clipped there."""
    m = target.model()
    prefix, *full = inputs.contexts(m, [30, 24, 24, 24])
    k, v = target.put(inputs.dense(full))
    stores = [cf.DenseKV(*target.put(prefix)), cf.DenseKV(k, v)]
    tree = PrefixTree.from_levels([Level([0, 3], [30]), Level(range(4), [4, 9, 1])])
    plan = make_plan(target, tree, m, split=3, max_new_tokens=15)
    q = target.queries(m, 3)
    for lens in ([4, 9, 1], [5, 10, 2], [0, 24, 16], [19, 99, 16]):
        plan.set_lengths(target.put(torch.tensor(lens)))
        live = [min(t, c) for t, c in zip(lens, (19, 24, 16), strict=True)]
        contexts = inputs.join(prefix, [(a[:t], b[:t]) for (a, b), t in zip(full, live, strict=True)])
        target.check(cf.attend(q, stores, plan, backend=target.backend), q, contexts)


def test_rows_with_one_state_skip_the_workspace(target):
    """Which path ran is visible in the plan: direct, merged and empty rows side by side, all right."""
    m = target.model()
    lens = [10, 0, 70]
    contexts = inputs.contexts(m, lens)
    store, table = inputs.paged(contexts, 1)
    tree = PrefixTree.from_levels([Level(range(4), lens)], table=PageTable.from_block_table(target.put(table), 1))
    plan = make_plan(target, tree, m, split=1)
    assert (plan.num_slots, len(plan.merge)) == (0, 1)  # the empty row is written by the merge
    assert (plan.launches[0].items[:, 7] == -1).all()
    q = target.queries(m, 3)
    target.check(cf.attend(q, target.put(store), plan, backend=target.backend), q, contexts)
    plan = make_plan(target, tree, m, split=2)
    assert (plan.num_slots, len(plan.merge)) == (4, 3)
    target.check(cf.attend(q, target.put(store), plan, backend=target.backend), q, contexts)


def test_shared_only_and_rows_without_keys(target):
    """A tree that has no private level, and one in which nobody has any key."""
    m = target.model()
    prefix = inputs.contexts(m, [37])[0]
    q = target.queries(m, 3)
    store = cf.DenseKV(*target.put(prefix))
    plan = make_plan(target, PrefixTree.from_levels([Level([0, 3], [37])]), m)
    target.check(cf.attend(q, store, plan, backend=target.backend), q, [prefix] * 3)
    plan = make_plan(target, PrefixTree.from_levels([Level([0, 3], [0])]), m)
    state = cf.attend(q, store, plan, backend=target.backend)
    assert (state.o == 0).all()
    assert (state.lse == -torch.inf).all()


@pytest.mark.parametrize("split", [1, 3])
def test_a_finished_request_is_empty_whatever_it_shared(target, split):
    """Lengths from the request's start: 0 is below the private node, so the shared tokens do not count either."""
    m = target.model()
    contexts, store, tree = prefix_in_one_table(target, m, 32, [5, 20, 9])
    plan = make_plan(target, tree, m, split=split)
    q = target.queries(m, 3)
    lens = [37, 0, 41]
    plan.set_lengths(target.put(torch.tensor(lens)))
    state = cf.attend(q, store, plan, backend=target.backend)
    empty = tuple(x[:0] for x in contexts[1])
    target.check(state, q, [contexts[0], empty, contexts[2]])
    assert (state.lse[1] == -torch.inf).all()


@pytest.mark.parametrize("split", ["wave", 2])
@pytest.mark.parametrize("q_len", [1, 2])
def test_a_discovered_tree_in_any_order(target, q_len, split):
    """Two groups and two loners, mixed up: rows of q and of the output stay in request order."""
    m = target.model()
    heads = inputs.contexts(m, [24, 16], seed=5)
    tails = inputs.contexts(m, [5, 9, 30, 2, 17, 8])
    group = [0, None, 1, 0, 1, 0]
    store, table = inputs.paged([*heads, *tails], 8)
    rows = torch.full((6, 8), -1, dtype=torch.int32)
    contexts = []
    for b, (g, tail) in enumerate(zip(group, tails, strict=True)):
        own = table[2 + b, : -(-len(tail[0]) // 8)]
        pages = own if g is None else torch.cat([table[g, : len(heads[g][0]) // 8], own])
        rows[b, : len(pages)] = pages
        contexts.append(tail if g is None else tuple(torch.cat([heads[g][i], tail[i]]) for i in (0, 1)))
    lens = [len(k) for k, _ in contexts]
    on_device = PageTable.from_block_table(target.put(rows), 8)
    tree = PrefixTree.from_block_tables(rows, lens, 8, q_lens=q_len, table=on_device)
    assert tree.num_shared == 2
    assert tree.order is not None
    plan = make_plan(target, tree, m, split=split, max_new_tokens=3)
    q = target.queries(m, 6 * q_len)
    target.check(cf.attend(q, target.put(store), plan, backend=target.backend), q, contexts, q_lens=q_len)
    finished = [0 if b == 3 else n for b, n in enumerate(lens)]
    plan.set_lengths(target.put(torch.tensor(finished)))
    contexts[3] = tuple(x[:0] for x in contexts[3])
    target.check(cf.attend(q, target.put(store), plan, backend=target.backend), q, contexts, q_lens=q_len)


@pytest.mark.parametrize("dims", [(40, 24), (72, 72), (80, 80), (96, 96), (112, 112)])
def test_head_dims_in_wide_tiles(target, dims):
    """Many rows over one prefix: the tiles of 64 rows and more, on dims that fill them and on dims that do not."""
    m = target.model(num_q_heads=6, head_dim=dims[0], v_head_dim=dims[1])
    lens = [3] * 20
    prefix, *suffixes = inputs.contexts(m, [150, *lens])
    q = target.queries(m, 20)
    state = cf.cascade_decode(
        q, target.put(prefix), target.put(inputs.dense(suffixes)), num_splits=2, backend=target.backend
    )  # fmt: skip
    target.check(state, q, inputs.join(prefix, suffixes))
