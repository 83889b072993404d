"""Trees found from page ids: equal to flat attention whatever is shared, and bad tables refused."""

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cascade_fd as cf
from cascade_fd import PageTable, PrefixIndex, PrefixTree
from cascade_fd.testing import inputs, numerics, oracle
from tests.reference.test_plan import HARDWARE

MODEL = inputs.Model(4, 2, 16, 16)
PAGE = 4


@st.composite
def batches(draw):
    """Requests that branch off one another at random pages; lengths end inside pages; some are padded or identical."""
    fresh = iter(range(1, 10_000))
    rows, lens = [], []
    for _ in range(draw(st.integers(0, 7))):
        base = rows[draw(st.integers(0, len(rows) - 1))] if rows and draw(st.booleans()) else []
        row = base[: draw(st.integers(0, len(base)))] + [next(fresh) for _ in range(draw(st.integers(0, 4)))]
        rows.append(row)
        lens.append(draw(st.integers(0, len(row) * PAGE)) if draw(st.booleans()) else len(row) * PAGE)
    return rows, lens


def build_batch(rows, q_len):
    """A pool with a key in every slot, and the table, padded with an id that must not be read."""
    used = max([0, *(i for row in rows for i in row)])
    g = inputs.generator(0)
    pool = [torch.randn(used + 1, PAGE, 2, 16, generator=g) for _ in range(2)]
    width = max([1, *map(len, rows)])
    table = np.full((len(rows), width), -1, np.int32)
    for r, row in enumerate(rows):
        table[r, : len(row)] = row
    q = inputs.queries(MODEL, len(rows) * q_len)
    return cf.PagedKV(*pool), table, q


