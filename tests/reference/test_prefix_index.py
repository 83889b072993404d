"""The incremental index: after any changes it says what discovery says of the batch, and it changes nothing on an error."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cascade_fd.prefix_index import PrefixIndex
from tests.reference.test_discovery import check, in_batch

ids = st.lists(st.integers(0, 2), max_size=5)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), ids),
        st.tuples(st.just("append"), st.integers(0, 99), ids),
        st.tuples(st.just("remove"), st.integers(0, 99)),
    ),
    max_size=40,
)


def tidy(index):
    """Every node but the root ends a request or branches, and counts the requests below it."""
    todo = [index._root]
    while todo:
        node = todo.pop()
        assert node.size == len(node.keys) + sum(child.size for child in node.children.values())
        assert node is index._root or (len(node.edge) and (node.keys or len(node.children) > 1))
        for head, child in node.children.items():
            assert child.parent is node and child.edge[0] == head
            todo.append(child)


def apply(index, batch, step, number):
    """One change, made to the index and to a plain dict of lists alike."""
    kind, *rest = step
    if kind == "add":
        index.add(number, rest[0])
        batch[number] = rest[0]
    elif batch:
        key = list(batch)[rest[0] % len(batch)]
        if kind == "append":
            index.append_pages(key, rest[1])
            batch[key] = batch[key] + rest[1]
        else:
            index.remove(key)
            del batch[key]


@settings(max_examples=300, deadline=None)
@given(steps)
def test_any_sequence_of_changes(sequence):
    index, batch = PrefixIndex(), {}
    for number, step in enumerate(sequence):
        apply(index, batch, step, number)
        tidy(index)
        check(in_batch(index, batch), list(batch.values()))
    assert len(index) == len(batch) and all(key in index for key in batch)
    for key in batch:
        index.remove(key)
    assert not index._root.children and not index._root.keys and index._root.size == 0


def test_growing_apart_and_together():
    index = PrefixIndex()
    index.add("a", [1, 2])
    index.add("b", [1])
    assert index.runs()[1].stop.tolist() == [1]
    index.append_pages("b", [2])
    assert index.runs()[1].stop.tolist() == [2]
    index.append_pages("b", [3])
    index.append_pages("a", [3, 4])
    assert index.runs()[1].stop.tolist() == [3]
    index.remove("b")
    keys, runs = index.runs()
    assert keys == ["a"] and len(runs) == 0 and runs.own.tolist() == [0]


def test_ids_are_copied():
    mine = np.array([1, 2, 3])
    index = PrefixIndex()
    index.add("a", mine)
    mine[:] = 9
    index.add("b", [1, 2, 4])
    index.append_pages("a", mine)
    mine[:] = 8
    index.add("c", np.array([1, 2, 3, 9, 9, 9], np.int32))
    assert index.runs()[1].stop.tolist() == [2, 6]


def test_appending_nothing_changes_nothing():
    index = PrefixIndex()
    for key, pages in enumerate([[], [1], [1], [1, 2], [5]]):
        index.add(key, pages)
    before = state(index)[1]
    for key in range(5):
        index.append_pages(key, [])
        tidy(index)
    assert state(index)[1] == before


def test_a_deep_tree_needs_no_recursion():
    index = PrefixIndex()
    for n in range(1200):
        index.add(n, [0] * n)
    keys, runs = index.runs()
    assert len(keys) == 1200 and len(runs) == 1198
    for n in reversed(range(1200)):
        index.remove(n)
    assert len(index) == 0


def state(index):
    keys, runs = index.runs()
    return keys, [getattr(runs, f).tolist() for f in ("parent", "first", "last", "start", "stop", "own")]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda i: i.add("a", [1]), ValueError, "key: expected one that is not in the index, got 'a', which is"),
        (lambda i: i.remove("c"), KeyError, "key: expected one of the 2 in the index, got 'c'"),
        (lambda i: i.append_pages("c", [1]), KeyError, "key: expected one of the 2 in the index, got 'c'"),
        (lambda i: i.add("c", [1, -2]), ValueError, "page_ids: expected ids of at least 0, got -2 at position 1"),
        (lambda i: i.append_pages("a", [-1]), ValueError, "page_ids: expected ids of at least 0, got -1 at position 0"),
        (lambda i: i.add("c", [0.5]), TypeError, "page_ids: expected dtype int32 or int64, got float64"),
        (lambda i: i.append_pages("b", [[1]]), ValueError, r"page_ids: expected shape \[n\], got \[1, 1\]"),
    ],
)
def test_errors_name_the_argument_and_change_nothing(call, error, message):
    index = PrefixIndex()
    index.add("a", [1, 2])
    index.add("b", [1, 3])
    before = state(index)
    with pytest.raises(error, match=message):
        call(index)
    assert state(index) == before
