"""From a tree to a plan: check the options, choose what is shared, tiles and splits; ``layout`` does the rest. No Triton."""

from __future__ import annotations

import numpy as np
import torch

from cascade_fd.checks import FLOAT_DTYPES, check_choice, check_group, check_int
from cascade_fd.hardware import Hardware, hardware_of
from cascade_fd.planning.choice import Asked, Choice
from cascade_fd.planning.cost import Load, hidden, predict
from cascade_fd.planning.layout import INT32_MAX, assemble
from cascade_fd.planning.payoff import RULES, SHARE, choose, has_hopper
from cascade_fd.planning.splits import FIXED_TOKENS, POLICIES, cut
from cascade_fd.planning.tiling import Tiling, kernels_of, options, pick_tile, swapped, tile_of
from cascade_fd.planning.work import Frame, Group, Work, ceil
from cascade_fd.planning.worklist import Plan, Shape
from cascade_fd.tiles import NARROW, SINGLE, AttendTile, tile_rows
from cascade_fd.tree import PrefixTree

SKEWED = 4  # times their mean that the longest of nodes is, from which one warp takes too long for it (d5: 657 us against 625)


def plan(
    tree: PrefixTree,
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int | tuple[int, int],
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
    split: str | int = "balanced",
    share: str = "auto",
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
        split: "balanced" (items as equal as fill the device once), "wave" (FlashAttention-2's wave-efficiency rule), "fixed"
            (splits of 512 tokens), "stream_k" (LeanAttention: every slot the same number of key blocks, across requests), or a
            number of splits for every node.
        share: "auto" (a cost model decides for every shared node whether it is computed once or with each of its children),
            "always", or "never" (as if nothing were shared; to compare).
        max_new_tokens: how far private nodes may grow before a new plan is needed (``Plan.advance``, ``Plan.set_lengths``).
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
    dims = head_dim if isinstance(head_dim, tuple) else (head_dim, head_dim)
    _check_counts(tree, num_q_heads=(num_q_heads,), num_kv_heads=(num_kv_heads,), head_dim=dims)
    shape = Shape(num_q_heads, num_kv_heads, *dims, dtype)
    _check_options(tree, shape, split, share, max_new_tokens)
    asked = Asked(split, share, batch_invariant)
    device = torch.device(device)
    return _plan(tree, Frame(shape, device, hardware or hardware_of(device), asked), max_new_tokens)


def plan_with_tiles(tree: PrefixTree, like: Plan) -> Plan:
    """Plan ``tree`` as ``like`` was, with no other tiles than it has."""
    tiles = {launch.tile.block_m: launch.tile for launch in like.launches}
    return _plan(tree, Frame(like.shape, like.device, like.hardware, like.asked, tiles), like.max_new_tokens)


def _plan(tree: PrefixTree, frame: Frame, max_new_tokens: int) -> Plan:
    work = Work.measure(tree, frame.shape, max_new_tokens)
    if frame.asked.batch_invariant:
        _check_invariant(tree, frame.asked)
        choice = Choice(np.zeros(len(tree.nodes), bool), (), rule=RULES["invariant"])
        return assemble(tree, work, _invariant_splits(tree, work, frame), frame, choice)
    choice = choose(tree, work, frame)
    if choice.folded.any():
        work.fold(choice.folded)
    return assemble(tree, work, _choose_splits(tree, work, frame, choice), frame, choice)


def _check_counts(tree: PrefixTree, **counts: tuple[int, ...]) -> None:
    if not isinstance(tree, PrefixTree):
        raise TypeError(f"tree: expected a PrefixTree, got {type(tree).__name__}")
    for name, values in counts.items():
        pair = name == "head_dim"
        if len(values) != 1 + pair or not all(isinstance(n, int) for n in values):
            raise TypeError(f"{name}: expected an integer{' or (D, Dv)' if pair else ''}, got {values}")


def _check_options(tree: PrefixTree, shape: Shape, split: str | int, share: str, max_new_tokens: int) -> None:
    check_group(shape.num_q_heads, shape.num_kv_heads)
    if min(shape.head_dims) < 1:
        raise ValueError(f"head_dim: expected at least 1, got {shape.head_dims}")
    if shape.dtype not in FLOAT_DTYPES:
        raise TypeError(f"dtype: expected float32, float16 or bfloat16, got {shape.dtype}")
    if split not in POLICIES and (not isinstance(split, int) or isinstance(split, bool) or split < 1):
        names = ", ".join(map(repr, POLICIES))
        raise ValueError(f"split: expected {names} or a number of splits of at least 1, got {split!r}")
    check_choice("share", share, SHARE)
    check_int("max_new_tokens", max_new_tokens, 0, INT32_MAX)
    if max_new_tokens and not tree.has_private:
        raise ValueError("max_new_tokens: expected 0 for a tree without private nodes, which cannot grow")


def _choose_splits(tree: PrefixTree, work: Work, frame: Frame, choice: Choice) -> list[Group]:
    """Sort the nodes into launches and give every node a split size."""
    hw, split = frame.hardware, frame.asked.split
    kinds = [_group(tree, work.tokens, work.num_rows, sizes) for sizes in _size_options(work, frame, choice)]
    hopper = has_hopper(tree, frame)
    ways = []
    for some in kinds:
        tiles = options(hw, frame.shape, [rows for rows, _ in some]) if hopper else [()]
        ways += [(some, option) for option in tiles if choice.kernels in (None, kernels_of(option))]
    ways = ways or [(kinds[0], ())]
    if len(ways) == 1:
        launched = _launches(work, *ways[0], frame)
    else:
        launched = min((_launches(work, *way, frame, True) for way in ways), key=lambda both: _expected(both[1], hw))
    groups, loads = launched
    page = _page_sizes(tree, work)
    if isinstance(split, int):
        work.chunk = np.maximum(ceil(ceil(work.tokens, split), page) * page, 1)
    else:
        _cut(work, groups, split, hw, hidden(loads, hw) if loads else [1] * len(groups), page)
    work.splits = ceil(work.tokens + work.lead, work.chunk) * (work.tokens > 0)
    return groups


def _size_options(work: Work, frame: Frame, choice: Choice) -> list[tuple[int, ...]]:
    """Rows of tiles to choose from: as weighed, or else with the narrow tile and without, and with that of one warp group."""
    sizes, narrow = choice.sizes, NARROW.block_m
    if frame.tiles or narrow not in sizes or choice.once is not None:
        return [sizes]
    few = (work.num_rows <= narrow) & (work.tokens > 0)
    lens = work.tokens[few]
    if not len(lens) or lens.max() > SKEWED * lens.mean() or len(lens) * frame.shape.num_kv_heads < 2 * frame.hardware.num_sms:
        found = [sizes[1:]]
    else:
        found = [sizes[1:], sizes]
    between = (work.num_rows > SINGLE.block_m // 4) & (work.num_rows <= SINGLE.block_m // 2) & (work.tokens > 0)
    if between.any() and frame.hardware.costs.knows(SINGLE.kernel):
        found += [swapped(some) for some in found]
    return found


def _launches(
    work: Work, kinds: list[tuple[int, np.ndarray]], option: tuple[AttendTile, ...], frame: Frame, compared: bool = False
) -> tuple[list[Group], list[Load]]:
    """Tile and nodes of every launch, and the launches as the cost model sees them (none, where nothing depends on it).

    ``option``: one of ``tiling.options``. ``compared``: with other launches.
    """
    shape, hw = frame.shape, frame.hardware
    groups: list[Group] = []
    loads: list[Load] = []
    tiling = Tiling(shape, hw, alone=len(kinds) == 1)
    for rows, nodes in kinds:
        programs = ceil(work.num_rows[nodes], rows) * shape.num_kv_heads
        tile = tile_of(option, rows) or pick_tile(hw, shape, rows)
        if frame.tiles:
            tile = frame.tiles[rows]
        if compared or option or len(kinds) > 1:
            load = _load(tile, programs, work.tokens[nodes], shape)
            if not frame.tiles:
                tile = tiling.next(load)
            loads.append(load)
        elif not frame.tiles:
            tile = pick_tile(hw, shape, rows, int(programs.sum()), alone=True)
        groups.append(Group(tile, nodes, programs))
    return groups, loads


def _expected(loads: list[Load], hw: Hardware) -> float:
    """Microseconds, before it is known how nodes are cut."""
    return predict([load.cut_evenly(hw.num_sms) for load in loads], 0.0, hw).us


def _load(tile: AttendTile, programs: np.ndarray, tokens: np.ndarray, shape: Shape) -> Load:
    """Unsplit nodes with items of one block, as the cost model sees them; their mean row tiles stand for all."""
    heads, count = shape.num_kv_heads, int(programs.sum())
    blocks = int((tokens * programs).sum()) / tile.block_n
    unique = int(tokens.sum()) * heads / tile.block_n
    return Load.of(tile, shape, count, [(unique, blocks / max(unique, 1))], 1.0)


def _cut(work: Work, groups: list[Group], policy: str, hw: Hardware, least: list[int], page: np.ndarray | int) -> None:
    """Tokens per split of every node. Splits end where pages do."""
    work.chunk, work.lead = np.ones_like(work.tokens), np.zeros_like(work.tokens)
    for group, few in zip(groups, least, strict=True):
        part, lead = cut(policy, work.tokens[group.nodes], group.programs, group.tile, hw.num_sms, few)
        work.chunk[group.nodes], work.lead[group.nodes] = part, lead
    if policy == "fixed":
        return
    work.chunk = ceil(work.chunk, page) * page
    into_page = work.nodes.start % page
    if into_page.any():
        moved = work.lead + into_page
        more = ceil(work.tokens + moved, work.chunk) > ceil(work.tokens + work.lead, work.chunk)
        work.lead = np.where(more | (moved >= work.chunk), work.lead, moved)  # not at the price of one more split


def _page_sizes(tree: PrefixTree, work: Work) -> np.ndarray | int:
    """Tokens per page of every node; 1 for dense stores."""
    sizes = [1 if table is None else table.page_size for table in tree.tables]
    return sizes[0] if len(set(sizes)) == 1 else np.array(sizes)[work.nodes.level]


def _check_invariant(tree: PrefixTree, asked: Asked) -> None:
    if not tree.declared:
        raise ValueError("batch_invariant: expected a tree from levels, got one whose sharing was found in this very batch")
    if asked.split not in ("balanced", "fixed"):
        raise ValueError(f"split: expected 'fixed' (or the default) with batch_invariant, got {asked.split!r}")
    if asked.share == "never":
        raise ValueError("share: expected 'always' (or the default) with batch_invariant, got 'never'")


def _invariant_splits(tree: PrefixTree, work: Work, frame: Frame) -> list[Group]:
    """As ``_choose_splits``, from nothing but each node: however many share it, its rows meet the same tile and splits."""
    shape, hw = frame.shape, frame.hardware
    shared = np.arange(len(tree.nodes)) < tree.num_shared
    work.chunk = np.full(len(work.tokens), FIXED_TOKENS)
    work.splits = ceil(work.tokens, FIXED_TOKENS)
    sizes = tile_rows(hw, shape.dtype, shape.head_dims)
    groups = _group(tree, work.tokens, np.where(shared, 64, work.num_rows), sizes)
    return [Group(pick_tile(hw, shape, size), nodes, np.ones_like(nodes)) for size, nodes in groups]


def _group(tree: PrefixTree, tokens: np.ndarray, num_rows: np.ndarray, sizes: tuple[int, ...]) -> list[tuple[int, np.ndarray]]:
    """Rows of the tile, and the nodes, of every launch: one tile, and one table or one dense store. Larger tiles first."""
    live = np.flatnonzero(tokens > 0)
    if not len(live):
        return []
    kind = np.minimum(np.searchsorted(sizes, num_rows), len(sizes) - 1)
    key = len(sizes) - 1 - kind
    if len(tree.tables) > 1:
        key = key * len(tree.tables) + tree.sources[tree.nodes.level]
    keys = sorted(set(key[live].tolist()))
    nodes = [live] if len(keys) == 1 else [live[key[live] == k] for k in keys]
    return [(sizes[kind[n[0]]], n) for n in nodes]
