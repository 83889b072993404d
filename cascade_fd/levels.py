"""Nodes from levels that a caller declares: root first, private level last, each inside the one above."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cascade_fd.kv import PageTable, host_ints
from cascade_fd.nodes import NO_LIMIT, Nodes, check_room


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


def level_nodes(levels: Sequence[Level], ptrs: Sequence[np.ndarray], table: PageTable | None) -> list[Nodes]:
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


def check_nesting(ptrs: Sequence[np.ndarray], B: int) -> None:
    for i, ptr in enumerate(ptrs):
        if ptr[-1] != B:
            raise ValueError(f"levels[{i}].indptr: expected it to end at {B} requests like levels[0], got {int(ptr[-1])}")
        if i and not np.isin(ptrs[i - 1], ptr).all():
            raise ValueError(f"levels[{i}].indptr: expected every node inside one node of levels[{i - 1}]")


def check_drafts(own: Nodes, q_lens: np.ndarray, has_private: bool) -> None:
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
