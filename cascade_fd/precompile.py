"""Every kernel variant that a set of model shapes can launch, compiled for a named GPU. ``cascade-fd compile``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing import get_context
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.table import Table

from cascade_fd.checks import check_choice
from cascade_fd.hardware import PRESETS, Hardware
from cascade_fd.kv import DenseKV, KVStore, PagedKV, PageTable
from cascade_fd.levels import Level
from cascade_fd.ops.attend import attend
from cascade_fd.ops.merge import merge, merge_, merge_ragged
from cascade_fd.planning.planner import plan
from cascade_fd.planning.worklist import Plan
from cascade_fd.state import AttentionState
from cascade_fd.tree import PrefixTree

if TYPE_CHECKING:
    from cascade_fd.kernels.aot import Compiled

# A few registers' worth: where rows may be written directly, Triton 3.6 spills up to 16 bytes of the 64-row tile outside its
# loop; tiles that leave room for others spill up to 40; 3.9 keeps 48 bytes of coordinates for TMA on the stack.
SPILL_BYTES = 48
WIDE_SPILL_BYTES = 96  # heads 256 wide take all registers of a thread: 3.6 spills up to 8 bytes (pages of 64), 3.9 up to 96
ARCHS = ("sm_80", "sm_90", "sm_100", "gfx942")


@dataclass(frozen=True)
class Case:
    """One model shape with one kind of cache; ``batches`` are (requests, rows per request) that reach different tiles.

    ``spill_bytes``: what a kernel may spill.
    """

    name: str
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    page_size: int  # 0: dense
    batches: tuple[tuple[int, int], ...] = ((2, 1), (2, 8), (16, 1), (64, 1))
    spill_bytes: int = SPILL_BYTES


CASES = (
    Case("llama 8B bf16, page 16", 32, 8, 128, torch.bfloat16, 16),
    Case("llama 8B fp16, page 1", 32, 8, 128, torch.float16, 1, ((2, 1), (64, 1))),
    Case("llama 8B bf16, dense", 32, 8, 128, torch.bfloat16, 0, ((2, 1), (64, 1))),
    Case("smollm2 fp32, dense", 9, 3, 64, torch.float32, 0, ((2, 1), (16, 1))),
    Case("qwen2 G=7 bf16, page 16", 28, 4, 128, torch.bfloat16, 16, ((2, 1),)),
    Case("llama 1B bf16 D=64, page 16", 32, 8, 64, torch.bfloat16, 16, ((16, 1), (64, 1))),
    Case("gemma bf16 D=256, page 64", 16, 8, 256, torch.bfloat16, 64, ((2, 1), (64, 1)), WIDE_SPILL_BYTES),
    Case("phi-2 bf16 D=80, page 16", 32, 32, 80, torch.bfloat16, 16, ((2, 1), (64, 1))),
)


def plans(case: Case, hw: Hardware) -> Iterator[Plan]:
    """One shared and one private level of each batch, with every size of tile that the rows ask for, and by every kernel."""
    kernels = [(), *(some for some in (("hopper", "narrow"), ("beside", "single")) if all(map(hw.costs.knows, some)))]
    for (B, q_len), some in product(case.batches, kernels):
        levels = [Level([0, B], [1 << 14], _table(case, 1)), Level(range(B + 1), [1 << 14] * B, _table(case, B))]
        tree = PrefixTree.from_levels(levels, q_lens=q_len)
        yield plan(
            tree,
            num_q_heads=case.num_q_heads,
            num_kv_heads=case.num_kv_heads,
            head_dim=case.head_dim,
            dtype=case.dtype,
            device="meta",
            hardware=replace(hw, costs=hw.costs.only(*some)),
            share="always",
        )


def launch_all(case: Case, hw: Hardware) -> None:
    """Run the plans, and the merges, of ``case`` on meta tensors."""
    store = _store(case)
    for made in plans(case, hw):
        q = torch.empty(made.num_rows, case.num_q_heads, case.head_dim, dtype=case.dtype, device="meta")
        state = attend(q, store, made, backend="triton")
    _merges(state)


def _merges(state: AttentionState) -> None:
    sink = torch.empty(state.num_heads, device="meta")
    mask = torch.empty(state.num_rows, dtype=torch.bool, device="meta")
    merge(state, state, backend="triton")
    merge(state, state, sink=sink, backend="triton")
    merge_(state, state, mask=mask, backend="triton")
    merge(state, state, state, sink=sink, backend="triton")
    for most, rows in ((2, 8), (2, 4096), (32, 8), (256, 8)):
        merge_ragged(state, torch.empty(rows + 1, dtype=torch.int64, device="meta"), max_states=most, backend="triton")


def _store(case: Case) -> KVStore:
    rows, tokens = (1 << 20, case.page_size) if case.page_size else (64, 1 << 14)
    k = torch.empty(rows, tokens, case.num_kv_heads, case.head_dim, dtype=case.dtype, device="meta")
    return PagedKV(k, k) if case.page_size else DenseKV(k, k)


def _table(case: Case, rows: int) -> PageTable | None:
    if not case.page_size:
        return None
    ids = torch.empty(rows, (1 << 14) // case.page_size, dtype=torch.int32, device="meta")
    return PageTable.from_block_table(ids, case.page_size)


def compile_case(case: Case, arch: str) -> list[Compiled]:
    """All variants of ``case`` for ``arch`` ("sm_90", "gfx942", ...), each once. Needs no GPU."""
    from cascade_fd.kernels.aot import describe, target

    check_choice("target", arch, ARCHS)
    with target(PRESETS[arch]) as compiled:
        launch_all(case, PRESETS[arch])
    return [describe(kernel) for kernel in {k.hash: k for k in compiled}.values()]


def problems(variant: Compiled, arch: str, spill_bytes: int = SPILL_BYTES) -> list[str]:
    """What would make a variant fail to launch, or crawl."""
    found = []
    if variant.shared > PRESETS[arch].smem:
        found.append(f"{variant.shared} bytes of shared memory, the device has {PRESETS[arch].smem}")
    if (variant.spills or 0) > spill_bytes:
        found.append(f"{variant.spills} bytes spilled")
    if variant.name == "attend_kernel" and variant.load_bytes < 16:
        found.append(f"keys and values are loaded {variant.load_bytes} bytes at a time")
    return found


def run(archs: Sequence[str], jobs: int | None = None) -> int:
    """Compile every case for every target on all cores, print a table; the exit status is the number of problems, capped."""
    table = Table("target", "case", "kernel", "warps", "registers", "spills", "shared", "load", title="compiled, not run")
    bad: list[str] = []
    work = [(case, arch) for arch in archs for case in CASES]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for (case, arch), variants in zip(work, pool.map(compile_case, *zip(*work, strict=True)), strict=True):
            for variant in sorted(set(variants), key=str):
                table.add_row(arch, case.name, *variant.cells())
                bad += [f"{arch}, {case.name}, {variant.name}: {text}" for text in problems(variant, arch, case.spill_bytes)]
    console = Console(width=120)
    console.print(table)
    for text in bad:
        console.print(f"[red]{text}[/red]")
    console.print(f"{len(table.rows)} kinds of variant, {len(bad)} problems")
    return min(len(bad), 1)
