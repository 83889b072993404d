"""The host side of the two kernels for Hopper: which launches they can take, TMA descriptors of stores, and the launch itself.

Gluon is imported when the first launch asks for it. Whatever keeps these kernels from running, the portable one runs instead.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
import weakref
from dataclasses import replace
from typing import Any

import torch

from cascade_fd.kernels.attend import operands
from cascade_fd.kernels.launch import TRITON, is_recording, may_enter_early, run
from cascade_fd.kv import KVStore
from cascade_fd.planning.worklist import Launch, Plan
from cascade_fd.tiles import FETCH_REGISTERS, AttendTile, hopper_lacks

_TESTED = (3, 6), (3, 9)  # releases of Triton
_MOST_BYTES = 1 << 40  # a stride that TMA can take is shorter

_failed: dict[str, str] = {}  # by kernel, as tiles name it, why it is not tried again
_judged: weakref.WeakKeyDictionary[KVStore, list[str]] = weakref.WeakKeyDictionary()
_described: weakref.WeakKeyDictionary[KVStore, dict[int, tuple[Any, Any]]] = weakref.WeakKeyDictionary()


def hopper_can(plan: Plan, launch: Launch, store: KVStore, qk_scale: float = 1.0) -> list[str]:
    """Why a kernel for Hopper cannot take a launch that was planned for it; empty if it can."""
    shape = plan.shape
    reasons = [*hopper_lacks(plan.hardware.arch, shape.dtype, shape.head_dims, launch.page_size)]
    if not qk_scale > 0:
        reasons.append("sm_scale is positive")
    if launch.tile.kernel in _failed:
        reasons.append(_failed[launch.tile.kernel])
    return [*reasons, *available(plan.device), *_store_lacks(store)]


@functools.cache
def available(device: torch.device) -> tuple[str, ...]:
    """Why the kernels for Hopper cannot run on a device of this machine; devices that are only compiled for can do anything."""
    reasons = []
    if not _TESTED[0] <= TRITON <= _TESTED[1]:
        reasons.append(f"Triton is one of 3.6 to 3.9, got {TRITON[0]}.{TRITON[1]}")
    elif importlib.util.find_spec("triton.experimental.gluon") is None:
        reasons.append("Triton has Gluon")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) != (9, 0):
        reasons.append("the GPU has compute capability 9.0")
    if device.type == "cpu":
        reasons.append("tensors are on a GPU")
    return tuple(reasons)


def launch_hopper(q, store, plan, launch, partials, out, scales, chain=0):
    """Launch once, with arguments as ``launch_attend`` has them, if ``hopper_can``. Returns whether that was done.

    It is not where it does not compile: one warning, and no further attempt with that kernel.
    """
    shape, tile = plan.shape, _without_spills(launch.tile, plan.shape.head_dims)
    tensors = (q, *operands(plan, launch, partials, out))
    strides = (q.stride(), launch.table_stride, out.o.stride(), out.lse.stride())
    layout = (shape, tile, launch.page_size, chain, *strides)
    units = launch.items.shape[0] * shape.num_kv_heads
    stay = tile.kernel in ("hopper", "beside")  # programs, one an SM, that take items in turn
    grid = min(units, plan.hardware.num_sms) if stay else units
    scalars = scales if tile.kernel == "narrow" else (*scales, units)
    try:
        descriptors = _descriptors(store, _box_tokens(launch.page_size, tile.block_n))
        run(_kernel(tile.kernel), grid, tensors, layout, scalars, _hopper_arguments, descriptors)
    except Exception as error:
        if is_recording():
            raise
        _give_up(tile.kernel, error)
        return False
    return True


def _without_spills(tile: AttendTile, head_dims: tuple[int, int]) -> AttendTile:
    """The tile, with steps of half as many keys where Triton 3.9 would spill 112 to 152 bytes; items do not depend on steps."""
    if TRITON >= (3, 9) and max(head_dims) <= 64 and not tile.whole:
        return replace(tile, block_n=tile.block_n // 2)
    return tile


def _give_up(kernel: str, error: Exception) -> None:
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    _failed[kernel] = f"it has not failed before ({first})"
    warnings.warn(f"cascade_fd: the Hopper kernel {kernel!r} failed, the portable one runs instead: {first}", stacklevel=2)


def _kernel(name: str) -> Any:
    if name == "narrow":
        from cascade_fd.kernels.narrow_kernel import narrow_kernel

        return narrow_kernel
    from cascade_fd.kernels.hopper_kernel import hopper_kernel

    return hopper_kernel


def _hopper_arguments(shape, tile, page_size, chain, q, table, out, lse):
    """The kernel's strides and constexprs, from strides of whole tensors."""
    ints = (*q[:2], table, *out[:2], *lse)
    own = _narrow_settings(tile) if tile.kernel == "narrow" else _wide_settings(tile)
    return ints, {
        "HKV": shape.num_kv_heads,
        "G": shape.group,
        "D": shape.head_dim,
        "DV": shape.v_head_dim,
        "PAGE_SIZE": page_size,
        "BLOCK_N": tile.block_n,
        "BOX": _box_tokens(page_size, tile.block_n),
        "STAGES": tile.num_stages,
        "CHAIN": chain,
        "num_warps": tile.num_warps,
        **own,
        **may_enter_early(chain == 2),
    }


