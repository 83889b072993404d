"""Which requests share which leading pages, found from page ids alone. NumPy on the host.

Exact: ids are compared, never hashed. Rows are sorted as bytes, so that rows with a common prefix become neighbours; the
common prefix of any two rows is then the shortest one between the neighbours from one to the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

# Gathers ids of several rows: (rows, first page, pages) -> [rows, pages or fewer], with anything beyond a row's end.
_Window = Callable[[np.ndarray, int, int], np.ndarray]
_NARROW = 32  # pages of each row compared at first: many pairs part early
_WINDOW_IDS = 1 << 16  # ids gathered at once: small enough for a core's cache and for memory that is not new each time


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
    table = _ids("pages", pages, "B W")
    B, W = table.shape
    lens = _counts(counts, np.full(B, W))
    heads = table[:, 0] if W else np.zeros(B, table.dtype)
    rows = _candidates(heads, lens)
    keys = [table[b, :n].tobytes() for b, n in zip(rows.tolist(), lens[rows].tolist(), strict=True)]
    return _runs(lens, rows, keys, lambda some, at, width: table[some, at : at + width])


def discover_ragged(indices: Any, indptr: Any, counts: Any) -> Runs:
    """``discover`` for rows of any lengths in one list; never builds a rectangle, memory is a few times the ids'.

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
    ids = _ids("indices", indices, "nnz")
    ptr = _integers("indptr", indptr)
    if len(ptr) < 1 or ptr[0] != 0 or (np.diff(ptr) < 0).any() or ptr[-1] != len(ids):
        raise ValueError(f"indptr: expected offsets that start at 0, never fall and end at {len(ids)}, got {_short(ptr)}")
    lens = _counts(counts, np.diff(ptr))
    heads = np.zeros(len(lens), ids.dtype)
    heads[lens > 0] = ids[ptr[:-1][lens > 0]]
    rows = _candidates(heads, lens)
    begin = ptr[rows]
    keys = [ids[i:j].tobytes() for i, j in zip(begin.tolist(), (begin + lens[rows]).tolist(), strict=True)]

    def window(some: np.ndarray, at: int, width: int) -> np.ndarray:
        first = ptr[some] + at
        if first.max() + width <= len(ids):
            return np.lib.stride_tricks.sliding_window_view(ids, width)[first]
        return ids.take(first[:, None] + np.arange(width), mode="clip")

    return _runs(lens, rows, keys, window)


def _ids(name: str, value: Any, axes: str) -> np.ndarray:
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


def _candidates(heads: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Requests whose first page another request has too. All others share nothing, and cost nothing from here on."""
    rows = np.flatnonzero(counts)
    _, head, sharers = np.unique(heads[rows], return_inverse=True, return_counts=True)
    return rows[sharers[head] > 1]


def _runs(counts: np.ndarray, rows: np.ndarray, keys: list[bytes], window: _Window) -> Runs:
    """Runs of a batch; ``keys`` are the ids, as bytes, of the requests ``rows``. The others share nothing."""
    # Python compares bytes with memcmp: several times faster than NumPy's sorts of rows, which go byte by byte.
    ranked = rows[sorted(range(len(keys)), key=keys.__getitem__)]
    B = len(counts)
    shared = np.zeros(max(B, 1), np.int64)  # [p]: pages in common of positions p and p + 1; 0 after the last position
    if len(ranked):
        shared[: len(ranked) - 1] = _common_pages(ranked[:-1], ranked[1:], counts, window)
    order = np.concatenate((ranked, np.setdiff1d(np.arange(B), rows, assume_unique=True)))
    return _in_batch_order(order, shared[:B], *_nest(shared))


def _common_pages(a: np.ndarray, b: np.ndarray, counts: np.ndarray, window: _Window) -> np.ndarray:
    """How many leading ids request ``a[i]`` has in common with ``b[i]``, window after window of the pairs still equal."""
    limit = np.minimum(counts[a], counts[b])
    common, pairs, at, width = limit.copy(), np.arange(len(a)), 0, _NARROW
    while len(pairs):
        differs = window(a[pairs], at, width) != window(b[pairs], at, width)
        where = differs.argmax(1)
        parted = differs[np.arange(len(pairs)), where]
        common[pairs[parted]] = np.minimum(at + where, limit[pairs])[parted]
        at += width
        pairs = pairs[~parted & (limit[pairs] > at)]
        width = max(_NARROW, _WINDOW_IDS // max(len(pairs), 1))
    return common


def _nest(shared: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Nested intervals of neighbours: ``[n, 4]`` columns parent, first, last, stop, and for each pair of neighbours the
    node that holds exactly what they share (-1: nothing). One step per change of ``shared``, with a stack of open nodes.
    """
    changes = np.flatnonzero(np.diff(shared, prepend=-1))
    nodes: list[list[int]] = []
    stack: list[int] = []
    holder = []
    for i, depth in zip(changes.tolist(), shared[changes].tolist(), strict=True):
        first = i
        while stack and nodes[stack[-1]][3] > depth:  # position i is the last one that shares so much
            node = nodes[stack.pop()]
            first, node[2] = node[1], i + 1
            inner = stack and nodes[stack[-1]][3] >= depth
            node[0] = stack[-1] if inner else len(nodes) if depth else -1  # else: the node about to open holds it
        if depth and not (stack and nodes[stack[-1]][3] == depth):
            stack.append(len(nodes))
            nodes.append([-1, first, -1, depth])
        holder.append(stack[-1] if stack else -1)
    lengths = np.diff(np.append(changes, len(shared)))
    return np.array(nodes, np.int64).reshape(-1, 4), np.repeat(np.array(holder, np.int64), lengths)


def _in_batch_order(order: np.ndarray, shared: np.ndarray, nodes: np.ndarray, holder: np.ndarray) -> Runs:
    """Put siblings in the order of their lowest request, and nodes in preorder.

    Siblings are the nodes and the private rests under one parent; each moves as a block.
    """
    parent, first, last, stop = nodes.T
    n, B = len(nodes), len(order)
    before = np.roll(shared, 1)  # what position p shares with p - 1; the entry after the last position is 0
    inner = np.where(shared >= before, holder[:B], np.roll(holder[:B], 1))  # innermost node of each position
    lowest = np.minimum.reduceat(np.append(order, B), np.stack((first, last), 1).ravel())[::2] if n else first
    above = np.concatenate((parent, inner))
    offset = _offsets(above, np.concatenate((lowest, order)), np.concatenate((last - first, np.ones(B, np.int64))))
    begin = [*offset[:n].tolist(), 0]  # 0: what the parent -1 adds
    up = parent.tolist()
    for i in np.argsort(stop).tolist():  # parents first
        begin[i] += begin[up[i]]
    position = offset[n:] + np.array(begin)[inner]
    moved = np.array(begin[:n], np.int64)
    preorder = np.lexsort((stop, moved))
    index = np.append(np.argsort(preorder), -1)
    parent, stop, moved = index[parent[preorder]], stop[preorder], moved[preorder]
    place = np.argsort(position)
    start = np.append(stop, 0)[parent]
    return Runs(order[place], parent, moved, moved + (last - first)[preorder], start, stop, np.maximum(shared, before)[place])


def _offsets(group: np.ndarray, rank: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Where each block begins within its group if the blocks of a group stand one after the other by rank."""
    by = np.lexsort((rank, group))
    ends = np.cumsum(size[by])
    opens = np.diff(group[by], prepend=-2) != 0
    base = (ends - size[by])[opens]
    offset = np.empty_like(ends)
    offset[by] = ends - size[by] - base[np.cumsum(opens) - 1]
    return offset
