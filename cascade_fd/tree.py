"""Who shares what: a forest of KV ranges over a batch of requests.

A *node* is a range of tokens of one table row, read by a run of requests that are neighbours in *tree order*. A request's
context is its chain of nodes from a root down; the last one, its *private* node, is read by it alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cascade_fd.checks import check_int
from cascade_fd.kv import PageTable, check_indptr, host_ints

NO_LIMIT = 1 << 40  # room of a dense row, which only the store knows


@dataclass(frozen=True, eq=False)
class Level:
    """One level of a tree as a caller declares it.

    Attributes:
        indptr: ``[n + 1]``: node i is read by requests ``indptr[i] .. indptr[i + 1] - 1``.
        lens: ``[n]`` tokens in each node.
        table: page ids with one row per node, counted from the node's first token. None: the level's tokens are found in
            the tree's own request table, or the level's KV store is dense and node i is its row i.
    """

    indptr: Any
    lens: Any
    table: PageTable | None = None


@dataclass(frozen=True, eq=False)
class Nodes:
    """All nodes of a tree as int64 arrays of length n on the host, parents before children.

    Attributes:
        parent: index of the node above; -1 for a root.
        first, last: positions ``[first, last)`` in tree order that read the node.
        level: which of the tree's tables (and of the KV stores, where ``attend`` is given several) holds its tokens.
        row: table row, or row of a dense store.
        start, stop: token range within that row.
        room: tokens the row has pages for.
    """

    parent: np.ndarray
    first: np.ndarray
    last: np.ndarray
    level: np.ndarray
    row: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    room: np.ndarray

    def __len__(self) -> int:
        return len(self.first)

    @classmethod
    def concatenate(cls, parts: Sequence[Nodes]) -> Nodes:
        return cls(*(np.concatenate([getattr(p, name) for p in parts]) for name in cls.__dataclass_fields__))


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """Nodes over a batch, and how many query rows each request has.

    Attributes:
        nodes: see ``Nodes``. The last B of them are the private nodes in tree order, if the tree has any.
        tables: page ids per level; None for a dense store.
        q_lens: ``[B]`` query rows of each request, in tree order.
        order: ``[B]`` request at each position of tree order; None if they are the same.
        has_private: whether every request has a private node.
        causal: whether a request's rows are causal among themselves: the last row sees every key of its private node,
            the one before it all but the last, and so on. One row per request sees all.
    """

    nodes: Nodes
    tables: tuple[PageTable | None, ...]
    q_lens: np.ndarray
    order: np.ndarray | None
    has_private: bool
    causal: bool

    @property
    def num_requests(self) -> int:
        return len(self.q_lens)

    @property
    def num_rows(self) -> int:
        return int(self.q_lens.sum())

    @property
    def num_shared(self) -> int:
        """Nodes that are not private."""
        return len(self.nodes) - (self.num_requests if self.has_private else 0)

    @classmethod
    def from_levels(
        cls, levels: Sequence[Level], *, q_lens: Any = 1, table: PageTable | None = None, causal: bool = True
    ) -> PrefixTree:
        """A tree from explicit levels, root first, private level last; tree order is request order.

        Args:
            levels: see ``Level``. Their ``indptr`` must cover the same requests and nest. The last level is private if it has
                one node per request.
            q_lens: query rows per request: one number, or ``[B]``.
            table: page ids with one row per *request*, counted from the request's first token. A shared node then reads
                the row of its first request, and starts where the level above it ends.
            causal: see ``PrefixTree``.

        Raises:
            ValueError: levels that do not nest, negative lengths, a table too short, or more draft rows than keys.

        Example:
            >>> tree = PrefixTree.from_levels([Level([0, 4], [4096]), Level([0, 1, 2, 3, 4], [7, 9, 0, 16])])
            >>> tree.num_requests, len(tree.nodes), tree.num_shared
            (4, 5, 1)
        """
        if not levels:
            raise ValueError("levels: expected at least one level, got none")
        ptrs = [check_indptr(f"levels[{i}].indptr", level.indptr) for i, level in enumerate(levels)]
        B = int(ptrs[0][-1])
        _check_nesting(ptrs, B)
        parts = _level_nodes(levels, ptrs, table)
        rows = _q_lens(q_lens, B)
        has_private = len(ptrs[-1]) == B + 1 and bool((np.diff(ptrs[-1]) == 1).all())
        if causal:
            _check_drafts(parts[-1], rows, has_private)
        tables = tuple(table if level.table is None else level.table for level in levels)
        return cls(Nodes.concatenate(parts), tables, rows, None, has_private, causal)


def _level_nodes(levels: Sequence[Level], ptrs: Sequence[np.ndarray], table: PageTable | None) -> list[Nodes]:
    start = np.zeros(int(ptrs[0][-1]), np.int64)  # tokens of each request above this level
    parts: list[Nodes] = []
    for i, (level, ptr) in enumerate(zip(levels, ptrs, strict=True)):
        parent = np.full(len(ptr) - 1, -1)
        if i:
            parent = sum(map(len, parts[:-1])) + np.searchsorted(ptrs[i - 1], ptr[:-1], side="right") - 1
        nodes = _nodes(f"levels[{i}]", level, i, ptr, parent, start, table)
        check_room(f"levels[{i}].lens", nodes, nodes.stop)
        start = start + np.repeat(nodes.stop - nodes.start, np.diff(ptr))
        parts.append(nodes)
    return parts


def _nodes(
    name: str, level: Level, index: int, ptr: np.ndarray, parent: np.ndarray, start: np.ndarray, table: PageTable | None
) -> Nodes:
    lens = host_ints(f"{name}.lens", level.lens)
    n = len(ptr) - 1
    if len(lens) != n or (lens < 0).any():
        raise ValueError(f"{name}.lens: expected {n} lengths of at least 0, got {lens[:8].tolist()}")
    first, last = ptr[:-1], ptr[1:]
    which = np.full(n, index)
    if level.table is None and table is not None:
        if table.num_rows != len(start):
            raise ValueError(f"table: expected one row per request ({len(start)}), got {table.num_rows}")
        if n and (first == last).any():
            raise ValueError(f"{name}.indptr: expected nodes of at least one request beside a request table, got an empty one")
        begin = start[first]
        return Nodes(parent, first, last, which, first, begin, begin + lens, table.room[first])
    if level.table is not None and level.table.num_rows != n:
        raise ValueError(f"{name}.table: expected one row per node ({n}), got {level.table.num_rows}")
    room = np.full(n, NO_LIMIT) if level.table is None else level.table.room
    return Nodes(parent, first, last, which, np.arange(n), np.zeros(n, np.int64), lens, room)


def check_room(name: str, nodes: Nodes, stop: np.ndarray) -> None:
    """No token before ``stop`` of a node may need more table entries than its row has."""
    bad = np.flatnonzero(stop > nodes.room)
    if len(bad):
        i = bad[0]
        raise ValueError(
            f"{name}: expected lengths that fit the table, got {stop[i]} tokens for node {i} of level {nodes.level[i]}, whose "
            f"table row has pages for {nodes.room[i]}"
        )


def _check_nesting(ptrs: Sequence[np.ndarray], B: int) -> None:
    for i, ptr in enumerate(ptrs):
        if ptr[-1] != B:
            raise ValueError(f"levels[{i}].indptr: expected it to end at {B} requests like levels[0], got {int(ptr[-1])}")
        if i and not np.isin(ptrs[i - 1], ptr).all():
            raise ValueError(f"levels[{i}].indptr: expected every node inside one node of levels[{i - 1}]")


def _q_lens(q_lens: Any, B: int) -> np.ndarray:
    one = isinstance(q_lens, (int, np.integer))
    lens = np.full(B, check_int("q_lens", q_lens, 0), np.int64) if one else host_ints("q_lens", q_lens)
    if len(lens) != B or (lens < 0).any():
        raise ValueError(f"q_lens: expected {B} row counts of at least 0, got {lens[:8].tolist()}")
    return lens


def _check_drafts(own: Nodes, q_lens: np.ndarray, has_private: bool) -> None:
    """A causal request needs as many private keys as query rows; no keys at all is a padded request and allowed."""
    if not has_private:
        if (q_lens > 1).any():
            raise ValueError(
                "levels: expected one private node per request in the last level, got nodes shared by requests of several "
                "query rows, whose causal order they cannot express; add a level of one node per request (lens may be 0)"
            )
        return
    keys = own.stop - own.start
    bad = np.flatnonzero((keys > 0) & (q_lens > keys))
    if len(bad):
        i = bad[0]
        raise ValueError(
            f"q_lens: expected at most as many query rows as private keys, got {q_lens[i]} rows for {keys[i]} keys "
            f"(request {own.first[i]})"
        )
