"""Strategies of the literature in one kernel, switched at compile time; without any of them it is the library's own again.

MAXIMUM: FlashDecoding++'s unified maximum, or the first tile's. FUSED: the last program to finish a row merges its states.
WALKS: LeanAttention's stream-K, one program per slot.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from benchmarks.ablation.last_arriver import arrive, merge_tile
from benchmarks.ablation.sums import is_unsafe, range_sums
from cascade_fd.kernels.algebra import inverse, log_sum
from cascade_fd.kernels.attend import NO_LENGTH
from cascade_fd.kernels.loaders import load_tile


@triton.jit
def one_item(
    i,
    waits,
    inputs,
    plan,
    outputs,
    arrivals,
    q_kv_strides,
    strides,
    scalars,
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
    MAXIMUM: tl.constexpr,
    FUSED: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Item i. ``waits``: whether this is the launch's last. Tuples: arguments of ``ablation_kernel``, in its order."""
    q_ptr, k_ptr, v_ptr = inputs
    ids_ptr, items_ptr, lens_ptr, rows_ptr = plan
    part_o_ptr, part_lse_ptr, out_ptr, lse_ptr = outputs
    counts_ptr, arrived_ptr, again_ptr = arrivals
    stride_q_t, stride_q_h, stride_k_p, stride_k_t, stride_k_h, stride_v_p, stride_v_t, stride_v_h = q_kv_strides
    stride_ids, stride_out_t, stride_out_h, stride_lse_t, stride_lse_h = strides
    qk_scale, lse_scale, phi = scalars
    h = tl.program_id(0) % HKV
    item = items_ptr + i * 8
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
    limit = tl.where(unfinished, limit, 0)
    seen_by_all = tl.min(tl.where(row_ok, limit, stop), 0)

    k_ptr += h.to(tl.int64) * stride_k_h
    v_ptr += h.to(tl.int64) * stride_v_h
    if PAGE_SIZE == 0:
        k_ptr += table_row * stride_k_p
        v_ptr += table_row * stride_v_p
    else:
        ids_ptr += table_row * stride_ids
    m, l, acc = range_sums(
        q, k_ptr, v_ptr, ids_ptr, start, stop, limit, seen_by_all, phi, qk_scale,
        stride_k_p, stride_k_t, stride_v_p, stride_v_t,
        D, DV, PAGE_SIZE, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, WIDE, PRECISION, MAXIMUM, None,
    )  # fmt: skip
    if MAXIMUM != "running":
        unsafe = row_ok & is_unsafe(l, acc, limit - start, MAXIMUM, v_ptr.dtype.element_ty == tl.float16)
        if tl.max(unsafe.to(tl.int32), 0) > 0:
            tl.atomic_add(again_ptr, 1)
            m, l, acc = range_sums(
                q, k_ptr, v_ptr, ids_ptr, start, stop, limit, seen_by_all, phi, qk_scale,
                stride_k_p, stride_k_t, stride_v_p, stride_v_t,
                D, DV, PAGE_SIZE, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, WIDE, PRECISION, "running", 2,
            )  # fmt: skip

    if CHAIN == 2:  # Whoever waits for this launch then waits for the one before it too.
        if waits:
            gdc_wait()
    o = acc * inverse(l)[:, None]
    lse = log_sum(m, l, 1.0, 1.0)
    d = tl.arange(0, BLOCK_DV)
    out_at = out_row * stride_out_t + head * stride_out_h
    lse_at = out_row * stride_lse_t + head.to(tl.int64) * stride_lse_h
    if DIRECT:
        num_direct = tl.where(state < 0, num_rows, 0)
        direct = r < num_direct
        o_ok = direct[:, None] & (d < DV)[None, :]
        tl.store(out_ptr + out_at[:, None] + d[None, :], o.to(out_ptr.dtype.element_ty), mask=o_ok)
        tl.store(lse_ptr + lse_at, lse * lse_scale, mask=direct)
        row_ok = r < num_rows - num_direct
    first_slot = tl.load(rows_ptr + row * 4 + 1, mask=row_ok, other=0)
    o_ok = row_ok[:, None] & (d < DV)[None, :]
    H: tl.constexpr = HKV * G
    part = (first_slot.to(tl.int64) + state) * H + head
    tl.store(part_o_ptr + part[:, None] * DV + d[None, :], o, mask=o_ok, eviction_policy="evict_last")
    tl.store(part_lse_ptr + part, lse, mask=row_ok, eviction_policy="evict_last")
    if FUSED:
        count = tl.load(counts_ptr + row, mask=row_ok, other=0)
        is_last = arrive(arrived_ptr + row * H + head, count, row_ok)
        count = tl.where(is_last, count, 0)
        if tl.max(count, 0) > 0:
            merge_tile(
                part_o_ptr, part_lse_ptr, out_ptr, lse_ptr, part - state * H, count, out_at, lse_at, num_rows, lse_scale,
                H, DV, BLOCK_DV, BLOCK_S,
            )  # fmt: skip


@triton.jit(do_not_specialize=["stride_ids", "stride_lse_t", "stride_lse_h"])
def ablation_kernel(
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
    walks_ptr,
    counts_ptr,
    arrived_ptr,
    again_ptr,
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
    phi,
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
    MAXIMUM: tl.constexpr,
    FUSED: tl.constexpr,
    WALKS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Arguments as of ``attend_kernel``, and: items ``walks[i] .. walks[i + 1] - 1`` of program i; of each query row how many
    states it has; of each packed row how many have arrived (0 again in the end); how many items ``phi`` did not suit.
    """
    if CHAIN > 0:
        gdc_launch_dependents()
    inputs = (q_ptr, k_ptr, v_ptr)
    plan = (ids_ptr, items_ptr, lens_ptr, rows_ptr)
    outputs = (part_o_ptr, part_lse_ptr, out_ptr, lse_ptr)
    arrivals = (counts_ptr, arrived_ptr, again_ptr)
    q_kv_strides = (stride_q_t, stride_q_h, stride_k_p, stride_k_t, stride_k_h, stride_v_p, stride_v_t, stride_v_h)
    strides = (stride_ids, stride_out_t, stride_out_h, stride_lse_t, stride_lse_h)
    scalars = (qk_scale, lse_scale, phi)
    i = tl.program_id(0) // HKV
    is_last = tl.program_id(0) == tl.num_programs(0) - 1
    if WALKS:
        stop = tl.load(walks_ptr + i + 1)
        for item in range(tl.load(walks_ptr + i), stop):
            one_item(
                item, is_last & (item == stop - 1), inputs, plan, outputs, arrivals, q_kv_strides, strides, scalars,
                HKV, G, D, DV, PAGE_SIZE, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, WIDE, PRECISION, DIRECT, CHAIN, MAXIMUM, FUSED,
                BLOCK_S,
            )  # fmt: skip
    else:
        one_item(
            i, is_last, inputs, plan, outputs, arrivals, q_kv_strides, strides, scalars,
            HKV, G, D, DV, PAGE_SIZE, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, WIDE, PRECISION, DIRECT, CHAIN, MAXIMUM, FUSED,
            BLOCK_S,
        )  # fmt: skip
