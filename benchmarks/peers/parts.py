"""A case as calls of other libraries: one over whole contexts, or one per level of the tree. Pages stay where they are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cascade_fd.bench.workload import Workload


@dataclass(frozen=True)
class Part:
    """One call: ``nodes`` sequences, ``rows`` query rows each, over keys of their own.

    Attributes:
        table: ``[nodes, pages]`` int32.
        lens: ``[nodes]`` keys, on the host.
        rows: query rows of each node; together they are the batch's rows in order.
        causal: aligned to the end of the keys.
    """

    table: torch.Tensor
    lens: np.ndarray
    rows: int
    causal: bool

    @property
    def nodes(self) -> int:
        return len(self.lens)


def whole(load: Workload) -> Part:
    """Every request over its whole context."""
    case = load.case
    return Part(load.table, case.seq_lens, case.q_len, case.q_len > 1)


def levels(load: Workload) -> list[Part]:
    """Each level's nodes, root first: the rows of all its requests over a node's own keys. Only private keys are causal."""
    case, parts, column = load.case, [], 0
    for lens in case.node_lens:
        requests = case.requests // len(lens)
        end = column + -(-int(lens.max()) // case.page_size)
        table = load.table[::requests, column:end].contiguous()
        parts.append(Part(table, lens, requests * case.q_len, requests == 1 and case.q_len > 1))
        column = end
    return parts


def forked(calls: Sequence[Callable[[], Any]], streams: Sequence[torch.cuda.Stream]) -> list[Any]:
    """Results of all calls; each of the first ``len(streams)`` is made on a stream of its own."""
    if not streams:
        return [call() for call in calls]
    main, results = torch.cuda.current_stream(), []
    for stream, call in zip(streams, calls, strict=False):
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            results.append(call())
    results += [call() for call in calls[len(streams) :]]
    for stream in streams:
        main.wait_stream(stream)
    return results


def side_streams(number: int) -> list[torch.cuda.Stream]:
    return [side_stream(i) for i in range(number)]


@functools.cache
def side_stream(i: int) -> torch.cuda.Stream:
    """The same for all settings: torch's streams are a few that come round again, and one of them captures."""
    return torch.cuda.Stream()
