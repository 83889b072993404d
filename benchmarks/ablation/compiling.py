"""Compile what a run needs in several processes: Triton's cache on the disk hands it to the run, which compiles one by one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

from benchmarks.ablation.strategies import ALL, Strategy, strategies
from benchmarks.peers.race import Say, reason
from cascade_fd.bench.cases import Case
from cascade_fd.bench.workload import Workload, tree_of
from cascade_fd.hardware import Hardware
from cascade_fd.kernels.aot import target
from cascade_fd.kv import PagedKV
from cascade_fd.planning.planner import plan
from cascade_fd.state import AttentionState


def compile_all(wanted: Mapping[Case, Sequence[Strategy]], hw: Hardware, say: Say) -> None:
    """Compile the kernels of ``wanted``. What fails here is left to the run."""
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1), get_context("spawn")) as pool:
        tasks = {}
        for case, some in wanted.items():
            for family in dict.fromkeys(strategy.family for strategy in some):
                tasks[case.name, family] = pool.submit(compile_family, case.name, family, hw)
        for (name, family), task in tasks.items():
            try:
                task.result()
            except Exception as fault:
                say(f"{name}, {family}: not compiled ahead: {reason(fault)}")


def compile_family(name: str, family: str, hw: Hardware) -> list[str]:
    """Compile the strategies of one family on a case; names of the kernels."""
    load = unreal(ALL[name], hw)
    with target(hw) as compiled:
        for strategy in strategies(load.case):
            if strategy.family == family:
                strategy.prepare([load], "triton")[0]()
    return [kernel.metadata.name for kernel in compiled]


def unreal(case: Case, hw: Hardware) -> Workload:
    """An input set whose tensors have no memory; what makes up its plan is real, on the host."""
    meta, bf16 = torch.device("meta"), torch.bfloat16
    pages = [int((-(-lens // case.page_size)).max()) for lens in case.node_lens]
    table = torch.zeros(case.requests, sum(pages), dtype=torch.int32)
    total = sum(int((-(-lens // case.page_size)).sum()) for lens in case.node_lens)
    heads = {"num_q_heads": case.num_q_heads, "num_kv_heads": case.num_kv_heads, "head_dim": case.head_dim}
    made = plan(tree_of(case, table), **heads, dtype=bf16, device="cpu", hardware=hw)
    q = torch.empty(case.rows, case.num_q_heads, case.head_dim, dtype=bf16, device=meta)
    k, v = (torch.empty(total, case.page_size, case.num_kv_heads, case.head_dim, dtype=bf16, device=meta) for _ in range(2))
    out = AttentionState(torch.empty_like(q), torch.empty(q.shape[:2], device=meta), "e")
    return Workload(case, q, PagedKV(k, v), table, made, out)
