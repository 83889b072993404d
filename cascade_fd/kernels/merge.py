"""Kernel 2: exact merges of states, ragged n-way and pairwise. lse comes in any declared base and leaves in any.

Rows of both kernels are numbered on the grid's first axis alone, which holds 2^31 - 1 programs.
"""

import functools

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from cascade_fd.kernels.algebra import NEG_INF, fold_mass, fold_one, fold_states, inverse, log_sum
from cascade_fd.kernels.launch import may_enter_early, run
from cascade_fd.state import base_factor
from cascade_fd.tiles import padded

_STRIDES = ["stride_lse_t", "stride_lse_h"]


@triton.jit(do_not_specialize=["stride_part_lse_n", "stride_part_lse_h", *_STRIDES])
def merge_rows_kernel(
    part_o_ptr,
    part_lse_ptr,
    indptr_ptr,
    rows_ptr,
    sink_ptr,
    out_ptr,
    lse_ptr,
    stride_part_o_n,
    stride_part_o_h,
    stride_part_lse_n,
    stride_part_lse_h,
    stride_out_t,
    stride_out_h,
    stride_lse_t,
    stride_lse_h,
    unit,
    m_scale,
    log2_scale,
    sink_scale,
    H: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_SINK: tl.constexpr,
    CHAIN: tl.constexpr,
):
    """One output row, BLOCK_H heads and BLOCK_D columns per program; BLOCK_S states in flight, in index order.

    A row of -1 is room that no row of the batch needs. CHAIN: programs enter while the states are still computed, and wait.
    """
    COLUMNS: tl.constexpr = (DV + BLOCK_D - 1) // BLOCK_D
    d = tl.program_id(0) % COLUMNS * BLOCK_D + tl.arange(0, BLOCK_D)
    h = tl.program_id(0) // COLUMNS % (H // BLOCK_H) * BLOCK_H + tl.arange(0, BLOCK_H)
    i = tl.program_id(0) // (COLUMNS * (H // BLOCK_H))
    first = tl.load(indptr_ptr + i)
    last = tl.load(indptr_ptr + i + 1)
    if HAS_ROWS:
        row = tl.load(rows_ptr + i).to(tl.int64)
    else:
        row = i.to(tl.int64)
    if CHAIN:
        gdc_wait()
    m = tl.full([BLOCK_H], NEG_INF, tl.float32)
    l = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    for s0 in range(first, last, BLOCK_S):
        s = s0 + tl.arange(0, BLOCK_S)
        slot = s.to(tl.int64)[:, None]
        x_ptrs = part_lse_ptr + (slot * stride_part_lse_n + h[None, :] * stride_part_lse_h)
        x = tl.load(x_ptrs, mask=(s < last)[:, None], other=NEG_INF)
        o_ptrs = part_o_ptr + (slot * stride_part_o_n + h[None, :] * stride_part_o_h)[:, :, None] + d[None, None, :]
        o = tl.load(o_ptrs, mask=(s < last)[:, None, None] & (d < DV)[None, None, :], other=0.0)
        m, l, acc = fold_states(m, l, acc, x, o.to(tl.float32), unit)
    if HAS_SINK:
        m, l, alpha = fold_mass(m, l, tl.load(sink_ptr + h).to(tl.float32) * sink_scale, unit)
        acc *= alpha[:, None]
    o = (acc * inverse(l)[:, None]).to(out_ptr.dtype.element_ty)
    lse = log_sum(m, l, m_scale, log2_scale)
    if row >= 0:
        tl.store(out_ptr + row * stride_out_t + (h * stride_out_h)[:, None] + d[None, :], o, mask=(d < DV)[None, :])
        tl.store(lse_ptr + row * stride_lse_t + h.to(tl.int64) * stride_lse_h, lse)


