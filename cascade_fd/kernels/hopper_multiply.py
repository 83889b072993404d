"""The warp groups of the Hopper kernel: each multiplies 64 packed rows of an item with all its tiles."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from cascade_fd.kernels.algebra import NEG_INF, inverse, log_sum, raised, weigh
from cascade_fd.kernels.hopper_fetch import PANEL, item_range, tile_range, tile_start
from cascade_fd.kernels.hopper_rescale import rescale

ROWS = gl.constexpr(64)  # of a warp group
BAND = gl.constexpr(16)  # tokens that are cleared at a time
NO_LENGTH = gl.constexpr(2**31 - 1)  # of a request without a private node: it is never finished


@gluon.jit
def clear_piece(piece, offset, first, last):
    """Zero what is outside ``[first, last)`` in a piece of values ``[tokens, 64]`` that begins at token ``offset``."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    token = offset + gl.arange(0, piece.shape[0], gl.SliceLayout(1, layout))
    kept = (token >= first) & (token < last)
    x = piece.load(layout)
    piece.store(gl.where(kept[:, None], x, gl.zeros_like(x)))


@gluon.jit
def clear_outside(bands, stage, first, last, DV: gl.constexpr, BLOCK_N: gl.constexpr):
    """Zero the values of a tile outside ``[first, last)``: memory there may hold anything, and a weight of 0 times NaN is NaN.

    Each warp group does so. What they write is the same, and the same as what was there inside the range.
    """
    PANELS: gl.constexpr = DV // PANEL
    NUM_BANDS: gl.constexpr = BLOCK_N // BAND
    for b in range(0, NUM_BANDS):
        for p in gl.static_range(PANELS):
            clear_piece(bands.index((stage * PANELS + p) * NUM_BANDS + b), b * BAND, first, last)
    fence_async_shared()


@gluon.jit
def seen(row, q_end, stop, end):
    """Row ``row`` sees keys below this: see ``limit`` of ``planning.worklist.Launch``."""
    return gl.where(q_end > 0, gl.minimum(end - q_end + row + 1, stop), stop)


@gluon.jit
def is_unfinished(lens_ptr, rows_ptr, row, row_ok):
    """Whether the request of a row still has a length that its private tokens begin within."""
    private = gl.load(rows_ptr + row * 4 + 2, mask=row_ok, other=-1)
    private_start = gl.load(rows_ptr + row * 4 + 3, mask=row_ok, other=0)
    return gl.load(lens_ptr + private, mask=private >= 0, other=NO_LENGTH) >= private_start


@gluon.jit
def packed_rows(GROUP: gl.constexpr, item, h, G: gl.constexpr, layout: gl.constexpr):
    """Row, query head and existence of the packed rows of a warp group, of KV head h."""
    r = GROUP * ROWS + gl.arange(0, ROWS, layout)
    packed = gl.load(item) + r
    return packed // G, h * G + packed % G, r < gl.load(item + 1)


@gluon.jit
def load_q(GROUP: gl.constexpr, item, h, pointers, strides, G: gl.constexpr, D: gl.constexpr, layout: gl.constexpr):
    """Queries of a warp group, zeros where there are none."""
    row, head, row_ok = packed_rows(GROUP, item, h, G, gl.SliceLayout(1, layout))
    out_row = gl.load(pointers[3] + row * 4, mask=row_ok, other=0).to(gl.int64)
    offsets = out_row * strides[0] + head * strides[1]
    d = gl.arange(0, D, gl.SliceLayout(0, layout))
    return gl.load(pointers[0] + (offsets[:, None] + d[None, :]), mask=row_ok[:, None], other=0.0)


@gluon.jit
def row_max(s):
    """The largest score of each row: four chains of comparisons a thread, since one would wait for itself."""
    lanes = gl.max(s.reshape([s.shape[0], s.shape[1] // 16, 16]), 1)
    return gl.convert_layout(gl.max(lanes, 1), gl.SliceLayout(1, s.type.layout))


@gluon.jit
def weights_of(m, s, qk_scale):
    """Raise m lazily to the scores of a tile; returns it, their weights, and the factor for what was added up before."""
    m_new = raised(m, row_max(s) * qk_scale)
    p, alpha = weigh(m, m_new, s, qk_scale)
    return m_new, p, alpha


@gluon.jit
def add_up(l, alpha, p):
    """Add weights to l, which has 8 columns, two of each thread's own: they are added up at the end."""
    layout: gl.constexpr = l.type.layout
    sums = gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 8]), 1)
    return l * gl.convert_layout(alpha, gl.SliceLayout(1, layout))[:, None] + gl.convert_layout(sums, layout)


