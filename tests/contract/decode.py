"""Decode: one row per request, every length, split, layout and head shape."""

from dataclasses import replace

import pytest
import torch

import cascade_fd as cf
from cascade_fd import Level, PageTable, PrefixTree
from cascade_fd.hardware import H200
from cascade_fd.testing import inputs
from tests.contract.cascade import make_plan

BLOCK_N = 32  # of the CPU tiles; 64 on GPUs, so the lengths below straddle both


def paged_case(target, lens, page_size=16, layout="NHD", gain=1.0, **model):
    m = target.model(**model)
    contexts = inputs.contexts(m, lens)
    store, table = inputs.paged(contexts, page_size, layout=layout)
    return target.queries(m, len(lens), gain=gain), contexts, target.put(store), target.put(table)


@pytest.mark.parametrize("num_splits", [None, 1, 2, 3, 1000])
def test_every_split_count_on_every_edge_length(target, num_splits):
    lens = [1, BLOCK_N - 1, BLOCK_N, BLOCK_N + 1, 0, 2 * BLOCK_N - 1, 2 * BLOCK_N, 2 * BLOCK_N + 1, 97]
    q, contexts, store, table = paged_case(target, lens)
    state = cf.decode(q, store, block_table=table, seq_lens=lens, num_splits=num_splits, backend=target.backend)
    target.check(state, q, contexts)
    assert (state.o[4] == 0).all()
    assert (state.lse[4] == -torch.inf).all()


@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_lengths_around_split_boundaries(target, offset):
    # 3 splits of 160 tokens are 64 tokens each (pages of 16): 2 * 64 + offset ends a split one short, exactly, one over.
    lens = [64 + offset, 128 + offset, 160]
    q, contexts, store, table = paged_case(target, lens)
    seq_lens = target.put(torch.tensor(lens))  # on a GPU: lengths only the device knows
    target.check(cf.decode(q, store, block_table=table, seq_lens=seq_lens, num_splits=3, backend=target.backend), q, contexts)


@pytest.mark.parametrize("page_size", [1, 2, 16, 24, 32, 64, 128])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_page_sizes_and_layouts(target, page_size, layout):
    lens = [page_size - 1, page_size, page_size + 1, 70]
    q, contexts, store, table = paged_case(target, lens, page_size, layout)
    for num_splits in (1, 2):
        options = {"num_splits": num_splits, "backend": target.backend}
        target.check(cf.decode(q, store, block_table=table, seq_lens=lens, **options), q, contexts)


@pytest.mark.parametrize(("Hq", "Hkv"), [(3, 3), (9, 3), (8, 2), (14, 2), (8, 1), (70, 2)])
def test_group_sizes(target, Hq, Hkv):
    lens = [5, 40]
    q, contexts, store, table = paged_case(target, lens, num_q_heads=Hq, num_kv_heads=Hkv)
    for num_splits in (1, 2):
        options = {"num_splits": num_splits, "backend": target.backend}
        target.check(cf.decode(q, store, block_table=table, seq_lens=lens, **options), q, contexts)


@pytest.mark.parametrize(
    "dims", [(16, 16), (40, 24), (64, 64), (72, 72), (80, 80), (96, 96), (112, 112), (192, 128), (256, 256)]
)
def test_head_dims(target, dims):
    lens = [35, 3]
    q, contexts, store, table = paged_case(target, lens, head_dim=dims[0], v_head_dim=dims[1])
    for num_splits in (1, 2):
        options = {"num_splits": num_splits, "backend": target.backend}
        target.check(cf.decode(q, store, block_table=table, seq_lens=lens, **options), q, contexts)


@pytest.mark.parametrize("gain", [40.0, 1e4])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_large_logits(target, gain, num_splits):
    lens = [70, 1, 0]
    q, contexts, store, table = paged_case(target, lens, gain=gain)
    state = cf.decode(q, store, block_table=table, seq_lens=lens, num_splits=num_splits, backend=target.backend)
    target.check(state, q, contexts)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_dense(target, layout):
    m = target.model(num_q_heads=6)
    lens = [0, 1, 33, 64]
    contexts = inputs.contexts(m, lens)
    k, v = target.put(inputs.dense(contexts))
    if layout == "HND":
        k, v = k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
    q = target.queries(m, 4)
    for num_splits in (1, 2):
        options = {"num_splits": num_splits, "kv_layout": layout, "backend": target.backend}
        target.check(cf.decode(q, k, v, seq_lens=lens, **options), q, contexts)


