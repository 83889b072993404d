"""The Triton backend: NVIDIA and AMD GPUs, and the CPU inside Triton's interpreter (TRITON_INTERPRET=1, for tests)."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence

import torch

from cascade_fd.checks import UnsupportedError
from cascade_fd.kernels.attend import launch_attend
from cascade_fd.kernels.hopper import hopper_can, launch_hopper
from cascade_fd.kernels.launch import CAN_CHAIN
from cascade_fd.kernels.merge import launch_merge_pair, launch_merge_rows
from cascade_fd.kv import KVStore
from cascade_fd.planning.worklist import Launch, MergeRows, Plan
from cascade_fd.state import AttentionState, base_factor
from cascade_fd.tiles import merge_tile

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton looks when kernels are defined, and so only once
_merge_tile = functools.lru_cache(merge_tile)


def partial_states(
    q: torch.Tensor, stores: Sequence[KVStore], plan: Plan, sm_scale: float, out: AttentionState
) -> AttentionState:
    """See ``reference.partial_states``. Partials are in base 2; every slot is written by exactly one item."""
    _check_device(q, multiplies=True)
    for launch in plan.launches:
        _check_alignment(stores[launch.levels[0]], launch)
    shape, device = plan.shape, q.device
    o = torch.empty(plan.num_slots, shape.num_q_heads, shape.v_head_dim, dtype=torch.float32, device=device)
    lse = torch.empty(plan.num_slots, shape.num_q_heads, dtype=torch.float32, device=device)
    partials = AttentionState.trusted(o, lse, "2")
    scales = (sm_scale * base_factor("e", "2"), base_factor("2", out.base))
    for i, launch in enumerate(plan.launches):
        chain = min(i + 1, 2) if plan.chained and _can_chain(device) else 0
        store = stores[launch.levels[0]]
        arguments = (q, store, plan, launch, partials, out, scales, chain)
        by_hopper = launch.tile.kernel != "attend" and not hopper_can(plan, launch, store, scales[0])
        if not by_hopper or not launch_hopper(*arguments):
            launch_attend(*arguments)
    return partials


def merge_rows(partials: AttentionState, rows: MergeRows, out: AttentionState, sink: torch.Tensor | None = None) -> None:
    """See ``reference.merge_rows``."""
    _check_device(out.o)
    _, H, Dv = out.o.shape
    tile = _merge_tile(rows.max_states, Dv, len(rows) * H, H)
    launch_merge_rows(partials, rows, out, sink, tile, rows.chained and _can_chain(out.device))


def merge_pair(
    a: AttentionState,
    b: AttentionState,
    out: AttentionState,
    mask: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
) -> None:
    """See ``reference.merge_pair``."""
    _check_device(out.o)
    launch_merge_pair(a, b, out, mask, sink)


@functools.cache
def _can_chain(device: torch.device) -> bool:
    """A plan that was made for a newer GPU runs here too, one launch after the other."""
    return CAN_CHAIN and (device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0))


def _check_device(tensor: torch.Tensor, *, multiplies: bool = False) -> None:
    """The kernels need a GPU, or the interpreter, in which ``tl.dot`` multiplies bfloat16 wrongly (merges are right)."""
    if tensor.is_cuda and not _INTERPRETED:
        return
    reasons = []
    if tensor.device.type == "cpu" and not _INTERPRETED:
        reasons.append("tensors are on the CPU and TRITON_INTERPRET=1 is not set; use backend='reference'")
    if _INTERPRETED and multiplies and tensor.dtype == torch.bfloat16:
        reasons.append("Triton's interpreter multiplies bfloat16 wrongly; use float16 or float32 there")
    if reasons:
        raise UnsupportedError("backend='triton'", reasons)


def _check_alignment(store: KVStore, launch: Launch) -> None:
    """Triton 3.6.0 gives warp-group MMA too little shared memory where tiles cannot be copied asynchronously: refuse."""
    if launch.tile.block_m >= 64 and not store.aligned:
        strides = f"strides {list(store.k.stride()[:3])} and {list(store.v.stride()[:3])}"
        reason = f"keys and values start at multiples of 16 elements if {launch.tile.block_m} packed rows share a program"
        raise UnsupportedError("this KV store", [f"{reason}; got {strides}, or memory that does not start so"])
