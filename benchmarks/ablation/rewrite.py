"""Plans made over: other rows per program, other splits, launches in sequence. What an item means stays as ``Launch`` says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from cascade_fd.planning.planner import plan
from cascade_fd.planning.worklist import NUM_ROWS, OUT_ROW, ROW0, START, STOP, Launch, Plan
from cascade_fd.tiles import attend_tile


def replanned(old: Plan, split: str | int) -> Plan:
    """The same tree, cut otherwise."""
    shape = old.shape
    heads = {"num_q_heads": shape.num_q_heads, "num_kv_heads": shape.num_kv_heads, "head_dim": shape.head_dims}
    return plan(old.tree, **heads, dtype=shape.dtype, device=old.device, split=split, hardware=old.hardware)


def in_sequence(old: Plan) -> Plan:
    """Every launch, the merge too, begins when the one before it has ended."""
    return replace(old, chained=False, merge=replace(old.merge, chained=False))


def with_rows(old: Plan, most: int) -> Plan:
    """No item of more than ``most`` packed rows, in the smallest tile that holds them.

    With most = 1 each query head has programs of its own; with G, each query row. A row's states keep their places.
    """
    return replace(old, launches=tuple(_with_rows(old, launch, most) for launch in old.launches))


def _with_rows(old: Plan, launch: Launch, most: int) -> Launch:
    items = launch.items.cpu().numpy()
    if items[:, NUM_ROWS].max(initial=0) <= most:
        return launch
    counts = np.maximum(-(-items[:, NUM_ROWS] // most), 1)
    offset = (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)) * most
    items = np.repeat(items, counts, 0)
    items[:, ROW0] += offset.astype(np.int32)
    items[:, NUM_ROWS] = np.minimum(items[:, NUM_ROWS] - offset, most)
    shape = old.shape
    tile = attend_tile(old.hardware, shape.dtype, shape.head_dims, most, len(items) * shape.num_kv_heads)
    return replace(launch, items=torch.from_numpy(items).to(launch.items.device), tile=tile, count=len(items))


def state_counts(plan: Plan) -> torch.Tensor:
    """``[T]`` int32: partial states of each row in tree order; 0 where it is written directly."""
    counts = plan.merge.indptr.diff().to(torch.int32)
    by_out = torch.zeros(plan.num_rows, dtype=torch.int32, device=counts.device)
    by_out[slice(None) if plan.merge.rows is None else plan.merge.rows.long()] = counts
    return by_out[plan.rows[:, OUT_ROW].long()]


def walks(plan: Plan, i: int) -> torch.Tensor:
    """``[W + 1]`` int32 for launch i of a "stream_k" plan: items ``walks[w] .. walks[w + 1] - 1`` are what slot w was given.

    Slots were cut to equal numbers of blocks along the items' order, so neighbours fill a slot.
    """
    launch = plan.launches[i]
    items, block = launch.items.cpu().numpy(), launch.tile.block_n
    most = int(plan.cuts.chunk[plan.launch_of == i].max()) // block
    first, done = [0], 0
    for at, blocks in enumerate((-(-(items[:, STOP] - items[:, START]) // block)).tolist()):
        if done and done + blocks > most:
            first.append(at)
            done = 0
        done += blocks
    return torch.tensor([*first, len(items)], dtype=torch.int32, device=launch.items.device)