def test_dense_takes_all_keys_by_default(target):
    m = target.model()
    contexts = inputs.contexts(m, [20, 20])
    q = target.queries(m, 2)
    target.check(cf.decode(q, *target.put(inputs.dense(contexts)), backend=target.backend), q, contexts)


def test_csr_indices_and_token_map(target):
    lens = [5, 0, 37, 16]
    q, contexts, store, table = paged_case(target, lens, 4)
    pages = [-(-t // 4) for t in lens]
    indices = torch.cat([table[b, :n] for b, n in enumerate(pages)])
    indptr = torch.tensor([0, *pages]).cumsum(0)
    csr = cf.PageTable.from_csr(indices, indptr, 4)
    target.check(cf.decode(q, store, block_table=csr, seq_lens=lens, backend=target.backend), q, contexts)

    q, contexts, store, table = paged_case(target, lens, 1)
    slots = [6, 1, 4, 0]  # requests live in these rows of a larger map
    token_map = table.new_full((8, 64), -1)  # int32, -1 where nothing may be read
    token_map[slots, : table.shape[1]] = table
    by_slot = cf.PageTable.from_token_map(token_map, slots)
    target.check(cf.decode(q, store, block_table=by_slot, seq_lens=lens, num_splits=2, backend=target.backend), q, contexts)


def test_int64_page_ids_and_table_views(target):
    lens = [20, 9]
    q, contexts, store, table = paged_case(target, lens, 4)
    wide = torch.full((2, 40), -1, dtype=torch.int64, device=table.device)
    wide[:, 3 : 3 + table.shape[1]] = table
    view = wide[:, 3 : 3 + table.shape[1]]
    target.check(cf.decode(q, store, block_table=view, seq_lens=lens, backend=target.backend), q, contexts)


def test_interleaved_pool_and_packed_qkv(target):
    """K and V as halves of one pool, q as a slice of a packed projection: strides honoured, nothing copied."""
    lens = [21, 40]
    m = target.model(num_q_heads=6)
    contexts = inputs.contexts(m, lens)
    store, table = inputs.paged(contexts, 16)
    pool = target.put(torch.stack([store.k, store.v], 1))
    packed = target.queries(target.model(num_q_heads=10), 2)
    q = packed[:, 2:8]
    both = cf.PagedKV(pool[:, 0], pool[:, 1])
    for num_splits in (1, 2):
        options = {"num_splits": num_splits, "backend": target.backend}
        target.check(cf.decode(q, both, block_table=target.put(table), seq_lens=lens, **options), q, contexts)


@pytest.mark.parametrize("num_splits", [1, 2])
def test_out_buffers_are_written_with_their_strides(target, num_splits):
    lens = [21, 40]
    q, contexts, store, table = paged_case(target, lens)
    T, Hq, D = q.shape
    out = torch.full((T, 2 * Hq, D), torch.nan, dtype=q.dtype, device=q.device)
    lse = torch.full((Hq, T + 3), torch.nan, device=q.device)
    state = cf.decode(
        q, store, block_table=table, seq_lens=lens, num_splits=num_splits, backend=target.backend,
        out=out[:, ::2], lse_out=lse.T[:T],
    )  # fmt: skip
    assert state.o.data_ptr() == out.data_ptr()
    assert state.lse.data_ptr() == lse.data_ptr()
    target.check(state, q, contexts)
    assert out[:, 1::2].isnan().all()
    assert lse[:, T:].isnan().all()


def moved(x, how):
    """The same values in new memory: contiguous, one element off 16 bytes, between other heads, or rows of odd length."""
    if how == "contiguous":
        return x.clone()
    if how == "one element off":
        return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)
    if how == "between others":
        return x.new_full((x.shape[0], 2 * x.shape[1], x.shape[2]), torch.nan)[:, ::2].copy_(x)
    return x.new_full((*x.shape[:2], x.shape[2] + 3), torch.nan)[..., : x.shape[2]].copy_(x)


def test_calls_in_turn_with_other_memory(target):
    """A plan is used over and over; what one call's tensors look like must not leak into the next call."""
    lens = [70, 9]
    q, contexts, store, table = paged_case(target, lens)
    m = target.model()
    shape = {"num_q_heads": m.num_q_heads, "num_kv_heads": m.num_kv_heads, "head_dim": (m.head_dim, m.v_head_dim)}
    tree = cf.PrefixTree.from_levels([cf.Level(range(3), lens)], table=cf.PageTable.from_block_table(table, 16))
    plan = cf.plan(tree, **shape, dtype=m.dtype, device=target.device, split=2)
    ways = ["contiguous", "one element off", "between others", "rows of odd length"]
    for turn in range(3):
        for i, way in enumerate(ways):
            mine = moved(q * (turn + 1), way)
            out = moved(torch.full_like(q, torch.nan), ways[(i + turn) % 4])
            lse = torch.full((q.shape[1], 2), torch.nan, device=q.device).T
            state = cf.attend(mine, store, plan, out=out, lse_out=lse, backend=target.backend)
            assert state.o is out and state.lse is lse
            target.check(state, mine, contexts)
            target.check(cf.attend(mine, store, plan, base="2", backend=target.backend).to_base("e"), mine, contexts)


def test_one_lse_through_every_path(target):
    lens = [64, 50]
    q, contexts, store, table = paged_case(target, lens)
    common = {"block_table": table, "seq_lens": lens, "backend": target.backend}
    states = [cf.decode(q, store, num_splits=n, **common) for n in (1, 2, 4)]
    states.append(cf.verify(q[:, None], store, **common))
    states.append(cf.decode(q, store, base="2", **common).to_base("e"))
    k, v = target.put(inputs.dense([contexts[0]]))
    prefix, rest = (k[0, :16], v[0, :16]), (k[:, 16:], v[:, 16:])
    cascade = cf.cascade_decode(q[:1], prefix, rest, backend=target.backend)
    for state in states:
        assert state.base == "e"
        target.check(state, q, contexts)
        torch.testing.assert_close(state.lse, states[0].lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cascade.lse, states[0].lse[:1], rtol=1e-5, atol=1e-5)


def test_halves_merged_outside_with_their_bases(target):
    m = target.model()
    contexts = inputs.contexts(m, [48, 48])
    k, v = target.put(inputs.dense(contexts))
    q = target.queries(m, 2)
    a = cf.decode(q, k[:, :20], v[:, :20], backend=target.backend, base="2")
    b = cf.decode(q, k[:, 20:], v[:, 20:], backend=target.backend)
    assert (a.base, b.base) == ("2", "e")
    target.check(cf.merge(a, b, backend=target.backend), q, contexts)


def test_sm_scale(target):
    q, contexts, store, table = paged_case(target, [33])
    state = cf.decode(q, store, block_table=table, seq_lens=[33], sm_scale=0.7, backend=target.backend)
    target.check(state, q, contexts, sm_scale=0.7)


def test_no_requests(target):
    m = target.model()
    q = target.queries(m, 0)
    k = target.put(torch.zeros(0, 5, m.num_kv_heads, m.head_dim, dtype=m.dtype))
    state = cf.decode(q, k, k, backend=target.backend)
    assert state.o.shape == (0, m.num_q_heads, m.head_dim)
    assert state.lse.shape == (0, m.num_q_heads)


def test_extreme_valid_rows_do_not_come_out_empty(target):
    """All logits below -5e4: a finite stand-in for -inf would swallow the row."""
    m = target.model(num_q_heads=2, num_kv_heads=1, head_dim=16, v_head_dim=16)
    k = torch.ones(1, 40, 1, 16, dtype=m.dtype) * 100
    v = torch.randn(1, 40, 1, 16, generator=inputs.generator(3)).to(m.dtype)
    q = target.put(torch.full((1, 2, 16), -64.0, dtype=m.dtype))
    state = cf.decode(q, target.put(k), target.put(v), sm_scale=1.0, num_splits=2, backend=target.backend)
    assert (state.lse < -5e4).all()
    target.check(state, q, [(k[0], v[0])], sm_scale=1.0)


@pytest.mark.parametrize("lens", [[700] * 20, [600 - 8 * (i % 11) for i in range(22)]], ids=["equal", "unequal"])
def test_several_waves_of_which_the_last_requests_are_cut(target, lens):
    """On three SMs: some rows are written directly, others merged, by the same launch."""
    m = target.model(num_q_heads=8, num_kv_heads=2, head_dim=64, v_head_dim=64)
    contexts = inputs.contexts(m, lens)
    store, table = inputs.paged(contexts, 16)
    tree = PrefixTree.from_levels([Level(range(len(lens) + 1), lens)], table=PageTable.from_block_table(target.put(table), 16))
    plan = make_plan(target, tree, m, hardware=replace(H200, num_sms=3))
    narrow = [launch.tile.kernel for launch in plan.launches] == ["narrow"]
    assert narrow == (target.dtype.itemsize == 2)
    assert not narrow or 0 < len(plan.merge) < len(lens)
    q = target.queries(m, len(lens))
    target.check(cf.attend(q, target.put(store), plan, backend=target.backend), q, contexts)
