"""One dense oracle in float64 that knows nothing of plans, pages, splits or merges."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from cascade_fd.state import AttentionState

Rows = Sequence[tuple[torch.Tensor, torch.Tensor]]


def attention(
    q: torch.Tensor, contexts: Rows, *, q_lens: Any = 1, sm_scale: float | None = None, causal: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each request over its whole context, in float64.

    Args:
        q: ``[T, Hq, D]``, requests one after the other.
        contexts: per request ``(k [t, Hkv, D], v [t, Hkv, Dv])``.
        q_lens: rows per request; the last row sees every key, the one before it all but the last, if ``causal``.

    Returns:
        ``o [T, Hq, Dv]`` and ``lse [T, Hq]`` (natural log), float64 on the CPU; (0, -inf) for rows without keys.
    """
    lens = [q_lens] * len(contexts) if isinstance(q_lens, int) else list(q_lens)
    scale = 1 / math.sqrt(q.shape[-1]) if sm_scale is None else sm_scale
    outs, lses, row = [], [], 0
    for n, (k, v) in zip(lens, contexts, strict=True):
        o, lse = _one(q[row : row + n].double().cpu(), k.double().cpu(), v.double().cpu(), scale, causal)
        outs.append(o)
        lses.append(lse)
        row += n
    return torch.cat(outs), torch.cat(lses)


def _one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    n, keys, group = len(q), len(k), q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,thd->qht", q, k) * scale
    if causal:
        limit = keys - n + torch.arange(n) + 1
        scores = scores.masked_fill(torch.arange(keys) >= limit[:, None, None], -math.inf)
    if keys == 0:
        return torch.zeros(n, q.shape[1], v.shape[2], dtype=torch.float64), torch.full(q.shape[:2], -math.inf).double()
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - torch.where(lse == -math.inf, 0.0, lse)[..., None])
    return torch.einsum("qht,thd->qhd", weights, v), lse


def merge(states: Sequence[AttentionState], sink: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge states of the same rows in float64, natural log out."""
    ln2 = math.log(2.0)
    lse = torch.stack([s.lse.double().cpu() * (ln2 if s.base == "2" else 1.0) for s in states])
    o = torch.stack([s.o.double().cpu() for s in states])
    if sink is not None:
        lse = torch.cat([lse, sink.double().cpu().expand(1, *lse.shape[1:])])
        o = torch.cat([o, torch.zeros_like(o[:1])])
    total = torch.logsumexp(lse, 0)
    weights = torch.exp(lse - torch.where(total == -math.inf, 0.0, total))
    return (weights[..., None] * torch.where(weights[..., None] > 0, o, 0.0)).sum(0), total
