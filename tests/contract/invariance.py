"""Batch invariance: bitwise the same for a request whoever else is in the batch. Kernels only; torch does not promise it."""

import numpy as np
import pytest
import torch

import cascade_fd as cf
from cascade_fd import Level, PageTable, PrefixTree
from cascade_fd.testing import inputs


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("q_len", [1, 3])
def test_a_request_does_not_feel_its_batch(target, q_len, seed):
    """Random batches around one request: mates come and go, share its prefix or not, are short or long."""
    rng = np.random.default_rng(seed)
    m = target.model()
    prefixes = inputs.contexts(m, [700, 48], seed=seed)
    mine = inputs.contexts(m, [530], seed=10 + seed)[0]
    want = alone = None
    for mates in (0, 1, 3, 9):
        lens = rng.integers(q_len, 1200 if mates == 3 else 90, mates).tolist()
        sharers = int(rng.integers(0, mates + 1))  # of the mates, so many share my prefix; I am the last of them
        others = inputs.contexts(m, lens, seed=30 + mates)
        suffixes = [*others[:sharers], mine, *others[sharers:]]
        q = target.queries(m, (mates + 1) * q_len, seed=90 + mates)
        if alone is None:
            alone = q[:q_len].clone()
        q[sharers * q_len : (sharers + 1) * q_len] = alone
        state = run(target, m, q, prefixes, suffixes, sharers + 1, q_len)
        got = state[sharers * q_len : (sharers + 1) * q_len]
        want = want or got
        assert torch.equal(got.o, want.o)
        assert torch.equal(got.lse, want.lse)


def run(target, m, q, prefixes, suffixes, sharers, q_len):
    """``sharers`` requests on the first prefix, the others on the second."""
    B = len(suffixes)
    groups = [sharers, B - sharers] if sharers < B else [sharers]
    store, table = inputs.paged([*prefixes[: len(groups)], *suffixes], 16)
    table = target.put(table)
    n = len(groups)
    levels = [
        Level(np.cumsum([0, *groups]), [len(k) for k, _ in prefixes[:n]], PageTable.from_block_table(table[:n], 16)),
        Level(range(B + 1), [len(k) for k, _ in suffixes], PageTable.from_block_table(table[n:], 16)),
    ]
    tree = PrefixTree.from_levels(levels, q_lens=q_len)
    plan = cf.plan(
        tree, num_q_heads=m.num_q_heads, num_kv_heads=m.num_kv_heads, head_dim=m.head_dim, dtype=m.dtype,
        device=target.device, batch_invariant=True,
    )  # fmt: skip
    state = cf.attend(q, target.put(store), plan, backend=target.backend)
    contexts = [c for i, s in enumerate(suffixes) for c in inputs.join(prefixes[int(i >= sharers)], [s])]
    target.check(state, q, contexts, q_lens=q_len)
    return state
