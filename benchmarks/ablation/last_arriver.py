"""What the last program to finish a row does: it merges the row's states, in index order, whoever it is."""

import triton
import triton.language as tl

from cascade_fd.kernels.algebra import NEG_INF, fold_one, fold_states, inverse, log_sum


@triton.jit
def arrive(arrived_ptr, count, row_ok):
    """Tell that this program's states are written; ``[M]`` which rows now have all ``count``. Their counters begin again."""
    tl.debug_barrier()  # all threads have stored before any tells
    arrived = tl.atomic_add(arrived_ptr, 1, mask=row_ok, sem="acq_rel")
    is_last = row_ok & (arrived == count - 1)
    tl.store(arrived_ptr, 0, mask=is_last)
    tl.debug_barrier()  # none reads before all were told
    return is_last


@triton.jit
def row_state(part_o_ptr, part_lse_ptr, part, count, d, H: tl.constexpr, DV: tl.constexpr, BLOCK_S: tl.constexpr):
    """One packed row's ``m, l [1]`` and ``acc [1, Dv]`` from ``count`` states that begin at ``part``, BLOCK_S in flight."""
    m = tl.full([1], NEG_INF, tl.float32)
    l = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, d.shape[0]], tl.float32)
    for s0 in range(0, count, BLOCK_S):
        s = s0 + tl.arange(0, BLOCK_S)
        at = part + s * H
        # Others wrote them in this very launch: they are not looked for in the L1.
        x = tl.load(part_lse_ptr + at, mask=s < count, other=NEG_INF, cache_modifier=".cg")
        ok = (s < count)[:, None] & (d < DV)[None, :]
        o = tl.load(part_o_ptr + at[:, None] * DV + d[None, :], mask=ok, other=0.0, cache_modifier=".cg")
        m, l, acc = fold_states(m, l, acc, x[:, None], o[:, None, :], 1.0)
    return m, l, acc


@triton.jit
def tile_states(part_o_ptr, part_lse_ptr, part, count, d, H: tl.constexpr, DV: tl.constexpr):
    """``m, l, acc`` of all rows of a tile, state by state. Rows with a count of 0 stay empty."""
    m = tl.full([part.shape[0]], NEG_INF, tl.float32)
    l = tl.zeros([part.shape[0]], tl.float32)
    acc = tl.zeros([part.shape[0], d.shape[0]], tl.float32)
    for s in range(tl.max(count, 0)):
        at = part + s * H
        x = tl.load(part_lse_ptr + at, mask=s < count, other=NEG_INF, cache_modifier=".cg")
        ok = (s < count)[:, None] & (d < DV)[None, :]
        o = tl.load(part_o_ptr + at[:, None] * DV + d[None, :], mask=ok, other=0.0, cache_modifier=".cg")
        m, l, acc = fold_one(m, l, acc, x, o, 1.0)
    return m, l, acc


@triton.jit
def merge_tile(
    part_o_ptr, part_lse_ptr, out_ptr, lse_ptr, part, count, out_at, lse_at, num_rows, scale,
    H: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Merge the packed rows of a tile that have a count; in index order, whoever does. BLOCK_S 1: all rows at once."""
    d = tl.arange(0, BLOCK_DV)
    if BLOCK_S == 1:
        m, l, acc = tile_states(part_o_ptr, part_lse_ptr, part, count, d, H, DV)
        o = (acc * inverse(l)[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + out_at[:, None] + d[None, :], o, mask=(count > 0)[:, None] & (d < DV)[None, :])
        tl.store(lse_ptr + lse_at, log_sum(m, l, scale, scale), mask=count > 0)
    else:
        r = tl.arange(0, part.shape[0])
        for j in range(num_rows):
            n = tl.sum(tl.where(r == j, count, 0), 0)
            if n > 0:
                at = tl.sum(tl.where(r == j, part, 0), 0)
                m, l, acc = row_state(part_o_ptr, part_lse_ptr, at, n, d, H, DV, BLOCK_S)
                o_ptrs = out_ptr + tl.sum(tl.where(r == j, out_at, 0), 0) + d[None, :]
                tl.store(o_ptrs, (acc * inverse(l)[:, None]).to(out_ptr.dtype.element_ty), mask=(d < DV)[None, :])
                tl.store(lse_ptr + tl.sum(tl.where(r == j, lse_at, 0), 0) + tl.arange(0, 1), log_sum(m, l, scale, scale))
