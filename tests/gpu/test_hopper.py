"""The kernels for Hopper: the results of the portable one, on every kind of launch that they take, and proof that they ran."""

import time
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import cascade_fd as cf
from cascade_fd import Level, PageTable, PrefixTree, hardware
from cascade_fd.backends import triton as backend
from cascade_fd.testing import inputs
from tests.contract.cascade import make_plan
from tests.contract.target import Target

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper GPU"
)


@pytest.fixture
def target(request):
    """bfloat16, unless a test asks for another dtype: each variant takes ten seconds to compile."""
    return Target("triton", "cuda", getattr(request, "param", torch.bfloat16))


both = pytest.mark.parametrize("target", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"], indirect=True)


def with_kernels(monkeypatch, *kernels):
    """A device on which sharing, and these kernels, always pay."""
    hw = hardware.hardware_of("cuda")
    costs = hw.costs.only(*kernels)
    tiles = tuple(replace(t, step=1e-3, start=0.0, warm=1e-3, cold=1e-3) if t.kernel in kernels else t for t in costs.tiles)
    hw = replace(hw, costs=replace(costs, launch=0.0, follow=0.0, merge=0.0, state=0.0, tiles=tiles))
    monkeypatch.setattr(hardware, "_of_cuda", lambda index: hw)


@pytest.fixture(autouse=True, params=["hopper", "beside narrow", "single narrow"])
def kernels(request, monkeypatch):
    """Which kernels always pay: the wide one alone on its SMs, beside the narrow one, or with one warp group."""
    with_kernels(monkeypatch, *request.param.split())
    return request.param


def fitting(kernels, wide, single):
    """What makes launches of 128 rows, or, for one warp group, of 64."""
    return single if "single" in kernels else wide


@pytest.fixture
def ran(monkeypatch):
    """Of every launch for a wide tile since the last look, whether a kernel for Hopper took it; narrow ones must be taken."""
    seen = []

    def hopper(q, store, plan, launch, *rest):
        done = real(q, store, plan, launch, *rest)
        if launch.tile.kernel == "narrow":
            assert done
        else:
            seen.append(done)
        return done

    real = backend.launch_hopper
    monkeypatch.setattr(backend, "launch_hopper", hopper)

    def look():
        found, seen[:] = seen[:], []
        return found

    return look


def model(target, group, dim=128, **changes):
    return target.model(num_q_heads=2 * group, num_kv_heads=2, head_dim=dim, v_head_dim=dim, **changes)


def requests(group):
    """Enough for more than one tile of 128 packed rows, the last of them ragged."""
    return 150 // group


def over_a_prefix(target, m, prefix_len, page, layout="NHD", split=None, growth=None):
    """One tile's worth of requests and a bit over a prefix; a pool with NaN wherever nobody's tokens are.

    ``growth``: factors of the prefix's keys, by token.
    """
    B = requests(m.num_q_heads // 2)
    lens = [(i * 5) % 23 for i in range(B)]
    prefix, *suffixes = inputs.contexts(m, [prefix_len, *lens])
    if growth:
        prefix = (prefix[0] * growth(torch.arange(prefix_len))[:, None, None]).to(m.dtype), prefix[1]
    q = target.queries(m, B)
    options = {"num_splits": split, "backend": "triton"}
    if page:
        store, table = inputs.paged([prefix, *suffixes], page, layout=layout)
        store, table = target.put(store), target.put(table)
        tables = {"prefix_table": table[0], "prefix_len": prefix_len, "suffix_table": table[1:]}
        state = cf.cascade_decode(q, store, store, suffix_lens=lens, **tables, **options)
    else:
        room = [tuple(torch.cat([x, torch.full_like(x[:1], torch.nan)]) for x in prefix)]
        k, v = target.put(inputs.dense(suffixes))
        plan = make_plan(target, PrefixTree.from_levels([Level([0, B], [prefix_len]), Level(range(B + 1), lens)]), m)
        state = cf.attend(q, [cf.DenseKV(*target.put(inputs.dense(room))), cf.DenseKV(k, v)], plan)
    target.check(state, q, inputs.join(prefix, suffixes))


@both
def test_smallest(target, ran):
    """One tile of keys: run this first."""
    over_a_prefix(target, model(target, 4), 128, 16, split=1)
    assert ran() == [True]


@pytest.mark.parametrize("page", [16, 64, 48, 256, 0])
@pytest.mark.parametrize("prefix_len", [1, "page-1", "page+1", 700])
def test_pages_and_lengths(target, ran, page, prefix_len):
    length = (page or 128) + int(prefix_len.removeprefix("page")) if isinstance(prefix_len, str) else prefix_len
    over_a_prefix(target, model(target, 4), length, page)
    assert ran() == [True]


GROWTH = {  # of keys, and so of scores, by token
    "slowly": lambda token: 1 + token / 150,
    "in jumps": lambda token: 1 + 4 * (token // 200),
    "never": lambda token: 8 / (1 + token / 100),
}


@both
@pytest.mark.parametrize("growth", list(GROWTH))
def test_scores_that_grow(target, ran, growth):
    """Weights are relative to a score that is raised now and then, in some rows of a warp, and outputs are scaled only then."""
    for splits in (1, 2):
        over_a_prefix(target, model(target, 4), 900, 16, split=splits, growth=GROWTH[growth])
    assert ran() == [True, True]


@pytest.mark.parametrize(("group", "dim"), [(1, 128), (3, 64), (8, 128), (16, 64)])
def test_groups_and_head_dims(target, ran, group, dim):
    over_a_prefix(target, model(target, group, dim), 333, 16, split=2)
    assert ran() == [True]


def test_heads_before_tokens(target, ran):
    over_a_prefix(target, model(target, 4), 333, 16, layout="HND")
    assert ran() == [True]


def test_different_head_dims(target, ran):
    m = target.model(num_q_heads=8, num_kv_heads=2, head_dim=128, v_head_dim=64)
    over_a_prefix(target, m, 200, 16)
    over_a_prefix(target, target.model(num_q_heads=8, num_kv_heads=2, head_dim=64, v_head_dim=128), 200, 0)
    assert ran() == [True, True]


@pytest.mark.parametrize("kernels", ["hopper"], indirect=True)
@pytest.mark.parametrize(
    ("group", "dims", "page"), [(2, (256, 256), 16), (16, (256, 256), 0), (4, (256, 64), 48), (4, (128, 256), 64)]
)
def test_head_dims_of_256(target, ran, group, dims, page):
    """Tiles of 64 keys, for the wide kernel alone; after it a portable launch."""
    m = target.model(num_q_heads=2 * group, num_kv_heads=2, head_dim=dims[0], v_head_dim=dims[1])
    for length, split in ((100, None), (333, 2), (640, 1)):
        over_a_prefix(target, m, length, page, split=split)
    assert ran() == [True] * 3


def test_slices_of_an_interleaved_pool(target, ran):
    """Keys and values of one pool, and queries that are a slice of wider rows."""
    m = model(target, 4)
    B = requests(4)
    prefix, *suffixes = inputs.contexts(m, [200, *[7] * B])
    store, table = inputs.paged([prefix, *suffixes], 16)
    pool = target.put(torch.stack([store.k, store.v], 1))
    store = cf.PagedKV(pool[:, 0], pool[:, 1])
    table = target.put(table)
    q = target.put(torch.cat([inputs.queries(m, B)] * 2, 2))[:, :, : m.head_dim]
    tables = {"prefix_table": table[0], "prefix_len": 200, "suffix_table": table[1:], "suffix_lens": [7] * B}
    target.check(cf.cascade_decode(q, store, store, **tables), q, inputs.join(prefix, suffixes))
    assert ran() == [True]


@pytest.mark.parametrize("split", ["balanced", "stream_k", 3])
@pytest.mark.parametrize("page", [8, 16])
def test_nodes_that_start_inside_a_page(target, ran, kernels, page, split):
    """Whole contexts in each request's pages; a second shared node starts at token 21. Pages of 8 are not for TMA."""
    m = model(target, 4)
    B = fitting(kernels, 40, 16)
    root, branch, *leaves = inputs.contexts(m, [21, 300, *[3, 0, 40, 9] * (B // 4)])
    contexts = [tuple(torch.cat([root[i], branch[i], leaf[i]]) for i in (0, 1)) for leaf in leaves]
    levels = [Level([0, B], [21]), Level([0, B], [300]), Level(range(B + 1), [3, 0, 40, 9] * (B // 4))]
    store, table = inputs.paged(contexts, page)
    tree = PrefixTree.from_levels(levels, table=PageTable.from_block_table(target.put(table), page))
    plan = make_plan(target, tree, m, split=split, share="always")
    q = target.queries(m, B)
    target.check(cf.attend(q, target.put(store), plan), q, contexts)
    assert ran() == ([True] if page % 16 == 0 else [])
    plan.set_lengths(target.put(torch.tensor([0 if b % 3 == 0 else len(k) for b, (k, _) in enumerate(contexts)])))
    contexts = [tuple(x[:0] for x in c) if b % 3 == 0 else c for b, c in enumerate(contexts)]  # finished requests
    target.check(cf.attend(q, target.put(store), plan), q, contexts)


@pytest.mark.parametrize("lens", [(100, 357, 64), (64, 65, 130)])
def test_causal_rows_in_a_wide_tile(target, ran, kernels, lens):
    """Query rows for several tiles of packed rows, or one, and several tiles of keys that only some rows see."""
    m, rows = model(target, 4), fitting(kernels, 64, 16)
    contexts = inputs.contexts(m, lens)
    store, table = inputs.paged(contexts, 16)
    q = target.queries(m, rows * len(lens))
    tree = PrefixTree.from_levels(
        [Level(range(len(lens) + 1), lens)], q_lens=rows, table=PageTable.from_block_table(target.put(table), 16)
    )
    for split in (1, 2, "balanced"):
        state = cf.attend(q, target.put(store), make_plan(target, tree, m, split=split))
        target.check(state, q, contexts, q_lens=rows)
    assert ran() == [True] * 3


def test_graph_replay_while_lengths_grow(target, ran, kernels):
    """Private nodes of many rows by 4 heads: captured at short lengths, replayed at others, with a finished request between."""
    m, rows = model(target, 4), fitting(kernels, 40, 13)
    full = inputs.contexts(m, [500, 500, 500])
    store, table = inputs.paged(full, 16)
    store = target.put(store)
    tree = PrefixTree.from_levels(
        [Level(range(4), [40, 53, 100])], q_lens=rows, table=PageTable.from_block_table(target.put(table), 16)
    )
    plan = make_plan(target, tree, m, split=3, max_new_tokens=400)
    q = target.queries(m, 3 * rows)
    cf.attend(q, store, plan)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        state = cf.attend(q, store, plan)
    assert ran() == [True, True]
    for lens in ([40, 53, 100], [127, 128, 129], [420, 0, 256], [41, 433, 500]):
        plan.set_lengths(target.put(torch.tensor(lens)))
        state.o.fill_(torch.nan)
        graph.replay()
        target.check(state, q, [(k[:t], v[:t]) for (k, v), t in zip(full, lens, strict=True)], q_lens=rows)


def test_negative_scales_and_the_switch_use_the_portable_kernel(target, ran, kernels, monkeypatch):
    m, B = model(target, 4), fitting(kernels, 40, 16)
    prefix = inputs.contexts(m, [300])[0]
    q = target.queries(m, B)
    plan = make_plan(target, PrefixTree.from_levels([Level([0, B], [300])]), m)
    store = cf.DenseKV(*target.put(prefix))
    target.check(cf.attend(q, store, plan, sm_scale=-0.1), q, [prefix] * B, sm_scale=-0.1)
    assert ran() == []
    on = cf.attend(q, store, plan)
    assert ran() == [True]
    monkeypatch.setenv("CASCADE_FD_HOPPER", "0")
    off = cf.attend(q, store, plan)
    assert ran() == []
    for state in (on, off):
        target.check(state, q, [prefix] * B)


@pytest.mark.parametrize(("B", "P", "S", "q_len"), [(1024, 2048, 128, 1), (64, 4096, 48, 1), (64, 2048, 96, 4)])
def test_sixty_launches_are_bitwise_the_same(ran, kernels, B, P, S, q_len):
    """A stage that is refilled too early shows as a rare difference long before it shows as an error."""
    B, P = fitting(kernels, (B, P), (16 // q_len, 4 * P))
    m = inputs.Model(num_q_heads=32, num_kv_heads=8, head_dim=128, v_head_dim=128, dtype=torch.bfloat16)
    page = 16
    g = torch.Generator("cuda").manual_seed(0)
    pages = P // page + B * S // page
    ids = torch.randperm(pages, generator=g, device="cuda").int()
    prefix, suffix = ids[: P // page], ids[P // page :].view(B, -1)
    k, v = (torch.randn(pages, page, 8, 128, generator=g, device="cuda", dtype=m.dtype) for _ in range(2))
    q = torch.randn(B * q_len, 32, 128, generator=g, device="cuda", dtype=m.dtype)
    table = PageTable.from_block_table(torch.cat([prefix.expand(B, -1), suffix], 1), page)
    tree = PrefixTree.from_levels([Level([0, B], [P]), Level(range(B + 1), [S] * B)], q_lens=q_len, table=table)
    plan = make_plan(Target("triton", "cuda", m.dtype), tree, m, share="always")
    kv = cf.PagedKV(k, v)
    states = [cf.attend(q, kv, plan) for _ in range(60)]
    assert ran() == [True] * 60
    for a, b in pairwise(states):
        assert torch.equal(a.o, b.o)
        assert torch.equal(a.lse, b.lse)


@pytest.mark.parametrize("items", ["none live", "one", "one per program", "fifty per program"])
def test_no_launch_hangs(target, ran, kernels, items):
    """Items: none with keys, one, an SM each, fifty an SM; programs take them in turn, or, of one warp group, each its own."""
    heads = fitting(kernels, 32, 16)
    m = target.model(num_q_heads=heads, num_kv_heads=1, head_dim=64, v_head_dim=64)
    slots = torch.cuda.get_device_properties(0).multi_processor_count
    nodes = {"none live": 3, "one": 1, "one per program": slots, "fifty per program": 50 * slots}[items]
    length = 0 if items == "none live" else 40
    table = PageTable.from_block_table(torch.arange(3, device="cuda", dtype=torch.int32)[None].repeat(nodes, 1), 16)
    tree = PrefixTree.from_levels([Level(range(nodes + 1), [40] * nodes)], q_lens=4, table=table)
    plan = make_plan(target, tree, m, split=1)
    if not length:
        plan.set_lengths(torch.zeros(nodes, device="cuda", dtype=torch.int32))
    context = inputs.contexts(m, [48])[0]
    store = target.put(cf.PagedKV(*(x.view(3, 16, 1, 64) for x in context)))
    q = target.queries(m, 4 * nodes)
    state = cf.attend(q, store, plan)
    done, deadline = torch.cuda.Event(), time.monotonic() + 30
    done.record()
    while not done.query():  # a synchronisation would hang with it
        assert time.monotonic() < deadline, "the launch hangs"
    assert ran() == [True]
    few = slice(max(0, 4 * nodes - 12), 4 * nodes)
    target.check(state[few], q[few], [tuple(x[:length] for x in context)] * (few.stop // 4 - few.start // 4), q_lens=4)


def test_capacity_plans_follow_a_batch(target, ran, kernels):
    """A plan with room, replayed for another tree: items beyond its own compute nothing, on every kernel."""
    m, B = model(target, 4), fitting(kernels, 40, 16)
    lens = [300, *[30, 0, 61, 17] * (B // 4)]
    prefix, *suffixes = inputs.contexts(m, lens)
    store, table = inputs.paged([prefix, *suffixes], 16)
    store, table = target.put(store), target.put(table)

    def tree_of(tokens):
        prefixes = Level([0, B], [tokens], PageTable.from_block_table(table[:1], 16))
        return PrefixTree.from_levels([prefixes, Level(range(B + 1), lens[1:], PageTable.from_block_table(table[1:], 16))])

    plan = make_plan(target, tree_of(300), m, share="always").with_room(3)
    q = target.queries(m, B)
    target.check(cf.attend(q, store, plan), q, inputs.join(prefix, suffixes))
    plan.update_(tree_of(47))
    target.check(cf.attend(q, store, plan), q, inputs.join(tuple(x[:47] for x in prefix), suffixes))
    assert ran() == [True, True]
