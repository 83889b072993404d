"""What only a GPU can show: 64-bit offsets, large grids, graph replays, one compilation for all batch sizes."""

import pytest
import torch

import cascade_fd as cf
from cascade_fd import Level, PrefixTree
from cascade_fd.bench.cases import CASES
from cascade_fd.bench.workload import build
from cascade_fd.testing import inputs
from tests.contract.steps import REQUESTS, Server, batch


def test_page_offsets_beyond_int32(target):
    """A small pool with a huge page stride: page * stride exceeds 2^31 elements."""
    m = target.model(num_kv_heads=1, num_q_heads=2, head_dim=64, v_head_dim=64)
    contexts = inputs.contexts(m, [20, 37])
    store, table = inputs.paged(contexts, 16, extra=1)
    pages = store.num_rows
    stride = 2**31 // (pages - 2) // 64 * 64
    pools = []
    for part in (store.k, store.v):
        room = torch.zeros((pages - 1) * stride + 16 * 64, dtype=m.dtype, device="cuda")
        pool = room.as_strided((pages, 16, 1, 64), (stride, 64, 64, 1))
        pool.copy_(part)
        pools.append(pool)
    q = target.queries(m, 2)
    for num_splits in (1, 2):
        state = cf.decode(q, cf.PagedKV(*pools), block_table=table.cuda(), seq_lens=[20, 37], num_splits=num_splits)
        target.check(state, q, contexts)


@pytest.mark.parametrize("form", ["pair", "many", "ragged"])
def test_more_rows_than_a_grid_axis_holds(target, form):
    states = [target.state(70_001, 3, 40, seed=i) for i in range(3)]
    if form == "pair":
        target.check_merge(cf.merge(*states[:2]), states[:2])
    elif form == "many":
        target.check_merge(cf.merge(*states), states)
    else:
        flat = cf.AttentionState.stack(states)
        target.check_merge(cf.merge_ragged(flat, torch.arange(0, len(flat) + 1, 3, device="cuda")), states)


