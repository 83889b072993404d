"""What a way to compute a case is, beside ours and torch's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.ablation.rewrite import replanned
from cascade_fd.bench.measure import setting_of
from cascade_fd.bench.workload import Workload
from cascade_fd.planning.worklist import Plan

Run = Callable[[], torch.Tensor]
OURS = "cascade_fd"
PORTABLE = "cascade_fd portable"


class SkipError(Exception):
    """Why there is nothing to time; one line."""


@dataclass(frozen=True)
class Provider:
    """One way to compute a case.

    Attributes:
        name: the library.
        setting: how it is called.
        prepare: from the input sets of a case, for each what computes ``o [rows, Hq, D]`` over it every time it is called. All
            that depends only on lengths and page ids is done here, once for all sets, and not timed, as our plan is.
    """

    name: str
    setting: str
    prepare: Callable[[Sequence[Workload]], list[Run]]


def over(loads: Sequence[Workload], run: Callable[[Workload], torch.Tensor]) -> list[Run]:
    """``run`` for each input set."""
    return [partial(run, load) for load in loads]


def ours(load: Workload) -> list[Provider]:
    """cascade_fd, by the plan that the input set has; where that uses kernels for one kind of GPU, also without them."""
    found = [_planned(OURS, load, load.plan)]
    if any(launch.tile.kernel != "attend" for launch in load.plan.launches):
        hw = load.plan.hardware
        portable = replace(load.plan, hardware=replace(hw, costs=hw.costs.only()))
        found.append(_planned(PORTABLE, load, replanned(portable, "balanced")))
    return found


def _planned(name: str, load: Workload, made: Plan) -> Provider:
    def run(load: Workload) -> torch.Tensor:
        return replace(load, plan=made).run().o

    return Provider(name, setting_of(replace(load, plan=made), "balanced"), partial(over, run=run))


def sdpa(load: Workload) -> list[Provider]:
    """scaled_dot_product_attention of torch, for decode batches of one length: it has no pages and no lengths."""
    case = load.case
    if len(case.levels) > 1 or case.q_len > 1 or case.lens is not None:
        raise SkipError("only for one row per request, one length and nothing shared")
    backends = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    return [Provider("torch sdpa", f"{name}, contiguous KV", partial(_sdpa, backend)) for name, backend in backends.items()]


def _sdpa(backend: SDPBackend, loads: Sequence[Workload]) -> list[Run]:
    return [_sdpa_run(backend, load) for load in loads]


def _sdpa_run(backend: SDPBackend, load: Workload) -> Run:
    q = load.q[:, :, None]
    k, v = (x[load.table.long()].flatten(1, 2).transpose(1, 2).contiguous() for x in (load.kv.k, load.kv.v))

    def run() -> torch.Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, enable_gqa=True).squeeze(2)

    return run
