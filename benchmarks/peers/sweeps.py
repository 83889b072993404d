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
        return each.name == OURS or each.setting in self.settings


FA3 = ("flat, num_splits=auto", "flat, num_splits=auto, schedule ahead")
SWEEPS = {
    "context": Sweep(CONTEXT_CASES, ("flashinfer", "fa3", "vllm", "ours"), frozenset((*FA3, "decode", "tensor-core decode"))),
}
