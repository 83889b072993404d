"""How finely ranges are cut: small pure functions, host only. A policy is one of them, by name."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cascade_fd.tiles import AttendTile

POLICIES = ("balanced", "wave", "fixed", "stream_k")
FIXED_TOKENS = 512  # tokens per split of the "fixed" policy
# Narrow programs of fewer tokens cost more than they bring (c1: 0.8 us).
NARROW_TOKENS = 256
# Several waves of them: unless waves are so full, no item is longer than so many slots' shares of what is left, and no node cut
# in more than so many. With 2 shares 128 requests of 8,192 keys take 966 us, with 1.5 971, with 1 975, whole 1,015 (in thirds,
# on a machine as fast, 976); but where slots run at different speeds (d6, on some 261 us whole) a shorter end is safer.
FULL, AHEAD, MOST_CUTS = 0.9, 1.5, 4
Blocks = np.ndarray  # [n] integers
Cut = tuple[np.ndarray, np.ndarray | int]  # tokens per split of each node, and by how many its first split is shorter


def cut(policy: str, tokens: np.ndarray, programs: np.ndarray, tile: AttendTile, num_sms: int, least: int = 1) -> Cut:
    """Tokens per split of each node of one launch, and by how many its first split is shorter.

    Args:
        policy: see ``POLICIES``.
        tokens: ``[n]`` keys of each node, at least 1.
        programs: ``[n]`` programs that one split of the node launches (row tiles x KV heads).
        tile, num_sms: they give the keys per block, and the programs that the device should hold, and can hold, at once.
        least: blocks that an item may have without making the call longer ("balanced" only).
    """
    if policy == "fixed":
        return np.full(len(tokens), FIXED_TOKENS), 0
    blocks, slots = -(-tokens // tile.block_n), num_sms * tile.per_sm
    if policy == "balanced":
        counts = -(-blocks // balanced_part(blocks, programs, tile, num_sms, least))
        if tile.kernel == "narrow":
            counts = np.maximum(counts, tapered_cuts(blocks, programs, num_sms * tile.fits, at_least(tile, least)))
        return -(-blocks // counts) * tile.block_n, 0
    if policy == "stream_k":
        part, lead = stream_k_part(blocks, programs, slots)
        return np.full(len(tokens), part * tile.block_n), lead * tile.block_n
    longest = int(blocks.max())
    work = -(-int((blocks * programs).sum()) // longest)  # in units of the longest range: the rule is for equal ones
    return np.full(len(tokens), -(-longest // wave_splits(work, slots, longest)) * tile.block_n), 0


def at_least(tile: AttendTile, least: int) -> int:
    """Blocks that an item should have, if its node has as many."""
    return max(least, NARROW_TOKENS // tile.block_n if tile.kernel == "narrow" else 1)


def balanced_part(blocks: Blocks, programs: Blocks, tile: AttendTile, num_sms: int, least: int = 1) -> int:
    """Blocks per split: as short as the longest item can be with all items running at once.

    A second wave that is nearly empty costs more than slots that stay free (12 to 20 % on an H200). So items keep to the
    slots that run best, and more of them share an SM, where they fit, only if that SM then has no more to do. Where there are
    more nodes than slots, only those are cut that would outlast a slot's share of the work.
    """
    longest, total = int(blocks.max()), int(programs.sum())
    if longest == blocks.min():
        return Cuttable(lambda part: total * -(-longest // part), longest, total * longest, total).part(tile, num_sms, least)
    work = int((blocks * programs).sum())
    return Cuttable(lambda part: int((-(-blocks // part) * programs).sum()), longest, work, total).part(tile, num_sms, least)


def tapered_cuts(blocks: Blocks, programs: Blocks, slots: int, least: int) -> Blocks:
    """In how many items to cut each node where several waves of programs run, so that slots end at about the same time.

    Nodes come longest first, to whichever slot is free, and the last ones would keep a few slots busy while the others idle. So
    no item is much longer than a slot's share of what is left: guided self-scheduling (Polychronopoulos and Kuck, 1987).
    ``least``: blocks that an item should have.
    """
    waves = int(programs.sum()) / slots
    if waves <= 1 or waves > FULL * math.ceil(waves):
        return np.ones_like(blocks)
    order = np.argsort(-blocks, kind="stable")
    left = np.empty_like(blocks)
    left[order] = np.cumsum((blocks * programs)[order][::-1])[::-1]  # in this node and those after it
    counts = np.minimum(np.ceil(blocks * slots / (AHEAD * left)), blocks // least)
    return np.clip(counts, 1, MOST_CUTS).astype(int)


@dataclass(slots=True)
class Cuttable:
    """The nodes of a launch, as the balanced policy sees them.

    Attributes:
        programs: how many programs splits of so many blocks make.
        longest: blocks of the longest node.
        blocks: of all programs.
        total: programs without splits.
    """

    programs: Callable[[int], int]
    longest: int
    blocks: int
    total: int

    def part(self, tile: AttendTile, num_sms: int, least: int) -> int:
        """See ``balanced_part``."""
        slots = num_sms * min(tile.per_sm, tile.fits)
        first = max(-(-self.blocks // slots), at_least(tile, least))
        if self.total >= slots:
            return first
        part = self._shortest(first, slots)
        if tile.fits > tile.per_sm and part > first:
            shorter = self._shortest(first, num_sms * tile.fits)
            if shorter * -(-self.programs(shorter) // num_sms) <= part * tile.per_sm:
                return shorter
        return part

    def _shortest(self, low: int, most: int) -> int:
        """The shortest split of at least ``low`` blocks that makes at most so many programs. Longer splits never make more."""
        if self.programs(low) <= most:
            return low
        high = max(self.longest, low)  # unsplit: fewer programs than slots
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.programs(middle) <= most else (middle, high)
        return high


def stream_k_part(blocks: np.ndarray, programs: np.ndarray, slots: int) -> tuple[int, np.ndarray]:
    """LeanAttention's cut (Sanovar et al., 2024): all blocks in a row, a slot gets the same number wherever requests end.

    Returns the blocks per slot, and by how many each node's first split is shorter, since the slot began in the node before.
    A slot that two nodes share is two items here, side by side in the launch.
    """
    part = max(1, -(-int((blocks * programs).sum()) // slots))
    before = np.cumsum(blocks * programs) - blocks * programs
    return part, before // programs % part


@functools.lru_cache(4096)
def wave_splits(work: int, slots: int, num_blocks: int, max_splits: int = 128) -> int:
    """FlashAttention-2's wave-efficiency rule: the smallest split count within 85 % of the best last-wave use.

    Args:
        work: programs that one split per range would launch.
        slots: programs the device holds at once.
        num_blocks: key tiles of the longest range; a range is never cut finer than a tile.
        max_splits: upper bound.

    From ``num_splits_heuristic`` of FlashAttention-2 (Dao, 2023). A count that gives no smaller splits than the count below
    it is skipped (11 and 12 splits of 64 tiles are both 6 tiles long).
    """
    if work >= 0.8 * slots:
        return 1
    counts = np.arange(1, max(1, min(max_splits, slots, num_blocks)) + 1)
    tiles = -(-num_blocks // counts)
    counts = counts[np.append(True, tiles[1:] != tiles[:-1])]
    waves = work * counts / slots
    use = waves / np.maximum(np.ceil(waves), 1)  # busy fraction of the waves
    return int(counts[use >= 0.85 * use.max()][0])
