"""Rows of cases beside the usual ones: by context, with few settings of each library, and by the shape of the heads."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.peers.provider import OURS, Provider
from cascade_fd.bench.cases import CONTEXT_CASES, SHAPE_CASES, Case


@dataclass(frozen=True)
class Sweep:
    """``cases`` by name, the ``providers`` to ask, and the ``settings`` to take of theirs (none: all); of ours all."""

    cases: dict[str, Case]
    providers: tuple[str, ...]
    settings: frozenset[str] = frozenset()

    def wants(self, each: Provider) -> bool:
        return not self.settings or each.name.startswith(OURS) or each.setting in self.settings


FEW = ("flat, num_splits=auto", "flat, num_splits=auto, schedule ahead", "decode", "tensor-core decode")
CONTIGUOUS = ("flash, contiguous KV", "cudnn, contiguous KV", "contiguous KV, a batch")  # of those that must be asked for
ALL = ("flashinfer", "fa3", "vllm", "ours")
SWEEPS = {"context": Sweep(CONTEXT_CASES, ALL, frozenset(FEW + CONTIGUOUS)), "shapes": Sweep(SHAPE_CASES, ALL)}
