"""The cost model: predicted time of a call from a few numbers per launch. Constants are ``costs.Costs``.

A full device takes a block's share of an SM for every block; no launch is done before its longest item is. Launches that
overlap add up their blocks, launches in sequence their times. A launch whose tile takes whole SMs comes first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cascade_fd.costs import BLOCK_BYTES, Costs
from cascade_fd.hardware import Hardware
from cascade_fd.planning.worklist import Shape
from cascade_fd.tiles import AttendTile

OVERLAP = 0.5  # of the times of launches that overlap, but for the longest, what is hidden
# The same beside the "beside" tile: of portable tiles, and of the narrow one, which keeps tensor cores busier: so less, where
# the wide launch takes longest, but for head dims up to 64, whose products are short (h1: 80 us of narrow programs beside 111
# take 129 in all, 81 of 16-row ones 140). And nothing is read faster than in MEMORY of a full device's time.
BESIDE_OVERLAP, NARROW_OVERLAP, BOUND_OVERLAP, MEMORY = 0.58, 0.72, 0.35, 1.12
ALONE = 0.5  # of a program's start and end, what nothing hides where it has an SM to itself
IDLE = 1.0  # of the time in which a launch that takes whole SMs leaves some free, what others make use of there
MOST_BESIDE = 16  # rows of tiles that leave enough registers to run beside it
# Of head dims up to 64 the bytes of a block are half as many, but scores, and their exponentials, as many: it takes so much
# longer than its bytes say. Of small tiles; of large ones, by kernel.
PACE_64, PACE_64_LARGE = 1.2, {"attend": 1.5, "hopper": 1.75, "beside": 1.55, "single": 1.55}
LARGE = 64  # rows
TAIL = 0.2  # of the time that slots would idle in a last wave that is not full, if waves did not overlap


@dataclass(slots=True)
class Load:
    """One launch.

    Attributes:
        rows, per_sm, kernel: its tile.
        programs: how many.
        reads: pairs of blocks of different keys, all KV heads, and how many programs read each of them: about at the same time,
            so that all but the first find it in the cache.
        longest: blocks of the longest item.
        size: see ``block_size``.
        whole: see ``AttendTile``.
        dim: the larger head dim.
    """

    rows: int
    per_sm: int
    programs: float
    reads: Sequence[tuple[float, float]]
    longest: float
    size: float = 1.0
    kernel: str = "attend"
    whole: bool = False
    dim: int = 128

    @classmethod
    def of(
        cls,
        tile: AttendTile,
        shape: Shape,
        programs: float,
        reads: Sequence[tuple[float, float]],
        longest: float,
        block_n: int = 0,
    ) -> Load:
        """Of a tile; blocks have its length, or ``block_n`` keys."""
        size = block_size(shape, tile, block_n)
        dim = max(shape.head_dims)
        return cls(tile.block_m, tile.per_sm, programs, reads, longest, size, tile.kernel, tile.whole, dim)

    def busy(self, costs: Costs, num_sms: int) -> float:
        """Microseconds that a full device takes for all blocks."""
        tile = costs.tile(self.rows, self.per_sm, self.kernel)
        work, first = 0.0, tile.cold - tile.warm
        for blocks, times in self.reads:
            work += blocks * (first + times * tile.warm)
        busy = (self.size * work + self.programs * tile.start) / num_sms
        waves = self.programs / (num_sms * self.per_sm)
        return busy * (1 + TAIL * (math.ceil(waves) / waves - 1)) if waves > 1 else busy

    def cut_evenly(self, num_sms: int) -> Load:
        """The same with items as long as equal shares of all blocks: before it is known how nodes are cut."""
        return replace(self, longest=max(1.0, self.blocks / (num_sms * self.per_sm)))

    def chain(self, costs: Costs) -> float:
        """Microseconds that the longest item takes alone."""
        start = costs.tile(self.rows, self.per_sm, self.kernel).start if self.whole else 0.0
        return self.longest * self.step(costs) + ALONE * start

    def step(self, costs: Costs) -> float:
        """Microseconds that one block takes alone."""
        return self.size * costs.tile(self.rows, self.per_sm, self.kernel).step

    @property
    def blocks(self) -> float:
        """Of all programs together."""
        return sum(number * times for number, times in self.reads)


@dataclass(frozen=True)
class Prediction:
    """Microseconds of a call, and what most of them are spent on."""

    us: float
    bound: str


def block_size(shape: Shape, tile: AttendTile, block_n: int = 0) -> float:
    """What a block of a tile, or one of ``block_n`` keys, costs in units of one of ``BLOCK_BYTES``: its bytes, and its pace."""
    return sum(shape.head_dims) * shape.dtype.itemsize * (block_n or tile.block_n) / BLOCK_BYTES * pace(shape, tile)


def pace(shape: Shape, tile: AttendTile) -> float:
    """How much longer a block takes than its bytes say, with other head dims than 128."""
    if max(shape.head_dims) > 64:
        return 1.0
    return PACE_64 if tile.block_m < LARGE else PACE_64_LARGE[tile.kernel]


def predict(loads: Sequence[Load], state_bytes: float, hw: Hardware, costs: Costs | None = None) -> Prediction:
    """``state_bytes``: of all partial states, 0 if nothing is merged. ``costs``: others than the hardware's."""
    costs = costs or hw.costs
    if not loads:
        return Prediction(costs.merge, "launches")
    busy, chains = [load.busy(costs, hw.num_sms) for load in loads], [load.chain(costs) for load in loads]
    if hw.overlaps:
        fixed, work, chain = costs.launch + costs.follow * (len(loads) - 1), sum(busy), max(chains)
        times = [_longer(*both) for both in zip(busy, chains, strict=True)]
        us = fixed + sum(times) - _hidden_us(loads, times, hw.num_sms, costs)
    else:
        fixed, work, chain = costs.launch * len(loads), sum(busy), sum(chains)
        us = fixed + sum(map(_longer, busy, chains))
    if state_bytes:
        fixed += costs.merge
        us += costs.merge + costs.state * state_bytes / 1e6
    parts = {"launches": fixed, "reading and multiplying": work, "the longest item": chain}
    return Prediction(us, max(parts, key=parts.__getitem__))


