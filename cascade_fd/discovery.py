"""Which requests share which leading pages, found from page ids alone. NumPy on the host.

Exact: ids are compared, never hashed. Requests are sorted by their ids, so that those that share stand side by side; how many
ids each has in common with the next then says who shares what.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

# Ids read at once: about so many, so that they stay in the core's cache, in a multiple of so many columns, because ``argmax``
# over flags takes 256 at a time and is slow on what is left over.
_WINDOW_IDS, _STEP = 1 << 16, 256


@dataclass(frozen=True, eq=False)
class Runs:
    """Every run of whole pages that two or more requests share, as a forest over the batch.

    A node ends where its set of sharers changes, so no child has the same sharers as its parent. Private rests are not
    nodes: request ``order[p]`` owns what follows its first ``own[p]`` pages. All arrays are int64 on the host.

    Example: pages [[7, 8, 9], [5, 6, 6], [7, 8, 4], [7, 1, 1]] give

        order  0 2 3 1        parent  -1  0        requests 0, 2 and 3 share page 0 (id 7),
        own    2 2 1 0        first    0  0        requests 0 and 2 page 1 as well (id 8)
                              last     3  2
                              start    0  1
                              stop     1  2

    Attributes:
        order: ``[B]`` tree position -> request: a permutation with the sharers of each node side by side.
        parent: ``[n]`` index of the parent node, -1 for roots. Nodes are in preorder: a parent comes before its children.
        first, last: ``[n]`` the requests at tree positions ``first .. last - 1`` share the node; at least two.
        start, stop: ``[n]`` page range within the row of each sharer; start is the parent's stop, or 0.
        own: ``[B]`` in tree order: leading pages of each request that shared nodes cover.
    """

    order: np.ndarray
    parent: np.ndarray
    first: np.ndarray
    last: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    own: np.ndarray

    def __len__(self) -> int:
        return len(self.parent)


def discover(pages: Any, counts: Any) -> Runs:
    """Find every shared run in a block table: two requests share page i if their first i + 1 page ids are equal.

    Requests keep their order as far as sharing lets them (siblings stand by their lowest request), so a batch whose sharers
    are side by side already keeps its order. A page id that occurs twice in one request is an error of the caller that is not
    looked for here; trees check for it.

    Args:
        pages: ``[B, W]`` int32 or int64, any strides. What lies beyond a request's count is padding and has no influence.
        counts: ``[B]`` how many leading pages of each request may be shared; leave out a page that is still written to.

    Raises:
        TypeError: ids or counts that are not integers.
        ValueError: wrong ranks, lengths that disagree, or counts outside ``[0, W]``.

    Example:
        >>> runs = discover([[7, 8, 9], [5, 6, 6], [7, 8, 4], [7, 1, 1]], [3, 3, 3, 3])
        >>> runs.order.tolist(), runs.stop.tolist(), runs.own.tolist()
        ([0, 2, 3, 1], [1, 2], [2, 2, 1, 0])
    """
    table = check_ids("pages", pages, "B W")
    B, W = table.shape
    lens = _counts(counts, np.full(B, W))
    ids, step = flat_rows(table)
    return _runs(ids, np.arange(B) * step, lens)


def discover_ragged(indices: Any, indptr: Any, counts: Any) -> Runs:
    """``discover`` for requests of any lengths in one list. Builds no rectangle: ids are compared where they are.

    Token ids work as page ids do, with pages of one token.

    Args:
        indices: ``[nnz]`` int32 or int64 page ids, request b in ``indices[indptr[b]:indptr[b + 1]]``.
        indptr: ``[B + 1]`` offsets.
        counts: ``[B]`` as in ``discover``.

    Raises:
        TypeError, ValueError: as ``discover``, and offsets that do not start at 0, fall, or do not end at nnz.

    Example:
        >>> discover_ragged([7, 8, 9, 7, 8], [0, 3, 5], [3, 2]).own.tolist()
        [2, 2]
    """
    ids = np.ascontiguousarray(check_ids("indices", indices, "nnz"))
    ptr = _integers("indptr", indptr)
    if len(ptr) < 1 or ptr[0] != 0 or (np.diff(ptr) < 0).any() or ptr[-1] != len(ids):
        raise ValueError(f"indptr: expected offsets that start at 0, never fall and end at {len(ids)}, got {_short(ptr)}")
    lens = _counts(counts, np.diff(ptr))
    return _runs(ids, ptr[:-1], lens)


def check_ids(name: str, value: Any, axes: str) -> np.ndarray:
    """An int32 or int64 array of the rank that ``axes`` names; an empty list passes."""
    array = np.asarray(value)
    if array.ndim != len(axes.split()):
        raise ValueError(f"{name}: expected shape [{', '.join(axes.split())}], got {list(array.shape)}")
    if array.size == 0 and array.dtype.kind == "f":  # an empty list
        array = array.astype(np.int64)
    if array.dtype.kind != "i" or array.itemsize not in (4, 8):
        raise TypeError(f"{name}: expected dtype int32 or int64, got {array.dtype}")
    return array


def _integers(name: str, value: Any) -> np.ndarray:
    array = np.asarray(value)
    if array.ndim != 1:
        raise ValueError(f"{name}: expected a list of integers, got shape {list(array.shape)}")
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{name}: expected a list of integers, got {array.dtype}")
    return array.astype(np.int64)


def _counts(value: Any, widths: np.ndarray) -> np.ndarray:
    counts = _integers("counts", value)
    if len(counts) != len(widths):
        raise ValueError(f"counts: expected one count per request (B={len(widths)}), got {len(counts)}")
    bad = np.flatnonzero((counts < 0) | (counts > widths))
    if len(bad):
        b = bad[0]
        raise ValueError(f"counts: expected at most the {widths[b]} pages of request {b} and at least 0, got {counts[b]}")
    return counts


def _short(array: np.ndarray) -> str:
    return f"{array[:8].tolist()}{'...' if len(array) > 8 else ''}"


def flat_rows(table: np.ndarray) -> tuple[np.ndarray, int]:
    """The table as one list, and the distance from row to row in it. A view, unless the strides are unusual."""
    B, W = table.shape
    step, rest = divmod(table.strides[0], table.itemsize)
    if not table.size or rest or step < 0 or table.strides[1] != table.itemsize:
        return np.ascontiguousarray(table).ravel(), W
    return np.lib.stride_tricks.as_strided(table, ((B - 1) * step + W,), (table.itemsize,)), step


def _runs(ids: np.ndarray, begin: np.ndarray, counts: np.ndarray) -> Runs:
    """Runs of a batch whose request b has the ids ``ids[begin[b] : begin[b] + counts[b]]``."""
    rows = np.flatnonzero(counts)
    opening = ids[begin[rows]]
    by = opening.argsort(kind="stable")
    rows = rows[by[_company(_changes(opening[by]))[0]]]  # those that share anything
    return _in_batch_order(*_nodes(*_sorted(ids, begin, counts, rows), len(counts)))


def _sorted(ids: np.ndarray, begin: np.ndarray, counts: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``rows`` sorted by their ids, and how many ids each has in common with the next (the last: 0).

    Sorted as bytes, which is fast; any order would do in which those that share ids are side by side. Window by window, so
    that a row is read as far as it shares and to the end of that window. A row that ends is followed by zeros, and stands
    before its equals that go on.
    """
    rows = rows[counts[rows].argsort(kind="stable")]
    common = np.zeros(len(rows), np.int64)
    places, group, at = np.arange(len(rows)), np.zeros(len(rows), np.int64), 0  # not in order yet; one group: the same so far
    while len(places):
        some = rows[places]
        longest = int(counts[some].max())
        width = min(max(2 * _STEP, 2 * at), -(-_WINDOW_IDS // (_STEP * len(places))) * _STEP, longest)
        at = min(at, longest - width)  # the last window is no narrower: it overlaps the one before
        left = counts[some] - at
        block = _windows(ids, begin[some] + at, left, width)
        by = block.view(f"V{width * block.itemsize}")[:, 0].argsort(kind="stable")
        if group[-1]:
            by = by[group[by].argsort(kind="stable")]
        if (by[1:] < by[:-1]).any():
            rows[places], block, left = some[by], block[by], left[by]
        both, apart = np.minimum(left[1:], left[:-1]), group[1:] != group[:-1]
        same = np.minimum(_same(block), both)
        common[places[:-1]] = np.where(apart, common[places[:-1]], at + same)
        opens = np.ones(len(some), bool)
        opens[1:] = apart | (same < width) | (both == width)
        more, group = _company(opens)
        places, at = places[more], at + width
    return rows, common


def _windows(ids: np.ndarray, first: np.ndarray, left: np.ndarray, width: int) -> np.ndarray:
    """``[n, width]`` ids from each ``first`` on, and zeros after the ``left`` ids that a row has."""
    step, last = ids.itemsize, len(ids) - width
    windows = np.ndarray((last + 1, width), ids.dtype, ids, 0, (step, step))  # sliding_window_view, without the time it takes
    if left.min() >= width:
        return windows[first]
    block = windows[np.minimum(first, last)]
    late = first > last
    block[late] = ids.take(first[late, None] + np.arange(width), mode="clip")
    block[np.arange(width, dtype=np.int32) >= np.minimum(left, width).astype(np.int32)[:, None]] = 0
    return block


def _same(block: np.ndarray) -> np.ndarray:
    """How many leading entries each row has in common with the next."""
    differs = block[1:] != block[:-1]
    where = differs.argmax(1)
    where[~differs[np.arange(len(where)), where]] = block.shape[1]
    return where


def _changes(key: np.ndarray) -> np.ndarray:
    """True where a sorted key differs from the entry before it, and on the first entry."""
    change = np.ones(len(key), bool)
    np.not_equal(key[1:], key[:-1], out=change[1:])
    return change


def _company(opens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which entries are not alone in their group, and the numbers of their groups; groups begin where ``opens``."""
    some = ~opens
    some[:-1] |= some[1:]
    return some, opens[some].cumsum() - 1


def _nodes(rows: np.ndarray, common: np.ndarray, B: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes ``[4, n]`` (parent, stop, number of requests, lowest request) and the innermost node of each request (-1: none).

    Along the sorted rows, a node lasts from where ``common`` rises above its parent's stop to where it falls below its own: the
    intervals of Abouelhoda, Kurtz and Ohlebusch, Replacing suffix trees with enhanced suffix arrays, 2004.
    """
    parent, stop, first, size, lowest = [0], [0], [0], [B], [0]  # node 0 is the batch
    top, inner = 0, []  # the innermost node that is open, and that of each row
    above: list[int] = []  # nodes that are open around it
    for i, (row, depth) in enumerate(zip(rows.tolist(), common.tolist(), strict=True)):
        begin, low, below = i, row, 0
        inner.append(top if depth <= stop[top] else len(stop))
        while depth < stop[top]:
            begin, low = first[top], min(low, lowest[top])
            size[top], lowest[top] = i + 1 - begin, low
            below, top = top, above.pop()
        if depth > stop[top]:  # a node begins, at this row or around the one that just ended
            parent[below] = len(stop)
            above.append(top)
            parent.append(top)
            top = len(stop)
            stop.append(depth)
            first.append(begin)
            size.append(0)
            lowest.append(low)
        elif low < lowest[top]:
            lowest[top] = low
    innermost = np.full(B, -1)
    innermost[rows] = np.array(inner, np.int64) - 1
    return np.array((np.array(parent) - 1, stop, size, lowest))[:, 1:], innermost


def _in_batch_order(nodes: np.ndarray, inner: np.ndarray) -> Runs:
    """Runs from nodes (rows as of ``_nodes``) and the innermost node of each request (-1: none).

    Siblings, which are the nodes and the private rests under one parent, stand in the order of their lowest request.
    """
    parent, stop, size, lowest = nodes
    n, B = len(parent), len(inner)
    above, rank = np.concatenate((parent, inner)), np.concatenate((lowest, np.arange(B)))
    offset = _offsets(above, rank, np.concatenate((size, np.ones(B, np.int64))))
    begin, up = [*offset[:n].tolist(), 0], parent.tolist()  # 0: what the parent -1 adds
    for i in stop.argsort().tolist():  # parents first
        begin[i] += begin[up[i]]
    first = np.array(begin)
    order = np.argsort(offset[n:] + first[inner])
    own = np.append(stop, 0)[inner][order]
    preorder = np.lexsort((stop, first[:n]))
    index = np.append(np.argsort(preorder), -1)
    parent, first, stop, size = index[parent[preorder]], first[preorder], stop[preorder], size[preorder]
    return Runs(order, parent, first, first + size, np.append(stop, 0)[parent], stop, own)


def _offsets(group: np.ndarray, rank: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Where each block begins within its group if the blocks of a group stand one after the other by rank."""
    by = (group * len(rank) + rank).argsort()  # no two of a group have the same rank
    ends = np.cumsum(size[by])
    opens = _changes(group[by])
    base = (ends - size[by])[opens]
    offset = np.empty_like(ends)
    offset[by] = ends - size[by] - base[np.cumsum(opens) - 1]
    return offset
