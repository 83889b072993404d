"""Lay out a plan's arrays: number the partial states, list the items, bring everything to the device. NumPy on the host."""

from __future__ import annotations

import numpy as np
import torch

from cascade_fd.kv import PageTable
from cascade_fd.nodes import Nodes, offsets_of
from cascade_fd.planning.choice import Choice
from cascade_fd.planning.work import Frame, Group, Work, ceil
from cascade_fd.planning.worklist import (
    FIRST_SLOT,
    NODE,
    NUM_ROWS,
    OUT_ROW,
    PRIVATE_NODE,
    PRIVATE_START,
    Q_END,
    ROW0,
    START,
    STATE,
    STOP,
    TABLE_ROW,
    Cuts,
    Launch,
    MergeRows,
    Plan,
)
from cascade_fd.tree import PrefixTree

INT32_MAX = 2**31 - 1
INVARIANT_STATES = 32  # the merge's tile, whatever the most states of a row in this batch


def assemble(tree: PrefixTree, work: Work, groups: list[Group], frame: Frame, choice: Choice) -> Plan:
    """Number the states, build every array, and bring them to the device in one copy."""
    slots, is_direct, first_state = _states(tree, work)
    whole = _whole(tree, work, first_state)
    lens = np.empty(len(whole), np.int64)
    lens[whole[:, NODE]] = work.nodes.stop
    rows, merged, indptr = _row_tables(tree, work, slots, is_direct)
    ordered, states = frame.asked.split == "stream_k", int(slots.max(initial=1))
    items = [_items(tree, work, group, whole, ordered) for group in groups]
    floors = _floors(tree)
    arrays = _upload([rows.ravel(), merged, indptr, lens, floors, *(x.ravel() for x in items)], frame.device)
    launch_of = np.full(len(tree.nodes), -1)
    for launch, group in enumerate(groups):
        launch_of[group.nodes] = launch
    chained = frame.hardware.overlaps
    return Plan(
        launches=tuple(_launch(tree, work, *parts) for parts in zip(groups, items, arrays[5:], strict=True)),
        merge=MergeRows(
            arrays[2], arrays[1], INVARIANT_STATES if frame.asked.batch_invariant else states, chained and bool(groups)
        ),
        rows=arrays[0].view(-1, 4),
        lens=arrays[3],
        floors=arrays[4],
        num_slots=int(indptr[-1]),
        slots_used=int(indptr[-1]),
        chained=chained,
        shape=frame.shape,
        device=frame.device,
        hardware=frame.hardware,
        tree=tree,
        nodes=work.nodes,
        asked=frame.asked,
        choice=choice,
        cuts=Cuts(work.chunk, work.lead, work.splits),
        launch_of=launch_of,
        max_new_tokens=work.growth,
    )


def _states(tree: PrefixTree, work: Work) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Per request its workspace slots, and whether it is direct, see ``states_of``; per node its rows' first state or -1."""
    if not tree.num_shared:
        alone = work.splits == 1
        return np.where(alone, 0, work.splits), alone, -1 * alone
    nodes = work.nodes
    states, direct, is_direct = states_of(nodes, work.splits, tree.num_requests)
    return np.where(is_direct, 0, states), is_direct, np.where(direct, -1, nodes.sum_above(work.splits))


