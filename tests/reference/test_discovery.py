"""Discovery of shared runs against sets of prefixes, in which nothing can be wrong; and the index against discovery."""

import tracemalloc
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cascade_fd import discovery
from cascade_fd.discovery import Runs, discover, discover_ragged
from cascade_fd.prefix_index import PrefixIndex

FIELDS = ("order", "parent", "first", "last", "start", "stop", "own")


def oracle(lists):
    """{(sharers, start, stop)} and own per request: who shares is a matter of equal tuples, page by page."""
    holders = {}
    for b, ids in enumerate(lists):
        for n in range(1, len(ids) + 1):
            holders.setdefault(tuple(ids[:n]), set()).add(b)
    pages, own = {}, [0] * len(lists)
    for prefix, sharers in holders.items():
        if len(sharers) > 1:
            pages.setdefault(frozenset(sharers), []).append(len(prefix))  # one set of sharers, one run
            for b in sharers:
                own[b] = max(own[b], len(prefix))
    return {(sharers, min(n) - 1, max(n)) for sharers, n in pages.items()}, own


def check(runs: Runs, lists):
    """Everything the type promises, and the oracle's partition."""
    B, n = len(lists), len(runs)
    assert all(getattr(runs, f).dtype == np.int64 for f in FIELDS)
    assert sorted(runs.order.tolist()) == list(range(B))
    order = runs.order.tolist()
    found = [(frozenset(order[a:z]), s, e) for a, z, s, e in zip(runs.first, runs.last, runs.start, runs.stop, strict=True)]
    nodes, own = oracle(lists)
    assert len(found) == n
    assert set(found) == nodes and n == len(nodes)
    assert runs.own.tolist() == [own[b] for b in order]
    for i, p in enumerate(runs.parent.tolist()):
        assert p < i
        if p < 0:
            assert runs.start[i] == 0
        else:
            assert runs.first[p] <= runs.first[i] and runs.last[i] <= runs.last[p]
            assert runs.start[i] == runs.stop[p]
    nest = list(zip(runs.first.tolist(), (-runs.last).tolist(), strict=True))
    assert nest == sorted(nest)  # preorder: by position, the larger node first


def padded(lists, dtype=np.int32, fill=-1, extra=0):
    table = np.full((len(lists), max(map(len, lists), default=0) + extra), fill, dtype)
    for row, ids in zip(table, lists, strict=True):
        row[: len(ids)] = ids
    return table, [len(ids) for ids in lists]


def ragged(lists, dtype=np.int32):
    return np.array([i for ids in lists for i in ids], dtype), np.cumsum([0, *map(len, lists)]), [len(ids) for ids in lists]


def same(a: Runs, b: Runs):
    for field in FIELDS:
        np.testing.assert_array_equal(getattr(a, field), getattr(b, field), field)


def batch_order(lists):
    """Every request by the lowest of those it shares each page with."""
    lowest = {}
    for b, ids in enumerate(lists):
        for n in range(1, len(ids) + 1):
            lowest.setdefault(tuple(ids[:n]), b)
    paths = [[*(lowest[tuple(ids[:n])] for n in range(1, len(ids) + 1)), b] for b, ids in enumerate(lists)]
    return sorted(range(len(lists)), key=paths.__getitem__)


def discovered(lists, **options):
    """Runs of ``lists`` by every entry point, checked against each other and the oracle."""
    runs = discover(*padded(lists, **options))
    assert runs.order.tolist() == batch_order(lists)
    same(runs, discover_ragged(*ragged(lists, options.get("dtype", np.int32))))
    check(runs, lists)
    return runs


def indexed(lists) -> Runs:
    index = PrefixIndex()
    for b, ids in enumerate(lists):
        index.add(b, ids)
    return in_batch(index, range(len(lists)))


def in_batch(index, batch) -> Runs:
    """The runs of an index with ``order`` naming requests by their place in ``batch``."""
    keys, runs = index.runs()
    np.testing.assert_array_equal(runs.order, np.arange(len(keys)))
    place = {key: b for b, key in enumerate(batch)}
    return Runs(np.array([place[key] for key in keys], np.int64), *(getattr(runs, f) for f in FIELDS[1:]))


