"""How many splits: small pure functions, host only."""

from __future__ import annotations

import math


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
    limit = max(1, min(max_splits, slots, num_blocks))
    counts = [s for s in range(1, limit + 1) if s == 1 or _tiles(num_blocks, s) != _tiles(num_blocks, s - 1)]
    use = {s: _wave_use(work * s, slots) for s in counts}
    best = max(use.values())
    return next(s for s in counts if use[s] >= 0.85 * best)


def _tiles(num_blocks: int, splits: int) -> int:
    return -(-num_blocks // splits)


def _wave_use(programs: int, slots: int) -> float:
    """Busy fraction of the waves that ``programs`` programs take."""
    waves = programs / slots
    return waves / math.ceil(waves) if programs else 0.0
