"""Which tiles the launches of a call may use, and which each of them gets: that depends on those before it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from cascade_fd.hardware import Hardware
from cascade_fd.planning.cost import MOST_BESIDE, Load
from cascade_fd.planning.worklist import Shape
from cascade_fd.tiles import HOPPER, NARROW, ROOM, SINGLE, AttendTile, attend_tile, hopper_tiles

CROWD = 0.25  # from this share of a launch's work on, what runs before it takes enough of the SMs to call for small programs


def pick_tile(
    hw: Hardware, shape: Shape, rows: int, programs: int = 1, *, crowded: bool = False, alone: bool = False
) -> AttendTile:
    """The tile of a launch. ``crowded``: much work is launched before it. ``alone``: no other launch belongs to the call."""
    if rows == NARROW.block_m:
        return hopper_tiles(shape.head_dims)[NARROW.kernel]
    return attend_tile(hw, shape.dtype, shape.head_dims, rows, programs, beside=crowded and hw.overlaps, alone=alone)


def known_tiles(hw: Hardware, shape: Shape) -> dict[str, AttendTile]:
    """The tiles of the kernels for Hopper that there are for some heads and that the device has costs of, by kernel."""
    return {kernel: tile for kernel, tile in hopper_tiles(shape.head_dims).items() if hw.costs.knows(kernel)}


def options(hw: Hardware, shape: Shape, rows: list[int]) -> list[tuple[AttendTile, ...]]:
    """What launches of tiles with so many rows, one after the other, may use of the tiles of the kernels for Hopper.

    One tile at most for the first launch, of 128 rows, and one for those of 64; () where all keep to portable ones. No half SM,
    if there is the whole, where nothing follows that fits beside it.
    """
    known = known_tiles(hw, shape).values()
    wide = [(tile,) for tile in known if tile.block_m == HOPPER.block_m and rows[:1] == [tile.block_m]]
    single = [(tile,) for tile in known if tile.block_m == SINGLE.block_m and tile.block_m in rows]
    some = wide if rows[1:] and max(rows[1:]) <= MOST_BESIDE else wide[:1]
    return [(*first, *later) for first in ((), *some) for later in ((), *single)]


def swapped(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The same, but with the tile of one warp group for the portable one of half as many rows."""
    return tuple(sorted({SINGLE.block_m if size == SINGLE.block_m // 2 else size for size in sizes}))


def tile_of(option: tuple[AttendTile, ...], rows: int) -> AttendTile | None:
    """What one of ``options`` uses for launches of so many rows; None: a portable tile."""
    return next((tile for tile in option if tile.block_m == rows), None)


def kernels_of(option: tuple[AttendTile, ...]) -> tuple[str, ...]:
    """The kernels of one of ``options``."""
    return tuple(tile.kernel for tile in option)


@dataclass
class Tiling:
    """The tiles of a call's launches, one after the other.

    Attributes:
        shape, hw: what is planned for.
        alone: whether the call is one launch.
        tiles: those of the launches so far.
        before: SM time of these launches.
    """

    shape: Shape
    hw: Hardware
    alone: bool = False
    tiles: list[AttendTile] = field(default_factory=list)
    before: float = 0.0

    def next(self, load: Load) -> AttendTile:
        """The tile of the next launch; its load, made for any tile of its size, is told how many of this one an SM holds."""
        busy = 0.0 if load.whole else load.busy(self.hw.costs, self.hw.num_sms)
        tile = hopper_tiles(self.shape.head_dims).get(load.kernel)
        if tile is None:
            crowded = self.before > CROWD * busy
            tile = pick_tile(self.hw, self.shape, load.rows, int(load.programs), crowded=crowded, alone=self.alone)
        if tile.kernel == NARROW.kernel:
            room = [ROOM[other.kernel] for other in self.tiles if other.kernel in ROOM and not other.whole]
            tile = replace(tile, fits=min([tile.fits, *room]))
        load.per_sm, load.whole = tile.per_sm, tile.whole
        self.tiles.append(tile)
        self.before += busy
        return tile