@gluon.jit
def whole_tiles(m, l, acc, q, rings, barriers, qk_scale, first, stop, STAGES: gl.constexpr):
    """Add tiles ``first`` to ``stop - 1`` of this program, at least one.

    The products of a tile's scores run beside those of the tile before.
    """
    k_ring, v_ring, _ = rings
    k_full, k_empty, v_full, v_empty = barriers
    s_layout: gl.constexpr = m.type.layout.parent
    o_layout: gl.constexpr = acc.type.layout
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    BLOCK_N: gl.constexpr = k_ring.shape[1]
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, s_layout)
    stage = first % STAGES
    phase = (first // STAGES) & 1
    mbarrier.wait(k_full.index(stage), phase)
    s = warpgroup_mma(q, k_ring.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k_empty.index(stage), count=1)
    m, p, alpha = weights_of(m, s, qk_scale)
    l = add_up(l, alpha, p)
    weights = gl.convert_layout(p.to(v_ring.dtype), p_layout)
    for i in range(first + 1, stop):
        next_stage = i % STAGES
        next_phase = (i // STAGES) & 1
        mbarrier.wait(k_full.index(next_stage), next_phase)
        s = warpgroup_mma(q, k_ring.index(next_stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(stage), phase)
        acc = warpgroup_mma(weights, v_ring.index(stage), acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
        mbarrier.arrive(k_empty.index(next_stage), count=1)
        m, p, alpha = weights_of(m, s, qk_scale)
        l = add_up(l, alpha, p)
        mbarrier.wait(v_full.index(stage), phase)  # is over; a branch that keeps the wait below from moving up
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index(stage), count=1)
        acc = rescale(acc, alpha)
        weights = gl.convert_layout(p.to(v_ring.dtype), p_layout)
        stage = next_stage
        phase = next_phase
    mbarrier.wait(v_full.index(stage), phase)
    acc = warpgroup_mma(weights, v_ring.index(stage), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_empty.index(stage), count=1)
    return m, l, acc


@gluon.jit
def masked_tile(m, l, acc, q, rings, barriers, qk_scale, stage, phase, n0, start, stop, limit):
    """Add the tile at n0, of which row r sees tokens ``start`` to ``limit[r] - 1``."""
    k_ring, v_ring, v_bands = rings
    k_full, k_empty, v_full, v_empty = barriers
    s_layout: gl.constexpr = m.type.layout.parent
    o_layout: gl.constexpr = acc.type.layout
    BLOCK_N: gl.constexpr = k_ring.shape[1]
    DV: gl.constexpr = v_ring.shape[2]
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, s_layout)
    mbarrier.wait(k_full.index(stage), phase)
    s = warpgroup_mma(q, k_ring.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k_empty.index(stage), count=1)
    pos = n0 + gl.arange(0, BLOCK_N, gl.SliceLayout(0, s_layout))
    s = gl.where((pos >= start)[None, :] & (pos[None, :] < limit[:, None]), s, NEG_INF)
    m, p, alpha = weights_of(m, s, qk_scale)
    l = add_up(l, alpha, p)
    acc = rescale(acc, alpha)
    weights = gl.convert_layout(p.to(v_ring.dtype), gl.DotOperandLayout(0, o_layout, 2))
    mbarrier.wait(v_full.index(stage), phase)
    clear_outside(v_bands, stage, start - n0, stop - n0, DV, BLOCK_N)
    acc = warpgroup_mma(weights, v_ring.index(stage), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_empty.index(stage), count=1)
    return m, l, acc


@gluon.jit
def store_states(GROUP: gl.constexpr, item, h, m, l, acc, pointers, strides, lse_scale, HKV: gl.constexpr, G: gl.constexpr):
    """Of rows whose request is finished, the empty state. See the end of ``attend_kernel``."""
    _, _, lens_ptr, rows_ptr, part_o_ptr, part_lse_ptr, out_ptr, lse_ptr = pointers
    _, _, stride_out_t, stride_out_h, stride_lse_t, stride_lse_h = strides
    layout: gl.constexpr = acc.type.layout
    DV: gl.constexpr = acc.shape[1]
    row, head, row_ok = packed_rows(GROUP, item, h, G, gl.SliceLayout(1, layout))
    out_row = gl.load(rows_ptr + row * 4, mask=row_ok, other=0).to(gl.int64)
    first_slot = gl.load(rows_ptr + row * 4 + 1, mask=row_ok, other=0).to(gl.int64)
    unfinished = is_unfinished(lens_ptr, rows_ptr, row, row_ok)
    l = gl.where(unfinished, gl.convert_layout(gl.sum(l, 1), gl.SliceLayout(1, layout)), 0.0)
    o = gl.where(unfinished[:, None], acc, 0.0) * inverse(l)[:, None]
    lse = log_sum(gl.convert_layout(m, gl.SliceLayout(1, layout)), l, 1.0, 1.0)
    d = gl.arange(0, DV, gl.SliceLayout(0, layout))
    state = gl.load(item + 7)
    if state < 0:  # the only state of these rows: straight to the output
        offsets = out_row * stride_out_t + head * stride_out_h
        gl.store(out_ptr + (offsets[:, None] + d[None, :]), o.to(out_ptr.dtype.element_ty), mask=row_ok[:, None])
        gl.store(lse_ptr + (out_row * stride_lse_t + head.to(gl.int64) * stride_lse_h), lse * lse_scale, mask=row_ok)
    else:
        part = (first_slot + state) * (HKV * G) + head
        gl.store(part_o_ptr + (part[:, None] * DV + d[None, :]), o, mask=row_ok[:, None], eviction_policy="evict_last")
        gl.store(part_lse_ptr + part, lse, mask=row_ok, eviction_policy="evict_last")


@gluon.jit
def consume(
    GROUP: gl.constexpr,
    work,
    memory,
    HKV: gl.constexpr,
    G: gl.constexpr,
    D: gl.constexpr,
    DV: gl.constexpr,
    ALIGN: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    Q_IN_REGISTERS: gl.constexpr,
):
    """A warp group: rows ``GROUP * 64`` to ``GROUP * 64 + 63`` of every item of this program."""
    num_units, pointers, strides, scales = work
    q_tiles, rings, barriers = memory
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DV, 16])
    l_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 8, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    in_memory: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D, D // 8], [4, 1], [1, 0])
    q_layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2) if Q_IN_REGISTERS else in_memory
    done = 0
    for unit in range(gl.program_id(0), num_units, gl.num_programs(0)):
        item = pointers[1] + (unit // HKV) * 8
        h = unit % HKV
        start, stop, end = item_range(item, pointers[2])
        origin, count, ragged = tile_range(start, stop, BLOCK_N, ALIGN)
        row, _, _ = packed_rows(GROUP, item, h, G, row_layout)
        q_end = gl.load(item + 6)
        limit = seen(row, q_end, stop, end)
        seen_by_all = seen(gl.load(item) // G, q_end, stop, end)  # all rows of the item see what its first one sees
        whole = gl.maximum(gl.maximum(seen_by_all - origin, 0) // BLOCK_N - ragged, 0)
        q = load_q(GROUP, item, h, pointers, strides, G, D, q_layout)
        if not Q_IN_REGISTERS:
            q_tiles.index(GROUP).store(q)
            fence_async_shared()
            q = q_tiles.index(GROUP)
        m = gl.full([ROWS], NEG_INF, gl.float32, row_layout)
        l = gl.zeros([ROWS, 8], gl.float32, l_layout)
        acc = gl.zeros([ROWS, DV], gl.float32, o_layout)
        if whole > 0:
            m, l, acc = whole_tiles(m, l, acc, q, rings, barriers, scales[0], done, done + whole, STAGES)
        for i in range(whole, count):
            stage = (done + i) % STAGES
            phase = ((done + i) // STAGES) & 1
            n0 = tile_start(i, origin, count, ragged, BLOCK_N)
            m, l, acc = masked_tile(m, l, acc, q, rings, barriers, scales[0], stage, phase, n0, start, stop, limit)
        done += count
        store_states(GROUP, item, h, m, l, acc, pointers, strides, scales[1], HKV, G)
