"""From a tree to a plan: choose splits per level, lay out items, number the partial states. NumPy on the host, no Triton."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from cascade_fd.checks import FLOAT_DTYPES, check_group, check_int
from cascade_fd.hardware import Hardware, hardware_of
from cascade_fd.planning.splits import wave_splits
from cascade_fd.planning.worklist import Launch, MergeRows, Plan, Shape
from cascade_fd.tiles import AttendTile, attend_tile
from cascade_fd.tree import Nodes, PrefixTree, check_capacity

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class _LevelWork:
    """One level on the way to a launch. Arrays have one entry per node.

    Attributes:
        stop: capacity: the nodes' stop, plus max_new_tokens on the private level.
        row0, num_rows: packed rows.
        q_end: one past the last query token where a causal limit applies, else 0.
        chunk: tokens per split.
        splits: how many splits that makes; 0 for a node without keys or without rows.
    """

    nodes: Nodes
    stop: np.ndarray
    row0: np.ndarray
    num_rows: np.ndarray
    q_end: np.ndarray
    chunk: np.ndarray
    splits: np.ndarray
    tile: AttendTile

    def per_request(self, values: np.ndarray) -> np.ndarray:
        return np.repeat(values, self.nodes.last - self.nodes.first)


def plan(
    tree: PrefixTree,
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int | tuple[int, int],
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
    split: str | int = "wave",
    max_new_tokens: int = 0,
    hardware: Hardware | None = None,
) -> Plan:
    """Lay out the work of one attention call over ``tree``; the plan serves every layer, and every step up to its capacity.

    Args:
        tree: who shares what; its lengths are those of this step.
        num_q_heads, num_kv_heads: Hq and Hkv; Hq is a multiple of Hkv.
        head_dim: D, or (D, Dv).
        dtype: of q and of the cache; with D it decides the tiles.
        device: where q and the cache live.
        split: "wave" (FlashAttention-2's wave-efficiency rule per level) or a number of splits for every node.
        max_new_tokens: how far private ranges may grow before a new plan is needed (``Plan.set_lengths``).
        hardware: plan for this device instead of the one that ``device`` names (to plan without a GPU).

    Raises:
        ValueError: bad head counts, an unknown split rule, or a capacity beyond the page table.

    Example:
        >>> tree = PrefixTree.from_levels([Level([0, 2], [64]), Level([0, 1, 2], [5, 9])])
        >>> p = plan(tree, num_q_heads=8, num_kv_heads=2, head_dim=64, dtype=torch.float32, device="cpu")
        >>> p.num_items, p.num_slots
        (3, 4)
    """
    if not isinstance(tree, PrefixTree):
        raise TypeError(f"tree: expected a PrefixTree, got {type(tree).__name__}")
    dims = head_dim if isinstance(head_dim, tuple) else (head_dim, head_dim)
    _check_counts(num_q_heads=(num_q_heads,), num_kv_heads=(num_kv_heads,), head_dim=dims)
    shape = Shape(num_q_heads, num_kv_heads, *dims, dtype)
    _check_options(shape, split, max_new_tokens)
    device = torch.device(device)
    hw = hardware or hardware_of(device)
    last = len(tree.levels) - 1
    works = [_level_work(tree, i, shape, split, hw, growth=max_new_tokens if i == last else 0) for i in range(len(tree.levels))]
    return _assemble(tree, shape, device, works)


def _check_counts(**counts: tuple[int, ...]) -> None:
    for name, values in counts.items():
        pair = name == "head_dim"
        if len(values) != 1 + pair or not all(isinstance(n, int) for n in values):
            raise TypeError(f"{name}: expected an integer{' or (D, Dv)' if pair else ''}, got {values}")


def _check_options(shape: Shape, split: str | int, max_new_tokens: int) -> None:
    check_group(shape.num_q_heads, shape.num_kv_heads)
    if min(shape.head_dims) < 1:
        raise ValueError(f"head_dim: expected at least 1, got {shape.head_dims}")
    if shape.dtype not in FLOAT_DTYPES:
        raise TypeError(f"dtype: expected float32, float16 or bfloat16, got {shape.dtype}")
    if split != "wave" and (not isinstance(split, int) or isinstance(split, bool) or split < 1):
        raise ValueError(f"split: expected 'wave' or a number of splits of at least 1, got {split!r}")
    check_int("max_new_tokens", max_new_tokens, 0, _INT32_MAX)


def _level_work(tree: PrefixTree, level: int, shape: Shape, split: str | int, hw: Hardware, growth: int) -> _LevelWork:
    nodes = tree.levels[level]
    stop = nodes.stop + growth
    if growth:
        check_capacity("max_new_tokens", nodes, stop)
    row0 = tree.q_indptr[nodes.first] * shape.group
    num_rows = tree.q_indptr[nodes.last] * shape.group - row0
    private = tree.causal and level == len(tree.levels) - 1
    q_end = np.where(private & (nodes.last - nodes.first == 1), tree.q_indptr[nodes.last], 0)
    tokens = stop - nodes.start
    tile = _tile(num_rows[tokens > 0], shape, hw)
    if split == "wave":
        programs = _ceil(num_rows, tile.block_m) * shape.num_kv_heads
        chunk = np.full(len(nodes), _wave_chunk(tokens, programs, tile, hw), np.int64)
    else:
        page = nodes.table.page_size if nodes.table else 1
        chunk = np.maximum(_ceil(_ceil(tokens, int(split)), page) * page, 1)
    splits = _ceil(tokens, chunk) * (num_rows > 0)
    return _LevelWork(nodes, stop, row0, num_rows, q_end, chunk, splits, tile)


def _tile(num_rows: np.ndarray, shape: Shape, hw: Hardware) -> AttendTile:
    """The tile for a level whose nodes have ``num_rows`` packed rows."""
    most = int(num_rows.max(initial=1))
    return attend_tile(hw, shape.dtype, shape.head_dims, most, len(num_rows) * shape.num_kv_heads)


def _ceil(a: np.ndarray | int, b: np.ndarray | int) -> np.ndarray:
    return np.asarray(-(-a // b))


def _wave_chunk(tokens: np.ndarray, programs: np.ndarray, tile: AttendTile, hw: Hardware) -> int:
    """Tokens per split by FlashAttention-2's rule, counting work in units of the longest range.

    For equal ranges that is the rule itself; one long range among short ones is still cut.
    """
    blocks = _ceil(tokens, tile.block_n)
    longest = int(blocks.max(initial=1)) or 1
    work = int(_ceil(int((blocks * programs).sum()), longest))
    splits = wave_splits(work, hw.num_sms * tile.per_sm, longest)
    return int(_ceil(longest, splits)) * tile.block_n


def _direct_nodes(work: _LevelWork, states: np.ndarray) -> np.ndarray:
    """Nodes whose rows have no state but this node's: they skip the workspace. bool [nodes]."""
    others = np.concatenate(([0], np.cumsum(states != 1)))
    return (work.splits == 1) & (others[work.nodes.last] == others[work.nodes.first])


def _assemble(tree: PrefixTree, shape: Shape, device: torch.device, works: list[_LevelWork]) -> Plan:
    """Number the states, build every array, and bring them to the device in one copy."""
    states = sum((w.per_request(w.splits) for w in works), np.zeros(tree.num_requests, np.int64))
    direct = [_direct_nodes(w, states) for w in works]
    is_direct = sum((w.per_request(d) for w, d in zip(works, direct, strict=True)), np.zeros(tree.num_requests, bool))
    slots = np.repeat(np.where(is_direct, 0, states), np.diff(tree.q_indptr))  # workspace slots of each query row
    row_first = np.cumsum(slots) - slots
    merged = np.flatnonzero(~np.repeat(is_direct, np.diff(tree.q_indptr)))
    arrays = [row_first, merged, np.append(row_first[merged], slots.sum())]
    above = np.zeros(tree.num_requests, np.int64)  # states of each request from the levels above
    kept = []
    for level, (work, flags) in enumerate(zip(works, direct, strict=True)):
        items = _items(work, flags, above)
        above = above + work.per_request(work.splits)
        if len(items):
            kept.append((level, work, items))
            arrays += [items.ravel(), work.nodes.stop]
    first, rows, indptr, *rest = _upload(arrays, device)
    return Plan(
        launches=tuple(_launch(*k, rest[2 * i], rest[2 * i + 1], device) for i, k in enumerate(kept)),
        merge=MergeRows(indptr, rows, int(slots.max(initial=1))),
        row_first=first,
        num_slots=int(slots.sum()),
        num_rows=tree.num_rows,
        shape=shape,
        device=device,
        splits=tuple(w.splits for w in works),
    )


def _items(work: _LevelWork, direct: np.ndarray, above: np.ndarray) -> np.ndarray:
    """``[N, 8]`` items of one level: by node, then split, then row tile, so that tiles of one KV range run side by side."""
    nodes = work.nodes
    tiles = _ceil(work.num_rows, work.tile.block_m)
    counts = work.splits * tiles
    node = np.repeat(np.arange(len(nodes)), counts)
    local = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    split, row_tile = np.divmod(local, tiles[node])
    offset = row_tile * work.tile.block_m
    start = nodes.start[node] + split * work.chunk[node]
    return np.stack(
        [
            work.row0[node] + offset,
            np.minimum(work.tile.block_m, work.num_rows[node] - offset),
            nodes.row[node] if nodes.table is None else nodes.table.starts[nodes.row[node]],
            start,
            np.minimum(start + work.chunk[node], work.stop[node]),
            node,
            work.q_end[node],
            np.where(direct[node], -1, above[nodes.first[node]] + split),
        ],
        axis=1,
    )


def _launch(
    level: int, work: _LevelWork, items: np.ndarray, on_device: torch.Tensor, lens: torch.Tensor, device: torch.device
) -> Launch:
    table, nodes = work.nodes.table, work.nodes
    page = table.page_size if table else 1
    return Launch(
        items=on_device.view(-1, 8),
        lens=lens,
        ids=table.ids.to(device) if table else None,
        page_size=table.page_size if table else 0,
        table_stride=table.stride if table else 0,
        level=level,
        tile=work.tile,
        max_tokens=int((items[:, 4] - items[:, 3]).max()),
        id_range=table.host_range(nodes.row, nodes.start // page, _ceil(nodes.stop, page)) if table else None,
        max_row=int(nodes.row.max()),
        max_stop=int(work.stop.max()),
    )


def _upload(arrays: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """All arrays as int32 on ``device`` with one copy, each starting at a multiple of 16 bytes."""
    sizes = [len(a) for a in arrays]
    room = [-(-n // 4) * 4 for n in sizes]
    buffer = np.zeros(sum(room), np.int32)
    offsets = np.cumsum(room) - room
    for array, at in zip(arrays, offsets, strict=True):
        if len(array) and (array.max() > _INT32_MAX or (array.min() < 0 and array.min() < -1)):
            raise ValueError("tree: expected row, slot and token counts below 2**31, got a batch that needs more")
        buffer[at : at + len(array)] = array
    packed = torch.from_numpy(buffer).to(device, non_blocking=True)
    return [packed[at : at + n] for at, n in zip(offsets.tolist(), sizes, strict=True)]
