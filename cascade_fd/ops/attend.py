"""The operation that everything else is made of: attention of a batch over a plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Unpack

import torch

from cascade_fd.backends import get_backend
from cascade_fd.checks import check_dtype, check_last_axis, check_no_grad, check_same, check_shape, is_plain
from cascade_fd.kv import KVStore
from cascade_fd.ops.options import Output, destination, known_options
from cascade_fd.planning.worklist import Launch, Plan
from cascade_fd.state import AttentionState


def attend(q: torch.Tensor, kv: KVStore | Sequence[KVStore], plan: Plan, **output: Unpack[Output]) -> AttentionState:
    """Attention of every query row over all the ranges its plan gives it.

    Args:
        q: ``[T, Hq, D]``, rows in the tree's request order; any strides but the last.
        kv: one store for all levels, or one per level of the tree.
        plan: from ``plan``; reused for every layer and, up to its capacity, every step.
        output: see ``Output``.

    Raises:
        ValueError, TypeError: q, stores and plan do not fit each other; nothing is written then.
    """
    options = known_options("attend", output, Output)
    stores = _stores(kv, plan)
    shape, T = plan.shape, plan.num_rows
    _check_query(q, T, stores, plan)
    state = destination((T, shape.num_q_heads, shape.v_head_dim), q, options, (shape.dtype,))
    if state.o is q:
        raise ValueError("out: expected memory of its own, got q itself")
    scale = _scale(options.get("sm_scale"), plan)
    if T:
        backend = get_backend(options.get("backend"), q.device)
        partials = backend.partial_states(q, stores, plan, scale, state)
        if len(plan.merge):
            backend.merge_rows(partials, plan.merge, state)
    return state


def _scale(sm_scale: Any, plan: Plan) -> float:
    if sm_scale is None:
        return 1 / math.sqrt(plan.shape.head_dim)
    if not isinstance(sm_scale, (int, float)) or not math.isfinite(sm_scale):
        raise ValueError(f"sm_scale: expected a finite number, got {sm_scale!r}")
    return float(sm_scale)


def _stores(kv: Any, plan: Plan) -> list[KVStore]:
    if not isinstance(plan, Plan):
        raise TypeError(f"plan: expected a Plan, got {type(plan).__name__}")
    levels = len(plan.tree.tables)
    stores = list(kv) if isinstance(kv, (list, tuple)) else [kv] * levels
    for store in stores:
        if not isinstance(store, KVStore):
            raise TypeError(f"kv: expected a PagedKV or DenseKV, or one per level, got {type(store).__name__}")
    if len(stores) != levels:
        raise ValueError(f"kv: expected one store, or one per level ({levels}), got {len(stores)}")
    for launch in plan.launches:
        store = stores[launch.levels[0]]
        if len(launch.levels) > 1 and any(stores[level] is not store for level in launch.levels):
            raise ValueError(f"kv: expected one store for levels {list(launch.levels)}, which share a page table, got several")
        _check_store(store, launch)
    return stores


def _check_store(store: KVStore, launch: Launch) -> None:
    """Everything an item may address must exist; page ids are checked where they are on the host."""
    if store.page_size != launch.page_size:
        want = f"pages of {launch.page_size}" if launch.page_size else "a dense store"
        got = f"pages of {store.page_size}" if store.page_size else "a dense store"
        raise ValueError(f"kv: expected {want} at level {launch.levels[0]}, got {got}")
    if launch.ids is None:
        if launch.max_row >= store.num_rows or launch.max_stop > store.k.shape[1]:
            raise ValueError(
                f"kv: expected at least {launch.max_row + 1} rows of {launch.max_stop} tokens at level {launch.levels[0]}, "
                f"got {store.num_rows} of {store.k.shape[1]}"
            )
    elif launch.id_range and not (launch.id_range[0] >= 0 and launch.id_range[1] < store.num_rows):
        raise ValueError(
            f"block_table: expected page ids in [0, {store.num_rows}), got {launch.id_range[0]}..{launch.id_range[1]}"
        )


def _check_query(q: torch.Tensor, T: int, stores: list[KVStore], plan: Plan) -> None:
    shape = plan.shape
    plain = is_plain(q, (T, shape.num_q_heads, shape.head_dim), shape.dtype, plan.rows.device)
    if not plain:
        check_shape("q", q, "T Hq D", T=T, Hq=shape.num_q_heads, D=shape.head_dim)
        check_last_axis("q", q)
    previous = None
    for store in stores:
        if store is not previous:
            _check_match(q, store, plan)
        previous = store
    if plain:
        return
    check_dtype("q", q, (shape.dtype,))
    if q.device.type != plan.device.type:
        raise ValueError(f"plan: expected a plan for {q.device}, got one for {plan.device}")


def _check_match(q: torch.Tensor, store: KVStore, plan: Plan) -> None:
    shape, k, v = plan.shape, store.k, store.v
    check_no_grad(k=k, v=v)
    if q.dtype != k.dtype or q.device != k.device:
        check_same("dtype", q=q, k=k)
        check_same("device", q=q, k=k)
    if k.shape[2:] != (shape.num_kv_heads, shape.head_dim) or v.shape[3] != shape.v_head_dim:
        raise ValueError(
            f"kv: expected Hkv={shape.num_kv_heads} and (D, Dv)={shape.head_dims}, "
            f"got Hkv={store.num_kv_heads} and {store.head_dims}"
        )