@triton.jit(do_not_specialize=["num_rows", "stride_a_lse_t", "stride_a_lse_h", "stride_b_lse_t", "stride_b_lse_h", *_STRIDES])
def merge_pair_kernel(
    a_o_ptr,
    a_lse_ptr,
    b_o_ptr,
    b_lse_ptr,
    mask_ptr,
    sink_ptr,
    out_ptr,
    lse_ptr,
    stride_a_t,
    stride_a_h,
    stride_a_lse_t,
    stride_a_lse_h,
    stride_b_t,
    stride_b_h,
    stride_b_lse_t,
    stride_b_lse_h,
    stride_out_t,
    stride_out_h,
    stride_lse_t,
    stride_lse_h,
    num_rows,
    b_scale,
    unit,
    m_scale,
    log2_scale,
    sink_scale,
    H: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_SINK: tl.constexpr,
):
    """BLOCK_R rows (of T * H) per program. ``out`` may be ``a``: a program reads its rows before it writes them."""
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_D)
    t, h = r // H, r % H
    ok = r < num_rows
    if HAS_MASK:
        ok = ok & (tl.load(mask_ptr + t, mask=ok, other=0) != 0)
    tile_ok = ok[:, None] & (d < DV)[None, :]
    x = tl.load(a_lse_ptr + t * stride_a_lse_t + h * stride_a_lse_h, mask=ok, other=NEG_INF)
    o = tl.load(a_o_ptr + (t * stride_a_t + h * stride_a_h)[:, None] + d[None, :], mask=tile_ok, other=0.0)
    y = tl.load(b_lse_ptr + t * stride_b_lse_t + h * stride_b_lse_h, mask=ok, other=NEG_INF) * b_scale
    p = tl.load(b_o_ptr + (t * stride_b_t + h * stride_b_h)[:, None] + d[None, :], mask=tile_ok, other=0.0)
    m = tl.full([BLOCK_R], NEG_INF, tl.float32)
    l = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    m, l, acc = fold_one(m, l, acc, x, o.to(tl.float32), unit)
    m, l, acc = fold_one(m, l, acc, y, p.to(tl.float32), unit)
    if HAS_SINK:
        m, l, alpha = fold_mass(m, l, tl.load(sink_ptr + h, mask=ok, other=0.0).to(tl.float32) * sink_scale, unit)
        acc *= alpha[:, None]
    o = (acc * inverse(l)[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (t * stride_out_t + h * stride_out_h)[:, None] + d[None, :], o, mask=tile_ok)
    tl.store(lse_ptr + t * stride_lse_t + h * stride_lse_h, log_sum(m, l, m_scale, log2_scale), mask=ok)


@functools.cache
def _scales(source, target):
    """Factors: lse differences to log2 units, m to the target base, log2 to the target base, sink logits to the source base."""
    return (
        base_factor(source, "2"),
        base_factor(source, target),
        base_factor("2", target),
        base_factor("e", source),
    )


def launch_merge_rows(partials, rows, out, sink, tile, chain=False):
    """Merge all of ``rows`` from ``partials`` into ``out``. ``chain``: the kernel's CHAIN."""
    _, H, DV = out.o.shape
    indptr = rows.indptr
    tensors = (
        partials.o,
        partials.lse,
        indptr,
        indptr if rows.rows is None else rows.rows,
        partials.lse if sink is None else sink,
        out.o,
        out.lse,
    )
    strides = (partials.o.stride(), partials.lse.stride(), out.o.stride(), out.lse.stride())
    layout = (H, DV, tile, rows.rows is not None, sink is not None, chain, *strides)
    grid = (indptr.shape[0] - 1) * (H // tile.block_h) * -(-DV // tile.block_d)
    run(merge_rows_kernel, grid, tensors, layout, _scales(partials.base, out.base), _merge_rows_arguments)


def _merge_rows_arguments(H, DV, tile, has_rows, has_sink, chain, part_o, part_lse, out, lse):
    return (*part_o[:2], *part_lse, *out[:2], *lse), {
        "H": H,
        "DV": DV,
        "BLOCK_S": tile.block_s,
        "BLOCK_H": tile.block_h,
        "BLOCK_D": tile.block_d,
        "HAS_ROWS": has_rows,
        "HAS_SINK": has_sink,
        "CHAIN": chain,
        "num_warps": tile.num_warps,
        **may_enter_early(chain),
    }


def launch_merge_pair(a, b, out, mask, sink):
    """Merge two states of the same rows."""
    shape = out.o.shape
    tensors = (
        a.o,
        a.lse,
        b.o,
        b.lse,
        a.lse if mask is None else mask,
        a.lse if sink is None else sink,
        out.o,
        out.lse,
    )
    strides = [x.stride() for state in (a, b, out) for x in (state.o, state.lse)]
    layout = (shape, mask is not None, sink is not None, *strides)
    grid = -(-shape[0] * shape[1] // _rows_per_program(shape[2]))
    floats = (base_factor(b.base, a.base), *_scales(a.base, out.base))
    run(merge_pair_kernel, grid, tensors, layout, floats, _merge_pair_arguments)


def _merge_pair_arguments(shape, has_mask, has_sink, a_o, a_lse, b_o, b_lse, out, lse):
    T, H, DV = shape
    return (*a_o[:2], *a_lse, *b_o[:2], *b_lse, *out[:2], *lse, T * H), {
        "H": H,
        "DV": DV,
        "BLOCK_R": _rows_per_program(DV),
        "BLOCK_D": padded(DV),
        "HAS_MASK": has_mask,
        "HAS_SINK": has_sink,
        "num_warps": 4,
    }


def _rows_per_program(DV):
    return max(1, 1024 // padded(DV))
