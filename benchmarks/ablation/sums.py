"""The state of a range of keys: under the running maximum, as the library has it, or under a reference that never changes."""

import triton
import triton.language as tl

from cascade_fd.kernels.algebra import NEG_INF, fold_scores, shift
from cascade_fd.kernels.loaders import key_offsets, load_tile, page_ids

# Sums under a fixed reference lie between these, or they are computed again. Then float32 and bfloat16 neither overflow nor
# lose a term that counts. float16 has fewer exponents: too large a weight is infinite there, too small a mean one is refused.
LEAST = tl.constexpr(2.0**-60)
LEAST_MEAN_FP16 = tl.constexpr(2.0**-8)
MOST = tl.constexpr(2.0**100)


@triton.jit
def fold_fixed(m, l, acc, s, v, PRECISION: tl.constexpr):
    """Add a tile under the reference ``m``, which is finite: no maximum, nothing to rescale."""
    p = tl.exp2(s - m[:, None])
    return l + tl.sum(p, 1), tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)


@triton.jit
def is_unsafe(l, acc, seen, MAXIMUM: tl.constexpr, FP16: tl.constexpr):
    """``[M]`` whether sums under a fixed reference may be worse than under the row's maximum. ``seen``: keys of each row.

    The maximum of the first tile is no larger than the row's: there weights may be too large, but never too small.
    """
    if FP16 and MAXIMUM == "fixed":
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
    stop,
    limit,
    seen_by_all,
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
    MAXIMUM: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The state ``m, l, acc`` of keys ``start .. stop - 1``, of which row r sees those below ``limit[r]``.

    MAXIMUM "running": the loop of ``attend_kernel``. "fixed": m is ``phi``. "first tile": m is the row's maximum there.
    """
    if MAXIMUM == "fixed":
        m = tl.full([BLOCK_M], 0.0, tl.float32) + phi
    else:
        m = tl.full([BLOCK_M], NEG_INF, tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    n = tl.arange(0, BLOCK_N)
    pos = tl.minimum(start + n, stop - 1)
    page = page_ids(ids_ptr, pos, pos >= start, PAGE_SIZE)
    for n0 in tl.range(start, stop, BLOCK_N, num_stages=STAGES):
        k_offsets = key_offsets(page, pos, stride_k_p, stride_k_t, PAGE_SIZE, WIDE)
        v_offsets = key_offsets(page, pos, stride_v_p, stride_v_t, PAGE_SIZE, WIDE)
        pos = tl.minimum(n0 + BLOCK_N + n, stop - 1)
        page = page_ids(ids_ptr, pos, None, PAGE_SIZE)
        k = load_tile(k_ptr, k_offsets, True, D, BLOCK_D, False)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * qk_scale
        if n0 + BLOCK_N > seen_by_all:
            s = tl.where((n0 + n)[None, :] < limit[:, None], s, NEG_INF)
        v = load_tile(v_ptr, v_offsets, True, DV, BLOCK_DV, False)
        if MAXIMUM == "running":
            m, l, acc = fold_scores(m, l, acc, s, v, PRECISION)
        else:
            if MAXIMUM == "first tile":
                if n0 == start:
                    m = shift(tl.max(s, 1))  # who sees nothing here sees nothing at all
            l, acc = fold_fixed(m, l, acc, s, v, PRECISION)
    return m, l, acc