def grouped(*sizes, shared=3, private=2):
    """Groups of requests that share their first pages; all other ids occur once."""
    lists, fresh = [], iter(range(10**6, 10**7))
    for size in sizes:
        prefix = [next(fresh) for _ in range(shared)]
        lists += [prefix + [next(fresh) for _ in range(private)] for _ in range(size)]
    return lists


def binary(depth, run):
    """The 2**depth leaves of a full tree with ``run`` pages per node."""
    return [
        [(1 << level) + (leaf >> (depth - level)) for level in range(depth + 1) for _ in range(run)] for leaf in range(2**depth)
    ]


def chain(n):
    """Request i leaves the common path after i + 1 pages."""
    return [[*range(i + 1), 1000 + i] for i in range(n)]


def shuffled(lists):
    return [lists[i] for i in np.random.default_rng(0).permutation(len(lists))]


CASES = {
    "no requests": [],
    "one request": [[5, 6]],
    "one empty request": [[]],
    "all empty": [[], [], []],
    "nothing shared": [[1, 2], [3, 4], [5]],
    "identical": [[4, 4, 2]] * 5,
    "identical of one page": [[4]] * 2,
    "a prefix of the other": [[1, 2, 3, 4], [1, 2]],
    "every prefix of one": [list(range(n)) for n in range(9)],
    "an empty one among sharers": [[1, 2], [], [1, 3], []],
    "groups of 1, 5 and 58": grouped(1, 5, 58),
    "the same, mixed up": shuffled(grouped(1, 5, 58)),
    "later equality after a difference": [[1, 7, 8, 9], [2, 7, 8, 9], [3, 7, 8, 9]],
    "twins under a group": [[1, 2, 3], [1, 2, 4], [1, 2, 3], [1, 5]],
    "binary tree": binary(5, 2),
    "binary tree, mixed up": shuffled(binary(5, 2)),
    "chain": chain(40),
    "chain, backwards": chain(40)[::-1],
    "chain, mixed up": shuffled(chain(40)),
    "zeros where others end": [[1, 0, 6], [1, 0, 0, 0], [1], [1, 0, 5], [1, 0], [1, 0, 0, 0], [0, 0], [0]],
    "longer than any window": [[9] * 3000 + [1], [9] * 3000 + [2], [9] * 2500 + [3], [9] * 3000 + [2, 2]],
}


@pytest.mark.parametrize("lists", CASES.values(), ids=CASES)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_named_cases(lists, dtype):
    discovered(lists, dtype=dtype)
    check(indexed(lists), lists)


def test_the_documented_example():
    runs = discovered([[7, 8, 9], [5, 6, 6], [7, 8, 4], [7, 1, 1]])
    assert [getattr(runs, f).tolist() for f in FIELDS] == [[0, 2, 3, 1], [-1, 0], [0, 0], [3, 2], [0, 1], [1, 2], [2, 2, 1, 0]]


def test_ids_beyond_32_bits():
    low, high = 2**40 + 1, 2**41 + 1  # equal in their lower half
    runs = discovered([[low, 5], [high, 5], [low, 6]], dtype=np.int64)
    assert runs.order.tolist() == [0, 2, 1]
    assert indexed([[low, 5], [high, 5], [low, 6]]).own.tolist() == [1, 1, 0]


def test_a_batch_that_is_arranged_keeps_its_order():
    for lists in (grouped(1, 5, 3), binary(4, 1), chain(30)[::-1], [[1], [2], [3]], [[1, 2], [1, 2], [1], [9], [1 + 9]]):
        assert discovered(lists).order.tolist() == list(range(len(lists)))


@pytest.mark.parametrize("lists", [chain(256), chain(256)[::-1], shuffled(chain(256)), binary(8, 1), shuffled(binary(8, 1))])
def test_depth_takes_no_steps(lists):
    """Steps are windows of ids, however many nodes begin and end in one."""
    with patch.object(discovery, "_windows", wraps=discovery._windows) as steps:
        check(discover(*padded(lists)), lists)
    assert steps.call_count == 1


