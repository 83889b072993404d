"""A case made real: random pages in random order, a plan, one callable, and a check against float32 torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from cascade_fd.bench.cases import Case
from cascade_fd.kv import PagedKV, PageTable
from cascade_fd.levels import Level
from cascade_fd.ops.attend import attend
from cascade_fd.planning.planner import plan
from cascade_fd.planning.worklist import Plan
from cascade_fd.state import AttentionState
from cascade_fd.tree import PrefixTree


@dataclass(frozen=True)
class Workload:
    """One input set of a case. All sets of a case have the same ``table`` and ``plan``."""

    case: Case
    q: torch.Tensor
    kv: PagedKV
    table: torch.Tensor  # [requests, pages], rows of shorter requests padded with page 0
    plan: Plan
    out: AttentionState

    def run(self) -> AttentionState:
        return attend(self.q, self.kv, self.plan, out=self.out.o, lse_out=self.out.lse)

    def error(self) -> float:
        """Relative error (norm) of the first, the middle and the last request; poisons the output first."""
        self.out.o.fill_(torch.nan)
        self.out.lse.fill_(torch.nan)
        self.run()
        return math.inf if self.out.lse.isnan().any() else self.error_of(self.out.o)

    def error_of(self, o: torch.Tensor) -> float:
        """The same of any result ``o [rows, Hq, D]`` over these inputs; infinite if there is a NaN anywhere."""
        if o.isnan().any():
            return math.inf
        wants = ((o[rows].float(), want) for rows, want in self.expected)
        return max(float((got - want).norm() / want.norm()) for got, want in wants)

    @cached_property
    def expected(self) -> list[tuple[slice, torch.Tensor]]:
        """Rows of three requests and their results in float32."""
        case, n = self.case, self.case.q_len
        return [(slice(b * n, b * n + n), self._attend(b)) for b in sorted({0, case.requests // 2, case.requests - 1})]

    def _attend(self, b: int) -> torch.Tensor:
        case = self.case
        length = int(case.seq_lens[b])
        pages = self.table[b, : -(-length // case.page_size)].long()
        k, v = (x[pages].flatten(0, 1)[:length].float() for x in (self.kv.k, self.kv.v))
        q = self.q[b * case.q_len : (b + 1) * case.q_len].float().unflatten(1, (case.num_kv_heads, -1))
        scores = torch.einsum("qhgd,thd->hgqt", q, k) / math.sqrt(case.head_dim)
        limit = len(k) - case.q_len + 1 + torch.arange(case.q_len, device=k.device)
        scores.masked_fill_(torch.arange(len(k), device=k.device) >= limit[:, None], -math.inf)
        return torch.einsum("hgqt,thd->qhgd", scores.softmax(-1), v).flatten(1, 2)


def build(case: Case, device: torch.device, dtype: torch.dtype, split: str | int = "balanced") -> Workload:
    """Random inputs of ``case`` on ``device``."""
    return build_sets(case, device, dtype, 1, split)[0]


def build_sets(
    case: Case, device: torch.device, dtype: torch.dtype, sets: int, split: str | int = "balanced"
) -> list[Workload]:
    """Several input sets, as the layers of a model: q, keys, values and output of their own, but one page table and one plan.

    So page ids and plan arrays are as warm or cold as in a model, where the layer before has just read them.
    """
    g = torch.Generator(device=device).manual_seed(0)
    table, pages = _table(case, g)
    made = plan(
        tree_of(case, table),
        num_q_heads=case.num_q_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        dtype=dtype,
        device=device,
        split=split,
    )
    shape = (pages, case.page_size, case.num_kv_heads, case.head_dim)
    loads = []
    for _ in range(sets):
        k, v = (torch.randn(shape, generator=g, device=device, dtype=dtype) for _ in range(2))
        q = torch.randn(case.rows, case.num_q_heads, case.head_dim, generator=g, device=device, dtype=dtype)
        out = AttentionState(torch.empty_like(q), torch.empty(q.shape[:2], device=device), "e")
        loads.append(Workload(case, q, PagedKV(k, v), table, made, out))
    return loads


def _table(case: Case, g: torch.Generator) -> tuple[torch.Tensor, int]:
    """The block table, pages in random order, and how many pages there are."""
    counts = [-(-lens // case.page_size) for lens in case.node_lens]
    sizes = [int(count.sum()) for count in counts]
    order = torch.randperm(sum(sizes), generator=g, device=g.device).to(torch.int32)
    pages = [_rows(ids, count) for ids, count in zip(order.split(sizes), counts, strict=True)]
    return torch.cat([ids.repeat_interleave(case.requests // len(ids), 0) for ids in pages], 1), sum(sizes)


def _rows(ids: torch.Tensor, counts: np.ndarray) -> torch.Tensor:
    """``[nodes, most]`` page ids, ``counts[i]`` of them in row i, padded with 0."""
    used = torch.arange(int(counts.max())) < torch.from_numpy(counts)[:, None]
    rows = ids.new_zeros(used.shape)
    rows[used.to(ids.device)] = ids
    return rows


def tree_of(case: Case, table: torch.Tensor) -> PrefixTree:
    """The case's tree over a block table ``[requests, pages]``."""
    levels = [Level(np.arange(len(lens) + 1) * (case.requests // len(lens)), lens) for lens in case.node_lens]
    return PrefixTree.from_levels(levels, q_lens=case.q_len, table=PageTable.from_block_table(table, case.page_size))
