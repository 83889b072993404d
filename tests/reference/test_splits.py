"""How ranges are cut: the wave-efficiency rule against the table it is known by, the others against their promises."""

import heapq
from dataclasses import replace

import numpy as np
import pytest
import torch

from cascade_fd import Hardware, Level, PageTable, PrefixTree, plan
from cascade_fd.hardware import A100, CPU, H200, PRESETS
from cascade_fd.planning.splits import FIXED_TOKENS, balanced_part, cut, stream_k_part, tapered_cuts, wave_splits
from cascade_fd.tiles import NARROW, AttendTile, attend_tile


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
        made = flat_plan([65536], hw, split="wave")
        tile = made.launches[0].tile
        assert made.num_items == wave_splits(8, hw.num_sms * tile.per_sm, 65536 // tile.block_n)


@pytest.mark.parametrize("policy", ["wave", "balanced"])
def test_one_long_request_among_short_ones_is_cut_alone(policy):
    made = flat_plan([131072] + [1024] * 127, H200, split=policy)
    splits = made.splits
    assert splits[0] > 1
    assert (splits[1:] == 1).all()


@pytest.mark.parametrize("policy", ["wave", "balanced"])
def test_no_split_is_shorter_than_a_tile(policy):
    made = flat_plan([300] * 2, H200, split=policy)
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
        assert tile.smem(arch, (dim, dim), dtype.itemsize) <= hw.smem
        assert tile.block_n >= 16
        assert tile.block_m >= min(rows, 16)


def test_more_work_than_a_wave_takes_the_tile_that_packs_more_programs():
    few = attend_tile(H200, torch.bfloat16, (128, 128), 4, programs=128)
    many = attend_tile(H200, torch.bfloat16, (128, 128), 4, programs=512)
    assert (few.per_sm, many.per_sm) == (2, 5)
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


def tile_of(per_sm, fits):
    return AttendTile(16, 64, 2, 3, per_sm, fits)


def random_ranges(seed):
    rng = np.random.default_rng(seed)
    for _ in range(60):
        n = int(rng.integers(1, 30))
        yield rng.integers(1, int(rng.choice([3, 40, 700])), n), rng.integers(1, 9, n)


def programs_of(blocks, programs, part):
    return int((-(-blocks // part) * programs).sum())


@pytest.mark.parametrize("fits", [2, 3, 5])
@pytest.mark.parametrize("num_sms", [4, 16, 132])
def test_balanced_items_are_as_short_as_running_at_once_allows(num_sms, fits):
    """Against every part length: at most so many programs as slots, unless an SM that holds more of them has less to do."""
    slots, met = 2 * num_sms, 0
    for blocks, programs in random_ranges(num_sms):
        part = balanced_part(blocks, programs, tile_of(2, fits), num_sms)
        total = programs_of(blocks, programs, part)
        if programs.sum() >= slots:  # no range need be cut, but those longer than a slot's share
            assert part == -(-(blocks * programs).sum() // slots)
            continue
        shortest = next(p for p in range(1, 800) if programs_of(blocks, programs, p) <= slots)
        met += 1
        if total <= slots:
            assert part == shortest
        else:
            assert total <= num_sms * fits
            assert part * -(-total // num_sms) <= 2 * shortest
    assert met


def test_more_items_than_slots_where_an_sm_has_less_to_do():
    """160 programs of 79 blocks on 132 SMs: some SMs have two whole ones, 158 blocks; with three halves each, 144."""
    blocks, programs = np.full(20, 79), np.full(20, 8)
    assert balanced_part(blocks, programs, tile_of(2, 2), 132) >= 79
    part = balanced_part(blocks, programs, tile_of(2, 3), 132)
    assert part < 79
    assert part * -(-programs_of(blocks, programs, part) // 132) < 158


def ends(items, slots):
    """When each slot ends, if items go in order to whichever is free first."""
    busy = [0] * slots
    for item in items:
        heapq.heapreplace(busy, busy[0] + item)
    return busy


@pytest.mark.parametrize("nodes", [800, 1024, 1600, 2048, 2600])
def test_last_narrow_items_are_short_so_that_slots_end_together(nodes):
    """On 792 slots; whole nodes of 64 blocks would leave up to half of them idle for up to 64 blocks."""
    blocks, programs = np.full(nodes, 64), np.ones(nodes, int)
    chunk, _ = cut("balanced", 32 * blocks, programs, NARROW, 132)
    part, counts = chunk // 32, -(-32 * blocks // chunk)
    items = sorted((min(p, 64 - s * p) for p, n in zip(part, counts, strict=True) for s in range(n)), reverse=True)
    assert sum(items) == 64 * nodes and counts.max() == 4
    assert (counts[:-1] <= counts[1:]).all()  # equal nodes in order
    assert (counts == 1).mean() > 1 - 800 / nodes
    assert max(ends(items, 792)) < 0.93 * max(ends(blocks, 792))
    assert max(ends(items, 792)) < 64 * nodes / 792 + 16


@pytest.mark.parametrize(
    ("nodes", "fits", "tile"),
    [(768, 6, NARROW), (2300, 6, NARROW), (512, 4, NARROW), (500, 6, NARROW), (1024, 6, tile_of(4, 6))],
)
def test_nodes_stay_whole_where_waves_are_full_or_there_is_but_one(nodes, fits, tile):
    chunk, lead = cut("balanced", np.full(nodes, 2048), np.ones(nodes, int), replace(tile, fits=fits), 132)
    share = -(-2048 * nodes // (132 * 4))
    assert (chunk >= min(2048, share)).all() and lead == 0


def test_the_longest_nodes_of_several_waves_are_not_cut_for_nothing():
    """Lengths from 1 to 64, the sum of those up to n is n * n / 2 * 32: 1.5 slots' shares are longer than n from 33 on."""
    blocks = np.arange(2048) % 64 + 1
    counts = tapered_cuts(blocks, np.ones(2048, int), 792, 8)
    assert (counts[blocks > 34] == 1).all() and (counts[blocks < 16] == 1).all() and (counts[blocks == 30] == 2).all()
    assert max(ends(np.sort(np.repeat(-(-blocks // counts), counts))[::-1], 792)) <= max(ends(np.sort(blocks)[::-1], 792)) + 4


@pytest.mark.parametrize(("tokens", "want"), [(100, 128), (256, 256), (400, 224), (2048, 256)])
def test_narrow_items_keep_to_a_least_length(tokens, want):
    """256 tokens, or equal parts of a node that is no multiple of them, though 528 slots have but 16 nodes."""
    chunk, _ = cut("balanced", np.full(2, tokens), np.full(2, 8), NARROW, 132)
    assert (chunk == want).all()


def test_balanced_items_need_not_be_shorter_than_what_hides_them():
    blocks, programs = np.array([100, 100]), np.array([1, 1])
    free, at_least = (balanced_part(blocks, programs, tile_of(2, 2), 132, least) for least in (1, 30))
    assert (free, at_least) == (1, 30)


def test_fixed_splits_are_of_one_length():
    made = flat_plan([FIXED_TOKENS * 2, FIXED_TOKENS * 2 + 1, 5], H200, split="fixed")
    assert made.splits.tolist() == [2, 3, 1]
    assert (made.cuts.chunk == FIXED_TOKENS).all()


@pytest.mark.parametrize("slots", [1, 7, 264])
@pytest.mark.parametrize("heads", [1, 3])
def test_stream_k_gives_every_slot_the_same_number_of_blocks(slots, heads):
    """The blocks of all ranges in a row: slots end where ``part`` blocks do, and every item ends there or with its range."""
    for blocks, _ in random_ranges(slots):
        part, lead = stream_k_part(blocks, np.full(len(blocks), heads), slots)
        assert (part - 1) * slots < heads * blocks.sum() <= part * slots
        ends, position = set(), 0
        for n, first in zip(blocks.tolist(), lead.tolist(), strict=True):
            assert 0 <= first < part
            cuts = [min((s + 1) * part - first, n) for s in range(-(-(n + first) // part))]
            assert cuts == sorted(set(cuts)) and cuts[0] > 0 and cuts[-1] == n
            ends |= {position + c for c in cuts}
            position += n
        slot_ends = set(range(part, position + 1, part)) | {position}
        assert slot_ends <= ends
        assert all(e in slot_ends or e in np.cumsum(blocks) for e in ends)


def test_stream_k_plans_have_items_of_one_length_but_where_ranges_end():
    lens = [131072, 64 * 100, 64 * 333, 64 * 7]
    made = flat_plan(lens, H200, split="stream_k")
    items = made.launches[0].items
    per_slot = -(-8 * sum(lens) // 64 // (2 * 132)) * 64
    tokens = (items[:, 4] - items[:, 3]).tolist()
    assert sum(tokens) == sum(lens)
    assert max(tokens) == per_slot
    assert sum(n < per_slot for n in tokens) <= 2 * len(lens)  # the first and the last of each
    nodes = items[:, 5].tolist()
    assert nodes == sorted(nodes)  # in order, so that the two halves of a slot are neighbours


def test_splits_of_a_range_that_starts_inside_a_page_end_with_pages():
    """Private tokens from token 1000 on: the first split is shorter, so that the others begin with a page."""
    table = PageTable.from_block_table(np.arange(2 * 600, dtype=np.int32).reshape(2, 600), 16)
    tree = PrefixTree.from_levels([Level([0, 2], [1000]), Level(range(3), [7000, 7000])], table=table)
    made = plan(tree, num_q_heads=32, num_kv_heads=8, head_dim=128, device="cpu", hardware=H200, share="always")
    assert (made.cuts.lead[1:] == 1000 % 16).all()
    items = torch.cat([x.items for x in made.launches])
    cut = items[(items[:, 4] != 1000) & (items[:, 4] != 8000), 4]
    assert len(cut) > 2
    assert (cut % 16 == 0).all()


def test_no_item_is_empty_where_pages_are_longer_than_blocks():
    """A slot begins 64 tokens before this range, and the range 47 tokens into a page: together more than a slot has."""
    hw = Hardware("two slots", "cpu", 2, 1 << 20, 2e10)
    table = PageTable.from_block_table(np.arange(20, dtype=np.int32)[None], 48)
    tree = PrefixTree.from_levels([Level([0, 1], [47]), Level([0, 1], [81])], table=table)
    made = plan(
        tree, num_q_heads=1, num_kv_heads=1, head_dim=16, dtype=torch.float32, device="cpu", split="stream_k", hardware=hw,
        share="always",
    )  # fmt: skip
    items = made.launches[0].items
    assert (items[:, 3] < items[:, 4]).all()


@pytest.mark.parametrize("dims", [(40, 64), (64, 24), (72, 72)])
def test_dims_that_cannot_be_copied_asynchronously_keep_to_small_tiles(dims):
    for arch in ("sm_80", "sm_90", "sm_100"):
        assert attend_tile(PRESETS[arch], torch.bfloat16, dims, 1000).block_m <= 32
