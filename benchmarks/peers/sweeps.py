"""Rows of cases that differ in one thing, with few settings of each library."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.peers.provider import OURS, Provider
from cascade_fd.bench.cases import CONTEXT_CASES, Case


@dataclass(frozen=True)
class Sweep:
    """``cases`` by name, the ``providers`` to ask, and the ``settings`` to take of theirs; of ours all."""

    cases: dict[str, Case]
    providers: tuple[str, ...]
    settings: frozenset[str]

    def wants(self, each: Provider) -> bool:
        return each.name.startswith(OURS) or each.setting in self.settings


FEW = ("flat, num_splits=auto", "flat, num_splits=auto, schedule ahead", "decode", "tensor-core decode")
CONTIGUOUS = ("flash, contiguous KV", "cudnn, contiguous KV", "contiguous KV, a batch")  # of those that must be asked for
SWEEPS = {"context": Sweep(CONTEXT_CASES, ("flashinfer", "fa3", "vllm", "ours"), frozenset(FEW + CONTIGUOUS))}
