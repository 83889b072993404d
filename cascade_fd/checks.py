"""Argument checks shared by every public entry point, and the errors they raise.

A message always has three parts: the argument's name, what was expected, what was given. Axes are named as in the docs:
T query rows, B requests, Hq and Hkv heads, D (Dv) head dim, P pages, page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class UnsupportedError(NotImplementedError):
    """A correct request that this build, backend or device cannot serve. Lists every reason, not just the first."""

    def __init__(self, what: str, reasons: Sequence[str]):
        self.reasons = tuple(reasons)
        super().__init__(f"{what} is not supported:" + "".join(f"\n  - {r}" for r in self.reasons))


def is_plain(tensor: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> bool:
    """The quick yes: a tensor of just this shape, dtype and device, no gradient, last axis contiguous, nothing expanded.

    A no says nothing: the checks below then decide, and name what is wrong.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.shape != shape or tensor.dtype is not dtype:
        return False
    strides = tensor.stride()
    return strides[-1] == 1 and 0 not in strides and tensor.device == device and not tensor.requires_grad


def check_tensor(name: str, value: Any) -> torch.Tensor:
    """Refuse anything that is not a tensor."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")
    return value


def check_shape(name: str, tensor: Any, axes: str, **sizes: int) -> tuple[int, ...]:
    """Check rank and the named sizes; return the shape. ``check_shape("q", q, "B Hq D", D=128)``."""
    shape = tuple(check_tensor(name, tensor).shape)
    names = axes.split()
    if len(shape) != len(names) or any(sizes.get(n, s) != s for n, s in zip(names, shape, strict=True)):
        want = ", ".join(f"{n}={sizes[n]}" if n in sizes else n for n in names)
        raise ValueError(f"{name}: expected shape [{want}], got {list(shape)}")
    return shape


def check_dtype(name: str, tensor: torch.Tensor, allowed: Sequence[torch.dtype]) -> None:
    """Refuse a dtype that is not among ``allowed``; nothing is ever cast silently."""
    if tensor.dtype not in allowed:
        want = " or ".join(str(d).removeprefix("torch.") for d in allowed)
        raise TypeError(f"{name}: expected dtype {want}, got {str(tensor.dtype).removeprefix('torch.')}")


def check_same(what: str, **tensors: torch.Tensor) -> None:
    """Check that all tensors agree in ``what`` ('dtype' or 'device')."""
    values = {name: getattr(t, what) for name, t in tensors.items()}
    if len(set(values.values())) > 1:
        error = TypeError if what == "dtype" else ValueError
        given = ", ".join(f"{n} {v}" for n, v in values.items())
        raise error(f"{', '.join(values)}: expected one {what}, got {given}")


def check_last_axis(name: str, tensor: torch.Tensor) -> None:
    """The last axis must be contiguous; every other stride is honoured. We never copy behind the caller's back."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1 and tensor.numel():
        raise ValueError(
            f"{name}: expected a contiguous last axis (stride 1), got strides {list(tensor.stride())}; call .contiguous()"
        )


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Refuse a value that is not among ``choices``."""
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, choices))}, got {value!r}")


def check_group(num_q_heads: int, num_kv_heads: int) -> int:
    """Query heads per KV head, G = Hq / Hkv."""
    if num_kv_heads < 1 or num_q_heads < 1 or num_q_heads % num_kv_heads:
        raise ValueError(
            f"num_q_heads: expected a multiple of the number of KV heads (Hkv={num_kv_heads}), got Hq={num_q_heads}"
        )
    return num_q_heads // num_kv_heads


def check_int(name: str, value: Any, low: int, high: int | None = None) -> int:
    """A Python or NumPy integer within ``[low, high]``; bool is not one."""
    is_int = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_int or value < low or (high is not None and value > high):
        span = f"of at least {low}" if high is None else f"in [{low}, {high}]"
        raise ValueError(f"{name}: expected an integer {span}, got {value!r}")
    return int(value)


def check_no_grad(**tensors: torch.Tensor) -> None:
    """The kernels have no backward pass; refuse rather than return a result that silently has no gradient."""
    if not torch.is_grad_enabled():
        return
    names = [name for name, tensor in tensors.items() if tensor.requires_grad]
    if names:
        raise UnsupportedError("a gradient", [f"{', '.join(names)} requires grad; call under torch.no_grad()"])
