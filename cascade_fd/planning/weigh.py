"""Whole plans compared with the cost model: what is folded, and which tiles there are. Plain Python over kinds of node."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cascade_fd.hardware import Hardware
from cascade_fd.planning.cost import Load, block_size, hidden, predict
from cascade_fd.planning.splits import Cuttable
from cascade_fd.planning.tiling import Tiling, kernels_of, options, pick_tile, swapped, tile_of
from cascade_fd.planning.worklist import Shape
from cascade_fd.tiles import NARROW, SINGLE, AttendTile

CLEAR = 2.0  # a node that takes so many times longer with its children, and as long again as the whole call, is not weighed
# Predictions are off by up to 10 %. So between all and nothing the one is taken that is likely, all if two thirds of what is
# read are shared, unless the other promises to be faster by this factor. Of the time of nothing shared that takes 1.04 at worst
# instead of 1.09 (benchmarks/NOTES.md).
SURE, MOSTLY = 1.08, 2 / 3
MOST_TILES = 8  # small tiles that may stand for a large one

Kind = tuple[int, int, int, int, bool]


class Private(NamedTuple):
    """Private nodes with equally many packed rows: how many, and tokens of one, on average."""

    rows: int
    number: int
    tokens: int


class Where(NamedTuple):
    """What is planned for, the rows that tiles may have, and whether there are the kernels for Hopper."""

    shape: Shape
    hw: Hardware
    sizes: tuple[int, ...]
    hopper: bool = False


@dataclass(frozen=True, eq=False)
class Verdict:
    """As in ``Choice``, but per kind of node."""

    folded: np.ndarray
    sizes: tuple[int, ...]
    kernels: tuple[str, ...]
    once: np.ndarray
    each: np.ndarray
    compared: tuple[tuple[str, float], ...]


class Scale:
    """A batch on the scales: nodes that do not differ are counted, not listed, so that plain Python is fast.

    A kind of shared node has a kind of parent (-1: none), packed rows, tokens, how many private nodes hang on it, and whether
    it is stuck. Parents come before children. Private nodes are in groups of equal rows, at their mean length.
    """

    def __init__(self, kinds: tuple[Kind, ...], counts: tuple[int, ...], private: tuple[Private, ...], where: Where):
        self.kinds, self.counts, self.private = kinds, counts, private
        self.count = sum(group.number for group in private)
        self.shape, self.hw = shape, hw = where.shape, where.hw
        self.sizes, self.hopper = where.sizes, where.hopper
        self.tiles = {size: pick_tile(hw, shape, size) for size in self.sizes}
        self.block = {size: block_size(shape, tile) for size, tile in self.tiles.items()}

    @staticmethod
    def size(rows: int, sizes: tuple[int, ...]) -> int:
        return next((size for size in sizes if size >= rows), sizes[-1])

    def decide(self) -> Verdict:
        """Compare everything shared, nothing shared, and each node by its own costs."""
        once, each, greedy = self._node_by_node()
        nothing, everything = [False] * len(greedy), [not kind[4] for kind in self.kinds]
        sets = self._size_sets()
        best = {"everything shared": min((*self.predict(nothing, sizes), sizes) for sizes in sets)}
        folds = {"everything shared": nothing}
        close = any(b < CLEAR * a + best["everything shared"][0] for a, b in zip(once, each, strict=True))
        if any(everything) and close:
            folds["nothing shared"] = everything
        if greedy not in (nothing, everything) and close:
            folds["node by node"] = greedy
        for name, fold in folds.items():
            if name not in best:
                kept = self._natural(sets)
                sizes = kept if name == "nothing shared" else [*{*kept, best["everything shared"][2]}]
                best[name] = min((*self.predict(fold, some), some) for some in sizes)
        name = min(best, key=lambda key: best[key][0])
        likely = "everything shared" if self._shared_part() >= MOSTLY else "nothing shared"
        if name != "node by node" and likely in best and best[likely][0] < SURE * best[name][0]:
            name = likely
        compared = tuple((key, us) for key, (us, *_) in best.items())
        _, kernels, tiles = best[name]
        return Verdict(np.array(folds[name]), tiles, kernels, np.array(once), np.array(each), compared)

    def _shared_part(self) -> float:
        """Of all tokens that requests read if nothing is shared, those that they have in common with others."""
        requests: list[float] = [kind[3] for kind in self.kinds]
        shared = 0.0
        for i in reversed(range(len(self.kinds))):
            parent, _, tokens, _, _ = self.kinds[i]
            shared += self.counts[i] * tokens * requests[i]
            if parent >= 0:
                requests[parent] += requests[i] * self.counts[i] / self.counts[parent]
        return shared / max(1.0, shared + sum(group.tokens * group.number for group in self.private))

    def _node_by_node(self) -> tuple[list[float], list[float], list[bool]]:
        """Per kind the cost of computing a node once, and with each child, in microseconds of the device; and which is less.

        Children come after their parents, so going backwards every node knows what its children cost per token.
        """
        count = max(1, self.count)
        mean = sum(self._per_token(group.rows) * group.number for group in self.private) / count
        n = len(self.kinds)
        below, once, each, folded = [0.0] * n, [0.0] * n, [0.0] * n, [False] * n
        for i in reversed(range(n)):
            parent, rows, tokens, readers, stuck = self.kinds[i]
            below[i] += readers * mean
            mine = self._per_token(rows)
            once[i] = tokens * mine + self.hw.costs.state * self._state_bytes(rows) / 1e6
            each[i] = tokens * below[i]
            folded[i] = not stuck and each[i] < once[i]
            if parent >= 0:
                below[parent] += (below[i] if folded[i] else mine) * self.counts[i] / self.counts[parent]
        return once, each, folded

    def _per_token(self, rows: int) -> float:
        if not rows:
            return 0.0
        size = self.size(rows, self.sizes)
        tile = self.tiles[size]
        programs = -(-rows // size) * self.shape.num_kv_heads
        return programs * self.hw.costs.tile(size, tile.per_sm).warm * self.block[size] / (tile.block_n * self.hw.num_sms)

    def _state_bytes(self, packed_rows: float) -> float:
        return packed_rows * self.shape.num_kv_heads * self.shape.state_bytes

    def _size_sets(self) -> list[tuple[int, ...]]:
        """Sets of tile sizes, first what rows ask for. Each further size is a further launch; the narrow tile comes last."""
        rows = {kind[1] for kind in self.kinds if kind[1]} | {group.rows for group in self.private} or {1}
        portable = tuple(size for size in self.sizes if size != NARROW.block_m)
        natural = sorted({self.size(n, portable) for n in rows})
        first, *more = [size for size in portable if natural[0] <= size <= natural[-1]]
        sets = {tuple(natural): None}
        for size in (first, *more):
            for some in ((first, size), (first, size, natural[-1])):
                if some[-1] * MOST_TILES >= natural[-1]:
                    sets[tuple(sorted({self.size(n, some) for n in rows}))] = None
        if self.hopper and self.hw.costs.knows(SINGLE.kernel):
            sets |= {swapped(some): None for some in tuple(sets)}
        if len(portable) < len(self.sizes):
            sets |= {tuple(sorted({self.size(n, (NARROW.block_m, *some)) for n in rows})): None for some in tuple(sets)}
        return list(sets)

    def _natural(self, sets: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """What rows ask for, with the narrow tile and without."""
        narrow = tuple(sorted({NARROW.block_m if size == sets[0][0] else size for size in sets[0]}))
        return [sets[0], *([narrow] if narrow in sets else [])]

    def predict(self, folded: list[bool], sizes: tuple[int, ...]) -> tuple[float, tuple[str, ...]]:
        """Microseconds with some kinds of node folded and tiles of some sizes, and the kernels of ``options`` for that."""
        heads = self.shape.num_kv_heads
        bundles = {size: _Bundle(self.tiles[size]) for size in reversed(sizes)}
        extra, moved = self._move(folded)
        count = max(1, self.count)
        tiles = 0.0  # of a private node, on average
        for group in self.private:
            size = self.size(group.rows, sizes)
            row_tiles, block = -(-group.rows // size), self.tiles[size].block_n
            blocks = math.ceil((group.tokens + moved / count) / block)
            tiles += row_tiles * group.number / count
            if blocks:
                bundles[size].add(row_tiles * heads * group.number, blocks, group.rows * group.number, group.number)
                bundles[size].reads.append((group.tokens * group.number * heads / block, row_tiles))
        last = self.size(self.private[0].rows, sizes) if self.private else sizes[0]
        times = [kind[3] * tiles for kind in self.kinds]  # programs that read a token of a node
        for i in reversed(range(len(times))):
            parent, rows, tokens, _, _ = self.kinds[i]
            if not rows:
                continue
            size = last if folded[i] else self.size(rows, sizes)
            block, n = self.tiles[size].block_n, self.counts[i]
            if not folded[i]:
                times[i] = -(-rows // size)
            if parent >= 0:
                times[parent] += times[i] * n / self.counts[parent]
            if tokens:
                bundles[size].reads.append((tokens * n * heads / block, times[i]))
                if not folded[i]:
                    bundles[size].add(int(times[i]) * heads * n, -(-(tokens + extra[i]) // block), rows * n, n)
        return self._total([(size, bundle) for size, bundle in bundles.items() if bundle.entries])

    def _move(self, folded: list[bool]) -> tuple[list[int], int]:
        """Tokens that each kind takes on from those folded above it, and all private nodes together."""
        extra, passed = [0] * len(folded), [0] * len(folded)
        total = 0
        for i, (parent, _, tokens, readers, _) in enumerate(self.kinds):
            extra[i] = passed[parent] if parent >= 0 else 0
            passed[i] = extra[i] + tokens if folded[i] else 0
            total += readers * passed[i] * self.counts[i]
        return extra, total

    def _total(self, launches: list[tuple[int, _Bundle]]) -> tuple[float, tuple[str, ...]]:
        some = options(self.hw, self.shape, [size for size, _ in launches]) if self.hopper else [()]
        return min((self._timed(launches, option), kernels_of(option)) for option in some)

    def _timed(self, launches: list[tuple[int, _Bundle]], option: tuple[AttendTile, ...]) -> float:
        hw, tiling = self.hw, Tiling(self.shape, self.hw, alone=len(launches) == 1)
        loads: list[Load] = []
        for size, bundle in launches:
            mine = self.tiles[size]
            load = Load.of(tile_of(option, size) or mine, self.shape, bundle.programs, bundle.reads, 1, mine.block_n)
            bundle.tile = tiling.next(load)
            loads.append(load)
        rows, states = 0, 0
        for load, (_, bundle), least in zip(loads, launches, hidden(loads, hw), strict=True):
            part = bundle.part(hw.num_sms, least)
            load.programs, load.longest = 0, 0
            for programs, blocks, packed, count in bundle.entries:
                splits = -(-blocks // part)
                load.programs += programs * splits
                load.longest = max(load.longest, -(-blocks // splits))
                rows += packed * splits
                states += count * splits
        direct = states == self.count and len(launches) == 1
        return predict(loads, 0.0 if direct else self._state_bytes(rows), hw).us


class _Bundle:
    """Nodes of one launch. Entries are nodes that are cut alike: programs of one split, blocks of a node, rows, nodes."""

    __slots__ = ("blocks", "entries", "longest", "programs", "reads", "tile")

    def __init__(self, tile: AttendTile):
        self.tile = tile
        self.entries: list[tuple[int, int, int, int]] = []
        self.reads: list[tuple[float, float]] = []
        self.programs, self.blocks, self.longest = 0, 0, 0

    def add(self, programs: int, blocks: int, rows: int, count: int) -> None:
        self.entries.append((programs, blocks, rows, count))
        self.programs += programs
        self.blocks += programs * blocks
        self.longest = max(self.longest, blocks)

    def part(self, num_sms: int, least: int) -> int:
        """Blocks per split, see ``splits.balanced_part``."""
        return Cuttable(self.programs_of, self.longest, self.blocks, self.programs).part(self.tile, num_sms, least)

    def programs_of(self, part: int) -> int:
        """Programs of splits of at most ``part`` blocks."""
        return sum(programs * -(-blocks // part) for programs, blocks, _, _ in self.entries)
