"""Strategies of the literature in one kernel, switched at compile time; without any of them it is the library's own again.

FIXED: FlashDecoding++'s unified maximum. FUSED: the last program to finish a row merges its states. WALKS: LeanAttention's
stream-K, one program per slot.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from benchmarks.ablation.last_arriver import arrive, merge_tile
from cascade_fd.kernels.algebra import NEG_INF, fold_scores, inverse, log_sum
from cascade_fd.kernels.loaders import key_offsets, load_tile, page_ids

# Sums under a fixed reference lie between these, or they are computed again. Then float32 and bfloat16 neither overflow nor
# lose a term that counts. float16 has fewer exponents: too large a weight is infinite there, too small a mean one is refused.
LEAST = tl.constexpr(2.0**-60)
LEAST_MEAN_FP16 = tl.constexpr(2.0**-8)
MOST = tl.constexpr(2.0**100)
NO_LENGTH = tl.constexpr(2**31 - 1)  # of a request without a private node: it is never finished


@triton.jit
def fold_fixed(l, acc, s, v, phi, PRECISION: tl.constexpr):
    """Add a tile under the reference ``phi``: no maximum, nothing to rescale."""
    p = tl.exp2(s - phi)
    return l + tl.sum(p, 1), tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)


@triton.jit
def is_unsafe(l, acc, seen, FP16: tl.constexpr):
    """``[M]`` whether sums under a fixed reference may be worse than under the row's maximum. ``seen``: keys of each row."""
    if FP16:
        least = seen.to(tl.float32) * LEAST_MEAN_FP16
    else:
        least = LEAST
    fits = (l > least) & (l < MOST) & (tl.min((tl.abs(acc) < MOST).to(tl.int32), 1) > 0)  # NaN fits nowhere
    return (seen > 0) & (fits == 0)


