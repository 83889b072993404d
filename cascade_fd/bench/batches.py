"""Batches that share prefixes, as data, and times of their plans that can be compared: the plans of a batch take turns.

Every call of a CUDA graph reads other pages of one pool, so that the L2 is as cold as between two layers of a model.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from cascade_fd.bench.measure import MAX_ERROR, capture_stream, captured, gpu_us, wall_us
from cascade_fd.hardware import Hardware
from cascade_fd.kv import PagedKV, PageTable
from cascade_fd.levels import Level
from cascade_fd.ops.attend import attend
from cascade_fd.planning.planner import plan
from cascade_fd.planning.worklist import Plan
from cascade_fd.state import AttentionState
from cascade_fd.tree import PrefixTree

COLD_BYTES = 130e6  # what the calls of a graph read together: more than twice an H200's L2
CALLS = (6, 400)  # of a graph: enough to hide its own start, and not too long to capture
REPLAYS, FEWEST = 11, 4  # of a graph, after one that warms up; once it has taken ENOUGH, the fewest
ENOUGH = 240e3  # microseconds


@dataclass(frozen=True)
class Batch:
    """Groups of requests: each group shares a prefix, each request has a suffix of its own. bf16, pages in random order.

    Attributes:
        groups: requests of each group; a group of one shares nothing.
        prefix, suffix: tokens; whole pages of prefix, so that they are shared in memory.
        q_len: query rows per request.
    """

    groups: tuple[int, ...]
    prefix: int
    suffix: int
    q_len: int = 1
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16

    def __post_init__(self) -> None:
        if self.prefix % self.page_size:
            raise ValueError(f"prefix: expected a multiple of page_size={self.page_size}, got {self.prefix}")

    def __str__(self) -> str:
        sizes = sorted(set(self.groups))
        more = f", {self.q_len} rows each" if self.q_len > 1 else ""
        return f"{self.requests} requests in groups of {', '.join(map(str, sizes))}, {self.prefix} + {self.suffix} tokens{more}"

    @property
    def requests(self) -> int:
        return sum(self.groups)

    @property
    def packed(self) -> int:
        """Packed query rows that read the largest group's prefix."""
        return max(self.groups) * self.q_len * self.num_q_heads // self.num_kv_heads

    @property
    def pages(self) -> int:
        """Pages of the batch, each counted once."""
        return (len(self.groups) * self.prefix) // self.page_size + self.requests * -(-self.suffix // self.page_size)

    @property
    def page_elements(self) -> int:
        """Elements of a page's keys; its values are as many."""
        return self.page_size * self.num_kv_heads * self.head_dim

    @property
    def flat_tokens(self) -> int:
        """Tokens that requests read if they share nothing."""
        return self.requests * (self.prefix + self.suffix)


def tree_of(batch: Batch, device: torch.device) -> PrefixTree:
    """The batch's tree over a block table ``[requests, pages]`` on ``device``; the same one every time."""
    groups, ids = len(batch.groups), torch.randperm(batch.pages, generator=torch.Generator().manual_seed(0))
    shared = groups * batch.prefix // batch.page_size
    group = torch.repeat_interleave(torch.arange(groups), torch.tensor(batch.groups))
    pages = [ids[:shared].view(groups, -1)[group], ids[shared:].view(batch.requests, -1)]
    table = PageTable.from_block_table(torch.cat(pages, 1).to(device, torch.int32), batch.page_size)
    levels = [Level(range(batch.requests + 1), [batch.suffix] * batch.requests)]
    if batch.prefix:
        levels.insert(0, Level(np.cumsum([0, *batch.groups]), [batch.prefix] * groups))
    return PrefixTree.from_levels(levels, q_lens=batch.q_len, table=table)


def plan_of(
    batch: Batch, tree: PrefixTree, hw: Hardware, share: str = "auto", sizes: Sequence[int] = (), kernel: str = ""
) -> Plan:
    """A plan of the batch's ``tree``.

    ``sizes``: share with tiles of no other rows than these; the smallest is among them. ``kernel``: names of kernels to use
    where they can be, beside the portable one.
    """
    table = tree.tables[0]
    assert table is not None
    if kernel:
        hw = replace(hw, costs=hw.costs.only(*kernel.split()))
    return plan(
        tree,
        num_q_heads=batch.num_q_heads,
        num_kv_heads=batch.num_kv_heads,
        head_dim=batch.head_dim,
        device=table.ids.device,
        share=share,
        hardware=_at_other_prices(hw, sizes) if sizes else hw,
    )


