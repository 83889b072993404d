"""The wave-efficiency rule, against the table it is known by and made-up devices."""

import numpy as np
import pytest
import torch

from cascade_fd import Hardware, Level, PrefixTree, plan
from cascade_fd.hardware import A100, CPU, H200, PRESETS
from cascade_fd.planning.splits import balanced_splits, wave_splits
from cascade_fd.tiles import attend_tile


@pytest.mark.parametrize(
    ("work", "blocks", "splits"),
    [(8, 1000, 29), (32, 250, 7), (32, 63, 7), (128, 32, 2), (2048, 16, 1), (8, 3, 3)],
)
def test_the_known_table(work, blocks, splits):
    assert wave_splits(work, 264, blocks) == splits


@pytest.mark.parametrize("work", [0, 1, 5, 100, 211, 212, 10_000])
@pytest.mark.parametrize("blocks", [1, 2, 7, 64, 4096])
def test_bounds(work, blocks):
    splits = wave_splits(work, 264, blocks)
    assert 1 <= splits <= min(128, blocks)
    if work >= 0.8 * 264:
        assert splits == 1


def flat_plan(lens, hw, heads=8, **options):
    tree = PrefixTree.from_levels([Level(range(len(lens) + 1), lens)])
    return plan(tree, num_q_heads=4 * heads, num_kv_heads=heads, head_dim=128, device="cpu", hardware=hw, **options)


def test_plans_follow_the_device():
    for hw in (CPU, A100, H200, Hardware("small", "sm_90", 16, 232_448, 1e12)):
        made = flat_plan([65536], hw)
        tile = made.launches[0].tile
        assert made.num_items == wave_splits(8, hw.num_sms * tile.per_sm, 65536 // tile.block_n)


def test_one_long_request_among_short_ones_is_cut_alone():
    made = flat_plan([131072] + [1024] * 127, H200)
    splits = made.splits
    assert splits[0] > 1
    assert (splits[1:] == 1).all()


def test_no_split_is_shorter_than_a_tile():
    made = flat_plan([300] * 2, H200)
    items = made.launches[0].items.numpy()
    whole = made.launches[0].tile.block_n
    lengths = items[:, 4] - items[:, 3]
    assert all(n >= whole or stop == 300 for n, stop in zip(lengths, items[:, 4], strict=True))


def test_an_integer_is_a_run_time_split_count():
    assert flat_plan([1000] * 3, H200, split=7).splits.tolist() == [7, 7, 7]
    assert flat_plan([1000, 3, 0], H200, split=7).splits.tolist() == [7, 3, 0]


@pytest.mark.parametrize("arch", PRESETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [16, 72, 128, 192, 256])
def test_every_tile_fits_its_device(arch, dtype, dim):
    hw = PRESETS[arch]
    for rows in (1, 16, 17, 64, 1000):
        tile = attend_tile(hw, dtype, (dim, dim), rows)
        assert tile.smem(hw, (dim, dim), dtype.itemsize) <= hw.smem
        assert tile.block_n >= 16
        assert tile.block_m >= min(rows, 16)


def test_more_work_than_a_wave_takes_the_tile_that_packs_more_programs():
    few = attend_tile(H200, torch.bfloat16, (128, 128), 4, programs=128)
    many = attend_tile(H200, torch.bfloat16, (128, 128), 4, programs=512)
    assert (few.per_sm, many.per_sm) == (2, 4)
    assert np.prod([many.per_sm, H200.num_sms]) >= 512


@pytest.mark.parametrize(("B", "tokens", "programs"), [(1, 131072, 264), (4, 32768, 256), (16, 8192, 256), (64, 4096, 512)])
def test_balanced_splits_fill_one_wave(B, tokens, programs):
    made = flat_plan([tokens] * B, H200, split="balanced")
    assert made.num_items * 8 == programs


def test_balanced_splits_follow_the_lengths():
    lens = np.random.default_rng(0).integers(128, 8192, 128, endpoint=True)
    lens[0] = 131072
    made = flat_plan(lens, H200, split="balanced")
    items = made.launches[0].items
    cost = items[:, 4] - items[:, 3]
    assert made.splits[0] > 10
    assert (cost[1:] <= cost[:-1]).all()  # long items first
    slots = H200.num_sms * made.launches[0].tile.per_sm
    assert int(cost.max()) <= 1.3 * max(lens[1:].max(), lens.sum() * 8 / slots)


@pytest.mark.parametrize("slots", [1, 132, 528])
def test_balanced_splits_never_launch_a_second_wave_of_their_own(slots):
    rng = np.random.default_rng(1)
    for _ in range(50):
        blocks, programs = rng.integers(1, 500, 20), rng.integers(1, 9, 20)
        splits = balanced_splits(blocks, programs, slots)
        assert (splits >= 1).all()
        assert (splits <= blocks).all()
        assert ((splits - 1) * programs).sum() < slots


@pytest.mark.parametrize("dims", [(40, 64), (64, 24), (72, 72)])
def test_dims_that_cannot_be_copied_asynchronously_keep_to_small_tiles(dims):
    for arch in ("sm_80", "sm_90", "sm_100"):
        assert attend_tile(PRESETS[arch], torch.bfloat16, dims, 1000).block_m <= 32
