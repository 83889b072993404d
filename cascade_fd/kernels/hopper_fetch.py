"""The warp of the Hopper kernel that fetches keys and values by TMA, and the order in which tiles are computed."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

PANEL = gl.constexpr(64)  # columns of a box: 128 bytes, as far as the swizzle of shared memory reaches
# Triton 3.9 has no other name than the new one, 3.6 only the old one.
load_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


@gluon.jit
def item_range(item, lens_ptr):
    """First token of an item, one past the last, and the live length of its table row."""
    end = gl.load(lens_ptr + gl.load(item + 5))
    return gl.load(item + 3), gl.minimum(gl.load(item + 4), end), end


@gluon.jit
def tile_range(start, stop, BLOCK_N: gl.constexpr, ALIGN: gl.constexpr):
    """Where tiles start, how many there are, and whether (1 or 0) the first has tokens before ``start``.

    A tile starts at a multiple of ALIGN, so that none of its boxes lies in two pages.
    """
    origin = start // ALIGN * ALIGN
    count = gl.where(stop > start, (stop - origin + BLOCK_N - 1) // BLOCK_N, 0)
    return origin, count, gl.where(start > origin, 1, 0)


@gluon.jit
def tile_start(i, origin, count, ragged, BLOCK_N: gl.constexpr):
    """First token of the i-th tile in the order in which they are computed: a ragged first tile comes last."""
    return origin + gl.where(i + ragged < count, i + ragged, 0) * BLOCK_N


@gluon.jit
def fetch(desc, rows, tokens, h, full, boxes, stage, WIDTH: gl.constexpr, BLOCK_N: gl.constexpr):
    """Start the copies of a tile of keys or values into a stage, box by box. Boxes outside the store are filled with zeros."""
    NUM_BOXES: gl.constexpr = len(rows)
    PANELS: gl.constexpr = WIDTH // PANEL
    barrier = full.index(stage)
    mbarrier.expect(barrier, BLOCK_N * desc.dtype.primitive_bitwidth // 8 * WIDTH)
    for b in gl.static_range(NUM_BOXES):
        for p in gl.static_range(PANELS):
            load_box(desc, [rows[b], tokens[b], h, p * PANEL], barrier, boxes.index((stage * PANELS + p) * NUM_BOXES + b))


@gluon.jit
def places(ids_ptr, table_row, n0, stop, PAGE_SIZE: gl.constexpr, BOX: gl.constexpr, NUM_BOXES: gl.constexpr):
    """Row of the store and token in it where each box of a tile starts; row -1, outside the store, from ``stop`` on."""
    rows = ()
    tokens = ()
    for b in gl.static_range(NUM_BOXES):
        token = n0 + b * BOX
        if PAGE_SIZE == 0:
            rows = rows + (table_row,)  # type: ignore[assignment]
            tokens = tokens + (token,)  # type: ignore[assignment]
        else:
            row = gl.load(ids_ptr + token // PAGE_SIZE, mask=token < stop, other=-1).to(gl.int32)
            rows = rows + (row,)  # type: ignore[assignment]
            tokens = tokens + (0 if PAGE_SIZE == BOX else token % PAGE_SIZE,)  # type: ignore[assignment]
    return rows, tokens


@gluon.jit
def produce(
    num_units,
    sources,
    boxes,
    barriers,
    HKV: gl.constexpr,
    D: gl.constexpr,
    DV: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BOX: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The warp that fetches. It runs ahead of the warp groups by up to STAGES tiles, into the next items too."""
    k_desc, v_desc, ids_ptr, items_ptr, lens_ptr, stride_ids = sources
    k_boxes, v_boxes = boxes
    k_full, k_empty, v_full, v_empty = barriers
    NUM_BOXES: gl.constexpr = BLOCK_N // BOX
    done = 0
    for unit in range(gl.program_id(0), num_units, gl.num_programs(0)):
        item = items_ptr + (unit // HKV) * 8
        start, stop, _ = item_range(item, lens_ptr)
        origin, count, ragged = tile_range(start, stop, BLOCK_N, BOX if PAGE_SIZE else 1)
        table_row = gl.load(item + 2)
        ids = ids_ptr + table_row.to(gl.int64) * stride_ids if PAGE_SIZE else ids_ptr
        for i in range(0, count):
            n0 = tile_start(i, origin, count, ragged, BLOCK_N)
            rows, tokens = places(ids, table_row, n0, stop, PAGE_SIZE, BOX, NUM_BOXES)
            stage = (done + i) % STAGES
            free = (((done + i) // STAGES) & 1) ^ 1  # a new barrier counts as one whose phase 1 is over
            mbarrier.wait(k_empty.index(stage), free)
            fetch(k_desc, rows, tokens, unit % HKV, k_full, k_boxes, stage, D, BLOCK_N)
            mbarrier.wait(v_empty.index(stage), free)
            fetch(v_desc, rows, tokens, unit % HKV, v_full, v_boxes, stage, DV, BLOCK_N)
        done += count