def _at_other_prices(hw: Hardware, sizes: Sequence[int]) -> Hardware:
    """A device on which tiles of other rows cost too much, while further launches and partial states cost nothing.

    There share="auto" shares wherever that means less to read, and with the tiles one wants. How finely nodes are cut does not
    depend on these prices.
    """
    tiles = tuple(t if t.rows in sizes else replace(t, start=1e9) for t in hw.costs.tiles)
    return replace(hw, costs=replace(hw.costs, launch=0.0, follow=0.0, merge=0.0, state=0.0, tiles=tiles))


class Pool:
    """Random keys and values that all batches read, each its own views of them."""

    def __init__(self, device: torch.device, size: float):
        """``size``: bytes of keys and values together."""
        self.device = device
        g = torch.Generator(device=device).manual_seed(0)
        elements = int(size) // 4
        self.k, self.v = (torch.randn(elements, generator=g, device=device, dtype=torch.bfloat16) for _ in range(2))

    @classmethod
    def of(cls, device: torch.device, size: float) -> Pool:
        """As large as wanted, or half of what memory is free."""
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 64e6
        return cls(device, min(size, free / 2))

    def holds(self, batch: Batch) -> bool:
        return batch.pages * batch.page_elements <= len(self.k)

    def views(self, batch: Batch) -> list[PagedKV]:
        """Keys and values for each call of a graph, so that together they exceed the L2. One for a CPU."""
        need, size = batch.pages, batch.page_elements
        count = min(max(int(COLD_BYTES // (need * size * 4)) + 1, CALLS[0]), CALLS[1]) if self.device.type == "cuda" else 1
        room = len(self.k) // size - need
        starts = [int(room * i / max(count - 1, 1)) * size for i in range(count)]
        shape = (need, batch.page_size, batch.num_kv_heads, batch.head_dim)
        views = [[x[start : start + need * size].view(shape) for x in (self.k, self.v)] for start in starts]
        return [PagedKV(k, v) for k, v in views]


def times_us(pool: Pool, batch: Batch, plans: Sequence[Plan]) -> list[float]:
    """Median microseconds of a call of each plan. Plans are replayed in turn, so that drifting clocks are fair to all.

    Raises RuntimeError instead of timing if their results differ.
    """
    views, gpu = pool.views(batch), pool.device.type == "cuda"
    calls = [_calls(batch, each, views) for each in plans]
    _check(batch, [some[0]() for some in calls])
    replays = [_warmed_graph(some) if gpu else some[0] for some in calls]
    times: list[list[float]] = [[] for _ in plans]
    for i in range(REPLAYS + 1):
        for replay, mine in zip(replays, times, strict=True):
            mine.append((gpu_us(replay) if gpu else wall_us([replay])) / len(views))
        if i >= FEWEST and sum(map(sum, times)) * len(views) > ENOUGH * len(plans):
            break
    return [statistics.median(mine[1:]) for mine in times]


def _calls(batch: Batch, of: Plan, views: Sequence[PagedKV]) -> list[Callable[[], AttentionState]]:
    """One call per view, all with the same queries and into the same output, which is NaN until it is written."""
    device = views[0].k.device
    g = torch.Generator(device=device).manual_seed(1)
    shape = (batch.requests * batch.q_len, batch.num_q_heads, batch.head_dim)
    q = torch.randn(shape, generator=g, device=device, dtype=torch.bfloat16)
    out = AttentionState(torch.full_like(q, torch.nan), torch.empty(shape[:2], device=device), "e")
    return [partial(attend, q, kv, of, out=out.o, lse_out=out.lse) for kv in views]


def _check(batch: Batch, states: Sequence[AttentionState]) -> None:
    want = states[0].o.float()
    for state in states:
        error = float((state.o.float() - want).norm() / want.norm())
        if not error < MAX_ERROR:
            raise RuntimeError(f"{batch}: two plans differ by a relative error of {error:.2e}; not timed")


def _warmed_graph(calls: Sequence[Callable[[], object]]) -> Callable[[], None]:
    with torch.cuda.stream(capture_stream()):
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    return captured(calls)
