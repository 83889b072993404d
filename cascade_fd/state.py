"""The attention state: what attention over a set of keys leaves behind so that it can be merged with other sets, exactly.

Invariant: an empty state is ``o = 0, lse = -inf``; it is the identity of the merge. The algebra is in docs/concepts.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cascade_fd.checks import (
    FLOAT_DTYPES,
    check_choice,
    check_dtype,
    check_last_axis,
    check_same,
    check_shape,
)

BASES = ("e", "2")
_UNDECLARED = (
    "base: expected 'e' (FlashAttention, vLLM, SGLang) or '2' (FlashInfer), got nothing: an lse whose base nobody "
    "declared is refused, because merging log2 with natural log silently gives wrong weights"
)


@dataclass(frozen=True, eq=False)
class AttentionState:
    """Attention output over a set of keys, with the log of its softmax denominator.

    Attributes:
        o: ``[T, Hq, Dv]`` float32, float16 or bfloat16; the softmax-weighted mean of the values. Strides are honoured; the
            last axis is contiguous.
        lse: ``[T, Hq]`` float32, any strides; log of the sum of exp(score), scores including ``sm_scale``. -inf where a
            row has no key (then ``o`` is 0).
        base: "e" (natural log) or "2" (log2). Never guessed: leaving it out is an error.

    Example:
        >>> state = AttentionState(torch.zeros(2, 4, 8), torch.full((2, 4), -torch.inf), base="e")
        >>> state.num_rows, state.to_base("2").base
        (2, '2')
    """

    o: torch.Tensor
    lse: torch.Tensor
    base: str = ""

    def __post_init__(self) -> None:
        if not self.base:
            raise TypeError(_UNDECLARED)
        check_choice("base", self.base, BASES)
        T, Hq, _ = check_shape("o", self.o, "T Hq Dv")
        check_shape("lse", self.lse, "T Hq", T=T, Hq=Hq)
        check_dtype("o", self.o, FLOAT_DTYPES)
        check_dtype("lse", self.lse, (torch.float32,))
        check_same("device", o=self.o, lse=self.lse)
        check_last_axis("o", self.o)

    @classmethod
    def trusted(cls, o: torch.Tensor, lse: torch.Tensor, base: str) -> AttentionState:
        """A state of tensors that the caller has just made or checked; skips the checks (they cost 10 us)."""
        state = object.__new__(cls)
        state.__dict__.update(o=o, lse=lse, base=base)
        return state

    @classmethod
    def empty(
        cls,
        num_rows: int,
        num_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        base: str = "e",
    ) -> AttentionState:
        """The identity of the merge for ``num_rows`` rows: ``o = 0, lse = -inf``."""
        o = torch.zeros(num_rows, num_heads, head_dim, dtype=dtype, device=device)
        lse = torch.full((num_rows, num_heads), -math.inf, device=device)
        return cls(o, lse, base)

    @classmethod
    def cat(cls, states: Sequence[AttentionState]) -> AttentionState:
        """Rows of all states, one after the other, in the base of the first: ``[sum T, Hq, Dv]``. Copies."""
        o, lse, base = _aligned(states, "cat")
        return cls(torch.cat(o), torch.cat(lse), base)

    @classmethod
    def stack(cls, states: Sequence[AttentionState]) -> AttentionState:
        """S states of the same T rows, row by row: row ``t * S + s`` is state s of row t. Copies.

        This is the order that ``merge_ragged`` reads; its ``indptr`` is then ``[0, S, 2 S, ...]``.
        """
        o, lse, base = _aligned(states, "stack")
        shapes = {tuple(x.shape) for x in o}
        if len(shapes) > 1:
            raise ValueError(f"states: expected one shape [T, Hq, Dv], got {sorted(shapes)}")
        return cls(torch.stack(o, 1).flatten(0, 1), torch.stack(lse, 1).flatten(0, 1), base)

    @property
    def num_rows(self) -> int:
        return self.o.shape[0]

    @property
    def num_heads(self) -> int:
        return self.o.shape[1]

    @property
    def head_dim(self) -> int:
        return self.o.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        return self.o.dtype

    @property
    def device(self) -> torch.device:
        return self.o.device

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, rows: slice | torch.Tensor | Sequence[int]) -> AttentionState:
        """Select rows with a slice (a view), a list, or an index or bool tensor (a copy)."""
        if not isinstance(rows, (slice, torch.Tensor, list, range)):
            raise TypeError(f"rows: expected a slice, a list or a tensor, got {type(rows).__name__}; use state[i:i+1]")
        index: Any = rows if isinstance(rows, (slice, torch.Tensor)) else list(rows)
        return AttentionState(self.o[index], self.lse[index], self.base)

    def to_base(self, base: str) -> AttentionState:
        """The same state with ``lse`` in ``base``. ``o`` is shared; so is ``lse`` if the base is already right."""
        check_choice("base", base, BASES)
        if base == self.base:
            return self
        return AttentionState(self.o, self.lse * base_factor(self.base, base), base)


def base_factor(source: str, target: str) -> float:
    """What an lse in base ``source`` is multiplied by to be in base ``target``. The one place that knows ln 2."""
    if source == target:
        return 1.0
    return math.log2(math.e) if target == "2" else math.log(2.0)


def check_state(name: str, value: Any) -> AttentionState:
    """Refuse what is not an AttentionState; a bare (o, lse) pair has no base."""
    if isinstance(value, AttentionState):
        return value
    got = "a bare (o, lse) pair" if isinstance(value, tuple) else type(value).__name__
    raise TypeError(f"{name}: expected an AttentionState, got {got}. {_UNDECLARED}")


def _aligned(states: Sequence[AttentionState], verb: str) -> tuple[list[torch.Tensor], list[torch.Tensor], str]:
    if not states:
        raise ValueError(f"states: expected at least one state to {verb}, got none")
    base = check_state("states[0]", states[0]).base
    converted = [check_state(f"states[{i}]", s).to_base(base) for i, s in enumerate(states)]
    check_same("dtype", **{f"states[{i}].o": s.o for i, s in enumerate(converted)})
    check_same("device", **{f"states[{i}].o": s.o for i, s in enumerate(converted)})
    return [s.o for s in converted], [s.lse for s in converted], base
