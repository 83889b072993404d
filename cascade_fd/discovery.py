"""Which requests share which leading pages, found from page ids alone. NumPy on the host.

Exact: ids are compared, never hashed. A round compares every request of a group with one of them. Those that leave that
one's path at the same place by the same id are a group of the next round, compared from there on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

# Most ids of a pair, and of all pairs, that are compared at once: fewer take more steps, more leave the core's cache.
_WIDTH, _WINDOW_IDS = 1024, 1 << 17


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
    ids, step = _flat(table)
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


def _flat(table: np.ndarray) -> tuple[np.ndarray, int]:
    """The table as one list, and the distance from row to row in it. A view, unless the strides are unusual."""
    B, W = table.shape
    step, rest = divmod(table.strides[0], table.itemsize)
    if not table.size or rest or step < 0 or table.strides[1] != table.itemsize:
        return np.ascontiguousarray(table).ravel(), W
    return np.lib.stride_tricks.as_strided(table, ((B - 1) * step + W,), (table.itemsize,)), step


def _runs(ids: np.ndarray, begin: np.ndarray, counts: np.ndarray) -> Runs:
    """Runs of a batch whose request b has the ids ``ids[begin[b] : begin[b] + counts[b]]``.

    Work is what it takes to read every shared page about once; rounds are few (about log2 B, one if no shared run branches
    off another), unless the batch is arranged so that each round's leader leaves its group's path first.
    """
    B = len(counts)
    rows = np.flatnonzero(counts)
    rows = rows[ids[begin[rows]].argsort(kind="stable")]
    some, group = _company(_changes(ids[begin[rows]]))
    rows = rows[some]
    above, done = np.full(len(rows), -1), np.ones(len(rows), np.int64)  # node above each group, and ids known to be shared
    nodes, inner, n = [np.empty((4, 0), np.int64)], np.full(B, -1), 0
    while len(rows):
        depth = _depths(ids, begin[rows], counts[rows], group, done)
        more = depth < counts[rows]
        then = ids[np.where(more, begin[rows] + depth, 0)]  # the id by which a row leaves its leader
        place = (group << 32) + (depth << 1) + more
        by = np.lexsort((then, place))
        rows, group, above, depth, place, then = rows[by], group[by], above[by], depth[by], place[by], then[by]
        fresh = _changes(place >> 1)  # a node per depth at which a group splits; deeper rows of the group follow and share it
        first = fresh.nonzero()[0]
        node = fresh.cumsum() + (n - 1)
        root = _changes(group[first])
        nodes.append(_nodes(B, rows, group, first, np.where(root, above[first], node[first] - 1), depth))
        inner[rows] = node
        n += len(first)
        some, group = _company(_changes(place, then) | (place & 1 == 0))
        rows, above, done = rows[some], node[some], depth[some] + 1
    return _in_batch_order(np.concatenate(nodes, 1), inner)


def _nodes(B: int, rows: np.ndarray, group: np.ndarray, first: np.ndarray, parent: np.ndarray, depth: np.ndarray) -> np.ndarray:
    """``[4, n]`` parent, stop, number of requests and lowest request of nodes from ``first`` to the end of their group."""
    ends = group.searchsorted(group[first], side="right")
    # Later groups are lifted above earlier ones, so a minimum that runs backwards starts anew with each group.
    lowest = np.minimum.accumulate((rows + group * B)[::-1])[::-1][first] - group[first] * B
    return np.stack((parent, depth[first], ends - first, lowest))


def _changes(*keys: np.ndarray) -> np.ndarray:
    """True where any of the sorted keys differs from the entry before it, and on the first entry."""
    change = np.ones(len(keys[0]), bool)
    np.not_equal(keys[0][1:], keys[0][:-1], out=change[1:])
    for key in keys[1:]:
        change[1:] |= key[1:] != key[:-1]
    return change


def _company(opens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which entries are not alone in their group, and the numbers of their groups; groups begin where ``opens``."""
    some = ~opens
    some[:-1] |= some[1:]
    return some, opens[some].cumsum() - 1


