"""A case made real: random pages in random order, a plan, one callable, and a check against float32 torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

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
    """One input set of a case."""

    case: Case
    q: torch.Tensor
    kv: PagedKV
    tables: tuple[torch.Tensor, ...]  # per level [nodes, pages]
    plan: Plan
    out: AttentionState

    def run(self) -> AttentionState:
        return attend(self.q, self.kv, self.plan, out=self.out.o, lse_out=self.out.lse)

    def error(self) -> float:
        """Relative error (norm) of the first, the middle and the last request; poisons the output first."""
        self.out.o.fill_(torch.nan)
        self.out.lse.fill_(torch.nan)
        self.run()
        if self.out.o.isnan().any() or self.out.lse.isnan().any():
            return math.inf
        worst = 0.0
        for b in {0, self.case.requests // 2, self.case.requests - 1}:
            rows = slice(b * self.case.q_len, (b + 1) * self.case.q_len)
            want = self._expected(b, rows)
            worst = max(worst, float((self.out.o[rows].float() - want).norm() / want.norm()))
        return worst

    def _expected(self, b: int, rows: slice) -> torch.Tensor:
        case = self.case
        pages = [t[b * len(t) // case.requests].long() for t in self.tables]
        k, v = (x[torch.cat(pages)].flatten(0, 1).float() for x in (self.kv.k, self.kv.v))
        q = self.q[rows].float().unflatten(1, (case.num_kv_heads, -1))
        scores = torch.einsum("qhgd,thd->hgqt", q, k) / math.sqrt(case.head_dim)
        limit = len(k) - case.q_len + 1 + torch.arange(case.q_len, device=k.device)
        scores.masked_fill_(torch.arange(len(k), device=k.device) >= limit[:, None], -math.inf)
        return torch.einsum("hgqt,thd->qhgd", scores.softmax(-1), v).flatten(1, 2)


def build(case: Case, device: torch.device, dtype: torch.dtype, split: str | int = "wave", seed: int = 0) -> Workload:
    """Random inputs of ``case`` on ``device``; another ``seed`` is another input set."""
    g = torch.Generator(device=device).manual_seed(seed)
    counts = [nodes * -(-tokens // case.page_size) for nodes, tokens in case.levels]
    order = torch.randperm(sum(counts), generator=g, device=device).to(torch.int32)
    tables = tuple(ids.view(nodes, -1) for ids, (nodes, _) in zip(order.split(counts), case.levels, strict=True))
    shape = (sum(counts), case.page_size, case.num_kv_heads, case.head_dim)
    k, v = (torch.randn(shape, generator=g, device=device, dtype=dtype) for _ in range(2))
    q = torch.randn(case.rows, case.num_q_heads, case.head_dim, generator=g, device=device, dtype=dtype)
    made = plan(
        _tree(case, tables),
        num_q_heads=case.num_q_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        dtype=dtype,
        device=device,
        split=split,
    )
    out = AttentionState(torch.empty_like(q), torch.empty(q.shape[:2], device=device), "e")
    return Workload(case, q, PagedKV(k, v), tables, made, out)


def _tree(case: Case, tables: tuple[torch.Tensor, ...]) -> PrefixTree:
    levels = []
    for (nodes, tokens), table in zip(case.levels, tables, strict=True):
        indptr = np.arange(nodes + 1) * case.requests // nodes
        levels.append(Level(indptr, np.full(nodes, tokens), PageTable.from_block_table(table, case.page_size)))
    return PrefixTree.from_levels(levels, q_lens=case.q_len)