def test_few_long_requests_take_few_steps():
    row = np.arange(100_000, dtype=np.int32)
    with patch.object(discovery, "_windows", wraps=discovery._windows) as steps:
        runs = discover([row, row], [len(row)] * 2)
    assert runs.stop.tolist() == [len(row)] and steps.call_count < 10


def test_widths_and_counts_of_zero():
    assert len(discover(np.zeros((0, 5), np.int32), [])) == 0
    runs = discover(np.zeros((3, 0), np.int32), [0, 0, 0])
    assert runs.order.tolist() == [0, 1, 2] and runs.own.tolist() == [0, 0, 0]
    assert len(discover(np.ones((3, 4), np.int32), [0, 4, 0])) == 0
    assert discover(np.ones((3, 4), np.int32), [0, 4, 2]).stop.tolist() == [2]


def test_pages_beyond_a_count_have_no_influence():
    lists = [[1, 2], [1, 2], [1]]
    want = discovered(lists)
    for fill in (-1, 2, 7):
        same(want, discovered(lists, fill=fill, extra=3))
    table = np.array([[1, 2, 5, 5], [1, 2, 5, 5], [1, 2, 5, 5]], np.int32)
    same(want, discover(table, [2, 2, 1]))
    same(want, discover_ragged(table.ravel(), [0, 4, 8, 12], [2, 2, 1]))


@pytest.mark.parametrize(
    "view",
    [
        lambda t: np.repeat(t, 2, 0)[::2],
        lambda t: np.repeat(t, 2, 1)[:, ::2],
        lambda t: t[::-1].copy()[::-1],
        lambda t: np.asfortranarray(t),
        lambda t: np.pad(t, ((1, 2), (3, 4)))[1:-2, 3:-4],
        lambda t: t.astype(t.dtype.newbyteorder()),
        lambda t: np.array([(0, row) for row in t], [("tag", "u1"), ("row", t.dtype, t.shape[1:])])["row"],
    ],
    ids=["every other row", "every other column", "reversed", "column by column", "a slice", "other byte order", "a field"],
)
def test_strides_are_honoured(view):
    table, counts = padded(shuffled(binary(4, 3)))
    before = table.copy()
    strided = view(table)
    strided.flags.writeable = False
    same(discover(table, counts), discover(strided, counts))
    np.testing.assert_array_equal(strided, before)


def test_a_broadcast_row_is_one_run():
    runs = discover(np.broadcast_to(np.arange(6, dtype=np.int32), (4, 6)), [6, 6, 6, 6])
    assert (runs.first.tolist(), runs.last.tolist(), runs.stop.tolist()) == ([0], [4], [6])


def test_ragged_ids_may_be_strided():
    indices, indptr, counts = ragged(chain(20))
    same(discover_ragged(indices, indptr, counts), discover_ragged(np.repeat(indices, 2)[::2], indptr, counts))


def test_ragged_memory_follows_what_is_shared():
    """One request of 2**20 ids among 200 short ones: the rectangle would have 840 MB."""
    lists = [[1, 2, 3, b] for b in range(200)]
    indices = np.concatenate([np.ravel(lists), np.arange(1, 2**20 + 1)]).astype(np.int32)
    indptr = np.append(np.arange(0, 801, 4), len(indices))
    tracemalloc.start()
    try:
        runs = discover_ragged(indices, indptr, np.diff(indptr))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20
    assert runs.last.tolist()[0] == 201 and runs.stop.tolist()[0] == 3


few = st.lists(st.lists(st.integers(0, 2), max_size=7), max_size=12)  # small alphabets: prefixes often meet


@st.composite
def tries(draw):
    """Paths of a random tree, whose runs may be long, cut anywhere, in any order."""
    paths = [[]]
    for _ in range(draw(st.integers(1, 12))):
        stem = draw(st.sampled_from(paths))
        stem = stem[: draw(st.integers(0, len(stem)))]
        paths.append(stem + [draw(st.integers(0, 3))] * draw(st.sampled_from([1, 2, 40, 300])))
    return draw(st.permutations(paths + draw(st.lists(st.sampled_from(paths), max_size=4))))


