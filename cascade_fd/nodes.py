"""The nodes of a prefix tree as plain arrays, and the nodes that discovered runs make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cascade_fd.checks import check_int
from cascade_fd.discovery import Runs
from cascade_fd.kv import host_ints

NO_LIMIT = 1 << 40  # room of a dense row, which only the store knows


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

    def sum_above(self, values: np.ndarray) -> np.ndarray:
        """Per node, the sum of ``values [n]`` over the nodes above it."""
        above = np.zeros(len(self), np.int64)
        ancestor = self.parent.copy()
        live = np.flatnonzero(ancestor >= 0)
        while len(live):
            above[live] += values[ancestor[live]]
            ancestor[live] = self.parent[ancestor[live]]
            live = live[ancestor[live] >= 0]
        return above

    def fold(self, folded: np.ndarray) -> Nodes:
        """The same ranges with ``folded [n]`` nodes empty, and their children starting where they did."""
        start = self.start.copy()
        moves = np.flatnonzero((self.parent >= 0) & folded[self.parent])
        while True:
            before = start[moves]
            start[moves] = start[self.parent[moves]]
            if (before == start[moves]).all():
                break
        return replace(self, start=start, stop=np.where(folded, start, self.stop))

    @classmethod
    def concatenate(cls, parts: Sequence[Nodes]) -> Nodes:
        """One after the other; ``parent`` must count over all of them already."""
        return cls(*(np.concatenate([getattr(p, name) for p in parts]) for name in cls.__dataclass_fields__))


def check_room(name: str, nodes: Nodes, stop: np.ndarray) -> None:
    """No token before ``stop`` of a node may need more table entries than its row has."""
    bad = np.flatnonzero(stop > nodes.room)
    if len(bad):
        i = bad[0]
        raise ValueError(
            f"{name}: expected lengths that fit the table, got {stop[i]} tokens for node {i} of level {nodes.level[i]}, whose "
            f"table row has pages for {nodes.room[i]}"
        )


def nodes_of_runs(runs: Runs, page_size: int, seq_lens: np.ndarray, room: np.ndarray) -> Nodes:
    """Shared nodes, then one private node per request in tree order, all in one table of a row per request.

    A shared node reads the row of its first request in tree order.
    """
    B, n = len(runs.order), len(runs)
    # A request's innermost run is the last that begins at or before it of those that stop where its own pages begin.
    place = runs.stop * B + runs.first
    by_place = place.argsort()
    found = place[by_place].searchsorted(runs.own * B + np.arange(B), side="right") - 1
    deepest = np.where(runs.own > 0, np.append(by_place, -1)[found], -1)
    row = np.concatenate([runs.order[runs.first], runs.order])
    position = np.arange(B)
    return Nodes(
        parent=np.concatenate([runs.parent, deepest]),
        first=np.concatenate([runs.first, position]),
        last=np.concatenate([runs.last, position + 1]),
        level=np.zeros(n + B, np.int64),
        row=row,
        start=np.concatenate([runs.start, runs.own]) * page_size,
        stop=np.concatenate([runs.stop * page_size, seq_lens[runs.order]]),
        room=room[row],
    )


def row_counts(q_lens: Any, B: int) -> np.ndarray:
    """``q_lens``, one number or ``[B]``, as ``[B]``."""
    one = isinstance(q_lens, (int, np.integer))
    lens = np.full(B, check_int("q_lens", q_lens, 0), np.int64) if one else host_ints("q_lens", q_lens)
    if len(lens) != B or (lens < 0).any():
        raise ValueError(f"q_lens: expected {B} row counts of at least 0, got {lens[:8].tolist()}")
    return lens


def offsets_of(counts: np.ndarray) -> np.ndarray:
    """``[0, c0, c0 + c1, ...]``."""
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets
