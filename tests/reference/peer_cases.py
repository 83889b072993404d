"""Small cases for the tests of benchmarks/peers, and what they must give."""

import math
from contextlib import nullcontext

import torch

from benchmarks.peers.parts import side_stream
from cascade_fd.bench.cases import Case
from cascade_fd.bench.workload import build, build_sets

CPU = torch.device("cpu")
HEADS = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16, "page_size": 4}
SMALL = {
    "decode": Case("decode", ((3, 21),), **HEADS),
    "one request": Case("one request", ((1, 40),), **HEADS | {"num_kv_heads": 1}),
    "verify": Case("verify", ((3, 21),), q_len=4, **HEADS),
    "skewed": Case("skewed", ((5, 50),), lens=(50, 1, 4, 7, 32), **HEADS),
    "cascade": Case("cascade", ((1, 32), (6, 9)), **HEADS),
    "cascade of 2 groups": Case("cascade of 2 groups", ((2, 16), (6, 9)), **HEADS),
    "tree": Case("tree", ((1, 8), (2, 12), (4, 4), (12, 7)), **HEADS),
    "speculative": Case("speculative", ((1, 16), (3, 9)), q_len=4, **HEADS),
    "speculative tree": Case("speculative tree", ((1, 8), (2, 16), (4, 9)), q_len=2, **HEADS),
    "skewed cascade": Case("skewed cascade", ((1, 16), (4, 20)), q_len=2, lens=(20, 2, 5, 8), **HEADS),
}
WHERE = dict.fromkeys(("gpu", "driver", "torch", "triton", "commit", "date"), "")


def load_of(name):
    return build(SMALL[name], CPU, torch.float32)


def loads_of(name, sets=2):
    return build_sets(SMALL[name], CPU, torch.float32, sets)


def every_row(load):
    return torch.cat([load._attend(b) for b in range(load.case.requests)])


def check(prepare, loads):
    """What is prepared for several input sets computes each, in any order and again."""
    runs = prepare(loads)
    assert len(runs) == len(loads)
    for i in (0, -1, 0):
        torch.testing.assert_close(runs[i](), every_row(loads[i]), rtol=1e-5, atol=1e-5)


def attention(q, k, v, causal):
    """``q [Q, Hq, D]`` over ``k, v [T, Hkv, D]``: ``o`` and ``lse [Q, Hq]`` in natural log."""
    Q, Hq, D = q.shape
    T, Hkv, _ = k.shape
    k, v = (x.repeat_interleave(Hq // Hkv, 1) for x in (k, v))
    scores = torch.einsum("qhd,thd->hqt", q, k) / math.sqrt(D)
    if causal:
        scores = scores.masked_fill(torch.arange(T) > T - Q + torch.arange(Q)[:, None], -math.inf)
    return torch.einsum("hqt,thd->qhd", scores.softmax(-1), v), scores.logsumexp(-1).T


class Stream:
    """A stand-in for torch.cuda.Stream that remembers who waited for whom."""

    log: tuple = ()
    made: tuple = ()

    def __init__(self, name=None):
        self.name = name or f"side {len(Stream.made)}"
        Stream.made.append(self)

    def wait_stream(self, other):
        Stream.log.append((self.name, other.name))


def fake_streams(monkeypatch):
    """Streams that run nothing apart; what is forked and joined is in ``Stream.log``."""
    side_stream.cache_clear()
    Stream.made, Stream.log = [], []
    main = Stream("main")
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
