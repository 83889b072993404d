"""Options shared by the operations, and the buffers they write to."""

from __future__ import annotations

import functools
from typing import Any, TypedDict

import torch

from cascade_fd.checks import (
    FLOAT_DTYPES,
    check_choice,
    check_dtype,
    check_last_axis,
    check_no_grad,
    check_same,
    check_shape,
    is_plain,
)
from cascade_fd.state import BASES, AttentionState


class Output(TypedDict, total=False):
    """Options of every operation that computes attention.

    Attributes:
        sm_scale: factor on q . k; default ``1 / sqrt(D)``.
        out: ``[T, Hq, Dv]`` in q's dtype, written instead of a new tensor; must not overlap q or the cache.
        lse_out: ``[T, Hq]`` float32, any strides.
        base: "e" (default) or "2": base of the returned lse.
        backend: "reference" or "triton"; default by device.
    """

    sm_scale: float | None
    out: torch.Tensor | None
    lse_out: torch.Tensor | None
    base: str
    backend: str | None


class Options(Output, total=False):
    """``Output``, and what the one-shot forms need for the plan they make.

    Attributes:
        num_splits: splits per KV range; default: as many as fill the device once.
        kv_layout: layout of bare ``(k, v)`` tensors, "NHD" (default) or "HND".
    """

    num_splits: int | None
    kv_layout: str


def known_options(what: str, given: Any, kind: Any) -> dict[str, Any]:
    """A copy of ``given``; TypeError if it has a name that ``kind`` does not know."""
    names = _option_names(kind)
    if not given.keys() <= names:
        raise TypeError(f"{what}: expected options {sorted(names)}, got {sorted(given.keys() - names)}")
    return dict(given)


@functools.cache
def _option_names(kind: Any) -> frozenset[str]:
    return frozenset(kind.__annotations__) | frozenset(Output.__annotations__)


def destination(
    shape: tuple[int, int, int], like: torch.Tensor, options: Any, dtypes: tuple[torch.dtype, ...] = FLOAT_DTYPES
) -> AttentionState:
    """Where a result ``[T, Hq, Dv]`` goes: the caller's ``out`` and ``lse_out``, checked, or new tensors like ``like``."""
    out, lse, base = options.get("out"), options.get("lse_out"), options.get("base")
    check_no_grad(q=like)
    if base is not None:
        check_choice("base", base, BASES)
    if out is None:
        out = torch.empty(*shape, dtype=like.dtype, device=like.device)
    elif not is_plain(out, shape, like.dtype, like.device):
        _check_buffer("out", out, like, dict(zip(("T", "Hq", "Dv"), shape, strict=True)), dtypes)
        check_last_axis("out", out)
    if lse is None:
        lse = torch.empty(*shape[:2], dtype=torch.float32, device=like.device)
    elif not is_plain(lse, shape[:2], torch.float32, like.device):
        _check_buffer("lse_out", lse, like, dict(zip(("T", "Hq"), shape[:2], strict=True)), (torch.float32,))
    return AttentionState.trusted(out, lse, base or "e")


def _check_buffer(
    name: str, tensor: torch.Tensor, like: torch.Tensor, sizes: dict[str, Any], dtypes: tuple[torch.dtype, ...]
) -> None:
    check_shape(name, tensor, " ".join(sizes), **sizes)
    check_dtype(name, tensor, dtypes)
    check_same("device", **{"q": like, name: tensor})
    check_no_grad(**{name: tensor})
    if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise ValueError(f"{name}: expected memory of its own for every element, got an expanded tensor")