def _depths(ids: np.ndarray, begin: np.ndarray, counts: np.ndarray, group: np.ndarray, done: np.ndarray) -> np.ndarray:
    """How many leading ids each row shares with the leader of its group, and the leader with the closest of the others."""
    opens = _changes(group).nonzero()[0]
    # The middle one: a chain in batch order, where every request leaves the path a bit later, then halves in each round.
    leader = opens.copy()
    leader[:-1] += opens[1:]
    leader[-1] += len(group)
    leader //= 2
    other = leader[group]
    limit = np.minimum(counts, counts[other])
    limit[leader] = 0
    depth = _common(ids, begin, begin[other], limit, done)
    depth[leader] = np.maximum.reduceat(depth, opens)
    return depth


def _common(ids: np.ndarray, a: np.ndarray, b: np.ndarray, limit: np.ndarray, done: np.ndarray) -> np.ndarray:
    """How many ids, at most ``limit``, agree from ``a[i]`` and from ``b[i]`` on; the first ``done`` do. Window by window."""
    common, pairs = limit.copy(), (done < limit).nonzero()[0]
    at, left, starts = done[pairs], (limit - done)[pairs], np.stack((a + done, b + done))[:, pairs]
    while len(pairs):
        width = min(_WIDTH, -(-_WINDOW_IDS // len(pairs)), int(left.max()))
        differs = np.not_equal(*_windows(ids, starts, width))  # the ids are not kept: new memory costs more than comparing
        where = differs.argmax(1)
        parted = differs[np.arange(len(pairs)), where]
        found = parted & (where < left)
        common[pairs[found]] = (at + where)[found]
        going = (left > width) & ~parted
        pairs, at, left, starts = pairs[going], at[going] + width, left[going] - width, starts[:, going] + width
    return common


def _windows(ids: np.ndarray, first: np.ndarray, width: int) -> np.ndarray:
    """``[..., width]`` ids from each ``first`` on; what lies beyond the request's own is for the caller to ignore."""
    step, last = ids.itemsize, len(ids) - width
    windows = np.ndarray((last + 1, width), ids.dtype, ids, 0, (step, step))  # sliding_window_view, without the time it takes
    block = windows[np.minimum(first, last)]
    late = first > last
    if late.any():
        block[late] = ids.take(first[late][:, None] + np.arange(width), mode="clip")
    return block


def _in_batch_order(nodes: np.ndarray, inner: np.ndarray) -> Runs:
    """Runs from nodes (rows as of ``_nodes``, parents before children) and the innermost node of each request (-1: none).

    Siblings, which are the nodes and the private rests under one parent, stand in the order of their lowest request.
    """
    parent, stop, size, lowest = nodes
    n, B = len(parent), len(inner)
    above, rank = np.concatenate((parent, inner)), np.concatenate((lowest, np.arange(B)))
    offset = _offsets(above, rank, np.concatenate((size, np.ones(B, np.int64))))
    begin = [*offset[:n].tolist(), 0]  # 0: what the parent -1 adds
    for i, up in enumerate(parent.tolist()):
        begin[i] += begin[up]
    first = np.array(begin)
    order = np.argsort(offset[n:] + first[inner])
    own = np.append(stop, 0)[inner][order]
    preorder = np.lexsort((stop, first[:n]))
    index = np.append(np.argsort(preorder), -1)
    parent, first, stop, size = index[parent[preorder]], first[preorder], stop[preorder], size[preorder]
    return Runs(order, parent, first, first + size, np.append(stop, 0)[parent], stop, own)


def _offsets(group: np.ndarray, rank: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Where each block begins within its group if the blocks of a group stand one after the other by rank."""
    by = np.lexsort((rank, group))
    ends = np.cumsum(size[by])
    opens = _changes(group[by])
    base = (ends - size[by])[opens]
    offset = np.empty_like(ends)
    offset[by] = ends - size[by] - base[np.cumsum(opens) - 1]
    return offset
