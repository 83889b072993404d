"""The error budget: as good as torch in the same dtype, judged against float64. No hand-picked tolerances.

After flash-attention's tests (Dao): err(ours) <= 2 x err(same-dtype torch) + a rounding floor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from cascade_fd.state import AttentionState, base_factor
from cascade_fd.testing import oracle


def rounding(dtype: torch.dtype, size: torch.Tensor) -> float:
    """One unit in the last place of the largest magnitude in ``size``."""
    finite = size[torch.isfinite(size)]
    return torch.finfo(dtype).eps * float(finite.abs().max()) if finite.numel() else 0.0


def max_error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest absolute difference; infinite where one is infinite or NaN and the other differs."""
    got, exact = got.double().cpu(), exact.double().cpu()
    same = (got == exact) | (got.isnan() & exact.isnan())
    diff = torch.where(same, 0.0, (got - exact).abs())
    return float(torch.where(diff.isnan(), math.inf, diff).max()) if diff.numel() else 0.0


def torch_attention(
    q: torch.Tensor, contexts: oracle.Rows, *, q_lens: Any = 1, sm_scale: float | None = None, causal: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """What plain torch gives in q's own dtype: matmul, softmax, matmul. The yardstick of the budget."""
    lens: Sequence[int] = [q_lens] * len(contexts) if isinstance(q_lens, int) else list(q_lens)
    scale = 1 / math.sqrt(q.shape[-1]) if sm_scale is None else sm_scale
    outs, lses, row = [], [], 0
    for n, (k, v) in zip(lens, contexts, strict=True):
        group = q.shape[1] // k.shape[1]
        queries = q[row : row + n].transpose(0, 1)
        keys, values = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
        scores = (queries @ keys.transpose(1, 2)).float() * scale
        if causal:
            limit = len(k) - n + torch.arange(n, device=q.device) + 1
            scores = scores.masked_fill(torch.arange(len(k), device=q.device) >= limit[:, None], -math.inf)
        weights = torch.nan_to_num(torch.softmax(scores, -1)) if len(k) else scores
        outs.append((weights.to(q.dtype) @ values).transpose(0, 1))
        lses.append(torch.logsumexp(scores, -1).transpose(0, 1))
        row += n
    return torch.cat(outs), torch.cat(lses)


def assert_state(
    got: AttentionState, exact: tuple[torch.Tensor, torch.Tensor], plain: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Assert that ``got`` is within the budget of ``exact`` (float64, natural log), given what plain torch achieves."""
    lse = got.lse.double() * base_factor(got.base, "e")
    for name, ours, best, theirs, dtype in (
        ("o", got.o, exact[0], plain[0], got.dtype),
        ("lse", lse, exact[1], plain[1], torch.float32),
    ):
        # The result's cast; exp2 and sums in float32, whose terms are of order one even where they cancel.
        floor = 2 * rounding(dtype, best) + 4 * max(rounding(torch.float32, best), torch.finfo(torch.float32).eps)
        budget = 2 * max_error(theirs, best) + floor
        error = max_error(ours, best)
        assert error <= budget, f"{name}: error {error:.3e} exceeds the budget {budget:.3e}"
