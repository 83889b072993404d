"""The one place where kernels are launched, or, under ``compile_only``, compiled for a target without a GPU.

Triton's own launch path costs about 60 us of host time for kernels with this many arguments: it works out anew what every
argument is specialised on. Here a launch that differs from an earlier one in nothing but addresses and floats repeats it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
import triton
from triton import knobs
from triton.runtime import driver

_INT32_MAX = 2**31 - 1
_MAX_LAYOUTS = 4096  # a dense cache that grows has new strides, and so a new layout, in every step
TRITON = tuple(int(n) for n in triton.__version__.split(".")[:2])
# Releases in which what stands between ``compiled[grid](*args)`` and Triton's C launcher was tried and found the same.
_KNOWN_TRITON = (3, 4) <= TRITON <= (3, 9)
# Whether a launch can wait, on the device, for the one before it: Triton 3.4 cannot compile that, its interpreter not run it.
CAN_CHAIN = TRITON >= (3, 5) and not knobs.runtime.interpret

_recorder: ContextVar[list[Any] | None] = ContextVar("recorder", default=None)
_compiled: dict[Any, Any] = {}  # by what Triton specialises on
_repeats: dict[Any, Callable[..., None]] = {}  # by layout, which is finer but found faster


def run(
    kernel: Any,
    grid: int,
    tensors: Sequence[torch.Tensor],
    layout: tuple[Any, ...],
    floats: tuple[float, ...],
    arguments: Callable[..., tuple[Sequence[int], dict[str, Any]]],
    descriptors: Sequence[Any] = (),
) -> None:
    """Launch ``grid`` programs of ``kernel(*descriptors, *tensors, *ints, *floats, **meta)``.

    ``ints, meta = arguments(*layout)``. What is kept for a layout cannot go stale: all integers and constexprs follow from it,
    and so do the types of TMA descriptors; addresses are read anew. ``meta``: the constexprs in the order of the signature,
    then ``num_warps`` and the like. If a ``compile_only`` block is active, the compiled variant is recorded instead.
    """
    recorded = _recorder.get()
    if recorded is not None:
        ints, meta = arguments(*layout)
        recorded.append(kernel.warmup(*descriptors, *tensors, *ints, *floats, grid=(grid,), enable_fp_fusion=True, **meta))
        return
    device = tensors[0].get_device()
    if device >= 0 and device != torch.cuda.current_device():  # Triton launches there
        with torch.cuda.device(device):
            return run(kernel, grid, tensors, layout, floats, arguments, descriptors)
    addresses = [tensor.data_ptr() for tensor in tensors]
    facts = (id(kernel), device, *[tensor.dtype for tensor in tensors], *[address & 15 for address in addresses])
    repeat = _repeats.get((facts, layout))
    if repeat is not None:
        repeat(grid, (*descriptors, *addresses), floats)
        return
    ints, meta = arguments(*layout)
    variant = _variant(facts, ints, meta)
    compiled = _compiled.get(variant)
    if compiled is None:
        # Fusion is stated because Triton's default changes between releases.
        compiled = kernel[(grid,)](*descriptors, *tensors, *ints, *floats, enable_fp_fusion=True, **meta)
        if _is_reusable(compiled):
            _compiled[variant] = compiled
        return
    if len(_repeats) >= _MAX_LAYOUTS:
        _repeats.clear()
    constants = [meta[p.name] for p in kernel.params if p.is_constexpr]
    repeat = _repeats[facts, layout] = _repeater(compiled, device, (*ints,), constants)
    repeat(grid, (*descriptors, *addresses), floats)


def _variant(facts: tuple[Any, ...], ints: Sequence[int], meta: dict[str, Any]) -> tuple[Any, ...]:
    """At least what Triton specialises on: dtypes, alignment to 16 bytes; ints that are 1, multiples of 16, or need 64 bits."""
    return (*facts, *[(n == 1, n & 15, n > _INT32_MAX) for n in ints], *meta.items())


def may_enter_early(early: bool) -> dict[str, bool]:
    """The setting of a launch whose programs may start before the launch before it has ended, and wait for it themselves."""
    return {"launch_pdl": True} if early else {}  # AMD's compiler knows no such option


def _is_reusable(compiled: Any) -> bool:
    """Not for AMD, where Triton also looks at the size of the memory behind an address; its interpreter compiles nothing."""
    return compiled is not None and compiled.metadata.target.backend == "cuda"


def _repeater(compiled: Any, device: int, ints: tuple[int, ...], constants: list[Any]) -> Callable[..., None]:
    """``repeat(grid, addresses, floats)`` does what ``compiled[grid](*args)`` does, less what profilers' hooks need."""
    launch, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    stream_of = driver.active.get_current_stream

    def repeat(grid: int, addresses: Sequence[int], floats: tuple[float, ...]) -> None:
        if not _KNOWN_TRITON or _hooked():
            compiled[grid, 1, 1](*addresses, *ints, *floats, *constants)
            return
        launch(grid, 1, 1, stream_of(device), function, metadata, None, None, None, *addresses, *ints, *floats, *constants)

    return repeat


def _hooked() -> bool:
    """Whether a profiler watches launches; hooks are a function or None in Triton 3.4, a list of functions later."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def is_recording() -> bool:
    """Whether launches only compile."""
    return _recorder.get() is not None


@contextlib.contextmanager
def compile_only() -> Iterator[list[Any]]:
    """Inside the block launches only compile; yields the list that the compiled kernels are added to."""
    compiled: list[Any] = []
    token = _recorder.set(compiled)
    try:
        yield compiled
    finally:
        _recorder.reset(token)