def _hidden_us(loads: Sequence[Load], times: Sequence[float], num_sms: int, costs: Costs) -> float:
    """What launches hide of each other. The next one enters when the last wave of the first has begun."""
    side = [i for i, load in enumerate(loads) if not load.whole]
    mine = [times[i] for i in side]
    most = _hidden_beside([loads[i] for i in side], mine, num_sms)
    idle = sum(times[i] * max(0.0, 1 - load.programs / num_sms) for i, load in enumerate(loads) if load.whole)
    most += min(IDLE * idle, sum(mine) - most)
    return max(0.0, min(most, sum(times) - MEMORY * _reading(loads, num_sms, costs)))


def _hidden_beside(loads: Sequence[Load], times: Sequence[float], num_sms: int) -> float:
    """Of launches whose programs fit on an SM together, were there no end to what memory reads."""
    if len(loads) < 2:
        return 0.0
    first = loads[0]
    share = OVERLAP / max(1, math.ceil(first.programs / (num_sms * first.per_sm)))
    if first.kernel == "beside":
        if any(load.rows > MOST_BESIDE for load in loads[1:]):
            return 0.0
        share = BESIDE_OVERLAP
        if any(load.kernel == "narrow" for load in loads):
            share = BOUND_OVERLAP if times[0] == max(times) and first.dim > 64 else NARROW_OVERLAP
    return share * (sum(times) - max(times))


def _reading(loads: Sequence[Load], num_sms: int, costs: Costs) -> float:
    """Microseconds in which a full device reads all keys once from memory."""
    rate = min(costs.tile(load.rows, load.per_sm, load.kernel).cold for load in loads)
    return sum(load.size * sum(blocks for blocks, _ in load.reads) for load in loads) * rate / num_sms


def _longer(a: float, b: float) -> float:
    """The larger of two times; a little more where they are near each other and cannot hide each other."""
    most = max(a, b)
    return most * (1 + (min(a, b) / most) ** 6) ** (1 / 6) if most else 0.0


# Launches that overlap, on an H200: an item may take so much of the call's time, the first launch's and the later ones' (which
# start where room is left); and beside others' work a block takes longer, up to 2.9 times.
HIDDEN, HIDDEN_LATER, CROWDED = 0.6, 0.3, 1.9
SPARED = 0.5  # of the others' time, by how much longer a launch of one warp group may take so that they have more room


def hidden(loads: Sequence[Load], hw: Hardware) -> list[int]:
    """Per launch, the blocks of an item that ends before the others do, if launches overlap: no item need be shorter.

    Whole SMs may be taken for as long as all launches last one after the other, since others have the SMs that are left. One
    warp group leaves room on its SMs too, and may take longer by part of the others' time. ``loads`` are of items of one block.
    """
    if len(loads) < 2 or not hw.overlaps:
        return [1] * len(loads)
    busy = [0.0 if load.whole else load.busy(hw.costs, hw.num_sms) for load in loads]
    total, least = sum(busy), []
    first = next((load for load in loads if not load.whole), None)
    for load, mine in zip(loads, busy, strict=True):
        us, step = 0.0, load.step(hw.costs)
        if load.whole or load.kernel == "single":
            us = load.blocks * step / hw.num_sms + (1.0 if load.whole else SPARED) * (total - mine)
        elif load.kernel != "beside" and mine != total:  # there are others beside it
            us = (HIDDEN if load is first else HIDDEN_LATER) * total / (1 + CROWDED * (1 - mine / total))
        least.append(max(1, int(us / step)) if step else 1)
    return least
