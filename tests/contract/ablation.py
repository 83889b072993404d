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
from cascade_fd.ops.attend import attend
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
    "fixed": Switches("fixed"),
    "fixed, far off": Switches("fixed", FAR),
    "first tile": Switches("first tile"),
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


@pytest.mark.parametrize("name", [*CASES, "finished"])
def test_without_switches_it_is_the_library(target, name):
    load = load_of(target, "skewed" if name == "finished" else name)
    made = load.plan
    if name == "finished":  # two rows see nothing; the others, what they see
        made = replace(made, lens=made.lens.clone())
        made.lens[-2:] = -1
    want = attend(load.q, load.kv, made, backend=target.backend)
    for switches in (Switches(), Switches("first tile")):
        o, lse = run(load, Experiment(load, made, switches))
        if switches.maximum == "running":
            assert torch.equal(o, want.o) and torch.equal(lse, want.lse)
        assert ((lse == -torch.inf) == (want.lse == -torch.inf)).all() and numerics.max_error(o, want.o) < 2e-2
        assert (lse == -torch.inf).any() == (name == "finished")


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


HIGH, ALL = 1e4, slice(None)
SCORES = {  # natural log; the keys that get them; of which query heads; whether float32, and float16, compute again
    "fixed": {
        "all high": (HIGH, ALL, ALL, (True, True)),
        "all low": (-HIGH, ALL, ALL, (True, True)),
        "one row high": (HIGH, ALL, slice(0, 1), (True, True)),
        "one row low": (-HIGH, ALL, slice(1, 2), (True, True)),
        "one late key high": (HIGH, slice(38, 39), ALL, (True, True)),
        "one late key too high for float16": (14.0, slice(38, 39), ALL, (False, True)),
        "all too low for float16": (-14.0, ALL, ALL, (False, True)),
        "all but one low": (-HIGH, slice(0, 39), ALL, (True, True)),
    },
    "first tile": {
        "all high": (HIGH, ALL, ALL, (False, False)),
        "all low": (-HIGH, ALL, ALL, (False, False)),
        "one early key high": (HIGH, slice(3, 4), ALL, (False, False)),
        "all but one early key low": (-20.0, slice(1, None), ALL, (False, False)),
        "one late key high": (HIGH, slice(138, 139), ALL, (True, True)),
        "one late key high, of one row": (HIGH, slice(138, 139), slice(2, 3), (True, True)),
        "one late key that fits": (8.0, slice(138, 139), ALL, (False, False)),
        "one late key too high for float16": (18.0, slice(138, 139), ALL, (False, True)),
        "all later keys higher": (5.0, slice(64, None), ALL, (False, False)),
        "all but the last low": (-HIGH, slice(0, 139), ALL, (True, True)),
    },
}
CUTS = {"fixed": (40, 2), "first tile": (140, 1)}  # keys, and splits: tiles have 32 keys in the interpreter, 64 on a GPU


@pytest.mark.parametrize(("maximum", "scores"), [(maximum, name) for maximum, some in SCORES.items() for name in some])
def test_maxima_that_never_change_are_exact_for_any_scores(target, maximum, scores):
    (value, keys, heads, again), (tokens, splits) = SCORES[maximum][scores], CUTS[maximum]
    load = build(Case("one", ((1, tokens),), **HEADS), torch.device(target.device), target.dtype, splits)
    k = load.kv.k[load.table[0].long()]
    load.q[0, :, 0], k[..., 0] = 0, 0
    load.q[0, heads, 0] = math.copysign(math.sqrt(abs(value)), value)
    k.flatten(0, 1)[keys, :, 0] = math.sqrt(abs(value) * load.case.head_dim)
    load.kv.k[load.table[0].long()] = k
    call = Experiment(load, load.plan, Switches(maximum))
    o, lse = run(load, call)
    best, best_lse = oracle.attention(load.q.cpu(), contexts(load))
    # A score is off by a rounding of its size, and so, in relative terms, is a weight.
    slack = 8 * torch.finfo(o.dtype).eps + 2 * torch.finfo(torch.float32).eps * abs(value)
    assert numerics.max_error(o, best) <= slack * float(best.abs().max())
    assert numerics.max_error(lse, best_lse) <= 4 * numerics.rounding(torch.float32, best_lse) + 1e-6
    assert bool(call.again > 0) == again[target.dtype == torch.float16]
