"""The one place where kernels are launched, or, under ``compile_only``, compiled for a target without a GPU.

Triton's own launch path costs about 60 us of host time for kernels with this many arguments: it works out anew what every
argument is specialised on. Here a compiled kernel is found again by the same facts, cheaper, and called directly.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch

_recorder: ContextVar[list[Any] | None] = ContextVar("recorder", default=None)
_compiled: dict[Any, Any] = {}
_INT32_MAX = 2**31 - 1


def run(kernel: Any, grid: int, *args: Any, **meta: Any) -> None:
    """Launch ``grid`` programs; record the compiled variant instead if a ``compile_only`` block is active.

    ``meta``: the kernel's constexprs in the order of its signature, then ``num_warps`` and the like.
    """
    recorded = _recorder.get()
    if recorded is not None:
        recorded.append(kernel.warmup(*args, grid=(grid,), enable_fp_fusion=True, **meta))
        return
    key = (id(kernel), args[0].device, *_specialised_on(args), *meta.values())
    compiled = _compiled.get(key)
    if compiled is not None:
        compiled[0][grid, 1, 1](*args, *compiled[1])
        return
    # Fusion is stated because Triton's default changes between releases.
    compiled = kernel[(grid,)](*args, enable_fp_fusion=True, **meta)
    if compiled is not None:  # Triton's interpreter returns nothing
        _compiled[key] = compiled, [meta[p.name] for p in kernel.params if p.is_constexpr]


def _specialised_on(args: tuple[Any, ...]) -> list[Any]:
    """What Triton specialises a kernel on: a tensor's dtype and alignment; whether an int is 1, of 16, or needs 64 bits."""
    return [
        (arg.dtype, arg.data_ptr() & 15)
        if isinstance(arg, torch.Tensor)
        else (arg == 1, arg & 15, arg > _INT32_MAX)
        if type(arg) is int
        else None
        for arg in args
    ]


@contextlib.contextmanager
def compile_only() -> Iterator[list[Any]]:
    """Inside the block launches only compile; yields the list that the compiled kernels are added to."""
    compiled: list[Any] = []
    token = _recorder.set(compiled)
    try:
        yield compiled
    finally:
        _recorder.reset(token)
