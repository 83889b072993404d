"""The kernel of the ablation benchmark, on this folder's target, and in replays of a graph."""

import pytest
import torch

from benchmarks.ablation.experiment import Experiment, Switches
from cascade_fd.bench import cases as bench_cases
from cascade_fd.bench.measure import capture_stream, captured
from cascade_fd.bench.workload import build
from cascade_fd.tiles import HOPPER_SWITCH
from tests.contract.ablation import *  # noqa: F403


@pytest.mark.parametrize("name", ["d1", "d3", "v2", "c1", "t1"])
def test_the_last_arriver_in_replays(name, monkeypatch):
    """Counters begin again by themselves. Whoever merges, the bits are the same, unless tiles of two sizes may: two kernels."""
    monkeypatch.setenv(HOPPER_SWITCH, "0")
    load = build(bench_cases.CASES[name], torch.device("cuda"), torch.bfloat16)
    call = Experiment(load, load.plan, Switches(fused=True))
    with torch.cuda.stream(capture_stream()):
        call()
    torch.cuda.synchronize()
    first = load.out.o.clone()
    replay = captured([call] * 3)
    for _ in range(20):
        load.out.o.fill_(torch.nan)
        replay()
        if len(load.plan.launches) == 1:
            assert torch.equal(load.out.o, first)
        assert load.error_of(load.out.o) < 5e-3
    assert not call.arrived.any()