def _narrow_settings(tile):
    return {"ROWS": tile.block_m, "maxnreg": tile.registers}


def _wide_settings(tile):
    """``maxnreg``: what a warp of each group takes on average, in steps of 8: that of the fetching warp is filled up to four.

    Triton 3.9 keeps a second copy of queries in registers, and spills 224 bytes; read from shared memory it spills nothing.
    """
    groups, fetch = tile.block_m // 64, FETCH_REGISTERS[tile.kernel]
    return {
        "GROUPS": groups,
        "Q_IN_REGISTERS": tile.kernel == "beside" and TRITON < (3, 9),
        "CONSUMER_REGS": tile.registers,
        "PRODUCER_REGS": fetch,
        "maxnreg": -(-(groups * tile.registers + fetch) // (8 * (groups + 1))) * 8,
    }


def _box_tokens(page_size: int, block_n: int) -> int:
    """Tokens of one TMA copy: a power of two that divides pages and tiles."""
    return min(page_size & -page_size, block_n) if page_size else block_n


def _store_lacks(store: KVStore) -> list[str]:
    """Why TMA cannot read a store; empty if it can."""
    found = _judged.get(store)
    if found is None:
        found = _judged[store] = [*_tma_lacks("k", store.k), *_tma_lacks("v", store.v)]
    return found


def _descriptors(store: KVStore, tokens: int) -> tuple[Any, Any]:
    """Descriptors of the keys and values of a store, with boxes of so many tokens. They live as long as the store."""
    found = _described.setdefault(store, {})
    if tokens not in found:
        found[tokens] = _describe(store.k, tokens), _describe(store.v, tokens)
    return found[tokens]


def _tma_lacks(name: str, x: torch.Tensor) -> list[str]:
    """TMA wants starts and strides at multiples of 16 bytes; the stride of an axis of one element does not matter."""
    reasons = []
    strides = [stride * x.itemsize for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True) if size > 1]
    if not all(0 < stride < _MOST_BYTES and stride % 16 == 0 for stride in strides) or x.data_ptr() % 16:
        reasons.append(f"{name} starts, and has positive strides, at multiples of 16 bytes; got strides of {strides} bytes")
    if not x.numel():
        reasons.append(f"{name} is not empty")
    return reasons


def _describe(x: torch.Tensor, tokens: int) -> Any:
    """Of ``[rows, tokens, Hkv, D]``; a box is ``tokens`` tokens of one row and head, and 64 columns, which are 128 bytes."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    strides = [stride if size > 1 else x.shape[3] for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True)]
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, tokens, 1, 64], layout)
