"""Random batches through random trees, stores, tables, splits and lengths, against the oracle; a seed is a whole story."""

import numpy as np
import pytest
import torch

import cascade_fd as cf
from cascade_fd import Level, PageTable, PrefixTree
from cascade_fd.testing import inputs


def pick(rng, *choices):
    return choices[int(rng.integers(len(choices)))]


def levels_of(rng, B):
    """Request boundaries of up to three levels, coarse to fine; the last one is one node per request."""
    cuts = [np.arange(B + 1)]
    for _ in range(int(rng.integers(0, 3))):
        inner = cuts[-1][1:-1]
        cuts.append(np.r_[0, inner[rng.random(len(inner)) < 0.4], B])
    return cuts[::-1]


@pytest.mark.parametrize("seed", range(12))
def test_random_batches(target, seed):
    rng = np.random.default_rng(seed)
    B, page = int(rng.integers(1, 9)), pick(rng, 1, 4, 16, 0)
    Hkv = pick(rng, 1, 2)
    m = target.model(
        num_kv_heads=Hkv, num_q_heads=Hkv * pick(rng, 1, 3, 8), head_dim=pick(rng, 32, 40), v_head_dim=pick(rng, 32, 24)
    )
    q_lens = rng.integers(1, pick(rng, 2, 6), B)
    ptrs = levels_of(rng, B)
    lens = [rng.integers(0, 150, len(p) - 1) for p in ptrs]
    growth = int(rng.integers(0, 40))
    lens[-1] = np.where(rng.random(B) < 0.2, 0, np.maximum(lens[-1], q_lens))
    parts = [inputs.contexts(m, [*n, growth][: len(n)], seed=seed + 7 * i) for i, n in enumerate(lens[:-1])]
    private = inputs.contexts(m, (lens[-1] + growth).tolist(), seed=seed + 99)
    stores, tables = zip(*[place(target, p, page, pick(rng, "NHD", "HND"), seed) for p in [*parts, private]], strict=True)
    tree = PrefixTree.from_levels([Level(p, n, t) for p, n, t in zip(ptrs, lens, tables, strict=True)], q_lens=q_lens)
    plan = cf.plan(
        tree, num_q_heads=m.num_q_heads, num_kv_heads=Hkv, head_dim=(m.head_dim, m.v_head_dim), dtype=m.dtype,
        device=target.device, split=pick(rng, "wave", "balanced", "fixed", "stream_k", 1, 7), max_new_tokens=growth,
    )  # fmt: skip
    q = target.queries(m, int(q_lens.sum()), seed=seed)
    for _ in range(2):
        live = np.minimum(lens[-1] + rng.integers(0, growth + 1, B), lens[-1] + growth)
        live = np.where(live < q_lens, 0, live)
        plan.set_lengths(target.put(torch.from_numpy(live)))
        state = cf.attend(q, list(stores), plan, backend=target.backend)
        judge(target, state, q, [ptrs, parts, private, live], q_lens)


def place(target, contexts, page, layout, seed):
    """The contexts of one level in a pool with its table, or in a dense store."""
    if not page:
        return cf.DenseKV(*target.put(inputs.dense(contexts))), None
    store, table = inputs.paged(contexts, page, layout=layout, seed=seed)
    return target.put(store), PageTable.from_block_table(target.put(table), page)


def judge(target, state, q, batch, q_lens):
    """Request by request: a padded one (no private keys) sees what it shares, without a causal limit."""
    ptrs, parts, private, live = batch
    row = 0
    for b, (n, t) in enumerate(zip(q_lens.tolist(), live.tolist(), strict=True)):
        chain = [parts[i][int(np.searchsorted(p, b, side="right")) - 1] for i, p in enumerate(ptrs[:-1])]
        chain.append(tuple(x[:t] for x in private[b]))
        context = tuple(torch.cat([c[i] for c in chain]) for i in (0, 1))
        rows = slice(row, row + n)
        target.check(state[rows], q[rows], [context], q_lens=n, causal=t > 0)
        row += n
