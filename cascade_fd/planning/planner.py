"""From a tree to a plan: check the options and choose tiles and splits; ``layout`` does the rest. Host only, no Triton."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from cascade_fd.checks import FLOAT_DTYPES, check_group, check_int
from cascade_fd.hardware import Hardware, hardware_of
from cascade_fd.planning.layout import INT32_MAX, Group, Work, assemble, ceil
from cascade_fd.planning.splits import FIXED_TOKENS, POLICIES, chunks
from cascade_fd.planning.worklist import Plan, Shape
from cascade_fd.tiles import attend_tile, tile_rows
from cascade_fd.tree import PrefixTree

INVARIANT_STATES = 32  # the merge's tile, whatever the most states of a row in this batch


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
    batch_invariant: bool = False,
    hardware: Hardware | None = None,
) -> Plan:
    """Lay out the work of one attention call over ``tree``; the plan serves every layer, and every step up to its capacity.

    Args:
        tree: who shares what; its lengths are those of this step.
        num_q_heads, num_kv_heads: Hq and Hkv; Hq is a multiple of Hkv.
        head_dim: D, or (D, Dv).
        dtype: of q and of the cache; with D it decides the tiles.
        device: where q and the cache live.
        split: "wave" (FlashAttention-2's wave-efficiency rule), "balanced" (as many equal splits as fill the device once),
            "fixed" (splits of 512 tokens), or a number of splits for every node.
        max_new_tokens: how far private nodes may grow before a new plan is needed (``Plan.set_lengths``).
        batch_invariant: bitwise the same result for a request whoever else is in the batch, on the Triton backend: "fixed"
            splits counted from each node's start, tiles that depend on nothing but the request, and only declared sharing.
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
    _check_options(tree, shape, split, max_new_tokens)
    device = torch.device(device)
    hw = hardware or hardware_of(device)
    work = Work.measure(tree, shape, max_new_tokens)
    if batch_invariant:
        _check_invariant(tree, split)
        return assemble(tree, shape, device, work, _invariant_splits(tree, work, shape, hw), most_states=INVARIANT_STATES)
    return assemble(tree, shape, device, work, _choose_splits(tree, work, shape, split, hw))


def _check_counts(**counts: tuple[int, ...]) -> None:
    for name, values in counts.items():
        pair = name == "head_dim"
        if len(values) != 1 + pair or not all(isinstance(n, int) for n in values):
            raise TypeError(f"{name}: expected an integer{' or (D, Dv)' if pair else ''}, got {values}")


def _check_options(tree: PrefixTree, shape: Shape, split: str | int, max_new_tokens: int) -> None:
    check_group(shape.num_q_heads, shape.num_kv_heads)
    if min(shape.head_dims) < 1:
        raise ValueError(f"head_dim: expected at least 1, got {shape.head_dims}")
    if shape.dtype not in FLOAT_DTYPES:
        raise TypeError(f"dtype: expected float32, float16 or bfloat16, got {shape.dtype}")
    if split not in POLICIES and (not isinstance(split, int) or isinstance(split, bool) or split < 1):
        names = ", ".join(map(repr, POLICIES))
        raise ValueError(f"split: expected {names} or a number of splits of at least 1, got {split!r}")
    check_int("max_new_tokens", max_new_tokens, 0, INT32_MAX)
    if max_new_tokens and not tree.has_private:
        raise ValueError("max_new_tokens: expected 0 for a tree without private nodes, which cannot grow")


def _choose_splits(tree: PrefixTree, work: Work, shape: Shape, split: str | int, hw: Hardware) -> list[Group]:
    """Sort the nodes into launches and give every node a split size."""
    work.chunk = np.maximum(work.tokens, 1)
    if isinstance(split, int):
        page = np.array([1 if table is None else table.page_size for table in tree.tables])[work.nodes.level]
        work.chunk = np.maximum(ceil(ceil(work.tokens, split), page) * page, 1)
    launched = []
    for rows, nodes in _group(tree, work, tile_rows(hw, shape.dtype, shape.head_dims)):
        programs = ceil(work.num_rows[nodes], rows) * shape.num_kv_heads
        tile = attend_tile(hw, shape.dtype, shape.head_dims, rows, int(programs.sum()))
        if isinstance(split, str):
            work.chunk[nodes] = chunks(split, work.tokens[nodes], programs, tile, hw)
        launched.append((tile, nodes))
    work.splits = ceil(work.tokens, work.chunk)
    return launched


def _check_invariant(tree: PrefixTree, split: str | int) -> None:
    if not tree.declared:
        raise ValueError("batch_invariant: expected a tree from levels, got one whose sharing was found in this very batch")
    if split not in ("wave", "fixed"):
        raise ValueError(f"split: expected 'fixed' (or the default) with batch_invariant, got {split!r}")


def _invariant_splits(tree: PrefixTree, work: Work, shape: Shape, hw: Hardware) -> list[Group]:
    """As ``_choose_splits``, from nothing but each node: however many share it, its rows meet the same tile and splits."""
    sizes = tile_rows(hw, shape.dtype, shape.head_dims)
    shared = np.arange(len(tree.nodes)) < tree.num_shared
    rows = np.where(shared, 64, work.num_rows)
    work.chunk = np.full(len(work.tokens), FIXED_TOKENS)
    work.splits = ceil(work.tokens, work.chunk)
    groups = _group(tree, replace(work, num_rows=rows), sizes)
    return [(attend_tile(hw, shape.dtype, shape.head_dims, size), nodes) for size, nodes in groups]


def _group(tree: PrefixTree, work: Work, sizes: list[int]) -> list[tuple[int, np.ndarray]]:
    """Rows of the tile, and the nodes, of every launch: one tile, and one table or one dense store. Larger tiles first."""
    kind = np.minimum(np.searchsorted(sizes, work.num_rows), len(sizes) - 1)
    key = len(sizes) - 1 - kind
    if len(tree.tables) > 1:
        source = np.array([i if table is None else tree.tables.index(table) for i, table in enumerate(tree.tables)])
        key = key * len(tree.tables) + source[work.nodes.level]
    live = np.flatnonzero(work.tokens > 0)
    keys = sorted(set(key[live].tolist()))
    nodes = [live] if len(keys) == 1 else [live[key[live] == k] for k in keys]
    return [(sizes[kind[n[0]]], n) for n in nodes]
