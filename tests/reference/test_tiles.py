"""Which tile a launch or a merge gets, and what costs say of kernels that a device lacks."""

from dataclasses import replace

import pytest
import torch

from cascade_fd.hardware import PRESETS
from cascade_fd.planning.cost import Load
from cascade_fd.planning.layout import INVARIANT_STATES
from cascade_fd.planning.tiling import Tiling, options, pick_tile
from cascade_fd.planning.worklist import Shape
from cascade_fd.tiles import (
    BESIDE,
    FETCH_REGISTERS,
    HOPPER,
    HOPPER_256,
    NARROW,
    SINGLE,
    attend_tile,
    hopper_tiles,
    merge_tile,
    tile_rows,
)

H200 = PRESETS["sm_90"]
LLAMA = Shape(32, 8, 128, 128, torch.bfloat16)
GEMMA = Shape(16, 8, 256, 256, torch.bfloat16)
FILE = 512  # registers per lane in each of an SM's four files


@pytest.mark.parametrize(
    ("states", "dim", "rows", "heads", "want"),
    [
        (2, 128, 32768, 32, 4),  # many rows of few states
        (2, 128, 32768, 6, 2),  # as many heads as divide them
        (2, 128, 32768, 5, 1),
        (4, 128, 8192, 32, 2),
        (9, 128, 32768, 32, 1),  # states enough to fill a program
        (2, 128, 2048, 32, 2),
        (2, 128, 2047, 32, 1),  # few rows
        (2, 80, 32768, 32, 4),
        (2, 64, 32768, 32, 8),
        (9, 64, 8, 32, 2),  # two lanes have a head each: they would add up one sum together, in another order
        (9, 64, 8, 5, 1),
        (2, 16, 8, 24, 8),
    ],
)
def test_heads_of_a_merging_program(states, dim, rows, heads, want):
    tile = merge_tile(states, dim, rows, heads)
    assert (tile.block_h, tile.num_warps) == (want, 1)
    assert heads % tile.block_h == 0


def test_steps_of_a_merging_program_are_short_where_columns_and_rows_are_many():
    assert [merge_tile(5, 256, rows, 16).block_s for rows in (1024, 2048)] == [8, 4]


@pytest.mark.parametrize("dim", [16, 64, 80, 128, 256])
def test_a_batch_invariant_merge_is_the_same_for_any_number_of_rows(dim):
    """Steps of other lengths would add states up in another order."""
    assert len({merge_tile(INVARIANT_STATES, dim, rows, 32) for rows in (32, 1024, 2048, 32768)}) == 1


def test_what_fits_beside_the_wide_kernel():
    """A warp of each group is in every file, and the warps that fetch fill up a group of their own."""
    left = FILE - 2 * BESIDE.registers - FETCH_REGISTERS["beside"]
    assert left >= NARROW.registers
    assert left >= pick_tile(H200, LLAMA, 16, crowded=True).registers > 0
    assert FILE - 2 * HOPPER.registers - FETCH_REGISTERS["hopper"] < 32  # nothing beside the other size
    for tile in (HOPPER, BESIDE, HOPPER_256):
        assert (2 * tile.registers + FETCH_REGISTERS[tile.kernel]) % 24 == 0  # or a part of the file stays unused


@pytest.mark.parametrize(
    ("before", "want"),
    [((), 6), ((HOPPER,), 6), ((BESIDE,), 4), ((SINGLE,), 3), ((HOPPER, SINGLE), 3), ((HOPPER_256,), 6)],
)
def test_narrow_programs_find_what_room_earlier_launches_leave(before, want):
    tiling = Tiling(LLAMA, H200)
    for tile in before:
        tiling.next(Load.of(tile, LLAMA, 128, [(1000, 1)], 10))
    load = Load.of(NARROW, LLAMA, 512, [(1000, 1)], 10)
    tile = tiling.next(load)
    assert tile == replace(NARROW, fits=want) and load.per_sm == NARROW.per_sm
    assert [t.kernel for t in tiling.tiles] == [*(t.kernel for t in before), "narrow"]


def test_what_launches_may_use():
    assert options(H200, LLAMA, [128, 16]) == [(), (HOPPER,), (BESIDE,)]
    assert options(H200, LLAMA, [128]) == [(), (HOPPER,)]  # alone, it takes whole SMs
    assert options(H200, LLAMA, [64, 16]) == options(H200, LLAMA, [64]) == [(), (SINGLE,)]
    assert options(H200, LLAMA, [128, 64, 16]) == [(), (SINGLE,), (HOPPER,), (HOPPER, SINGLE)]  # 64 rows find no room in half
    half = replace(H200, costs=H200.costs.only("beside"))
    assert options(half, LLAMA, [128]) == options(half, LLAMA, [128, 32]) == [(), (BESIDE,)]  # there is no other
    assert options(H200, LLAMA, [32, 16]) == options(H200, LLAMA, []) == [()]
    assert options(H200, GEMMA, [128, 64]) == [(), (HOPPER_256,)]
    assert options(PRESETS["sm_80"], LLAMA, [128, 64]) == [()]


def test_heads_of_any_width_have_tiles():
    for dims in ((8, 8), (80, 96), (192, 128), (576, 512)):
        shape = Shape(16, 8, *dims, torch.bfloat16)
        tiling = Tiling(shape, H200)
        for rows in (128, 16):
            tile = pick_tile(H200, shape, rows)
            assert tiling.next(Load.of(tile, shape, 1, [(1, 1)], 1)).kernel == "attend"
    assert hopper_tiles((576, 512)) == {}
    assert max(tile_rows(H200, torch.bfloat16, (256, 256))) == 128
    assert max(tile_rows(H200, torch.bfloat16, (576, 512))) == 64


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256), (64, 256)])
def test_a_portable_tile_can_stand_in_for_each_kernel(dims):
    """A plan for these kernels also runs where they cannot: its items need as many rows, or the next size with more."""
    for tile in hopper_tiles(dims).values():
        assert attend_tile(H200, torch.bfloat16, dims, tile.block_m).block_m >= tile.block_m


def test_costs_of_some_kernels():
    costs = H200.costs.only("beside", "narrow")
    assert [costs.knows(kernel) for kernel in ("attend", "hopper", "beside", "narrow")] == [True, False, True, True]
    dear = {(t.rows, t.kernel) for t in costs.tiles if t.start > 1e6}
    assert dear == {(128, "attend"), (16, "attend")}  # the narrow tile stands for the smallest
    assert {t.kernel for t in H200.costs.only().tiles} == {"attend"}
    assert not any(t.start > 1e6 for t in H200.costs.only().tiles)
