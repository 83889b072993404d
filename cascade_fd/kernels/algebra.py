"""The state algebra inside kernels. No other file does arithmetic on exp2, log2 or -inf.

A running state is ``(m, l, acc)``: largest score (or one near it), sum of exp2(score - m), and the same sum weighted with the
values, all in float32. Scores are in log2 units; merges keep m in their input's base. Empty is ``m = -inf, l = 0, acc = 0``,
and stays so.
"""

import triton
import triton.language as tl

NEG_INF = tl.constexpr(float("-inf"))
SLACK = tl.constexpr(8.0)  # log2 units by which a score may exceed m where m is raised lazily: weights stay below 2^8


@triton.jit
def shift(m):
    """What to subtract before exp2: m, or 0 where nothing was seen, so that -inf - (-inf) never happens."""
    return tl.where(m == NEG_INF, 0.0, m)


@triton.jit
def raised(m, top):
    """m, or ``top`` where that is larger by more than SLACK: what is subtracted from scores need only be near the largest."""
    return tl.where(top > m + SLACK, top, m)


@triton.jit
def weigh(m, m_new, s, scale):
    """Weights ``[M, N]`` of scores ``s [M, N]`` from m_new on, and the factor for what was added up from m on.

    ``scale``, which is positive, puts scores in log2 units; they are -inf where masked.
    """
    base = shift(m_new)
    return tl.exp2(s * scale - base[:, None]), tl.exp2(m - base)


@triton.jit
def weigh_down(m, m_new, s, scale):
    """``weigh`` for scores ``s [N, M]``, keys along the rows."""
    base = shift(m_new)
    return tl.exp2(s * scale - base[None, :]), tl.exp2(m - base)


@triton.jit
def fold_scores(m, l, acc, s, v, PRECISION: tl.constexpr):
    """Add a tile: scores ``s [M, N]`` (log2 units, -inf where masked) and values ``v [N, Dv]``."""
    m_new = tl.maximum(m, tl.max(s, 1))
    p, alpha = weigh(m, m_new, s, 1.0)
    l = l * alpha + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return m_new, l, acc


@triton.jit
def fold_states(m, l, acc, x, o, unit):
    """Add states along axis 0: ``x [S, R]`` (lse), ``o [S, R, D]``, to the ``m, l [R]`` and ``acc [R, D]`` of R rows.

    ``unit`` turns *differences* of lse into log2 units: large lse lose nothing to a conversion. What an empty state carries
    as its output does not count, be it NaN.
    """
    m_new = tl.maximum(m, tl.max(x, 0))
    base = shift(m_new)
    w = tl.exp2((x - base[None, :]) * unit)
    alpha = tl.exp2((m - base) * unit)
    o = tl.where((x == NEG_INF)[:, :, None], 0.0, o)
    return m_new, l * alpha + tl.sum(w, 0), acc * alpha[:, None] + tl.sum(w[:, :, None] * o, 0)


@triton.jit
def fold_one(m, l, acc, x, o, unit):
    """Add one state to each row: ``x [R]``, ``o [R, D]``."""
    m_new = tl.maximum(m, x)
    base = shift(m_new)
    w = tl.exp2((x - base) * unit)
    alpha = tl.exp2((m - base) * unit)
    o = tl.where((x == NEG_INF)[:, None], 0.0, o)
    return m_new, l * alpha + w, acc * alpha[:, None] + w[:, None] * o


@triton.jit
def fold_mass(m, l, x, unit):
    """Add probability without a value (an attention sink). Returns the new m and l and the factor for acc."""
    m_new = tl.maximum(m, x)
    base = shift(m_new)
    alpha = tl.exp2((m - base) * unit)
    return m_new, l * alpha + tl.exp2((x - base) * unit), alpha


@triton.jit
def inverse(l):
    """1 / l, and 1 for the empty state, whose acc is 0."""
    return 1.0 / tl.where(l == 0.0, 1.0, l)


@triton.jit
def log_sum(m, l, m_scale, log2_scale):
    """The lse: m in the output's base plus log2(l) in it; -inf for the empty state."""
    return tl.where(l == 0.0, NEG_INF, m * m_scale + tl.log2(tl.where(l == 0.0, 1.0, l)) * log2_scale)
