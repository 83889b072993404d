"""The one place where kernels are launched, or, under ``compile_only``, compiled for a target without a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

_compiled: ContextVar[list[Any] | None] = ContextVar("compiled", default=None)


def run(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """Launch ``kernel`` on ``grid``; record the compiled variant instead if a ``compile_only`` block is active."""
    meta["enable_fp_fusion"] = True  # Triton's default changes between releases
    recorded = _compiled.get()
    if recorded is None:
        kernel[grid](*args, **meta)
    else:
        recorded.append(kernel.warmup(*args, grid=grid, **meta))


@contextlib.contextmanager
def compile_only() -> Iterator[list[Any]]:
    """Inside the block launches only compile; yields the list that the compiled kernels are added to."""
    compiled: list[Any] = []
    token = _compiled.set(compiled)
    try:
        yield compiled
    finally:
        _compiled.reset(token)
