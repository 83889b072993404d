"""Lay out a plan's arrays: number the partial states, list the items, bring everything to the device. NumPy on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cascade_fd.kv import PageTable
from cascade_fd.nodes import Nodes, check_room, offsets_of
from cascade_fd.planning.worklist import (
    FIRST_SLOT,
    NODE,
    NUM_ROWS,
    OUT_ROW,
    PRIVATE_NODE,
    PRIVATE_START,
    ROW0,
    START,
    STATE,
    STOP,
    TABLE_ROW,
    Launch,
    MergeRows,
    Plan,
    Shape,
)
from cascade_fd.tiles import AttendTile
from cascade_fd.tree import PrefixTree

INT32_MAX = 2**31 - 1
Group = tuple[AttendTile, np.ndarray]  # the nodes of one launch


@dataclass(eq=False)
class Work:
    """A plan in the making: arrays with one entry per node.

    Attributes:
        stop: capacity: the nodes' stop, plus max_new_tokens for private nodes.
        tokens: ``stop - start``; 0 if nobody reads the node.
        growth: max_new_tokens.
        row0, num_rows: packed rows.
        chunk, splits: tokens per split, and how many that makes; 0 for a node without keys or rows. Set by the planner.
    """

    nodes: Nodes
    stop: np.ndarray
    growth: int
    tokens: np.ndarray
    row0: np.ndarray
    num_rows: np.ndarray
    chunk: np.ndarray
    splits: np.ndarray

    @classmethod
    def measure(cls, tree: PrefixTree, shape: Shape, growth: int) -> Work:
        nodes = tree.nodes
        stop = nodes.stop
        if growth:
            stop = stop.copy()
            stop[tree.num_shared :] += growth
            check_room("max_new_tokens", nodes, stop)
        offsets = offsets_of(tree.q_lens) * shape.group
        row0 = offsets[nodes.first]
        num_rows = offsets[nodes.last] - row0
        tokens = np.where(num_rows > 0, stop - nodes.start, 0)
        return cls(nodes, stop, growth, tokens, row0, num_rows, np.ones_like(stop), np.zeros_like(stop))


def ceil(a: Any, b: Any) -> Any:
    return -(-a // b)


def assemble(
    tree: PrefixTree, shape: Shape, device: torch.device, work: Work, groups: list[Group], most_states: int = 0
) -> Plan:
    """Number the states, build every array, and bring them to the device in one copy.

    ``most_states`` fixes the merge's tile; by default it follows the batch.
    """
    states = _per_request(work.nodes, work.splits, tree.num_requests)
    others = offsets_of(states != 1)
    direct = (work.splits == 1) & (others[work.nodes.last] == others[work.nodes.first])
    is_direct = _per_request(work.nodes, direct, tree.num_requests) > 0
    slots = np.where(is_direct, 0, states)
    rows, merged, indptr = _row_tables(tree, slots, is_direct)
    ids, lens = _lengths(tree)
    above = work.nodes.sum_above(work.splits)  # states of a node's rows before its own
    columns = np.empty((len(ids), 3), np.int64)
    columns[:, 0], columns[:, 1], columns[:, 2] = ids, _q_end(tree), np.where(direct, -1, above)
    items = [_items(tree, work, nodes, tile, columns) for tile, nodes in groups]
    buffers = _upload([rows.ravel(), merged, indptr, lens, *(x.ravel() for x in items)], device)
    launch_of = np.full(len(tree.nodes), -1)
    for launch, (_, nodes) in enumerate(groups):
        launch_of[nodes] = launch
    launches = [_launch(tree, work, *group, i, b) for group, i, b in zip(groups, items, buffers[4:], strict=True)]
    return Plan(
        launches=tuple(launches),
        merge=MergeRows(buffers[2], buffers[1], most_states or int(slots.max(initial=1))),
        rows=buffers[0].view(-1, 4),
        lens=buffers[3],
        num_slots=int(indptr[-1]),
        num_private=len(tree.nodes) - tree.num_shared,
        shape=shape,
        device=device,
        tree=tree,
        splits=work.splits,
        launch_of=launch_of,
        max_new_tokens=work.growth,
    )


def _per_request(nodes: Nodes, values: np.ndarray, B: int) -> np.ndarray:
    """Sum of ``values`` over the nodes that each request (in tree order) reads."""
    if len(nodes) == B and nodes.parent.max(initial=-1) < 0 and (nodes.last - nodes.first == 1).all():
        return values.astype(np.int64)  # nothing is shared
    change = np.bincount(nodes.first, values, B + 1) - np.bincount(nodes.last, values, B + 1)
    return np.cumsum(change[:B]).astype(np.int64)


def _row_tables(tree: PrefixTree, slots: np.ndarray, is_direct: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``Plan.rows``, and the rows and indptr of the merge."""
    request = np.repeat(np.arange(tree.num_requests), tree.q_lens)
    per_row = slots[request]
    rows = np.empty((len(request), 4), np.int64)
    rows[:, OUT_ROW] = np.arange(len(request)) if tree.order is None else _row_order(tree)
    rows[:, FIRST_SLOT] = np.cumsum(per_row) - per_row
    rows[:, PRIVATE_NODE:] = -1, 0
    if tree.has_private:
        position = request if tree.order is None else tree.order[request]
        rows[:, PRIVATE_NODE] = tree.num_shared + position
        rows[:, PRIVATE_START] = tree.nodes.start[tree.num_shared + request]
    merged = np.flatnonzero(~is_direct[request])
    return rows, rows[merged, OUT_ROW], np.append(rows[merged, FIRST_SLOT], per_row.sum())


