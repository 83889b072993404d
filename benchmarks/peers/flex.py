"""flex_attention of torch over contiguous keys: it has no page tables, so a case's keys are gathered first, shared ones once.

Requests of one length that share nothing are a batch. All else is one sequence of keys, node by node, and a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from benchmarks.peers.parts import levels
from benchmarks.peers.provider import Provider, Run
from cascade_fd.bench.cases import Case
from cascade_fd.bench.workload import Workload

NAME = "torch flex"


def providers(load: Workload) -> list[Provider]:
    """One for every case."""
    case = load.case
    if len(case.levels) == 1 and case.lens is None:
        return [Provider(NAME, "contiguous KV, a batch", batched)]
    return [Provider(NAME, "contiguous KV, one sequence and a block mask", packed)]


def batched(loads: Sequence[Workload]) -> list[Run]:
    """See ``Provider``."""
    load, case = loads[0], loads[0].case
    T, first = int(case.seq_lens[0]), int(case.seq_lens[0]) - case.q_len
    mask = None
    if case.q_len > 1:
        mask = create_block_mask(lambda b, h, i, t: t <= first + i, None, None, case.q_len, T, device=load.q.device)
    attention = partial(_attention(load.q.device), block_mask=mask, enable_gqa=True)
    keys = [
        [x[load.table.long()].flatten(1, 2)[:, :T].transpose(1, 2).contiguous() for x in (load.kv.k, load.kv.v)]
        for load in loads
    ]
    shape = (case.requests, case.q_len)
    runs = [partial(attention, load.q.unflatten(0, shape).transpose(1, 2), *kv) for load, kv in zip(loads, keys, strict=True)]
    return [lambda run=run: run().transpose(1, 2).flatten(0, 1) for run in runs]


def packed(loads: Sequence[Workload]) -> list[Run]:
    """See ``Provider``."""
    load, slots = loads[0], _slots(loads[0])
    attention = partial(_attention(load.q.device), block_mask=block_mask(load.case, load.q.device), enable_gqa=True)
    keys = [[x.flatten(0, 1)[slots].transpose(0, 1)[None].contiguous() for x in (load.kv.k, load.kv.v)] for load in loads]
    runs = [partial(attention, load.q.transpose(0, 1)[None], *kv) for load, kv in zip(loads, keys, strict=True)]
    return [lambda run=run: run()[0].transpose(0, 1) for run in runs]


def _slots(load: Workload) -> torch.Tensor:
    """Places in the cache of every node's keys, level by level."""
    page, found = load.case.page_size, []
    for part in levels(load):
        slots = (part.table.long()[:, :, None] * page + torch.arange(page, device=part.table.device)).flatten(1)
        found += [row[:n] for row, n in zip(slots, part.lens.tolist(), strict=True)]
    return torch.cat(found)


def block_mask(case: Case, device: torch.device) -> BlockMask:
    """Which rows read which keys of one sequence, level by level: those of a key's node, private ones causally."""
    first, last, reach = (torch.from_numpy(x).to(device) for x in _readers(case))
    q_len = case.q_len

    def mask(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return (i // q_len >= first[t]) & (i // q_len < last[t]) & (i % q_len >= reach[t])

    return create_block_mask(mask, None, None, case.rows, len(first), device=device)


def _readers(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of every key: its first request, the first that is not its, and of a request the first row that sees it."""
    first, last, reach = [], [], []
    for lens in case.node_lens:
        each, nodes = case.requests // len(lens), np.arange(len(lens))
        first.append(np.repeat(nodes * each, lens))
        last.append(np.repeat((nodes + 1) * each, lens))
        own = len(lens) == case.requests
        reach += [np.arange(n) - (n - case.q_len) if own else np.zeros(n, np.int64) for n in lens.tolist()]
    return np.concatenate(first), np.concatenate(last), np.concatenate(reach)


def _attention(device: torch.device) -> Callable[..., torch.Tensor]:
    """Compiled for a GPU, and for each case anew: after a few shapes torch would stop compiling."""
    if device.type != "cuda":
        return flex_attention
    torch._dynamo.reset()
    return torch.compile(flex_attention, dynamic=False)
