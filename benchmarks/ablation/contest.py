"""All strategies of a case: each is checked, then their graphs are replayed in turn, then what a replay writes is checked."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from benchmarks.ablation.experiment import Experiment
from benchmarks.ablation.strategies import Strategy
from benchmarks.peers.race import Say, Where, reason
from cascade_fd.bench.cases import Case
from cascade_fd.bench.measure import MAX_ERROR, Row, input_sets, medians_us, replays_on, row_of, timer
from cascade_fd.bench.workload import Workload
from cascade_fd.tiles import HOPPER_SWITCH

Call = Callable[[], object]
MAX_LSE_ERROR = 1e-3  # against the default's: sums in float32 of the same products


@contextmanager
def portable() -> Iterator[None]:
    """Inside the block, and in processes that begin there, no launch takes the Hopper kernel."""
    before = os.environ.get(HOPPER_SWITCH)
    os.environ[HOPPER_SWITCH] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[HOPPER_SWITCH]
        else:
            os.environ[HOPPER_SWITCH] = before


def contest(case: Case, some: Sequence[Strategy], device: torch.device, where: Where, say: Say) -> list[Row]:
    """A row of every strategy that gives the right result, at first and in replays of its graph; others are told of."""
    loads = input_sets(case, device)
    lses: dict[int, torch.Tensor] = {}  # of the first strategy, by input set
    ready = []
    for strategy in some:
        try:
            calls = strategy.prepare(loads)
            error = max(_error(loads[i], calls[i], lses) for i in (0, -1))
            _check(error)
            ready.append((strategy, calls, error, timer(calls, device)))
        except Exception as fault:
            say(f"{case.name}, {strategy.name}: {reason(fault)}")
    times = medians_us([time_once for *_, time_once in ready], replays_on(device))
    rows = []
    for (strategy, calls, error, time_once), us in zip(ready, times, strict=True):
        try:
            error = max(error, *(_error(load, time_once, lses) for load in (loads[0], loads[-1])))
            _check(error)
            _check_counters(calls)
            rows.append(row_of(case, "cascade_fd", strategy.name, us, error, where))
        except Exception as fault:
            say(f"{case.name}, {strategy.name}, replayed: {reason(fault)}")
    return rows


def _error(load: Workload, call: Call, lses: dict[int, torch.Tensor]) -> float:
    """Of what ``call`` writes to the set's output, which is poisoned before; infinite if the lse is wrong."""
    load.out.o.fill_(torch.nan)
    load.out.lse.fill_(torch.nan)
    call()
    error, lse = load.error_of(load.out.o), load.out.lse
    if error < MAX_ERROR:
        error = error if (lse - lses.setdefault(id(load), lse.clone())).abs().max() < MAX_LSE_ERROR else math.inf
    return error


def _check(error: float) -> None:
    if not error < MAX_ERROR:
        raise RuntimeError(f"relative error {error:.2e} exceeds {MAX_ERROR:.0e}; not timed")


def _check_counters(calls: Sequence[Call]) -> None:
    if any(isinstance(call, Experiment) and bool(call.arrived.any()) for call in calls):
        raise RuntimeError("counters of arrived states did not come back to 0")
