"""FlashAttention-3 over a case's pages: one call over whole contexts, or one per level of the tree and merges.

Its pages are physically shared either way. Its states are merged by our kernels: it has none for that. What a build of it is
called with is made by a ``Make``; settings, levels and merges are the same for all builds.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from types import ModuleType
from typing import Any

import torch

from benchmarks.peers.parts import Part, forked, levels, side_streams, whole
from benchmarks.peers.provider import Provider, Run, SkipError, over
from cascade_fd import AttentionState, hardware_of, merge_
from cascade_fd.bench.workload import Workload
from cascade_fd.interop import from_flash_attention_3

NAME = "flash-attn 3"
TILE = 128  # packed query rows of one of its blocks


@dataclass(frozen=True)
class Setting:
    """How it is called.

    Attributes:
        by_level: one call per level of the tree, instead of one over whole contexts.
        num_splits: 0 lets it choose; None: ``fill`` times as many as fill the device once, for every call of its own.
        pack_gqa: None lets it choose. With pages of 16 it always packs, whatever is asked for.
        ahead: its schedule is made before, as for all layers of a model, and not timed.
        streams: each level on a stream of its own.
    """

    by_level: bool = False
    num_splits: int | None = 0
    fill: int = 1
    pack_gqa: bool | None = None
    ahead: bool = False
    streams: bool = False

    def __str__(self) -> str:
        splits = f"{self.fill} x fill" if self.num_splits is None else "auto" if self.num_splits == 0 else str(self.num_splits)
        parts = ["per level + merge" if self.by_level else "flat", f"num_splits={splits}"]
        parts += [f"pack_gqa={self.pack_gqa}"] * (self.pack_gqa is not None)
        return ", ".join(parts + ["schedule ahead"] * self.ahead + ["streams"] * self.streams)


Call = Callable[[Workload], Any]
Make = Callable[[Setting, Workload, Part, bool], Call]  # a call of a part; whether it is to give its lse, too

FLAT: tuple[Setting, ...] = (
    Setting(),
    Setting(num_splits=1),
    Setting(num_splits=None),
    Setting(num_splits=None, fill=2),
    Setting(pack_gqa=True),
    Setting(ahead=True),
)
LEVELS: tuple[Setting, ...] = (
    Setting(by_level=True),
    Setting(by_level=True, num_splits=1),
    Setting(by_level=True, num_splits=None),
    Setting(by_level=True, ahead=True),
    Setting(by_level=True, ahead=True, streams=True),
    Setting(),  # flat: reads what is shared once per request
)


def providers(load: Workload) -> list[Provider]:
    """Its settings for a case."""
    _module()
    return offers(NAME, _call, LEVELS if len(load.case.levels) > 1 else FLAT, load)


def offers(name: str, make: Make, settings: Sequence[Setting], load: Workload) -> list[Provider]:
    """``settings`` of the build of that name whose calls ``make`` makes."""
    if load.q.device.type != "cuda":
        settings = [setting for setting in settings if not setting.streams]
    return [Provider(name, str(setting), partial(prepare, make, setting)) for setting in settings]


def prepare(make: Make, setting: Setting, loads: Sequence[Workload]) -> list[Run]:
    """See ``Provider``."""
    first = loads[0]
    if not setting.by_level:
        call = make(setting, first, whole(first), False)
        return over(loads, lambda load: call(load).view_as(load.q))
    calls = [make(setting, first, part, True) for part in levels(first)]
    streams = side_streams(len(calls) - 1) if setting.streams else []

    def run(load: Workload) -> torch.Tensor:
        return _merged(forked([partial(call, load) for call in calls], streams))

    return over(loads, run)


def splits_of(setting: Setting, load: Workload, part: Part) -> int:
    """``num_splits`` of a call."""
    if setting.num_splits is not None:
        return setting.num_splits
    case = load.case
    packed = part.rows * case.num_q_heads // case.num_kv_heads
    blocks = part.nodes * case.num_kv_heads * -(-packed // TILE)
    return min(max(hardware_of(load.q.device).num_sms // blocks, 1) * setting.fill, 128)


def _module() -> ModuleType:
    try:
        return importlib.import_module("flash_attn_interface")
    except ImportError as error:
        raise SkipError(f"flash_attn_interface cannot be imported ({error})") from None


def _call(setting: Setting, load: Workload, part: Part, want_lse: bool) -> Call:
    """Its results are ``o [nodes, rows, Hq, D]``, or a tuple that begins with that and lse.

    Where a batched lse ``[nodes, Hq, rows]`` would have to be copied to be merged, the call is a packed one instead.
    """
    fa3, device, nodes = _module(), load.q.device, part.nodes
    packed = want_lse and nodes > 1 and part.rows > 1
    cu_q = torch.arange(0, (nodes + 1) * part.rows, part.rows, dtype=torch.int32, device=device) if packed else None
    lens = torch.from_numpy(part.lens).to(device, torch.int32)
    splits = splits_of(setting, load, part)
    common = {"cu_seqlens_q": cu_q, "causal": part.causal, "num_splits": splits, "pack_gqa": setting.pack_gqa}
    call = partial(
        fa3.flash_attn_with_kvcache,
        cache_seqlens=lens,
        page_table=part.table,
        max_seqlen_q=part.rows if packed else None,
        scheduler_metadata=_schedule(fa3, load, part, lens, common) if setting.ahead else None,
        return_softmax_lse=want_lse,
        **common,
    )
    return lambda load: call(load.q if packed else load.q.unflatten(0, (nodes, part.rows)), load.kv.k, load.kv.v)


def _schedule(fa3: ModuleType, load: Workload, part: Part, lens: torch.Tensor, common: dict[str, Any]) -> torch.Tensor:
    case = load.case
    longest = part.table.shape[1] * case.page_size  # what a call takes it to be, having only the table's width
    heads = (case.num_q_heads, case.num_kv_heads, case.head_dim)
    return fa3.get_scheduler_metadata(
        part.nodes, part.rows, longest, *heads, lens, qkv_dtype=load.q.dtype, page_size=case.page_size, **common
    )


def _merged(results: Sequence[Any]) -> torch.Tensor:
    """The merged output, in the memory of the last result. Two at a time: three states at once would be copied together."""
    states = [from_flash_attention_3(*result[:2]) for result in results]
    merged: AttentionState = reduce(merge_, states[:-1], states[-1])
    return merged.o
