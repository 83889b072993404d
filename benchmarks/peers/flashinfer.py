"""FlashInfer over a case's pages: its single calls, and one call per level, merged by its own kernel.

A setting is planned once for all input sets. XQA is left out: it is compiled for each group size and number of rows.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch

from benchmarks.peers.parts import Part, forked, levels, side_streams, whole
from benchmarks.peers.provider import Provider, Run, SkipError, over
from benchmarks.peers.ways import Way, chopped, composed_ways, flat_ways, pages_of
from cascade_fd.bench.workload import Workload

Pair = tuple[torch.Tensor, torch.Tensor]  # o and lse
Launch = Callable[[Workload, torch.Tensor, torch.Tensor, torch.Tensor | None], object]  # input set, q, memory of o, of lse
Level = Callable[[Workload], Pair]
NAME = "flashinfer"
SPACE = (3 << 30, 1 << 30)  # bytes of workspace: the first level or a single call, and each other level


@dataclass(frozen=True)
class Composed:
    """One call per level by ``ways``, root first, and merges; ``streams``: each level on a stream of its own."""

    ways: tuple[Way, ...]
    streams: bool = False

    def __str__(self) -> str:
        return f"per level: {' + '.join(map(str, self.ways))}" + ", streams" * self.streams


def providers(load: Workload) -> list[Provider]:
    """Its settings for a case."""
    offer = partial(Provider, f"{NAME} {_module().__version__}")
    case = load.case
    if len(case.levels) == 1:
        return [offer(str(way), partial(flat, way)) for way in flat_ways(case)]
    streams = (True, False) if load.q.device.type == "cuda" else (False,)
    made = [Composed(ways, on) for on in streams for ways in composed_ways(case, overlapping=on)]
    shipped = [offer("multi-level wrapper", partial(multi_level, None))]
    shipped.append(offer("multi-level wrapper, fa2", partial(multi_level, "fa2")))
    return shipped + [offer(str(setting), partial(composed, setting)) for setting in made]


def flat(way: Way, loads: Sequence[Workload]) -> list[Run]:
    """Whole contexts in one call. See ``Provider``."""
    launch = _launch(way, loads[0], whole(loads[0]), 0)

    def run(load: Workload) -> torch.Tensor:
        launch(load, load.q, load.out.o, None)
        return load.out.o

    return over(loads, run)


def multi_level(backend: str | None, loads: Sequence[Workload]) -> list[Run]:
    """MultiLevelCascadeAttentionWrapper as it comes, or with each level forced to a backend. See ``Provider``."""
    load, parts = loads[0], levels(loads[0])
    wrapper = _module().MultiLevelCascadeAttentionWrapper(len(parts), _workspace(0, load.q.device), "NHD")
    if backend is not None:
        for each in wrapper._batch_prefill_wrappers:
            each._backend = backend
    pages = [pages_of(part, load.case.page_size) for part in parts]
    ids = ([getattr(x, name) for x in pages] for name in ("qo_indptr", "kv_indptr", "indices", "last_page_len"))
    wrapper.plan(*ids, *_heads(load), load.case.page_size, causal=parts[-1].causal, **_dtypes(load))
    return over(loads, lambda load: wrapper.run(load.q, (load.kv.k, load.kv.v)))


def composed(setting: Composed, loads: Sequence[Workload]) -> list[Run]:
    """See ``Provider``. The merged result is in the memory of the last level's."""
    merge, parts = _module().merge_state_in_place, levels(loads[0])
    calls = [
        _level(way, loads[0], part, slot, last=part is parts[-1])
        for slot, (way, part) in enumerate(zip(setting.ways, parts, strict=True))
    ]
    streams = side_streams(len(calls) - 1) if setting.streams else []

    def run(load: Workload) -> torch.Tensor:
        *others, (o, lse) = forked([partial(call, load) for call in calls], streams)
        for other in others:
            merge(o, lse, *other)
        return o

    return over(loads, run)


def _level(way: Way, load: Workload, part: Part, slot: int, last: bool) -> Level:
    """A level's call into memory of its own, or, of the last level, into the input set's output."""
    if way.chunks > 1:
        return _by_hand(way, load, part, slot)
    launch = _launch(way, load, part, slot)
    own = None if last else _state(load, len(load.q))

    def call(load: Workload) -> Pair:
        out = own or (load.out.o, load.out.lse)
        launch(load, load.q, *out)
        return out

    return call