def contexts(kv, table, lens):
    out = []
    for row, n in zip(table, lens, strict=True):
        ids = row[: -(-n // PAGE)].astype(np.int64)
        out.append(tuple(x[ids].flatten(0, 1)[:n] for x in (kv.k, kv.v)))
    return out


@settings(max_examples=150, deadline=None)
@given(
    batches(),
    st.integers(1, 2),
    st.sampled_from(["wave", "balanced", "stream_k", 1, 3]),
    st.sampled_from(["block_table", "csr"]),
    st.sampled_from(HARDWARE),
    st.sampled_from(["auto", "always", "never"]),
)
def test_attention_over_a_discovered_tree_is_flat_attention(batch, q_len, split, form, hw, share):
    rows, lens = batch
    lens = [0 if n < q_len else n for n in lens]
    kv, table, q = build_batch(rows, q_len)
    if form == "block_table":
        tree = PrefixTree.from_block_tables(table, lens, PAGE, q_lens=q_len)
    else:
        ptr = np.concatenate(([0], np.cumsum([len(r) for r in rows]))).astype(np.int64)
        tree = PrefixTree.from_csr(np.array([i for r in rows for i in r], np.int64), ptr, lens, PAGE, q_lens=q_len)
    plan = cf.plan(
        tree, num_q_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32, device="cpu", split=split, hardware=hw,
        share=share,
    )  # fmt: skip
    state = cf.attend(q, kv, plan)
    if rows:
        full = contexts(kv, table, lens)
        numerics.assert_state(state, oracle.attention(q, full, q_lens=q_len), numerics.torch_attention(q, full, q_lens=q_len))


def test_what_is_shared_is_read_once():
    """Groups of 58, 5 and 1 in mixed order: one shared node a group, and the tokens of all nodes are the unique ones."""
    rng = np.random.default_rng(0)
    group = rng.permutation(np.repeat([0, 1, 2], [58, 5, 1]))
    table = np.stack([np.r_[100 * g : 100 * g + 10, 1000 + 4 * b : 1000 + 4 * b + 4] for b, g in enumerate(group)])
    tree = PrefixTree.from_block_tables(table.astype(np.int32), np.full(64, 14 * PAGE), PAGE)
    assert tree.num_shared == 2
    assert sorted((tree.nodes.last - tree.nodes.first)[:2]) == [5, 58]
    assert (tree.nodes.stop - tree.nodes.start).sum() == PAGE * len(np.unique(table))
    assert tree.order is not None
    assert sorted(tree.order) == list(range(64))


def test_the_page_of_the_query_rows_is_never_shared():
    for lens, shared in (([9, 9], 8), ([8, 8], 4), ([8, 12], 4)):  # pages of 4: of 8 keys the last page holds the query row
        tree = PrefixTree.from_block_tables([[1, 2, 3], [1, 2, 3]], lens, 4)
        assert tree.nodes.stop[0] == shared
    assert PrefixTree.from_block_tables([[1, 2, 3], [1, 2, 3]], [9, 9], 4, q_lens=3).nodes.stop[0] == 4


def test_token_ids_and_token_maps():
    """The same batch by tokens over a dense store, and by slots of a request-to-token map."""
    rows = [[5, 6, 7, 8], [5, 6, 9], [4], [5, 6, 7, 8, 1]]
    lens = [len(r) for r in rows]
    values = {}
    parts = [
        torch.stack([values.setdefault((tuple(r[: i + 1]), part), torch.randn(2, 16)) for i in range(len(r))])
        for part in (0, 1) for r in rows
    ]  # fmt: skip
    full = list(zip(parts[:4], parts[4:], strict=True))
    q = inputs.queries(MODEL, 4)
    sizes = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16, "dtype": torch.float32, "device": "cpu"}
    tree = PrefixTree.from_token_ids(rows)
    assert tree.num_shared == 2
    state = cf.attend(q, cf.DenseKV(*inputs.dense(full)), cf.plan(tree, **sizes))
    numerics.assert_state(state, oracle.attention(q, full), numerics.torch_attention(q, full))

    slots = {}
    token_map = np.full((9, 8), -1, np.int32)
    where = [6, 2, 0, 3]
    for b, r in zip(where, rows, strict=True):
        token_map[b, : len(r)] = [slots.setdefault(tuple(r[: i + 1]), len(slots)) for i in range(len(r))]
    pool = [torch.stack([values[(key, part)] for key in slots])[:, None] for part in (0, 1)]
    table = PageTable.from_token_map(token_map, where)
    tree = PrefixTree.from_block_tables(token_map[where], lens, 1, table=table)
    state = cf.attend(q, cf.PagedKV(*pool), cf.plan(tree, **sizes))
    numerics.assert_state(state, oracle.attention(q, full), numerics.torch_attention(q, full))


def test_an_index_gives_the_same_tree_as_discovery():
    index = PrefixIndex()
    lens, tables = {}, {}
    for key, pages, n in (("a", [1, 2, 3], 13), ("b", [1, 2, 7], 9), ("c", [8], 3), ("d", [1, 2, 3, 4], 17)):
        index.add(key, pages[: (n - 1) // PAGE])
        lens[key], tables[key] = n, [*pages, 90 + n]
    index.remove("b")
    del lens["b"], tables["b"]
    index.append_pages("c", [8])
    lens["c"], tables["c"] = 6, [8, 96]
    table = np.zeros((3, 5), np.int32)
    for row, pages in zip(table, tables.values(), strict=True):
        row[: len(pages)] = pages
    keys, tree = PrefixTree.from_index(index, lens, PageTable.from_block_table(table, PAGE))
    assert keys == list(lens)
    want = PrefixTree.from_block_tables(table, list(lens.values()), PAGE)
    for name in ("first", "last", "start", "stop", "row"):
        assert getattr(tree.nodes, name).tolist() == getattr(want.nodes, name).tolist()


@pytest.mark.parametrize(
    ("table", "lens", "options", "text"),
    [
        ([[1, -2], [3, 4]], [8, 8], {}, "block_tables: expected page ids of at least 0, got -2"),
        ([[1, 1], [3, 4]], [8, 8], {}, r"expected each page once in a request, got page 1 twice \(request 0\)"),
        ([[3, 4], [3, 3]], [8, 8], {}, r"got page 3 twice \(request 1\)"),
        ([[1, 2], [3, 4]], [9, 8], {}, r"seq_lens: expected lengths in \[0, 8\], got 9 for request 0"),
        ([[1, 2], [3, 4]], [8, -1], {}, "got -1 for request 1"),
        ([[1, 2], [3, 4]], [8], {}, r"seq_lens: expected one length and one table row per request \(2\)"),
        (
            [[1, 2], [3, 4]],
            [8, 2],
            {"q_lens": 3},
            "q_lens: expected at most as many query rows as keys, got 3 rows for 2 keys|3 rows, 2 keys",
        ),
        ([1, 2], [8], {}, r"block_tables: expected shape \[B, max_pages\], got \[2\]"),
        ([[1, 2]], [8], {"table": PageTable.from_block_table([[1, 2]], 8)}, "table: expected pages of 4, got 8"),
        ([[1, 2], [3, -1]], [8, 5], {}, "block_tables: expected page ids of at least 0, got -1"),
        ([[1, 2, 1], [1, 2, 4]], [9, 9], {}, r"expected each page once in a request, got page 1 twice \(request 0\)"),
        ([[1, 2], [3, 4]], [8, 9], {}, r"seq_lens: expected lengths in \[0, 8\], got 9 for request 1"),
        ([[1, 2], [3, 4]], [8, 8, 8], {}, r"seq_lens: expected one length and one table row per request \(2\), got 3, 2"),
        ([[1, 2]], [8], {"q_lens": [1, 1]}, "q_lens: expected 1 row counts of at least 0"),
        ([[1, 2]], [8], {"q_lens": -1}, "q_lens: expected an integer of at least 0, got -1"),
    ],
)
def test_bad_tables(table, lens, options, text):
    with pytest.raises(ValueError, match=text):
        PrefixTree.from_block_tables(table, lens, 4, **options)


def csr(rows):
    return np.array([i for r in rows for i in r], np.int64), np.cumsum([0, *map(len, rows)])


def builders(rows, lens, page_size):
    """The same batch as a table in either dtype, and as one list."""
    table = np.full((len(rows), max([1, *map(len, rows)])), -1, np.int64)
    for to, row in zip(table, rows, strict=True):
        to[: len(row)] = row
    if table.max(initial=0) < 2**31:
        yield lambda: PrefixTree.from_block_tables(table.astype(np.int32), lens, page_size)
    yield lambda: PrefixTree.from_block_tables(table, lens, page_size)
    yield lambda: PrefixTree.from_csr(*csr(rows), lens, page_size)


def test_padding_is_not_read_and_pages_may_repeat_across_requests():
    PrefixTree.from_block_tables([[1, 2, -7], [2, 1, 1]], [8, 8], 4)


@pytest.mark.parametrize(
    ("rows", "page", "request_"),
    [
        ([[9, 7], [1, 2, 3], [1, 2, 4, 1]], 1, 2),  # of a shared run, and on its own
        ([[1, 2, 2, 5], [1, 2, 2, 6]], 2, 0),  # both shared
        ([[1, 2, 3, 2], [1, 2, 3, 9], [1, 8]], 2, 0),  # in a run within a run
        ([[1, 2], [3, 4], [1, 5, 1]], 1, 2),
        ([[5, 6, 5, 6], [6, 5]], 5, 0),  # the lowest page is named
        ([[2**31 - 1, 4, 2**31 - 1], [4]], 2**31 - 1, 0),
        ([[2**40, 4, 2**40], [4]], 2**40, 0),
    ],
)
def test_a_page_twice_in_a_request_is_found_wherever_it_is(rows, page, request_):
    for build in builders(rows, [4 * len(r) for r in rows], 4):
        with pytest.raises(ValueError, match=rf"got page {page} twice \(request {request_}\)"):
            build()


@settings(max_examples=150, deadline=None)
@given(batches(), st.data())
def test_a_page_twice_is_an_error_only_within_a_request(batch, data):
    """Ids of few values are shared, met again elsewhere, or twice in one request; spread out, they are sorted, not marked."""
    rows, lens = batch
    few, apart = data.draw(st.integers(2, 40)), data.draw(st.sampled_from([1, 10**6]))
    rows = [[i % few * apart for i in row] for row in rows]
    used = [row[: -(-n // PAGE)] for row, n in zip(rows, lens, strict=True)]
    wrong = [b for b, row in enumerate(used) if len(set(row)) < len(row)]
    for build in builders(rows, lens, PAGE):
        if not wrong:
            assert build().num_requests == len(rows)
            continue
        page = min(i for i in used[wrong[0]] if used[wrong[0]].count(i) > 1)
        with pytest.raises(ValueError, match=rf"got page {page} twice \(request {wrong[0]}\)"):
            build()


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_a_large_page_id_takes_no_memory(dtype):
    table = np.arange(64, dtype=dtype).reshape(4, 16)
    table[2, 3] = np.iinfo(dtype).max
    tracemalloc.start()
    try:
        PrefixTree.from_block_tables(table, [64] * 4, 4)
        PrefixTree.from_csr(table.ravel(), np.arange(5) * 16, [64] * 4, 4)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