def _row_order(tree: PrefixTree) -> np.ndarray:
    """Row in q of every row in tree order."""
    counts = np.empty_like(tree.q_lens)
    counts[tree.order] = tree.q_lens
    begin = offsets_of(counts)[tree.order]
    return np.repeat(begin - offsets_of(tree.q_lens)[:-1], tree.q_lens) + np.arange(tree.num_rows)


def _lengths(tree: PrefixTree) -> tuple[np.ndarray, np.ndarray]:
    """Index of every node in ``Plan.lens`` (private nodes in request order), and the array."""
    ids = np.arange(len(tree.nodes))
    if tree.order is not None and tree.has_private:
        ids[tree.num_shared :] = tree.num_shared + tree.order
    lens = np.empty_like(tree.nodes.stop)
    lens[ids] = tree.nodes.stop
    return ids, lens


def _q_end(tree: PrefixTree) -> np.ndarray:
    """One past the last row of a private node's request where rows are causal; 0 elsewhere."""
    q_end = np.zeros(len(tree.nodes), np.int64)
    if tree.causal and tree.has_private:
        q_end[tree.num_shared :] = offsets_of(tree.q_lens)[1:]
    return q_end


def _items(tree: PrefixTree, work: Work, mine: np.ndarray, tile: AttendTile, columns: np.ndarray) -> np.ndarray:
    """``[N, 8]`` items of some nodes: by node, then split, then row tile, so that tiles of one KV range run side by side.

    ``columns [nodes, 3]``: NODE, Q_END, and the STATE of the node's first split or -1.
    """
    nodes = work.nodes
    table = tree.tables[int(nodes.level[mine[0]])]
    tiles = ceil(work.num_rows[mine], tile.block_m)
    counts = work.splits[mine] * tiles
    node = np.repeat(mine, counts)
    local = np.arange(len(node)) - np.repeat(offsets_of(counts)[:-1], counts)
    split, row_tile = np.divmod(local, np.repeat(tiles, counts))
    offset = row_tile * tile.block_m
    items = np.empty((len(node), 8), np.int64)
    items[:, ROW0] = work.row0[node] + offset
    items[:, NUM_ROWS] = np.minimum(tile.block_m, work.num_rows[node] - offset)
    items[:, TABLE_ROW] = nodes.row[node] if table is None else table.starts[nodes.row[node]]
    items[:, START] = nodes.start[node] + split * work.chunk[node]
    items[:, STOP] = np.minimum(items[:, START] + work.chunk[node], work.stop[node])
    items[:, NODE:] = columns[node]
    items[:, STATE] += np.where(items[:, STATE] < 0, 0, split)
    cost = items[:, START] - items[:, STOP]
    # Long items first, so that none starts when the others end; equal ones (and tiles of one range) stay side by side.
    return items[np.argsort(cost, kind="stable")] if cost.min() != cost.max() else items


def _launch(
    tree: PrefixTree, work: Work, tile: AttendTile, mine: np.ndarray, items: np.ndarray, buffer: torch.Tensor
) -> Launch:
    nodes = tree.nodes
    levels = nodes.level[mine]
    one_level = levels[0] == levels[-1] or len(set(levels.tolist())) == 1
    table = tree.tables[int(levels[0])]
    return Launch(
        items=buffer.view(-1, 8),
        ids=table.ids.to(buffer.device) if table else None,
        page_size=table.page_size if table else 0,
        table_stride=table.stride if table else 0,
        levels=(int(levels[0]),) if one_level else tuple(sorted(set(levels.tolist()))),
        tile=tile,
        max_tokens=int(items[0, STOP] - items[0, START]),  # long items come first
        id_range=_id_range(nodes, mine, table) if table else None,
        max_row=0 if table else int(nodes.row[mine].max()),
        max_stop=int(work.stop[mine].max()),
    )


def _id_range(nodes: Nodes, mine: np.ndarray, table: PageTable) -> tuple[int, int] | None:
    if table.ids.device.type != "cpu":
        return None
    return table.host_range(nodes.row[mine], nodes.start[mine] // table.page_size, ceil(nodes.stop[mine], table.page_size))


def _upload(arrays: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """All arrays as int32 on ``device`` with one copy, each starting at a multiple of 16 bytes."""
    sizes = [len(a) for a in arrays]
    offsets = offsets_of(np.array([ceil(n, 4) * 4 for n in sizes]))
    wide = np.zeros(offsets[-1], np.int64)
    for array, at in zip(arrays, offsets, strict=False):
        wide[at : at + len(array)] = array
    if len(wide) and wide.max() > INT32_MAX:
        raise ValueError("tree: expected row, slot and token counts below 2**31, got a batch that needs more")
    packed = torch.from_numpy(wide.astype(np.int32)).to(device, non_blocking=True)
    return [packed[at : at + n] for at, n in zip(offsets.tolist(), sizes, strict=False)]
