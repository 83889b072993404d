"""The kernel of the ablation benchmark: every switch computes attention, whatever the scores, and leaves its counters at 0.

Few and small: the interpreter takes long.
"""

import math
from dataclasses import replace

import pytest
import torch

from benchmarks.ablation.experiment import MANY, Experiment, Switches
from benchmarks.ablation.rewrite import in_sequence, replanned, with_rows
from benchmarks.ablation.strategies import FAR
from cascade_fd.bench.cases import Case
from cascade_fd.bench.workload import build
from cascade_fd.testing import numerics, oracle

HEADS = {"num_q_heads": 3, "num_kv_heads": 1, "head_dim": 24, "page_size": 4}
CASES = {
    "skewed": (
        Case("skewed", ((4, 40),), lens=(40, 1, 5, 33), **HEADS),
        4,
    ),  # more states than rows: the last arriver takes row by row
    "verify": (Case("verify", ((1, 26),), q_len=4, **HEADS), 3),  # the last split begins where two rows see nothing of it
    "tree": (Case("tree", ((1, 8), (2, 4), (4, 3)), q_len=2, **HEADS), 1),
}
SWITCHES = {
    "none": Switches(),
    "fixed": Switches(phi=0.0),
    "fixed, far off": Switches(phi=FAR),
    "fused": Switches(fused=True),
}


def load_of(target, name):
    case, split = CASES[name]
    return build(case, torch.device(target.device), target.dtype, split)


def contexts(load):
    lens, size = load.case.seq_lens.tolist(), load.case.page_size
    pages = [load.table[b, : -(-n // size)].long() for b, n in enumerate(lens)]
    return [tuple(x[p].flatten(0, 1)[:n].cpu() for x in (load.kv.k, load.kv.v)) for p, n in zip(pages, lens, strict=True)]


def run(load, call):
    load.out.o.fill_(torch.nan)
    load.out.lse.fill_(torch.nan)
    call()
    assert not call.arrived.any()
    return load.out.o.clone(), load.out.lse.clone()


def check(target, load, call):
    first = run(load, call)
    target.check(load.out, load.q, contexts(load), q_lens=load.case.q_len)
    return first


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("switches", SWITCHES)
def test_every_switch_computes_attention(target, name, switches):
    load, switches = load_of(target, name), SWITCHES[switches]
    call = Experiment(load, load.plan, switches)
    check(target, load, call)
    if switches.fused:
        assert set(call.at_once) == ({MANY} if name == "skewed" else {1})
    programs = sum(len(launch.items) for launch in load.plan.launches)
    assert int(call.again) == (programs if switches.phi else 0)


@pytest.mark.parametrize("fused", [False, True])
def test_a_program_per_slot(target, fused):
    load = load_of(target, "skewed")
    made = replanned(replace(load.plan, hardware=replace(load.plan.hardware, num_sms=3)), "stream_k")
    call = Experiment(load, made, Switches(walks=True, fused=fused))
    if target.device == "cpu":  # a GPU's tiles make fewer blocks than it has slots
        assert len(call.walks[0]) - 1 < len(made.launches[0].items)
    first = check(target, load, call)  # a second call begins with what the first left; the same bits, whoever came last
    assert all(torch.equal(a, b) for a, b in zip(first, run(load, call), strict=True))


def test_the_last_arriver_counts_packed_rows(target):
    """Items that begin and end inside a row's group of heads."""
    load = load_of(target, "verify")
    check(target, load, Experiment(load, in_sequence(with_rows(load.plan, 4)), Switches(fused=True)))


SCORES = {  # natural log; the keys that get them; of which query heads; whether float32, and float16, compute again
    "all high": (1e4, slice(None), slice(None), (True, True)),
    "all low": (-1e4, slice(None), slice(None), (True, True)),
    "one row high": (1e4, slice(None), slice(0, 1), (True, True)),
    "one row low": (-1e4, slice(None), slice(1, 2), (True, True)),
    "one late key high": (1e4, slice(38, 39), slice(None), (True, True)),
    "one late key too high for float16": (14.0, slice(38, 39), slice(None), (False, True)),
    "all too low for float16": (-14.0, slice(None), slice(None), (False, True)),
    "all but one low": (-1e4, slice(0, 39), slice(None), (True, True)),
}


@pytest.mark.parametrize("scores", SCORES)
def test_a_fixed_maximum_is_exact_for_any_scores(target, scores):
    value, keys, heads, again = SCORES[scores]
    load = build(Case("one", ((1, 40),), **HEADS), torch.device(target.device), target.dtype, 2)
    k = load.kv.k[load.table[0].long()]
    load.q[0, :, 0], k[..., 0] = 0, 0
    load.q[0, heads, 0] = math.copysign(math.sqrt(abs(value)), value)
    k.flatten(0, 1)[keys, :, 0] = math.sqrt(abs(value) * load.case.head_dim)
    load.kv.k[load.table[0].long()] = k
    call = Experiment(load, load.plan, Switches(phi=0.0))
    o, lse = run(load, call)
    best, best_lse = oracle.attention(load.q.cpu(), contexts(load))
    # A score is off by a rounding of its size, and so, in relative terms, is a weight.
    slack = 8 * torch.finfo(o.dtype).eps + 2 * torch.finfo(torch.float32).eps * abs(value)
    assert numerics.max_error(o, best) <= slack * float(best.abs().max())
    assert numerics.max_error(lse, best_lse) <= 4 * numerics.rounding(torch.float32, best_lse) + 1e-6
    assert bool(call.again > 0) == again[target.dtype == torch.float16]
