"""Launch settings: one table with provenance, read by the planner and the kernels.

Measured rows come from benchmarks/NOTES.md; the rest are first guesses that compile without spills.
"""

from __future__ import annotations

import functools
import math
import os
from dataclasses import dataclass, replace

import torch

from cascade_fd.hardware import Hardware


@dataclass(frozen=True)
class AttendTile:
    """Shape and resources of one program of the attend kernel.

    Attributes:
        block_m: packed query rows per program (query tokens x the G heads of one KV head).
        block_n: keys per step of the main loop.
        num_warps, num_stages: as Triton means them.
        per_sm: programs that should be resident on one SM: slots = num_sms * per_sm.
        fits: programs that can be resident; ``attend_tile`` counts them by shared memory.
        registers: most registers per thread; 0: as many as the compiler likes (NVIDIA only).
        kernel: "attend", the portable one; on Hopper GPUs also "hopper", which takes whole SMs, "beside", the same kernel in
            three quarters of one's registers, "single", the same with one warp group, and "narrow", for few rows.
        lone: only for a call that is one launch.
        whole: a program takes a whole SM: nothing of another launch fits beside it.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    per_sm: int
    fits: int = 1
    registers: int = 0
    kernel: str = "attend"
    lone: bool = False
    whole: bool = False

    def smem(self, arch: str, head_dims: tuple[int, int], itemsize: int) -> int:
        """Shared memory in bytes, from above: what Triton 3.6 to 3.9 allocate for K, V and (on NVIDIA) q."""
        amd = arch.startswith("gfx")
        warp_group = self.block_m >= 64 and not amd  # warp-group MMA keeps one more stage
        stages = self.num_stages if warp_group else max(1, self.num_stages - 1)
        elements = stages * self.block_n * sum(map(padded, head_dims)) + (0 if amd else self.block_m * padded(head_dims[0]))
        return elements * itemsize + 4096


@dataclass(frozen=True)
class MergeTile:
    """Shape of one program of the merge kernel: ``block_h`` heads of a row, ``block_d`` columns, ``block_s`` states a step."""

    block_s: int
    block_d: int
    num_warps: int
    block_h: int = 1


# Two groups of four warps multiply and one warp fetches; Triton counts the first group. Alone on an SM, with all its memory at
# D = 128, or with three quarters of the registers and a third of the memory, so that four narrow programs, or two of 16 rows,
# fit beside it: an SM's registers are four files of 512 per lane, of which "beside" leaves 128 each. Queries are in registers
# there, since half-size products that read them from shared memory, too, keep it busy (c4: 166 us instead of 151).
HOPPER = AttendTile(128, 128, 4, 3, 1, registers=232, kernel="hopper", whole=True)
BESIDE = AttendTile(128, 64, 4, 2, 1, registers=176, kernel="beside")
# One group of warps and one that fetches: more of few rows' keys under way than the portable tile of as many rows has.
SINGLE = AttendTile(64, 64, 4, 3, 1, registers=168, kernel="single")
# One warp that fetches for itself, two tiles ahead.
NARROW = AttendTile(8, 32, 1, 2, 4, fits=6, registers=128, kernel="narrow")
ROOM = {"attend": 4, "beside": 4, "single": 3}  # narrow programs that fit beside one of another launch
# Heads half as wide leave room for steps twice as long. And only from 48 KiB of shared memory on does Triton ask for SMs that
# prefer it to a cache: with less, nothing ran beside this kernel (h1: 187 us, not 121). Heads twice as wide fill an SM.
BESIDE_64, SINGLE_64, NARROW_64 = replace(BESIDE, block_n=128), replace(SINGLE, block_n=128), replace(NARROW, block_n=64)
HOPPER_256 = replace(HOPPER, block_n=64, num_stages=2)
FETCH_REGISTERS = {"hopper": 40, "beside": 32, "single": 56}  # of the warp that fetches, and of those that fill up its group
ON_HOPPER = tuple(tile.kernel for tile in (HOPPER, BESIDE, SINGLE, NARROW))
FREE = 65536 * 3 // 4  # registers of an SM of which a program may take so many and leave room for one of another launch
_HOPPER_TILES = {  # by the larger head dim, rising
    dim: {tile.kernel: tile for tile in tiles}
    for dim, tiles in {
        64: (HOPPER, BESIDE_64, SINGLE_64, NARROW_64),
        128: (HOPPER, BESIDE, SINGLE, NARROW),
        256: (HOPPER_256,),
    }.items()
}
HOPPER_DIMS = tuple(_HOPPER_TILES)
HOPPER_SWITCH = "CASCADE_FD_HOPPER"  # set to 0 in the environment, all launches keep to the portable kernel


def hopper_tiles(head_dims: tuple[int, int]) -> dict[str, AttendTile]:
    """The tiles of the kernels for Hopper that there are for some head dims, by kernel."""
    return next((tiles for dim, tiles in _HOPPER_TILES.items() if dim >= max(head_dims)), {})


def hopper_lacks(arch: str, dtype: torch.dtype, head_dims: tuple[int, int], page_size: int) -> tuple[str, ...]:
    """Why the kernels for Hopper cannot take a launch, as far as a plan can tell; empty if they can."""
    return _hopper_lacks(arch, dtype, head_dims, page_size, os.environ.get(HOPPER_SWITCH) == "0")


@functools.lru_cache(1024)
def _hopper_lacks(arch: str, dtype: torch.dtype, head_dims: tuple[int, int], page_size: int, is_off: bool) -> tuple[str, ...]:
    wanted = {
        "the GPU is a Hopper GPU (sm_90)": arch == "sm_90",
        "q and the cache are bfloat16 or float16": dtype in (torch.bfloat16, torch.float16),
        f"head dims are in {HOPPER_DIMS}": all(dim in HOPPER_DIMS for dim in head_dims),
        "the page size is a multiple of 16": page_size % 16 == 0,
        f"{HOPPER_SWITCH} is not 0": not is_off,
    }
    return tuple(reason for reason, holds in wanted.items() if not holds)


# (arch, bytes per element) -> tiles, by rows, then by how many fit an SM.
# sm_90, 2 bytes: measured on an H200, D = 128, page 16, 2026-11-30 (benchmarks/NOTES.md). Of 16 and 32 rows there are several:
# three stages and two programs per SM read fastest when that holds all the work; else two stages and four or five per SM, which
# keep batches of up to 660 programs in one wave (d4: 240 us against 279); beyond, steps of 32 keys, three of them in flight
# (128 requests of 8,192 keys: 955 us against 991). With 184 registers, 64 or 128 rows leave room for two small programs of
# another launch on the same SM (c3: 163 us before, 126 then).
_ATTEND: dict[tuple[str, int], tuple[AttendTile, ...]] = {
    ("sm_90", 2): (
        AttendTile(16, 64, 2, 3, 2),
        AttendTile(16, 64, 2, 2, 5, registers=128),
        AttendTile(16, 32, 2, 4, 4, lone=True),
        AttendTile(32, 64, 2, 3, 2),
        AttendTile(32, 64, 2, 2, 4),
        AttendTile(64, 128, 4, 2, 1, registers=248),
        AttendTile(64, 64, 4, 3, 1, registers=184),
        AttendTile(128, 64, 8, 3, 1, registers=184),
    ),
    ("sm_80", 2): (AttendTile(16, 64, 2, 3, 2), AttendTile(32, 64, 2, 3, 2), AttendTile(64, 64, 4, 3, 1)),
    ("gfx942", 2): (AttendTile(16, 32, 2, 2, 2), AttendTile(32, 32, 2, 2, 2), AttendTile(64, 32, 4, 2, 1)),
    ("cpu", 2): (AttendTile(16, 32, 4, 1, 1), AttendTile(64, 32, 4, 1, 1)),
    ("any", 2): (AttendTile(16, 64, 4, 2, 2), AttendTile(64, 64, 4, 2, 1)),
    ("cpu", 4): (AttendTile(16, 32, 4, 1, 1), AttendTile(64, 32, 4, 1, 1)),
    ("any", 4): (AttendTile(16, 32, 4, 2, 2), AttendTile(32, 32, 4, 2, 1)),
}


# Rows x heads from which there are many; from there on, states x heads x columns that a merging program loads in a step.
MERGE_ROWS, MERGE_ELEMENTS = 2048, 1024


def padded(dim: int) -> int:
    """The power of two, at least 16, that a head dim is padded to inside a tile."""
    return max(16, 1 << (dim - 1).bit_length())


def tile_rows(hw: Hardware, dtype: torch.dtype, head_dims: tuple[int, int]) -> tuple[int, ...]:
    """Rows of the tiles that a device has for a dtype and head dims, rising."""
    return tuple(_tiles(hw.arch, hw.smem, dtype, head_dims))


def attend_tile(
    hw: Hardware,
    dtype: torch.dtype,
    head_dims: tuple[int, int],
    rows: int,
    programs: int = 1,
    *,
    beside: bool = False,
    alone: bool = False,
) -> AttendTile:
    """The smallest tile that holds ``rows`` packed rows, or the largest there is, shrunk until its pipeline fits.

    Of tiles with as many rows, the first that can have ``programs`` resident at once, or the last: the one that takes least
    of an SM, as it should ``beside`` another launch. ``alone``: no other launch belongs to the call.
    """
    by_rows = _tiles(hw.arch, hw.smem, dtype, head_dims)
    same = by_rows.get(rows) or next((tiles for size, tiles in by_rows.items() if size >= rows), None)
    same = same or by_rows[max(by_rows)]
    same = tuple(t for t in same if alone or not t.lone)
    return next((t for t in same if t.per_sm * hw.num_sms >= programs and not beside), same[-1])


@functools.cache
def _tiles(arch: str, smem: int, dtype: torch.dtype, head_dims: tuple[int, int]) -> dict[int, tuple[AttendTile, ...]]:
    """The tiles of a device by their rows, rising."""
    tiles = _ATTEND.get((arch, dtype.itemsize)) or _ATTEND["any", dtype.itemsize]
    if any(dim % 16 for dim in head_dims):
        # Triton cannot prove 16-byte rows then and loads without async copies. With warp-group MMA (from 64 rows on) Triton
        # 3.6.0 then gives the kernel too little shared memory (D 40, Dv 24 on an H200: wrong results, and out-of-range shared
        # addresses under compute-sanitizer): such dims keep to plain MMA.
        tiles = tuple(t for t in tiles if t.block_m <= 32) or tiles[:1]
    width = max(map(padded, head_dims))
    if width > 128:
        # Accumulators twice as wide: spread them over twice the threads, or, of 128 rows, let them have all registers. Beyond
        # 256 columns that is not enough.
        tiles = tuple(_widened(t) for t in tiles if t.block_m <= 64 or width <= 256)
    fitted = [_fitted(tile, arch, smem, dtype.itemsize, head_dims) for tile in tiles]
    sizes = sorted({t.block_m for t in fitted})
    return {size: tuple(t for t in fitted if t.block_m == size) for size in sizes}


def _widened(tile: AttendTile) -> AttendTile:
    if tile.block_m >= 128:
        return replace(tile, num_stages=2, registers=0, whole=True)
    num_warps = min(8, 2 * tile.num_warps)
    return replace(tile, num_warps=num_warps, whole=tile.registers * 32 * num_warps > FREE)


def _fitted(tile: AttendTile, arch: str, smem: int, itemsize: int, head_dims: tuple[int, int]) -> AttendTile:
    while tile.smem(arch, head_dims, itemsize) * tile.per_sm > smem and tile.block_n > 16:
        tile = replace(tile, block_n=tile.block_n // 2)
    return replace(tile, fits=max(tile.per_sm, smem // tile.smem(arch, head_dims, itemsize)))


def merge_tile(max_states: int, head_dim: int, rows: int, heads: int = 1) -> MergeTile:
    """One-warp programs with all states in one load. With few rows and many states, columns are dealt out too; with many rows
    and few states, programs take several heads: so few bytes each, and they would come in many waves.

    A program has as many heads as give each thread the states of one column, if their number allows: then it adds them up
    alone and in order, however many there are. Nor does the step of 32 states, that of batch-invariant plans, depend on rows.
    ``rows``: rows x heads. Measured on an H200: c1 1.8 us against 7 us for eight rows looping; d7 (8 rows, 256 states) 21.3
    against 84 us in all; h1 (16,384 rows x heads of 64) 115 against 125; g1 (heads of 256, five states in steps of four, not
    eight) 194 against 197.
    """
    block_d, all_states = padded(head_dim), max(2, 1 << (max_states - 1).bit_length())
    if rows <= 1024 and max_states > 32:
        return MergeTile(min(256, all_states), 16, 4)
    most = min(32, 4096 // block_d)  # a warp holds no more: at D = 256 it would spill
    if block_d == 256 and max_states <= 8 and rows >= MERGE_ROWS:
        most = MERGE_ELEMENTS // block_d
    block_s = min(most, all_states)
    block_h = math.gcd(heads, max(1, 128 // block_d))
    while rows >= MERGE_ROWS * block_h and block_s * block_h * block_d < MERGE_ELEMENTS and heads % (2 * block_h) == 0:
        block_h *= 2
    return MergeTile(block_s, block_d, 1, block_h)
