"""Kernel 1: the attention state of one work item and one KV head per program (see ``planning.worklist.Launch``).

No key past the item's end is read: the last tile reads the last key again, and scores decide what counts. That leaves the
loads without masks, and so one loop, and few registers: what one program leaves free, programs of other launches run in.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cascade_fd.kernels.algebra import NEG_INF, fold_scores, inverse, log_sum
from cascade_fd.kernels.launch import may_enter_early, run
from cascade_fd.kernels.loaders import key_offsets, load_tile, page_ids
from cascade_fd.tiles import attend_tile, padded

_INT32_MAX = 2**31 - 1
NO_LENGTH = tl.constexpr(2**31 - 1)  # of a request without a private node: it is never finished


@triton.jit(do_not_specialize=["stride_ids", "stride_lse_t", "stride_lse_h"])
def attend_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
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
    stride_k_p,
    stride_k_t,
    stride_k_h,
    stride_v_p,
    stride_v_t,
    stride_v_h,
    stride_ids,
    stride_out_t,
    stride_out_h,
    stride_lse_t,
    stride_lse_h,
    qk_scale,
    lse_scale,
    HKV: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    DIRECT: tl.constexpr,
    CHAIN: tl.constexpr,
):
    """Arguments as in ``Launch``; qk_scale puts scores in log2 units, lse_scale puts the output's lse in its base.

    DIRECT: whether items may have a STATE below 0. CHAIN 1: the launch after this one may enter as soon as all programs here
    have started. CHAIN 2: so did this one.
    """
    if CHAIN > 0:
        gdc_launch_dependents()
    item = items_ptr + (tl.program_id(0) // HKV) * 8
    h = tl.program_id(0) % HKV
    row0 = tl.load(item)
    num_rows = tl.load(item + 1)
    table_row = tl.load(item + 2).to(tl.int64)
    start = tl.load(item + 3)
    q_end = tl.load(item + 6)
    state = tl.load(item + 7)
    end = tl.load(lens_ptr + tl.load(item + 5))
    stop = tl.minimum(tl.load(item + 4), end)

    r = tl.arange(0, BLOCK_M)
    row = (row0 + r) // G
    head = h * G + (row0 + r) % G
    row_ok = r < num_rows
    out_row = tl.load(rows_ptr + row * 4, mask=row_ok, other=0).to(tl.int64)
    q = load_tile(q_ptr, out_row * stride_q_t + head * stride_q_h, row_ok, D, BLOCK_D, True)
    private = tl.load(rows_ptr + row * 4 + 2, mask=row_ok, other=-1)
    private_start = tl.load(rows_ptr + row * 4 + 3, mask=row_ok, other=0)
    unfinished = tl.load(lens_ptr + private, mask=private >= 0, other=NO_LENGTH) >= private_start
    limit = tl.where(q_end > 0, tl.minimum(end - q_end + row + 1, stop), stop)
    limit = tl.where(unfinished, limit, 0)  # row r sees keys below limit
    seen_by_all = tl.min(tl.where(row_ok, limit, stop), 0)

    k_ptr += h.to(tl.int64) * stride_k_h
    v_ptr += h.to(tl.int64) * stride_v_h
    if PAGE_SIZE == 0:
        k_ptr += table_row * stride_k_p
        v_ptr += table_row * stride_v_p
    else:
        ids_ptr += table_row * stride_ids

    m = tl.full([BLOCK_M], NEG_INF, tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    n = tl.arange(0, BLOCK_N)
    pos = tl.minimum(start + n, stop - 1)
    page = page_ids(ids_ptr, pos, pos >= start, PAGE_SIZE)  # one tile ahead; none of an empty range
    for n0 in range(start, stop, BLOCK_N):
        k_offsets = key_offsets(page, pos, stride_k_p, stride_k_t, PAGE_SIZE, WIDE)
        v_offsets = key_offsets(page, pos, stride_v_p, stride_v_t, PAGE_SIZE, WIDE)
        pos = tl.minimum(n0 + BLOCK_N + n, stop - 1)
        page = page_ids(ids_ptr, pos, None, PAGE_SIZE)
        k = load_tile(k_ptr, k_offsets, True, D, BLOCK_D, False)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * qk_scale
        if n0 + BLOCK_N > seen_by_all:
            s = tl.where((n0 + n)[None, :] < limit[:, None], s, NEG_INF)
        v = load_tile(v_ptr, v_offsets, True, DV, BLOCK_DV, False)
        m, l, acc = fold_scores(m, l, acc, s, v, PRECISION)

    if CHAIN == 2:  # Whoever waits for this launch then waits for the one before it too. Not at the end: that costs registers.
        if tl.program_id(0) == tl.num_programs(0) - 1:
            gdc_wait()
    o = acc * inverse(l)[:, None]
    lse = log_sum(m, l, 1.0, 1.0)
    d = tl.arange(0, BLOCK_DV)
    if DIRECT:  # The only state of its rows goes straight to the output. Masks, since two branches cost 50 registers.
        num_direct = tl.where(state < 0, num_rows, 0)
        direct = r < num_direct
        o_offsets = out_row * stride_out_t + head * stride_out_h
        tl.store(
            out_ptr + o_offsets[:, None] + d[None, :], o.to(out_ptr.dtype.element_ty), mask=direct[:, None] & (d < DV)[None, :]
        )
        lse_offsets = out_row * stride_lse_t + head.to(tl.int64) * stride_lse_h
        tl.store(lse_ptr + lse_offsets, lse * lse_scale, mask=direct)
        row_ok = r < num_rows - num_direct
    # Loaded before the loop, this would cost 58 registers.
    first_slot = tl.load(rows_ptr + row * 4 + 1, mask=row_ok, other=0)
    o_ok = row_ok[:, None] & (d < DV)[None, :]
    part = (first_slot.to(tl.int64) + state) * (HKV * G) + head
    tl.store(part_o_ptr + part[:, None] * DV + d[None, :], o, mask=o_ok, eviction_policy="evict_last")
    tl.store(part_lse_ptr + part, lse, mask=row_ok, eviction_policy="evict_last")


def operands(plan, launch, partials, out):
    """What a kernel takes for a launch beside q and a store: plan arrays, then outputs. A dense store's ids are not read."""
    ids = launch.items if launch.ids is None else launch.ids
    return ids, launch.items, plan.lens, plan.rows, partials.o, partials.lse, out.o, out.lse