@settings(max_examples=300, deadline=None)
@given(few)
def test_small_alphabets(lists):
    discovered(lists)
    check(indexed(lists), lists)


@settings(max_examples=200, deadline=None)
@given(st.one_of(few, tries()), st.integers(1, 5), st.integers(1, 20))
def test_windows_of_any_width(lists, step, ids):
    with patch.multiple(discovery, _STEP=step, _WINDOW_IDS=ids):
        discovered(lists)


@settings(max_examples=100, deadline=None)
@given(tries())
def test_random_tries(lists):
    discovered(lists)
    check(indexed(lists), lists)


@settings(max_examples=150, deadline=None)
@given(few, st.data())
def test_counts_cut_requests_short(lists, data):
    counts = [data.draw(st.integers(0, len(ids))) for ids in lists]
    runs = discover(padded(lists)[0], counts)
    check(runs, [ids[:n] for ids, n in zip(lists, counts, strict=True)])
    same(runs, discover_ragged(*ragged(lists)[:2], counts))


@settings(max_examples=100, deadline=None)
@given(few, st.randoms())
def test_order_of_requests_does_not_matter(lists, random):
    mixed = list(range(len(lists)))
    random.shuffle(mixed)
    a, b = discover(*padded(lists)), discover(*padded([lists[i] for i in mixed]))

    def groups(runs, names):
        spans = zip(runs.first, runs.last, runs.start, runs.stop, strict=True)
        return {(frozenset(names[i] for i in runs.order[f:t]), int(s), int(e)) for f, t, s, e in spans}

    assert groups(a, range(len(lists))) == groups(b, mixed)


TABLE = np.zeros((2, 3), np.int32)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: discover(TABLE[0], [1, 1]), ValueError, r"pages: expected shape \[B, W\], got \[3\]"),
        (lambda: discover(TABLE.astype(float), [1, 1]), TypeError, "pages: expected dtype int32 or int64, got float64"),
        (lambda: discover(TABLE.astype(bool), [1, 1]), TypeError, "pages: expected dtype int32 or int64, got bool"),
        (lambda: discover(TABLE.astype(np.uint32), [1, 1]), TypeError, "pages: expected dtype int32 or int64, got uint32"),
        (lambda: discover(TABLE, [1]), ValueError, r"counts: expected one count per request \(B=2\), got 1"),
        (
            lambda: discover(TABLE, [1, 4]),
            ValueError,
            "counts: expected at most the 3 pages of request 1 and at least 0, got 4",
        ),
        (lambda: discover(TABLE, [-1, 0]), ValueError, "counts: expected at most the 3 pages .* and at least 0, got -1"),
        (lambda: discover(TABLE, [1.0, 2.0]), TypeError, "counts: expected a list of integers, got float64"),
        (lambda: discover(TABLE, [[1, 2]]), ValueError, r"counts: expected a list of integers, got shape \[1, 2\]"),
        (lambda: discover_ragged(TABLE, [0, 6], [6]), ValueError, r"indices: expected shape \[nnz\], got \[2, 3\]"),
        (lambda: discover_ragged([0.5], [0, 1], [1]), TypeError, "indices: expected dtype int32 or int64, got float64"),
        (lambda: discover_ragged([1, 2], [0, 1], [1]), ValueError, r"indptr: expected offsets .* end at 2, got \[0, 1\]"),
        (lambda: discover_ragged([1, 2], [0, 2, 1, 2], [0] * 3), ValueError, "indptr: expected offsets that .* never fall"),
        (lambda: discover_ragged([1, 2], [1, 2], [1]), ValueError, "indptr: expected offsets that start at 0"),
        (lambda: discover_ragged([], [], []), ValueError, "indptr: expected offsets that start at 0"),
        (lambda: discover_ragged([1, 2], [0, 1, 2], [1, 2]), ValueError, "counts: expected at most the 1 pages of request 1"),
        (lambda: discover_ragged([1, 2], [0, 1, 2], [1]), ValueError, r"counts: expected one count per request \(B=2\), got 1"),
    ],
)
def test_bad_input_names_the_argument(call, error, message):
    with pytest.raises(error, match=message):
        call()
