"""Merging states: two, many, in place, and ragged sets. Bases may differ; they are declared, so they are converted."""

from __future__ import annotations

from typing import Any, Unpack

import torch

from cascade_fd.backends import get_backend
from cascade_fd.checks import check_dtype, check_int, check_last_axis, check_same, check_shape
from cascade_fd.kv import check_indptr
from cascade_fd.ops.options import Output, destination, known_options
from cascade_fd.planning.worklist import MergeRows
from cascade_fd.state import AttentionState, check_state


def merge(*states: AttentionState, sink: torch.Tensor | None = None, **output: Unpack[Output]) -> AttentionState:
    """The state over the union of disjoint key sets: exact, associative, commutative; empty states change nothing.

    Args:
        states: one or more of ``[T, Hq, Dv]``, of any bases, one dtype and device.
        sink: ``[Hq]`` logits (natural log, as the model has them) of an attention sink, which takes probability but has no
            value. Merge it once, in the last merge.
        output: ``out`` (may be of another float dtype), ``lse_out``, ``base``, ``backend``; see ``Output``.

    The algebra is FlashInfer's (Ye et al. 2025) and, inside one kernel, the online softmax's (Milakov & Gimelshein 2018).

    Example:
        >>> a = AttentionState(torch.ones(1, 1, 4), torch.zeros(1, 1), base="e")
        >>> b = AttentionState(torch.zeros(1, 1, 4), torch.zeros(1, 1), base="2")
        >>> merge(a, b).o.flatten().tolist()
        [0.5, 0.5, 0.5, 0.5]
    """
    options = known_options("merge", output, Output)
    if not states:
        raise TypeError("states: expected at least one AttentionState, got none")
    first = check_state("states[0]", states[0])
    for i, other in enumerate(states[1:], 1):
        _check_match(f"states[{i}]", check_state(f"states[{i}]", other), first)
    _check_sink(sink, first)
    out = destination((first.num_rows, first.num_heads, first.head_dim), first.o, options)
    if first.o.numel() == 0:
        return out
    backend = get_backend(options.get("backend"), first.device)
    if len(states) == 2:
        backend.merge_pair(first, states[1], out, sink=sink)
    else:
        stacked = AttentionState.stack(states) if len(states) > 1 else first
        indptr = torch.arange(0, len(stacked) + 1, len(states), dtype=torch.int32, device=first.device)
        backend.merge_rows(stacked, MergeRows(indptr, None, len(states)), out, sink=sink)
    return out


def merge_(
    state: AttentionState, other: AttentionState, *, mask: torch.Tensor | None = None, backend: str | None = None
) -> AttentionState:
    """Merge ``other`` into ``state`` in place and return ``state``; its base stays.

    ``mask``: ``[T]`` bool; rows where it is False stay as they are.
    """
    check_state("state", state)
    _check_match("other", check_state("other", other), state)
    if mask is not None:
        check_shape("mask", mask, "T", T=state.num_rows)
        check_last_axis("mask", mask)
        check_dtype("mask", mask, (torch.bool,))
        check_same("device", state=state.o, mask=mask)
    if state.o.numel():
        get_backend(backend, state.device).merge_pair(state, other, state, mask=mask)
    return state


def merge_ragged(
    states: AttentionState,
    indptr: Any,
    *,
    max_states: int = 32,
    sink: torch.Tensor | None = None,
    **output: Unpack[Output],
) -> AttentionState:
    """Merge a ragged set: row i of the result merges states ``indptr[i] .. indptr[i + 1] - 1``, in that order.

    Args:
        states: ``[N, Hq, Dv]``: all states of all rows, row by row (``AttentionState.stack`` makes this order).
        indptr: ``[T + 1]`` offsets. On the host they are checked; on the GPU they are trusted.
        max_states: a hint, most states of a row; only sizes the kernel's tile.
        sink, output: as for ``merge``.

    A row without states becomes the empty state.
    """
    options = known_options("merge_ragged", output, Output)
    check_state("states", states)
    _check_sink(sink, states)
    check_int("max_states", max_states, 1)
    if isinstance(indptr, torch.Tensor) and indptr.device.type != "cpu":
        check_shape("indptr", indptr, "T+1")
        check_dtype("indptr", indptr, (torch.int32, torch.int64))
        check_same("device", states=states.o, indptr=indptr)
        offsets = indptr.contiguous()
    else:
        offsets = torch.from_numpy(check_indptr("indptr", indptr, total=states.num_rows)).to(states.device)
    T = len(offsets) - 1
    out = destination((T, states.num_heads, states.head_dim), states.o, options)
    if out.o.numel():
        backend = get_backend(options.get("backend"), states.device)
        backend.merge_rows(states, MergeRows(offsets, None, max_states), out, sink=sink)
    return out


def _check_match(name: str, state: AttentionState, first: AttentionState) -> None:
    T, Hq, Dv = first.o.shape
    check_shape(f"{name}.o", state.o, "T Hq Dv", T=T, Hq=Hq, Dv=Dv)
    check_same("dtype", **{"states[0].o": first.o, f"{name}.o": state.o})
    check_same("device", **{"states[0].o": first.o, f"{name}.o": state.o})


def _check_sink(sink: torch.Tensor | None, state: AttentionState) -> None:
    if sink is not None:
        check_shape("sink", sink, "Hq", Hq=state.num_heads)
        check_last_axis("sink", sink)
        check_dtype("sink", sink, (torch.float32, torch.float16, torch.bfloat16))
        check_same("device", states=state.o, sink=sink)