def launch_attend(q, store, plan, launch, partials, out, scales, chain=0):
    """Launch once. ``partials`` is contiguous ``[slots, Hq, Dv]`` float32 in base 2; ``out`` has any strides.

    ``scales``: the kernel's qk_scale and lse_scale. ``chain``: its CHAIN.
    """
    shape, tile, k, v = plan.shape, launch.tile, store.k, store.v
    if tile.kernel != "attend":  # planned for a kernel that cannot run here; items are the same
        tile = attend_tile(plan.hardware, shape.dtype, shape.head_dims, tile.block_m)
    tensors = (q, k, v, *operands(plan, launch, partials, out))
    strides = (q.stride(), k.stride(), v.stride(), launch.table_stride, out.o.stride(), out.lse.stride())
    layout = (shape, tile, launch.page_size, store.reach > _INT32_MAX, launch.direct, chain, *strides)
    grid = launch.items.shape[0] * shape.num_kv_heads
    run(attend_kernel, grid, tensors, layout, scales, _attend_arguments)


def _attend_arguments(shape, tile, page_size, wide, direct, chain, q, k, v, table, out, lse):
    """The kernel's strides and constexprs, from strides of whole tensors."""
    ints = (*q[:2], *k[:3], *v[:3], table, *out[:2], *lse)
    return ints, {
        "HKV": shape.num_kv_heads,
        "G": shape.group,
        "D": shape.head_dim,
        "DV": shape.v_head_dim,
        "PAGE_SIZE": page_size,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_D": padded(shape.head_dim),
        "BLOCK_DV": padded(shape.v_head_dim),
        "WIDE": wide,
        "PRECISION": "ieee" if shape.dtype.itemsize == 4 else "tf32",
        "DIRECT": direct,
        "CHAIN": chain,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        **({"maxnreg": tile.registers} if tile.registers else {}),
        **may_enter_early(chain == 2),
    }