@triton.jit
def range_sums(
    q,
    k_ptr,
    v_ptr,
    ids_ptr,
    start,
    whole,
    stop,
    limit,
    phi,
    qk_scale,
    stride_k_p,
    stride_k_t,
    stride_v_p,
    stride_v_t,
    D: tl.constexpr,
    DV: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    FIXED: tl.constexpr,
    MASKS: tl.constexpr,
):
    """The state ``m, l, acc`` of keys ``start .. stop - 1``: tiles that all rows see up to ``whole``, then those with masks.

    MASKS: all tiles with masks, which is slower, but less code.
    """
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    if FIXED:
        m = l + phi
    else:
        m = tl.full([BLOCK_M], NEG_INF, tl.float32)
    if MASKS:
        whole = start
    else:
        pos = start + tl.arange(0, BLOCK_N)
        page = page_ids(ids_ptr, pos, stop, PAGE_SIZE)
        for _ in range(start, whole, BLOCK_N):
            k_offsets = key_offsets(page, pos, stride_k_p, stride_k_t, PAGE_SIZE, WIDE)
            v_offsets = key_offsets(page, pos, stride_v_p, stride_v_t, PAGE_SIZE, WIDE)
            pos += BLOCK_N
            page = page_ids(ids_ptr, pos, stop, PAGE_SIZE)
            k = load_tile(k_ptr, k_offsets, pos, D, BLOCK_D, False)
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * qk_scale
            v = load_tile(v_ptr, v_offsets, pos, DV, BLOCK_DV, False)
            if FIXED:
                l, acc = fold_fixed(l, acc, s, v, phi, PRECISION)
            else:
                m, l, acc = fold_scores(m, l, acc, s, v, False, PRECISION)
    for n0 in tl.range(whole, stop, BLOCK_N, num_stages=2):
        pos = n0 + tl.arange(0, BLOCK_N)
        page = page_ids(ids_ptr, pos, stop, PAGE_SIZE)
        k_offsets = key_offsets(page, pos, stride_k_p, stride_k_t, PAGE_SIZE, WIDE)
        v_offsets = key_offsets(page, pos, stride_v_p, stride_v_t, PAGE_SIZE, WIDE)
        k = load_tile(k_ptr, k_offsets, pos < stop, D, BLOCK_D, True)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * qk_scale
        s = tl.where(pos[None, :] < limit[:, None], s, NEG_INF)
        v = load_tile(v_ptr, v_offsets, pos < stop, DV, BLOCK_DV, True)
        if FIXED:
            l, acc = fold_fixed(l, acc, s, v, phi, PRECISION)
        else:
            m, l, acc = fold_scores(m, l, acc, s, v, True, PRECISION)
    return m, l, acc


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
    CHAIN: tl.constexpr,
    FIXED: tl.constexpr,
    FUSED: tl.constexpr,
    WALKS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Arguments as of ``attend_kernel``, and: items ``walks[i] .. walks[i + 1] - 1`` of program i; of each query row how many
    states it has; of each packed row how many have arrived (0 again in the end); how many items ``phi`` did not suit.
    """
    if CHAIN > 0:
        gdc_launch_dependents()
    h = tl.program_id(0) % HKV
    first = tl.program_id(0) // HKV
    last = first + 1
    if WALKS:
        last = tl.load(walks_ptr + first + 1)
        first = tl.load(walks_ptr + first)
    for i in range(first, last):
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
        seen_by_all = tl.where(q_end > 0, tl.minimum(end - q_end + row0 // G + 1, stop), stop)
        whole = start + tl.maximum(seen_by_all - start, 0) // BLOCK_N * BLOCK_N
        limit = tl.where(q_end > 0, tl.minimum(end - q_end + row + 1, stop), stop)
        k = k_ptr + h.to(tl.int64) * stride_k_h
        v = v_ptr + h.to(tl.int64) * stride_v_h
        ids = ids_ptr
        if PAGE_SIZE == 0:
            k += table_row * stride_k_p
            v += table_row * stride_v_p
        else:
            ids += table_row * stride_ids
        m, l, acc = range_sums(
            q, k, v, ids, start, whole, stop, limit, phi, qk_scale, stride_k_p, stride_k_t, stride_v_p, stride_v_t,
            D, DV, PAGE_SIZE, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, WIDE, PRECISION, FIXED, False,
        )  # fmt: skip
        if FIXED:
            unsafe = row_ok & is_unsafe(l, acc, limit - start, v_ptr.dtype.element_ty == tl.float16)
            if tl.max(unsafe.to(tl.int32), 0) > 0:
                tl.atomic_add(again_ptr, 1)
                m, l, acc = range_sums(
                    q, k, v, ids, start, whole, stop, limit, phi, qk_scale, stride_k_p, stride_k_t, stride_v_p, stride_v_t,
                    D, DV, PAGE_SIZE, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, WIDE, PRECISION, False, True,
                )  # fmt: skip

        first_slot = tl.load(rows_ptr + row * 4 + 1, mask=row_ok, other=0).to(tl.int64)
        private = tl.load(rows_ptr + row * 4 + 2, mask=row_ok, other=-1)
        private_start = tl.load(rows_ptr + row * 4 + 3, mask=row_ok, other=0)
        unfinished = tl.load(lens_ptr + private, mask=private >= 0, other=NO_LENGTH) >= private_start
        l = tl.where(unfinished, l, 0.0)
        o = tl.where(unfinished[:, None], acc, 0.0) * inverse(l)[:, None]
        lse = log_sum(m, l, 1.0, 1.0)
        d = tl.arange(0, BLOCK_DV)
        o_ok = row_ok[:, None] & (d < DV)[None, :]
        out_at = out_row * stride_out_t + head * stride_out_h
        lse_at = out_row * stride_lse_t + head.to(tl.int64) * stride_lse_h
        if state < 0:
            tl.store(out_ptr + out_at[:, None] + d[None, :], o.to(out_ptr.dtype.element_ty), mask=o_ok)
            tl.store(lse_ptr + lse_at, lse * lse_scale, mask=row_ok)
        else:
            H: tl.constexpr = HKV * G
            part = first_slot * H + head
            mine = part + state * H
            tl.store(part_o_ptr + mine[:, None] * DV + d[None, :], o, mask=o_ok, eviction_policy="evict_last")
            tl.store(part_lse_ptr + mine, lse, mask=row_ok, eviction_policy="evict_last")
            if FUSED:
                count = tl.load(counts_ptr + row, mask=row_ok, other=0)
                is_last = arrive(arrived_ptr + row * H + head, count, row_ok)
                count = tl.where(is_last, count, 0)
                if tl.max(count, 0) > 0:
                    merge_tile(
                        part_o_ptr, part_lse_ptr, out_ptr, lse_ptr, part, count, out_at, lse_at, num_rows, lse_scale,
                        H, DV, BLOCK_DV, BLOCK_S,
                    )  # fmt: skip
    if CHAIN == 2:  # Whoever waits for this launch then waits for the one before it too.
        if tl.program_id(0) == tl.num_programs(0) - 1:
            gdc_wait()