def _by_hand(way: Way, load: Workload, part: Part, slot: int) -> Level:
    """Keys in ``way.chunks`` chunks, each read by its own copy of the rows, in one call; then merges."""
    rows, heads, dim = load.q.shape
    merge = _module().merge_state_in_place
    copies = load.q.new_empty(way.chunks, rows, heads, dim)
    o, lse = _state(load, way.chunks * rows)
    first, *others = zip(o.split(rows), lse.split(rows), strict=True)
    launch = _launch(way, load, chopped(part, way.chunks, load.case.page_size), slot)

    def call(load: Workload) -> Pair:
        copies.copy_(load.q.expand_as(copies))
        launch(load, copies.flatten(0, 1), o, lse)
        for other in others:
            merge(*first, *other)
        return first

    return call


def _launch(way: Way, load: Workload, part: Part, slot: int) -> Launch:
    """What runs a wrapper that is planned for ``part``; it writes an lse where there is memory for it."""
    make = {"decode": _decode, "tensor-core decode": _decode, "BatchAttention": _batch_attention}.get(way.kind, _prefill)
    return make(way, load, part, _workspace(slot, load.q.device))


def _decode(way: Way, load: Workload, part: Part, space: torch.Tensor) -> Launch:
    pages, cores = pages_of(part, load.case.page_size), way.kind != "decode"
    kind = {"use_tensor_cores": True, "backend": "fa2"} if cores else {"use_tensor_cores": False}
    wrapper = _module().BatchDecodeWithPagedKVCacheWrapper(space, "NHD", **kind)
    more = {"q_len_per_req": part.rows} if part.rows > 1 else {}  # several rows are causal there
    ids = (pages.kv_indptr, pages.indices, pages.last_page_len)
    wrapper.plan(*ids, *_heads(load), load.case.page_size, **_dtypes(load), **_split(way), **more)
    return _running(wrapper)


def _prefill(way: Way, load: Workload, part: Part, space: torch.Tensor) -> Launch:
    pages = pages_of(part, load.case.page_size)
    wrapper = _module().BatchPrefillWithPagedKVCacheWrapper(space, "NHD", backend=way.kind)
    ids = (pages.qo_indptr, pages.kv_indptr, pages.indices, pages.last_page_len)
    wrapper.plan(*ids, *_heads(load), load.case.page_size, causal=part.causal, **_dtypes(load), **_split(way))
    return _running(wrapper)


def _running(wrapper: Any) -> Launch:
    return lambda load, q, o, lse: wrapper.run(q, (load.kv.k, load.kv.v), out=o, lse=lse, return_lse=lse is not None)


def _batch_attention(way: Way, load: Workload, part: Part, space: torch.Tensor) -> Launch:
    case, pages = load.case, pages_of(part, load.case.page_size)
    wrapper = _module().BatchAttention("NHD", load.q.device)  # with workspaces of its own
    ids = (pages.qo_indptr, pages.kv_indptr, pages.indices, pages.lens)
    wrapper.plan(*ids, *_heads(load), case.head_dim, case.page_size, causal=part.causal, **_dtypes(load))
    return lambda load, q, o, lse: wrapper.run(q, (load.kv.k, load.kv.v), out=o, lse=lse)


def _heads(load: Workload) -> tuple[int, int, int]:
    return load.case.num_q_heads, load.case.num_kv_heads, load.case.head_dim


def _dtypes(load: Workload) -> dict[str, torch.dtype]:
    return {"q_data_type": load.q.dtype, "kv_data_type": load.kv.k.dtype}


def _split(way: Way) -> dict[str, int]:
    return {} if way.split is None else {"fixed_split_size": way.split}


def _state(load: Workload, rows: int) -> Pair:
    """Memory for a state, NaN until it is written."""
    o = load.q.new_full((rows, *load.q.shape[1:]), torch.nan)
    return o, torch.full(o.shape[:2], torch.nan, device=o.device)


@functools.cache
def _workspace(slot: int, device: torch.device) -> torch.Tensor:
    """For all settings of a process, which run one after the other; levels that may run at once have different slots."""
    size = SPACE[min(slot, 1)] if device.type == "cuda" else 1 << 10
    return torch.zeros(size, dtype=torch.uint8, device=device)


def _module() -> ModuleType:
    try:
        return importlib.import_module("flashinfer")
    except Exception as error:  # with a torch that has no CUDA it raises AssertionError
        raise SkipError(f"flashinfer cannot be imported ({type(error).__name__}: {error})") from None
