"""The attend kernel for Hopper where few rows read much: one warp fetches by TMA and multiplies.

What it computes is what ``attend_kernel`` computes (see ``planning.worklist.Launch``). Keys are the M of the MMA and packed
rows its N, so that 8 rows are not padded to 16. Columns are computed by panels of 64, so that half of the values are in
registers at a time. Several such programs fit on an SM beside one of the Hopper kernel's.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cascade_fd.kernels.algebra import NEG_INF, inverse, log_sum, weigh_down
from cascade_fd.kernels.hopper_fetch import PANEL, fetch, item_range, places, tile_range, tile_start
from cascade_fd.kernels.hopper_kernel import boxes_of, pieces
from cascade_fd.kernels.hopper_multiply import clear_piece, is_unfinished, seen


@gluon.jit
def fetch_tile(descs, full, boxes, stage, rows, tokens, h, D: gl.constexpr, DV: gl.constexpr, BLOCK_N: gl.constexpr):
    """Start the copies of a tile of keys, and of values, into a stage."""
    fetch(descs[0], rows, tokens, h, full[0], boxes[0], stage, D, BLOCK_N)
    fetch(descs[1], rows, tokens, h, full[1], boxes[1], stage, DV, BLOCK_N)


@gluon.jit
def load_q(q_ptr, offsets, row_ok, p: gl.constexpr, layout: gl.constexpr):
    """Queries, transposed: ``[64, ROWS]`` of the p-th panel of columns, zeros where there are none."""
    d = p * PANEL + gl.arange(0, PANEL, gl.SliceLayout(1, layout))
    return gl.load(q_ptr + (offsets[None, :] + d[:, None]), mask=row_ok[None, :], other=0.0)


@gluon.jit
def scores(k_panels, stage, q, mma: gl.constexpr, K_PANELS: gl.constexpr):
    """``[BLOCK_N, ROWS]`` of the keys in a stage, with queries by panels of columns."""
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    KEYS: gl.constexpr = k_panels.shape[1]
    ROWS: gl.constexpr = q[0].shape[1]
    s = gl.zeros([KEYS, ROWS], gl.float32, mma)
    s = mma_v2(k_panels.index(stage * K_PANELS).load(left), q[0], s)
    if K_PANELS == 2:
        s = mma_v2(k_panels.index(stage * K_PANELS + 1).load(left), q[1], s)
    return s


@gluon.jit
def add_values(v_panels, stage, weights, acc, V_PANELS: gl.constexpr):
    """Add the values in a stage to ``acc``, by panels of columns, the second of which does not count if there is but one."""
    left: gl.constexpr = gl.DotOperandLayout(0, acc[0].type.layout, 2)
    acc0, acc1 = acc
    acc0 = mma_v2(v_panels.index(stage * V_PANELS).permute((1, 0)).load(left), weights, acc0)
    if V_PANELS == 2:
        acc1 = mma_v2(v_panels.index(stage * V_PANELS + 1).permute((1, 0)).load(left), weights, acc1)
    return acc0, acc1


@gluon.jit
def store_states(
    item, h, packed, row, row_ok, state, pointers, strides, lse_scale, HKV: gl.constexpr, G: gl.constexpr, DV: gl.constexpr
):
    """Of rows whose request is finished, the empty state. See the end of ``attend_kernel``.

    ``state``: m, l, and acc by panels of columns, the second of which does not count if there is but one.
    """
    m, l, acc0, acc1 = state
    lens_ptr, rows_ptr, part_o_ptr, part_lse_ptr, out_ptr, lse_ptr = pointers
    stride_out_t, stride_out_h, stride_lse_t, stride_lse_h = strides
    mma: gl.constexpr = acc0.type.layout
    head = h * G + packed % G
    unfinished = is_unfinished(lens_ptr, rows_ptr, row, row_ok)
    l = gl.where(unfinished, l, 0.0)
    acc0 = gl.where(unfinished[None, :], acc0, 0.0) * inverse(l)[None, :]
    acc1 = gl.where(unfinished[None, :], acc1, 0.0) * inverse(l)[None, :]
    lse = log_sum(m, l, 1.0, 1.0)
    d = gl.arange(0, PANEL, gl.SliceLayout(1, mma))
    out_row = gl.load(rows_ptr + row * 4, mask=row_ok, other=0).to(gl.int64)
    first_slot = gl.load(rows_ptr + row * 4 + 1, mask=row_ok, other=0).to(gl.int64)
    index = gl.load(item + 7)
    o_ok = row_ok[None, :]
    if index < 0:  # the only state of these rows: straight to the output
        o_ptrs = out_ptr + ((out_row * stride_out_t + head * stride_out_h)[None, :] + d[:, None])
        gl.store(o_ptrs, acc0.to(out_ptr.dtype.element_ty), mask=o_ok)
        if DV > PANEL:
            gl.store(o_ptrs + PANEL, acc1.to(out_ptr.dtype.element_ty), mask=o_ok)
        gl.store(lse_ptr + (out_row * stride_lse_t + head.to(gl.int64) * stride_lse_h), lse * lse_scale, mask=row_ok)
    else:
        part = (first_slot + index) * (HKV * G) + head
        part_ptrs = part_o_ptr + (part[None, :] * DV + d[:, None])
        gl.store(part_ptrs, acc0, mask=o_ok, eviction_policy="evict_last")
        if DV > PANEL:
            gl.store(part_ptrs + PANEL, acc1, mask=o_ok, eviction_policy="evict_last")
        gl.store(part_lse_ptr + part, lse, mask=row_ok, eviction_policy="evict_last")


@gluon.jit
def narrow_memory(
    dtype: gl.constexpr,
    D: gl.constexpr,
    DV: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BOX: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The rings of stages, of keys and of values: as panels of 64 columns, as boxes, and the barriers "full"."""
    tile: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], tile)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, DV], tile)
    k_panels = pieces(k_ring, [STAGES * (D // PANEL), BLOCK_N, PANEL], tile)
    v_panels = pieces(v_ring, [STAGES * (DV // PANEL), BLOCK_N, PANEL], tile)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
    return (k_panels, v_panels), (boxes_of(k_ring, BOX), boxes_of(v_ring, BOX)), (k_full, v_full)


@gluon.jit(do_not_specialize=["stride_ids", "stride_lse_t", "stride_lse_h"])
def narrow_kernel(
    k_desc,
    v_desc,
    q_ptr,
    ids_ptr,
    items_ptr,
    lens_ptr,
    rows_ptr,
    part_o_ptr,
    part_lse_ptr,
    out_ptr,
    lse_ptr,
    stride_q_t,
    stride_q_h,
    stride_ids,
    stride_out_t,
    stride_out_h,
    stride_lse_t,
    stride_lse_h,
    qk_scale,
    lse_scale,
    HKV: gl.constexpr,
    G: gl.constexpr,
    D: gl.constexpr,
    DV: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BOX: gl.constexpr,
    STAGES: gl.constexpr,
    CHAIN: gl.constexpr,
):
    """Arguments as in ``hopper_kernel``. ROWS is a multiple of 8, BLOCK_N of 16."""
    if CHAIN > 0:
        gdc_launch_dependents()
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8])
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    columns: gl.constexpr = gl.SliceLayout(0, mma)
    NUM_BOXES: gl.constexpr = BLOCK_N // BOX
    K_PANELS: gl.constexpr = D // PANEL
    V_PANELS: gl.constexpr = DV // PANEL
    panels, boxes, full = narrow_memory(dtype, D, DV, BLOCK_N, BOX, STAGES)
    k_panels, v_panels = panels
    k_full, v_full = full
    descs = (k_desc, v_desc)
    pointers = (lens_ptr, rows_ptr, part_o_ptr, part_lse_ptr, out_ptr, lse_ptr)
    strides = (stride_out_t, stride_out_h, stride_lse_t, stride_lse_h)

    item = items_ptr + (gl.program_id(0) // HKV) * 8
    h = gl.program_id(0) % HKV
    start, stop, end = item_range(item, lens_ptr)
    table_row = gl.load(item + 2)
    origin, count, ragged = tile_range(start, stop, BLOCK_N, BOX if PAGE_SIZE else 1)
    if PAGE_SIZE != 0:
        ids_ptr += table_row.to(gl.int64) * stride_ids
    for i in range(0, gl.minimum(count, STAGES)):
        n0 = tile_start(i, origin, count, ragged, BLOCK_N)
        rows, tokens = places(ids_ptr, table_row, n0, stop, PAGE_SIZE, BOX, NUM_BOXES)
        fetch_tile(descs, full, boxes, i, rows, tokens, h, D, DV, BLOCK_N)

    row0 = gl.load(item)
    num_rows = gl.load(item + 1)
    q_end = gl.load(item + 6)
    q_row = gl.arange(0, ROWS, gl.SliceLayout(0, right))
    q_out_row = gl.load(rows_ptr + (row0 + q_row) // G * 4, mask=q_row < num_rows, other=0).to(gl.int64)
    q_offsets = q_out_row * stride_q_t + (h * G + (row0 + q_row) % G) * stride_q_h
    q0 = load_q(q_ptr, q_offsets, q_row < num_rows, 0, right)
    q1 = load_q(q_ptr, q_offsets, q_row < num_rows, K_PANELS - 1, right)

    r = gl.arange(0, ROWS, columns)
    row = (row0 + r) // G
    limit = seen(row, q_end, stop, end)
    whole = gl.maximum(gl.maximum(seen(row0 // G, q_end, stop, end) - origin, 0) // BLOCK_N - ragged, 0)
    m = gl.full([ROWS], NEG_INF, gl.float32, columns)
    l = gl.full([ROWS], 0.0, gl.float32, columns)
    acc0 = gl.zeros([PANEL, ROWS], gl.float32, mma)
    acc1 = gl.zeros([PANEL, ROWS], gl.float32, mma)
    n1 = tile_start(STAGES, origin, count, ragged, BLOCK_N)  # of the tile to fetch next
    rows, tokens = places(ids_ptr, table_row, n1, gl.where(STAGES < count, stop, 0), PAGE_SIZE, BOX, NUM_BOXES)
    for i in range(0, count):
        stage = i % STAGES
        phase = (i // STAGES) & 1
        mbarrier.wait(k_full.index(stage), phase)
        if i > 0:  # The stage of the tile before: behind this branch from the MMAs that read it, see ``whole_tiles``.
            if i - 1 + STAGES < count:
                fetch_tile(descs, full, boxes, (i - 1) % STAGES, rows, tokens, h, D, DV, BLOCK_N)
            n1 = tile_start(i + STAGES, origin, count, ragged, BLOCK_N)
            last = gl.where(i + STAGES < count, stop, 0)
            rows, tokens = places(ids_ptr, table_row, n1, last, PAGE_SIZE, BOX, NUM_BOXES)
        s = scores(k_panels, stage, (q0, q1), mma, K_PANELS)
        n0 = tile_start(i, origin, count, ragged, BLOCK_N)
        if i >= whole:
            pos = n0 + gl.arange(0, BLOCK_N, gl.SliceLayout(1, mma))
            s = gl.where((pos >= start)[:, None] & (pos[:, None] < limit[None, :]), s, NEG_INF)
        m_new = gl.maximum(m, gl.max(s, 0) * qk_scale)
        p, alpha = weigh_down(m, m_new, s, qk_scale)
        m = m_new
        l = l * alpha + gl.sum(p, 0)
        acc0 = acc0 * alpha[None, :]
        acc1 = acc1 * alpha[None, :]
        weights = gl.convert_layout(p.to(dtype), right)
        mbarrier.wait(v_full.index(stage), phase)
        if (n0 < start) | (n0 + BLOCK_N > stop):
            for panel in gl.static_range(V_PANELS):
                clear_piece(v_panels.index(stage * V_PANELS + panel), 0, start - n0, stop - n0)
                fence_async_shared()
        acc0, acc1 = add_values(v_panels, stage, weights, (acc0, acc1), V_PANELS)

    if CHAIN == 2:  # Whoever waits for this launch then waits for the one before it too.
        if gl.program_id(0) == gl.num_programs(0) - 1:
            gdc_wait()
    store_states(item, h, row0 + r, row, r < num_rows, (m, l, acc0, acc1), pointers, strides, lse_scale, HKV, G, DV)