def states_of(nodes: Nodes, splits: np.ndarray, B: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Per request how many states; per node whether its rows have no other and are written directly; per request the same.

    Rows with one state are written directly, if that holds for all rows of the node that has it.
    """
    states = _per_request(nodes, splits, B)
    several = offsets_of(states != 1)
    direct = (splits == 1) & (several[nodes.last] == several[nodes.first])
    return states, direct, _per_request(nodes, direct, B) > 0


def _per_request(nodes: Nodes, values: np.ndarray, B: int) -> np.ndarray:
    """Sum of ``values`` over the nodes that each request (in tree order) reads."""
    change = np.bincount(nodes.first, values, B + 1) - np.bincount(nodes.last, values, B + 1)
    return np.cumsum(change[:B]).astype(np.int64)


def lens_index(tree: PrefixTree) -> np.ndarray:
    """Where in ``Plan.lens`` each node is: private nodes first, in request order."""
    if not tree.has_private:
        return np.arange(len(tree.nodes))
    B, shared = tree.num_requests, tree.num_shared
    index = np.arange(-shared, B)
    index[:shared] += B + shared
    if tree.order is not None:
        index[shared:] = tree.order
    return index


def _floors(tree: PrefixTree) -> np.ndarray:
    """See ``Plan.floors``. Without tokens above it, a request of length 0 is a padded one."""
    if not tree.has_private:
        return np.empty(0, np.int64)
    nodes, shared = tree.nodes, tree.num_shared
    floors = nodes.start[shared:]
    if not shared:
        floors = np.maximum(floors, 1)
    elif (floors == 0).any():
        floors = np.where(nodes.sum_above(nodes.stop - nodes.start)[shared:] > 0, floors, np.maximum(floors, 1))
    if tree.order is None:
        return floors
    in_order = np.empty_like(floors)
    in_order[tree.order] = floors
    return in_order


def _row_tables(
    tree: PrefixTree, work: Work, slots: np.ndarray, is_direct: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``Plan.rows``, and the rows and indptr of the merge."""
    B, T = tree.num_requests, tree.num_rows
    request = np.arange(B) if T == B and (tree.q_lens == 1).all() else np.repeat(np.arange(B), tree.q_lens)
    per_row = slots[request]
    last_slot = np.cumsum(per_row)
    rows = np.empty((T, 4), np.int64)
    rows[:, OUT_ROW] = np.arange(T) if tree.order is None else _row_order(tree, work.offsets)
    rows[:, FIRST_SLOT] = last_slot - per_row
    if tree.has_private:
        rows[:, PRIVATE_NODE] = request if tree.order is None else tree.order[request]
        rows[:, PRIVATE_START] = tree.nodes.start[tree.num_shared :][request]
    else:
        rows[:, PRIVATE_NODE:] = -1, 0
    merged = np.flatnonzero(~is_direct[request])
    total = last_slot[-1:] if T else np.zeros(1, np.int64)
    return rows, rows[merged, OUT_ROW], np.concatenate((rows[merged, FIRST_SLOT], total))


def _row_order(tree: PrefixTree, offsets: np.ndarray) -> np.ndarray:
    """Row in q of every row in tree order."""
    counts = np.empty_like(tree.q_lens)
    counts[tree.order] = tree.q_lens
    begin = offsets_of(counts)[tree.order]
    return np.repeat(begin - offsets[:-1], tree.q_lens) + np.arange(tree.num_rows)


def _whole(tree: PrefixTree, work: Work, first_state: np.ndarray) -> np.ndarray:
    """``[nodes, 8]`` every node as a single item, with its row instead of where that is in a table."""
    whole = np.zeros((len(tree.nodes), 8), np.int64)
    whole[:, ROW0], whole[:, NUM_ROWS], whole[:, TABLE_ROW] = work.row0, work.num_rows, work.nodes.row
    whole[:, START], whole[:, STOP] = work.nodes.start, work.stop
    whole[:, NODE], whole[:, STATE] = lens_index(tree), first_state
    if tree.causal and tree.has_private:
        whole[tree.num_shared :, Q_END] = work.offsets[1:]  # one past the last row of the request
    return whole


def _items(tree: PrefixTree, work: Work, group: Group, whole: np.ndarray, ordered: bool) -> np.ndarray:
    """``[N, 8]`` items of some nodes: by node, then split, then row tile, so that tiles of one KV range run side by side."""
    tile, mine = group.tile, group.nodes
    table = tree.tables[int(tree.nodes.level[mine[0]])]
    tiles = ceil(work.num_rows[mine], tile.block_m)
    counts = work.splits[mine] * tiles
    total = int(counts.sum())
    items = whole[mine]
    if total != len(mine):  # several splits or row tiles
        node = np.repeat(mine, counts)
        items = whole[node]
        split = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
        if tiles.max() > 1:
            split, row_tile = np.divmod(split, np.repeat(tiles, counts))
            offset = row_tile * tile.block_m
            items[:, ROW0] += offset
            items[:, NUM_ROWS] = np.minimum(tile.block_m, items[:, NUM_ROWS] - offset)
        chunk = work.chunk[node]
        begin = split * chunk - work.lead[node]
        items[:, STOP] = np.minimum(items[:, START] + begin + chunk, items[:, STOP])
        items[:, START] += np.maximum(begin, 0)
        items[:, STATE] += split * (items[:, STATE] >= 0)
    if table is not None:
        items[:, TABLE_ROW] = table.starts[items[:, TABLE_ROW]]
    if ordered:
        return items
    cost = items[:, START] - items[:, STOP]
    # Long items first, so that none starts when the others end; equal ones (and tiles of one range) stay side by side.
    return items[np.argsort(cost, kind="stable")] if cost.min() != cost.max() else items


def _launch(tree: PrefixTree, work: Work, group: Group, items: np.ndarray, buffer: torch.Tensor) -> Launch:
    nodes, mine = tree.nodes, group.nodes
    levels = nodes.level[mine]
    one_level = levels[0] == levels[-1] or len(set(levels.tolist())) == 1
    table = tree.tables[int(levels[0])]
    return Launch(
        items=buffer.view(-1, 8),
        ids=table.ids.to(buffer.device) if table else None,
        page_size=table.page_size if table else 0,
        table_stride=table.stride if table else 0,
        levels=(int(levels[0]),) if one_level else tuple(sorted(set(levels.tolist()))),
        tile=group.tile,
        max_tokens=int((items[:, STOP] - items[:, START]).max()),
        id_range=_id_range(work.nodes, mine, table) if table else None,
        max_row=0 if table else int(nodes.row[mine].max()),
        max_stop=int(work.stop[mine].max()),
        count=len(items),
        direct=bool((items[:, STATE] < 0).any()),
    )


def _id_range(nodes: Nodes, mine: np.ndarray, table: PageTable) -> tuple[int, int] | None:
    if table.ids.device.type != "cpu":
        return None
    return table.host_range(nodes.row[mine], nodes.start[mine] // table.page_size, ceil(nodes.stop[mine], table.page_size))


def _upload(arrays: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """All arrays as int32 on ``device`` with one copy, each starting at a multiple of 16 bytes."""
    sizes = [len(a) for a in arrays]
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + ceil(size, 4) * 4)
    wide = np.zeros(offsets[-1], np.int64)
    for array, at in zip(arrays, offsets, strict=False):
        wide[at : at + len(array)] = array
    if len(wide) and wide.max() > INT32_MAX:
        raise ValueError("tree: expected row, slot and token counts below 2**31, got a batch that needs more")
    there = torch.from_numpy(wide.astype(np.int32)).to(device, non_blocking=True)
    return [there[at : at + n] for at, n in zip(offsets, sizes, strict=False)]
