"""The narrow kernel for Hopper alone: decode and short drafts, on every kind of store, and proof that it ran."""

import pytest
import torch

import cascade_fd as cf
from cascade_fd import Level, PageTable, PrefixTree
from cascade_fd.backends import triton as backend
from cascade_fd.testing import inputs
from tests.contract.cascade import make_plan
from tests.contract.target import Target
from tests.gpu.test_hopper import pytestmark as pytestmark
from tests.gpu.test_hopper import with_kernels

LENS = [0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 97, 200, 333]


@pytest.fixture
def target(request):
    return Target("triton", "cuda", getattr(request, "param", torch.bfloat16))


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    """Small batches, too, are worth the kernel; every launch must be taken."""
    with_kernels(monkeypatch, "narrow")
    monkeypatch.setattr("cascade_fd.planning.planner.SKEWED", 1e9)
    ran = []

    def hopper(*arguments):
        ran.append(arguments[3].tile.kernel)
        assert real(*arguments)
        return True

    real = backend.launch_hopper
    monkeypatch.setattr(backend, "launch_hopper", hopper)
    yield ran
    assert ran
    assert set(ran) == {"narrow"}


def run(target, m, lens=LENS, page=16, layout="NHD", q_len=1, split="balanced", copies=20):
    """Requests of some lengths, each several times, so that there are enough of them for the narrow tile."""
    lens = [length for length in lens if length >= q_len] * copies
    contexts = inputs.contexts(m, lens)
    q = target.queries(m, len(lens) * q_len)
    if page:
        store, table = inputs.paged(contexts, page, layout=layout)
        store, table = target.put(store), PageTable.from_block_table(target.put(table), page)
    else:
        store, table = cf.DenseKV(*target.put(inputs.dense(contexts))), None
    tree = PrefixTree.from_levels([Level(range(len(lens) + 1), lens)], q_lens=q_len, table=table)
    plan = make_plan(target, tree, m, split=split)
    target.check(cf.attend(q, store, plan), q, contexts, q_lens=q_len)
    return plan


def model(target, group=4, dim=128, v_dim=None):
    return target.model(num_q_heads=2 * group, num_kv_heads=2, head_dim=dim, v_head_dim=v_dim or dim)


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"], indirect=True)
@pytest.mark.parametrize("page", [16, 32, 48, 64, 0])
def test_pages(target, page):
    run(target, model(target), page=page)
    run(target, model(target), page=page, layout="HND" if page else "NHD", split=3)


@pytest.mark.parametrize(("group", "dim", "v_dim"), [(1, 128, 128), (7, 64, 64), (8, 128, 64), (2, 64, 128)])
def test_groups_and_head_dims(target, group, dim, v_dim):
    run(target, model(target, group, dim, v_dim))


@pytest.mark.parametrize(("group", "q_len"), [(4, 2), (1, 8), (2, 3)])
def test_causal_rows(target, group, q_len):
    for split in (1, 4, "balanced"):
        run(target, model(target, group), q_len=q_len, split=split)


def test_graph_replay_while_lengths_grow(target):
    """With finished requests, and lengths on both sides of tile and page borders."""
    m = model(target)
    B = 150
    full = inputs.contexts(m, [200] * B)
    store, table = inputs.paged(full, 16)
    store = target.put(store)
    tree = PrefixTree.from_levels([Level(range(B + 1), [20] * B)], table=PageTable.from_block_table(target.put(table), 16))
    plan = make_plan(target, tree, m, split=2, max_new_tokens=180)
    q = target.queries(m, B)
    cf.attend(q, store, plan)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        state = cf.attend(q, store, plan)
    for step in (0, 1, 12, 77, 180):
        lens = [0 if i % 7 == step % 7 else 1 + (20 + step) * (i + 1) // B for i in range(B)]
        plan.set_lengths(target.put(torch.tensor(lens)))
        state.o.fill_(torch.nan)
        graph.replay()
        target.check(state, q, [(k[:t], v[:t]) for (k, v), t in zip(full, lens, strict=True)])


def test_sixty_launches_are_bitwise_the_same(target):
    m = inputs.Model(num_q_heads=32, num_kv_heads=8, head_dim=128, v_head_dim=128, dtype=torch.bfloat16)
    B, S = 512, 400
    g = torch.Generator("cuda").manual_seed(0)
    ids = torch.randperm(B * S // 16, generator=g, device="cuda").int().view(B, -1)
    k, v = (torch.randn(B * S // 16, 16, 8, 128, generator=g, device="cuda", dtype=m.dtype) for _ in range(2))
    q = torch.randn(B, 32, 128, generator=g, device="cuda", dtype=m.dtype)
    tree = PrefixTree.from_levels([Level(range(B + 1), [S] * B)], table=PageTable.from_block_table(ids, 16))
    plan = make_plan(target, tree, m, split=2)
    states = [cf.attend(q, cf.PagedKV(k, v), plan) for _ in range(60)]
    assert all(torch.equal(x.o, states[0].o) and torch.equal(x.lse, states[0].lse) for x in states)