def test_many_requests(target):
    m = target.model(num_q_heads=2, num_kv_heads=2, head_dim=16, v_head_dim=16)
    k = torch.randn(40_000, 3, 2, 16, device="cuda", dtype=m.dtype)
    q = torch.randn(40_000, 2, 16, device="cuda", dtype=m.dtype)
    got = cf.decode(q, k, k)
    want = cf.decode(q, k, k, backend="reference")
    torch.testing.assert_close(got.o, want.o, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(got.lse, want.lse, rtol=1e-3, atol=1e-3)


def test_graph_replay_follows_the_lengths(target):
    """Captured at short lengths, replayed at long ones, with finished requests in between."""
    m = target.model()
    prefix, *full = inputs.contexts(m, [100, 400, 400, 400])
    k, v = target.put(inputs.dense(full))
    stores = [cf.DenseKV(*target.put(prefix)), cf.DenseKV(k, v)]
    tree = PrefixTree.from_levels([Level([0, 3], [100]), Level(range(4), [4, 9, 1])])
    plan = cf.plan(tree, num_q_heads=4, num_kv_heads=2, head_dim=32, dtype=m.dtype, device="cuda", split=5, max_new_tokens=391)
    q = target.queries(m, 3)
    cf.attend(q, stores, plan)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        state = cf.attend(q, stores, plan)
    for lens in ([4, 9, 1], [395, 400, 392], [0, 64, 392], [63, 65, 0]):
        plan.set_lengths(torch.tensor(lens, device="cuda"))
        graph.replay()
        contexts = inputs.join(prefix, [(a[:t], b[:t]) for (a, b), t in zip(full, lens, strict=True)])
        target.check(state, q, contexts)


def captured(server, plan, before=lambda: None):
    """A replay of ``before`` and one attention call; each time the output is poisoned first, so that nothing stale is read."""
    server.attend(plan)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        before()
        state = server.attend(plan)

    def replay():
        state.o.fill_(torch.nan)
        state.lse.fill_(torch.nan)
        graph.replay()
        return state

    return replay


def test_one_graph_serves_growing_requests_and_other_batches(target):
    """Captured once, with room: pages are appended, requests grow by hundreds of tokens, finish, and others come instead."""
    server = Server(target, page=16, width=64)
    options = {"share": "always", "max_new_tokens": 400}
    rows, lens = batch([(6, 20)], [5, 90, 33], room=0, page=16)
    plan = server.plan(rows, lens, **options).with_room(2.0)
    replay = captured(server, plan)
    live = torch.tensor(lens, dtype=torch.int32)
    server.check(replay(), lens)
    for step in (1, 150, 249):
        plan.advance(step)
        live += step
        server.append(live.tolist())
        server.check(replay(), live.tolist())
    with pytest.raises(ValueError, match="num_tokens: expected at most 0 more tokens"):
        plan.advance()
    live[[1, 4]] = 0
    plan.set_lengths(target.put(live))
    server.check(replay(), live.tolist())
    for groups, own in (([(2, 9), (3, 16)], [9, 3]), ([(6, 22)], [20]), ([(3, 5)], [50]), ([], [1]), ([(1, 0)] * 6, [300, 2])):
        rows, lens = batch(groups, own, room=0, page=16)  # fewer requests than were captured, other groups, or none
        plan.update_(server.tree(rows, lens))  # with the tiles that were captured
        lens += [0] * (REQUESTS - len(lens))
        server.check(replay(), lens)
        plan.advance(333)
        lens = [n + 333 if n else 0 for n in lens]
        server.append(lens)
        server.check(replay(), lens)
        server.check(replay(), lens)  # nothing is left over from the replay before


def test_a_graph_may_hold_the_growth_itself(target):
    server = Server(target, page=16, width=64)
    rows, lens = batch([(4, 3)], [5, 14], room=5, page=16)
    plan = server.plan(rows, lens, max_new_tokens=80)
    replay = captured(server, plan, plan.advance)
    for step in range(1, 41):
        state = replay()
        if step % 13 == 1:
            server.check(state, [n + step for n in lens] + [0, 0])
    assert plan.lens[:4].tolist() == [n + 40 for n in lens]


def test_one_compilation_serves_all_batches():
    """Batch size, lengths, rows, table width and split count are run-time values."""
    from cascade_fd.kernels.attend import attend_kernel
    from cascade_fd.kernels.merge import merge_rows_kernel

    def variants():
        return sum(len(c[0]) for kernel in (attend_kernel, merge_rows_kernel) for c in kernel.device_caches.values())

    def run(B, T, splits):
        k = torch.randn(B * T // 16, 16, 2, 64, device="cuda", dtype=torch.bfloat16)
        table = torch.randperm(B * T // 16, device="cuda").view(B, -1).int()
        q = torch.randn(B, 8, 64, device="cuda", dtype=torch.bfloat16)
        cf.decode(q, cf.PagedKV(k, k), block_table=table, seq_lens=[T] * B, num_splits=splits)

    run(3, 256, 3)
    before = variants()
    for B, T, splits in ((1, 304, 3), (2, 16 * 7, 4), (16, 16 * 9, 3), (17, 1024, 4)):
        run(B, T, splits)
    assert variants() == before


@pytest.mark.parametrize("name", ["d3", "v1", "c2", "t1"])
def test_benchmark_cases_are_right(name):
    assert build(CASES[name], torch.device("cuda"), torch.bfloat16).error() < 4e-3


def test_reference_backend_on_the_gpu(target):
    m = target.model()
    contexts = inputs.contexts(m, [30, 0, 65])
    store, table = inputs.paged(contexts, 4)
    q = target.queries(m, 3)
    state = cf.decode(q, target.put(store), block_table=table.cuda(), seq_lens=[30, 0, 65], num_splits=2, backend="reference")
    target.check(state, q, contexts)


def test_tensors_on_another_than_the_current_gpu(target):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    m = target.model()
    contexts = inputs.contexts(m, [30, 65])
    k, v = (x.to("cuda:1") for x in inputs.dense(contexts))
    q = inputs.queries(m, 2).to("cuda:1")
    state = cf.decode(q, k, v, seq_lens=[30, 65], num_splits=2)
    target.check(cf.merge(state, cf.AttentionState.empty(2, 4, 32, dtype=m.dtype, device="cuda:1")), q, contexts)


def test_no_synchronisation_in_plan_lengths_growth_update_or_attend(target):
    """With host lengths and a table on the GPU nothing waits for the GPU and nothing is copied back."""
    m = target.model()
    table = torch.randperm(64, device="cuda").view(4, 16).int()
    pool = torch.randn(64, 16, 2, 32, device="cuda", dtype=m.dtype)
    kv = cf.PagedKV(pool, pool)
    q = target.queries(m, 4)
    lens = torch.tensor([140, 100, 200, 0], device="cuda")

    def new_plan():
        tree = PrefixTree.from_levels(
            [Level([0, 4], [64]), Level(range(5), [70, 30, 100, 0])], table=cf.PageTable.from_block_table(table, 16)
        )
        return cf.plan(tree, num_q_heads=4, num_kv_heads=2, head_dim=32, dtype=m.dtype, device="cuda", max_new_tokens=40)

    def step(kept):
        plan = new_plan()
        plan.set_lengths(lens)
        kept.update_(plan)
        for some in (plan, kept):
            some.advance(3)
        plan.explain()
        return [cf.attend(q, kv, some) for some in (plan, kept, plan.with_room())]

    kept = new_plan().with_room()
    step(kept)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        states = step(kept)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert kept.lens[:4].tolist() == [143, 103, 203, 0]
    for state in states:
        assert state.lse[3].eq(-torch.inf).all()
        assert state.lse[:3].isfinite().all()
        torch.testing.assert_close(state.lse, states[0].lse, rtol=0, atol=0)
