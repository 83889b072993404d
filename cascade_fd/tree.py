"""Who shares what: a forest of KV ranges over a batch of requests.

A *node* is a range of tokens ``[start, stop)`` of one table row, read by a run of neighbouring requests. Nodes of one level
do not overlap; every node of a deeper level lies inside one node of the level above. The last level is each request's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cascade_fd.checks import check_int
from cascade_fd.kv import PageTable, check_indptr, host_ints


@dataclass(frozen=True, eq=False)
class Level:
    """One level of a tree as a caller declares it.

    Attributes:
        indptr: ``[n + 1]``: node i is read by requests ``indptr[i] .. indptr[i + 1] - 1``.
        lens: ``[n]`` tokens in each node.
        table: page ids with one row per node, counted from the node's first token. None: the level's tokens are found in the
            tree's own request table, or the level's KV store is dense and node i is its row i.
    """

    indptr: Any
    lens: Any
    table: PageTable | None = None


@dataclass(frozen=True, eq=False)
class Nodes:
    """All nodes of one level as arrays of length n (int64, host), in request order.

    Attributes:
        first, last: requests ``[first, last)`` read the node.
        row: table row (or row of a dense store) that holds its tokens.
        start, stop: token range within that row.
        table: the page ids, or None for a dense store.
    """

    first: np.ndarray
    last: np.ndarray
    row: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    table: PageTable | None

    def __len__(self) -> int:
        return len(self.first)


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """Levels of nodes over a batch, and how many query rows each request has.

    Attributes:
        levels: from the root down; the last one holds the private ranges.
        q_indptr: ``[B + 1]``: request b owns query rows ``q_indptr[b] .. q_indptr[b + 1] - 1``.
        causal: whether a request's rows are causal among themselves: the last row sees every key of its private node,
            the one before it all but the last, and so on. Always so for one row per request.
    """

    levels: tuple[Nodes, ...]
    q_indptr: np.ndarray
    causal: bool = True

    @property
    def num_requests(self) -> int:
        return len(self.q_indptr) - 1

    @property
    def num_rows(self) -> int:
        return int(self.q_indptr[-1])

    @classmethod
    def from_levels(
        cls, levels: Sequence[Level], *, q_lens: Any = 1, table: PageTable | None = None, causal: bool = True
    ) -> PrefixTree:
        """A tree from explicit levels, root first, private level last.

        Args:
            levels: see ``Level``. Their ``indptr`` must cover the same requests and nest.
            q_lens: query rows per request: one number, or ``[B]``.
            table: page ids with one row per *request*, counted from the request's first token. A shared node then reads the
                row of its first request, and starts where the level above it ends.
            causal: see ``PrefixTree``.

        Raises:
            ValueError: levels that do not nest, negative lengths, a table too short, or more draft rows than keys.

        Example:
            >>> tree = PrefixTree.from_levels([Level([0, 4], [4096]), Level([0, 1, 2, 3, 4], [7, 9, 0, 16])])
            >>> tree.num_requests, len(tree.levels)
            (4, 2)
        """
        if not levels:
            raise ValueError("levels: expected at least one level, got none")
        ptrs = [check_indptr(f"levels[{i}].indptr", level.indptr) for i, level in enumerate(levels)]
        B = int(ptrs[0][-1])
        _check_nesting(ptrs, B)
        q_indptr = _q_indptr(q_lens, B)
        built, start = [], np.zeros(B, np.int64)  # start: tokens of each request above this level
        for i, (level, ptr) in enumerate(zip(levels, ptrs, strict=True)):
            nodes = _nodes(f"levels[{i}]", level, ptr, start, table)
            check_capacity(f"levels[{i}].lens", nodes, nodes.stop)
            start = start + np.repeat(nodes.stop - nodes.start, np.diff(ptr))
            built.append(nodes)
        tree = cls(tuple(built), q_indptr, causal)
        _check_drafts(tree)
        return tree


def _nodes(name: str, level: Level, ptr: np.ndarray, start: np.ndarray, table: PageTable | None) -> Nodes:
    lens = host_ints(f"{name}.lens", level.lens)
    n = len(ptr) - 1
    if len(lens) != n or (lens < 0).any():
        raise ValueError(f"{name}.lens: expected {n} lengths of at least 0, got {lens[:8].tolist()}")
    first, last = ptr[:-1], ptr[1:]
    if level.table is None and table is not None:
        if table.num_rows != len(start):
            raise ValueError(f"table: expected one row per request ({len(start)}), got {table.num_rows}")
        begin = start[np.minimum(first, len(start) - 1)] if len(start) else np.zeros(n, np.int64)
        return Nodes(first, last, first, begin, begin + lens, table)
    if level.table is not None and level.table.num_rows != n:
        raise ValueError(f"{name}.table: expected one row per node ({n}), got {level.table.num_rows}")
    return Nodes(first, last, np.arange(n), np.zeros(n, np.int64), lens, level.table)


def check_capacity(name: str, nodes: Nodes, stop: np.ndarray) -> None:
    """No token past ``stop`` of a node may need more table entries than its row has."""
    if nodes.table is None:
        return
    room = nodes.table.widths[nodes.row] * nodes.table.page_size
    bad = np.flatnonzero(stop > room)
    if len(bad):
        i = bad[0]
        raise ValueError(
            f"{name}: expected lengths that fit the table, got {stop[i]} tokens for node {i} whose table row holds "
            f"{room[i]} ({nodes.table.widths[nodes.row[i]]} pages of {nodes.table.page_size})"
        )


def _check_nesting(ptrs: Sequence[np.ndarray], B: int) -> None:
    for i, ptr in enumerate(ptrs):
        if ptr[-1] != B:
            raise ValueError(f"levels[{i}].indptr: expected it to end at {B} requests like levels[0], got {int(ptr[-1])}")
        if i and not np.isin(ptrs[i - 1], ptr).all():
            raise ValueError(f"levels[{i}].indptr: expected every node inside one node of levels[{i - 1}]")


def _q_indptr(q_lens: Any, B: int) -> np.ndarray:
    one = isinstance(q_lens, (int, np.integer))
    lens = np.full(B, check_int("q_lens", q_lens, 0), np.int64) if one else host_ints("q_lens", q_lens)
    if len(lens) != B or (lens < 0).any():
        raise ValueError(f"q_lens: expected {B} row counts of at least 0, got {lens[:8].tolist()}")
    return np.concatenate(([0], np.cumsum(lens)))


def _check_drafts(tree: PrefixTree) -> None:
    """A causal request needs as many keys as query rows; no keys at all is a padded request and allowed."""
    own = tree.levels[-1]
    alone = own.last - own.first == 1
    q = tree.q_indptr[own.last] - tree.q_indptr[own.first]
    keys = own.stop - own.start
    several = np.diff(tree.q_indptr) > 1
    if tree.causal and (several & ~np.repeat(alone, own.last - own.first)).any():
        raise ValueError(
            "levels: expected one private node per request in the last level, got one shared by requests of several query "
            "rows, whose causal order it cannot express; add a level of one node per request (lens may be 0)"
        )
    bad = np.flatnonzero(tree.causal & alone & (keys > 0) & (q > keys))
    if len(bad):
        i = bad[0]
        raise ValueError(
            f"q_lens: expected at most as many query rows as private keys, got {q[i]} rows for {keys[i]} keys "
            f"(request {own.first[i]})"
        )
