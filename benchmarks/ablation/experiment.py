"""What launches ``kernels.ablation_kernel`` over the plans that the library's own kernel runs."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Literal

import torch

from benchmarks.ablation.kernels import ablation_kernel
from benchmarks.ablation.rewrite import state_counts, walks
from cascade_fd.backends.triton import merge_rows
from cascade_fd.bench.workload import Workload
from cascade_fd.kernels.attend import _INT32_MAX, _attend_arguments, operands
from cascade_fd.kernels.launch import CAN_CHAIN, run
from cascade_fd.planning.worklist import NUM_ROWS, Plan
from cascade_fd.state import AttentionState, base_factor

MANY = 32  # states that the last program loads at once, row by row, unless there are more rows than states


@dataclass(frozen=True)
class Switches:
    """What differs from the library's kernel.

    Attributes:
        maximum: "running", as the library has it; "fixed": ``phi`` (natural log) for all scores; "first tile": the row's
            largest score in the item's first tile. The latter two never rescale, and never change.
        fused: the last program to finish a row merges its states; there is no merge launch.
        walks: one program per slot of a "stream_k" plan, and KV head; else one per item and KV head.
    """

    maximum: Literal["running", "fixed", "first tile"] = "running"
    phi: float = 0.0
    fused: bool = False
    walks: bool = False


class Experiment:
    """A call of the kernel over an input set, into the set's own output.

    Attributes:
        arrived: ``[T, Hq]`` states that have arrived; all 0 between calls.
        again: how many items (times KV heads) the maximum did not suit, so that they were computed again.
    """

    def __init__(self, load: Workload, plan: Plan, switches: Switches):
        self.load, self.plan, self.switches = load, plan, switches
        device = plan.rows.device
        if switches.fused and not bool((plan.merge.indptr.diff() > 0).all()):
            raise ValueError("plan: expected at least one state for every row, got one that no program would write")
        self.counts = state_counts(plan)
        self.walks = [walks(plan, i) if switches.walks else launch.items for i, launch in enumerate(plan.launches)]
        states = [1 if int(x.items[:, NUM_ROWS].max()) > plan.merge.max_states else MANY for x in plan.launches]
        self.at_once = states if switches.fused else [0] * len(states)
        self.arrived = torch.zeros(plan.num_rows, plan.shape.num_q_heads, dtype=torch.int32, device=device)
        self.again = torch.zeros(1, dtype=torch.int32, device=device)

    def over(self, load: Workload) -> Experiment:
        """The same over another input set: plan and counters are shared, as layers of a model share them."""
        other = copy.copy(self)
        other.load = load
        return other

    def __call__(self) -> torch.Tensor:
        plan, out = self.plan, self.load.out
        H, Dv = plan.shape.num_q_heads, plan.shape.v_head_dim
        o = torch.empty(plan.num_slots, H, Dv, dtype=torch.float32, device=out.o.device)
        partials = AttentionState.trusted(o, torch.empty(o.shape[:2], dtype=torch.float32, device=o.device), "2")
        for i in range(len(plan.launches)):
            self._launch(i, partials)
        if len(plan.merge) and not self.switches.fused:
            merge_rows(partials, plan.merge, out)
        return out.o

    def _launch(self, i: int, partials: AttentionState) -> None:
        load, plan, walked, switches = self.load, self.plan, self.walks[i], self.switches
        launch, q, k, v, out = plan.launches[i], load.q, load.kv.k, load.kv.v, load.out
        tensors = (q, k, v, *operands(plan, launch, partials, out), walked, self.counts, self.arrived, self.again)
        ends = (switches.maximum, switches.fused, switches.walks, self.at_once[i])
        strides = (q.stride(), k.stride(), v.stride(), launch.table_stride, out.o.stride(), out.lse.stride())
        chain = min(i + 1, 2) if plan.chained and CAN_CHAIN else 0
        layout = (ends, plan.shape, launch.tile, launch.page_size, load.kv.reach > _INT32_MAX, launch.direct, chain, *strides)
        log2 = base_factor("e", "2")
        floats = (log2 / math.sqrt(plan.shape.head_dim), base_factor("2", out.base), switches.phi * log2)
        programs = len(walked) - 1 if switches.walks else len(launch.items)
        run(ablation_kernel, programs * plan.shape.num_kv_heads, tensors, layout, floats, _arguments)


def _arguments(ends, *library):
    """Those of the library's kernel and the switches."""
    ints, meta = _attend_arguments(*library)
    return ints, {**meta, **dict(zip(("MAXIMUM", "FUSED", "WALKS", "BLOCK_S"), ends, strict=True))}
