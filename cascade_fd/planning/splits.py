"""How finely ranges are cut: small pure functions, host only. A policy is one of them, by name."""

from __future__ import annotations

import functools

import numpy as np

from cascade_fd.hardware import Hardware
from cascade_fd.tiles import AttendTile

POLICIES = ("balanced", "wave", "fixed")
FIXED_TOKENS = 512  # tokens per split of the "fixed" policy


def chunks(policy: str, tokens: np.ndarray, programs: np.ndarray, tile: AttendTile, hw: Hardware) -> np.ndarray:
    """Tokens per split of each node of one launch.

    Args:
        policy: see ``POLICIES``.
        tokens: ``[n]`` keys of each node, at least 1.
        programs: ``[n]`` programs that one split of the node launches (row tiles x KV heads).
        tile, hw: they give the slots, the programs that the device holds at once.
    """
    if policy == "fixed":
        return np.full(len(tokens), FIXED_TOKENS)
    blocks = -(-tokens // tile.block_n)
    slots = hw.num_sms * tile.per_sm
    if policy == "balanced":
        return -(-blocks // balanced_splits(blocks, programs, slots)) * tile.block_n
    longest = int(blocks.max())
    work = -(-int((blocks * programs).sum()) // longest)  # in units of the longest range: the rule is for equal ones
    return np.full(len(tokens), -(-longest // wave_splits(work, slots, longest)) * tile.block_n)


def balanced_splits(blocks: np.ndarray, programs: np.ndarray, slots: int) -> np.ndarray:
    """As many equal splits as fill the slots once and no more: each node gets its share of them, rounded down, at least one.

    A second wave that is nearly empty costs more than slots that stay free (12 to 20 % on an H200); a node is never cut finer
    than a tile, and a node much longer than the others is cut more than they are.
    """
    share = (blocks * programs).sum() / slots  # tiles of a slot
    return np.maximum((blocks / max(share, 1.0)).astype(np.int64), 1)


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
