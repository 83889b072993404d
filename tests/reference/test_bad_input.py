"""Every kind of bad input: an error that names the argument, what was expected and what came; and nothing written."""

import numpy as np
import pytest
import torch

import cascade_fd as cf
from cascade_fd import AttentionState
from cascade_fd.testing.inputs import Model, contexts, dense, paged, queries

MODEL = Model()
ROWS = contexts(MODEL, [9, 4])
Q = queries(MODEL, 2)
KV, TABLE = paged(ROWS, 4)
K, V = dense(ROWS)
LENS = [9, 4]


def bad_table(value):
    table = TABLE.clone()
    table[1, 0] = value
    return table


def last_axis_strided(x):
    return x.repeat_interleave(2, -1)[..., ::2]


CALLS = {
    "rank of q": (lambda **o: cf.decode(Q[0], K, V, **o), ValueError, r"q: expected shape \[B, Hq, D\], got \[4, 32\]"),
    "rank of k": (lambda **o: cf.decode(Q, K[0, 0], V, **o), ValueError, r"k: expected shape \[B, T, Hkv, D\], got \[2, 32\]"),
    "v beside k": (
        lambda **o: cf.decode(Q, K, V[:, :5], **o),
        ValueError,
        r"v: expected shape \[B=2, T=9, Hkv=2, Dv\], got \[2, 5, 2, 32\]",
    ),
    "requests": (lambda **o: cf.decode(Q[:1], K, V, **o), ValueError, r"k: expected one row per request \(1\), got 2"),
    "group": (
        lambda **o: cf.decode(queries(Model(num_q_heads=5), 2), K, V, **o),
        ValueError,
        r"num_q_heads: expected a multiple of the number of KV heads \(Hkv=2\), got Hq=5",
    ),
    "head dim": (
        lambda **o: cf.decode(Q[..., :16].contiguous(), K, V, **o),
        ValueError,
        r"q: expected shape \[T=2, Hq=4, D=32\], got \[2, 4, 16\]",
    ),
    "dtype of q": (lambda **o: cf.decode(Q.half(), K, V, **o), TypeError, "q, k: expected one dtype, got q torch.float16"),
    "dtypes of k and v": (lambda **o: cf.decode(Q, K, V.half(), **o), TypeError, "k, v: expected one dtype"),
    "integer cache": (lambda **o: cf.decode(Q, K.int(), V.int(), **o), TypeError, "k: expected dtype float32 or float16"),
    "device": (lambda **o: cf.decode(Q, K.to("meta"), V.to("meta"), **o), ValueError, "q, k: expected one device, got q cpu"),
    "page id above": (
        lambda **o: cf.decode(Q, KV, block_table=bad_table(99), seq_lens=LENS, **o),
        ValueError,
        r"block_table: expected page ids in \[0, 7\), got 0..99|block_table: expected page ids in \[0, 7\), got \d+..99",
    ),
    "page id below": (
        lambda **o: cf.decode(Q, KV, block_table=bad_table(-1), seq_lens=LENS, **o),
        ValueError,
        r"block_table: expected page ids in \[0, 7\), got -1..",
    ),
    "float page ids": (
        lambda **o: cf.decode(Q, KV, block_table=TABLE.float(), seq_lens=LENS, **o),
        TypeError,
        "block_table: expected dtype int32 or int64, got float32",
    ),
    "length beyond the table": (
        lambda **o: cf.decode(Q, KV, block_table=TABLE, seq_lens=[13, 4], **o),
        ValueError,
        r"seq_lens: expected lengths in \[0, 12\], got 13 for request 0",
    ),
    "negative length": (lambda **o: cf.decode(Q, K, V, seq_lens=[-1, 4], **o), ValueError, "got -1 for request 0"),
    "number of lengths": (
        lambda **o: cf.decode(Q, K, V, seq_lens=[1], **o),
        ValueError,
        r"seq_lens: expected one length per request \(2\), got 1",
    ),
    "float lengths": (lambda **o: cf.decode(Q, K, V, seq_lens=[1.0, 2.0], **o), TypeError, "seq_lens: expected a list of int"),
    "q longer than its cache": (
        lambda **o: cf.verify(queries(MODEL, 10).view(2, 5, 4, 32), K, V, seq_lens=LENS, **o),
        ValueError,
        r"q_lens: expected at most as many query rows as private keys, got 5 rows for 4 keys \(request 1\)",
    ),
    "paged prefix of verify": (
        lambda **o: cf.verify(Q[:, None], K, V, prefix=KV, **o),
        ValueError,
        r"prefix: expected \(k, v\) or a DenseKV, got a PagedKV",
    ),
    "last axis of q": (
        lambda **o: cf.decode(last_axis_strided(Q), K, V, **o),
        ValueError,
        r"q: expected a contiguous last axis \(stride 1\), got strides",
    ),
    "last axis of k": (
        lambda **o: cf.decode(Q, last_axis_strided(K), V, **o),
        ValueError,
        "k: expected a contiguous last axis",
    ),
    "layout name": (
        lambda **o: cf.decode(Q, K, V, kv_layout="BSHD", **o),
        ValueError,
        "kv_layout: expected one of 'NHD', 'HND', got 'BSHD'",
    ),
    "base name": (lambda **o: cf.decode(Q, K, V, base="10", **o), ValueError, "base: expected one of .*, got '10'"),
    "backend name": (lambda **o: cf.decode(Q, K, V, backend="cuda", **o), ValueError, "backend: expected one of 'reference'"),
    "sm_scale": (lambda **o: cf.decode(Q, K, V, sm_scale=float("nan"), **o), ValueError, "sm_scale: expected a finite number"),
    "unknown option": (lambda **o: cf.decode(Q, K, V, causal=True, **o), TypeError, r"expected options .*, got \['causal'\]"),
    "table beside dense": (
        lambda **o: cf.decode(Q, K, V, block_table=TABLE, **o),
        ValueError,
        "block_table: expected None with dense keys and values",
    ),
    "no table": (lambda **o: cf.decode(Q, KV, seq_lens=LENS, **o), ValueError, "block_table: expected page ids for a PagedKV"),
    "page size of the table": (
        lambda **o: cf.decode(Q, KV, block_table=cf.PageTable.from_block_table(TABLE, 8), seq_lens=LENS, **o),
        ValueError,
        "kv: expected pages of 8 at level 0, got pages of 4",
    ),
    "gradient": (lambda **o: cf.decode(Q.clone().requires_grad_(), K, V, **o), cf.UnsupportedError, "q requires grad"),
}


@pytest.mark.parametrize("name", CALLS)
def test_refused_and_nothing_written(name):
    call, error, text = CALLS[name]
    out = torch.full((2, 4, 32), 7.0)
    lse = torch.full((2, 4), 7.0)
    if name == "q longer than its cache":
        out, lse = out.repeat(5, 1, 1), lse.repeat(5, 1)
    with pytest.raises(error, match=text):
        call(out=out, lse_out=lse)
    assert (out == 7).all()
    assert (lse == 7).all()


@pytest.mark.parametrize(
    ("out", "error", "text"),
    [
        ({"out": torch.zeros(2, 4, 16)}, ValueError, r"out: expected shape \[T=2, Hq=4, Dv=32\], got \[2, 4, 16\]"),
        ({"out": torch.zeros(2, 4, 32).half()}, TypeError, "out: expected dtype float32, got float16"),
        ({"lse_out": torch.zeros(4, 2)}, ValueError, r"lse_out: expected shape \[T=2, Hq=4\], got \[4, 2\]"),
        ({"lse_out": torch.zeros(2, 4).double()}, TypeError, "lse_out: expected dtype float32, got float64"),
    ],
)
def test_wrong_buffers(out, error, text):
    with pytest.raises(error, match=text):
        cf.decode(Q, K, V, **out)


OUT, LSE = torch.zeros(2, 4, 8), torch.zeros(2, 4)
STATE = AttentionState(OUT, LSE, "e")


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: AttentionState(OUT, LSE), TypeError, "base: expected 'e' .* got nothing"),
        (lambda: AttentionState(OUT, LSE, "10"), ValueError, "base: expected one of 'e', '2', got '10'"),
        (lambda: AttentionState(OUT, LSE.int(), "e"), TypeError, "lse: expected dtype float32, got int32"),
        (lambda: AttentionState(OUT, LSE.T, "e"), ValueError, r"lse: expected shape \[T=2, Hq=4\], got \[4, 2\]"),
        (lambda: AttentionState(OUT[0], LSE, "e"), ValueError, r"o: expected shape \[T, Hq, Dv\], got \[4, 8\]"),
        (
            lambda: AttentionState(OUT.long(), LSE, "e"),
            TypeError,
            "o: expected dtype float32 or float16 or bfloat16, got int64",
        ),
        (lambda: AttentionState(last_axis_strided(OUT), LSE, "e"), ValueError, "o: expected a contiguous last axis"),
        (lambda: AttentionState(OUT, LSE.to("meta"), "e"), ValueError, "o, lse: expected one device"),
        (lambda: AttentionState("o", LSE, "e"), TypeError, "o: expected a torch.Tensor, got str"),
        (lambda: STATE.to_base("ln"), ValueError, "base: expected one of"),
        (lambda: STATE[0], TypeError, "rows: expected a slice, a list or a tensor, got int"),
        (lambda: AttentionState.cat([]), ValueError, "states: expected at least one state to cat"),
        (lambda: AttentionState.stack([STATE, STATE[:1]]), ValueError, r"states: expected one shape \[T, Hq, Dv\]"),
        (
            lambda: cf.merge(STATE, (OUT, LSE)),
            TypeError,
            r"states\[1\]: expected an AttentionState, got a bare \(o, lse\) pair",
        ),
        (lambda: cf.merge(), TypeError, "states: expected at least one AttentionState, got none"),
        (lambda: cf.merge(STATE, STATE[:1]), ValueError, r"states\[1\].o: expected shape \[T=2, Hq=4, Dv=8\]"),
        (lambda: cf.merge(STATE, AttentionState(OUT.half(), LSE, "e")), TypeError, "expected one dtype"),
        (lambda: cf.merge(STATE, sink=torch.zeros(3)), ValueError, r"sink: expected shape \[Hq=4\], got \[3\]"),
        (lambda: cf.merge(STATE, sink=torch.zeros(8)[::2]), ValueError, r"sink: expected a contiguous last axis"),
        (
            lambda: cf.merge_(STATE, STATE, mask=torch.ones(2 * STATE.num_rows, dtype=torch.bool)[::2]),
            ValueError,
            r"mask: expected a contiguous last axis",
        ),
        (lambda: cf.merge_(STATE, STATE, mask=torch.ones(2)), TypeError, "mask: expected dtype bool, got float32"),
        (
            lambda: cf.merge_ragged(STATE, [0, 3]),
            ValueError,
            "indptr: expected offsets that start at 0, never fall and end at 2",
        ),
        (lambda: cf.merge_ragged(STATE, [0, 2, 1, 2]), ValueError, "indptr: expected offsets"),
        (lambda: cf.merge_ragged(STATE, [0, 2], max_states=0), ValueError, "max_states: expected an integer of at least 1"),
    ],
)
def test_states(call, error, text):
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: cf.PrefixTree.from_levels([]), "levels: expected at least one level"),
        (
            lambda: cf.PrefixTree.from_levels([cf.Level([0, 2], [8]), cf.Level([0, 1], [8])]),
            r"levels\[1\].indptr: expected it to end at 2 requests",
        ),
        (
            lambda: cf.PrefixTree.from_levels([cf.Level([0, 1, 3], [8, 8]), cf.Level([0, 2, 3], [8, 8])]),
            r"levels\[1\].indptr: expected every node inside one node of levels\[0\]",
        ),
        (lambda: cf.PrefixTree.from_levels([cf.Level([0, 2], [8, 8])]), r"levels\[0\].lens: expected 1 lengths"),
        (lambda: cf.PrefixTree.from_levels([cf.Level([0, 1], [-1])]), r"levels\[0\].lens: expected 1 lengths of at least 0"),
        (lambda: cf.PrefixTree.from_levels([cf.Level([0, 1], [8])], q_lens=-1), "q_lens: expected an integer of at least 0"),
        (
            lambda: cf.PrefixTree.from_levels([cf.Level([0, 1], [33])], table=cf.PageTable.from_block_table([[1, 2]], 16)),
            r"levels\[0\].lens: expected lengths that fit the table, got 33 tokens for node 0 .* has pages for 32",
        ),
        (lambda: cf.PageTable.from_block_table([[1, 2]], 0), "page_size: expected an integer of at least 1, got 0"),
        (lambda: cf.PageTable.from_csr([1, 2], [0, 1], 4), "indptr: expected offsets .* end at 2"),
        (lambda: cf.PageTable.from_token_map([[1, 2]], [1]), r"rows: expected row numbers in \[0, 1\), got 1..1"),
    ],
)
def test_trees_and_tables(call, text):
    with pytest.raises(ValueError, match=text):
        call()


def test_growth_beyond_the_table_is_refused_when_planned():
    table = cf.PageTable.from_block_table([[1, 2]], 16)
    tree = cf.PrefixTree.from_levels([cf.Level([0, 1], [30])], table=table)
    sizes = {"num_q_heads": 1, "num_kv_heads": 1, "head_dim": 16, "device": "cpu"}
    cf.plan(tree, max_new_tokens=2, **sizes)
    with pytest.raises(ValueError, match="max_new_tokens: expected lengths that fit the table, got 33 tokens"):
        cf.plan(tree, max_new_tokens=3, **sizes)


def test_a_table_edited_after_planning_is_still_checked_on_the_cpu():
    table = TABLE.clone()
    tree = cf.PrefixTree.from_levels([cf.Level([0, 1, 2], LENS)], table=cf.PageTable.from_block_table(table, 4))
    made = cf.plan(tree, num_q_heads=4, num_kv_heads=2, head_dim=32, dtype=torch.float32, device="cpu")
    table[0, 1] = -1
    with pytest.raises(ValueError, match=r"block_table: expected page ids in \[0, 7\), got -1"):
        cf.attend(Q, KV, made)


AGAIN = {
    "rank": ({"q": Q[0]}, ValueError, r"q: expected shape \[T=2, Hq=4, D=32\], got \[4, 32\]"),
    "no tensor": ({"q": None}, TypeError, "q: expected a torch.Tensor, got NoneType"),
    "rows": ({"q": Q[:1]}, ValueError, r"q: expected shape \[T=2, Hq=4, D=32\], got \[1, 4, 32\]"),
    "dtype": ({"q": Q.half()}, TypeError, "q, k: expected one dtype, got q torch.float16"),
    "dtype of q and cache": (
        {"q": Q.half(), "kv": cf.DenseKV(K.half(), V.half())},
        TypeError,
        "q: expected dtype float32, got float16",
    ),
    "device": ({"q": Q.to("meta")}, ValueError, "q, k: expected one device, got q meta"),
    "device of q and cache": (
        {"q": Q.to("meta"), "kv": cf.DenseKV(K.to("meta"), V.to("meta"))},
        ValueError,
        "plan: expected a plan for meta, got one for cpu",
    ),
    "last axis": ({"q": last_axis_strided(Q)}, ValueError, "q: expected a contiguous last axis"),
    "gradient of q": ({"q": Q.clone().requires_grad_()}, cf.UnsupportedError, "q requires grad"),
    "gradient of k": ({"kv": cf.DenseKV(K.clone().requires_grad_(), V)}, cf.UnsupportedError, "k requires grad"),
    "store": ({"kv": KV}, ValueError, "kv: expected a dense store at level 0, got pages of 4"),
    "short store": ({"kv": cf.DenseKV(K[:, :8], V[:, :8])}, ValueError, "kv: expected at least 2 rows of 9 tokens at level 0"),
    "heads of the store": ({"kv": cf.DenseKV(K[:, :, :1], V[:, :, :1])}, ValueError, r"kv: expected Hkv=2 and .*got Hkv=1"),
    "stores": ({"kv": [cf.DenseKV(K, V)] * 2}, ValueError, r"kv: expected one store, or one per level \(1\), got 2"),
    "no store": ({"kv": (K, V)}, TypeError, "kv: expected a PagedKV or DenseKV, or one per level, got Tensor"),
    "out": ({"out": torch.zeros(2, 4, 16)}, ValueError, r"out: expected shape \[T=2, Hq=4, Dv=32\], got \[2, 4, 16\]"),
    "dtype of out": ({"out": torch.zeros(2, 4, 32).half()}, TypeError, "out: expected dtype float32, got float16"),
    "device of out": ({"out": torch.zeros(2, 4, 32, device="meta")}, ValueError, "q, out: expected one device"),
    "expanded out": ({"out": torch.zeros(2, 1, 32).expand(2, 4, 32)}, ValueError, "out: expected memory of its own for every"),
    "last axis of out": ({"out": last_axis_strided(Q)}, ValueError, "out: expected a contiguous last axis"),
    "gradient of out": ({"out": torch.zeros(2, 4, 32, requires_grad=True)}, cf.UnsupportedError, "out requires grad"),
    "lse": ({"lse_out": torch.zeros(4, 2)}, ValueError, r"lse_out: expected shape \[T=2, Hq=4\], got \[4, 2\]"),
    "dtype of lse": ({"lse_out": torch.zeros(2, 4).double()}, TypeError, "lse_out: expected dtype float32, got float64"),
    "option": ({"causal": True}, TypeError, r"attend: expected options .*, got \['causal'\]"),
    "base": ({"base": "10"}, ValueError, "base: expected one of .*, got '10'"),
    "backend": ({"backend": ["triton"]}, ValueError, r"backend: expected one of .*, got \['triton'\]"),
}


@pytest.mark.parametrize("name", AGAIN)
def test_a_plan_that_was_used_before_refuses_as_a_new_one_does(name):
    """Checks that passed once are not taken for granted in the next call."""
    changes, error, text = AGAIN[name]
    tree = cf.PrefixTree.from_levels([cf.Level([0, 1, 2], LENS)])
    made = cf.plan(tree, num_q_heads=4, num_kv_heads=2, head_dim=32, dtype=torch.float32, device="cpu")
    out, lse = torch.empty(2, 4, 32), torch.empty(2, 4)
    good = {"q": Q, "kv": cf.DenseKV(K, V), "plan": made, "out": out, "lse_out": lse}
    for _ in range(2):
        cf.attend(**good)
        want = out.clone(), lse.clone()
        with pytest.raises(error, match=text):
            cf.attend(**{**good, **changes})
        assert torch.equal(out, want[0]) and torch.equal(lse, want[1])


def test_triton_on_the_cpu_says_what_to_do():
    with pytest.raises(cf.UnsupportedError, match="backend='triton' is not supported:\n  - tensors are on the CPU"):
        cf.decode(Q, K, V, backend="triton")


def test_batch_invariance_needs_declared_sharing_and_fixed_splits():
    sizes = {"num_q_heads": 1, "num_kv_heads": 1, "head_dim": 16, "device": "cpu", "batch_invariant": True}
    found = cf.PrefixTree.from_block_tables([[1, 2], [1, 3]], [20, 20], 16)
    with pytest.raises(ValueError, match="batch_invariant: expected a tree from levels"):
        cf.plan(found, **sizes)
    with pytest.raises(ValueError, match="split: expected 'fixed'"):
        cf.plan(cf.PrefixTree.from_levels([cf.Level([0, 1], [9])]), split=3, **sizes)


def test_a_store_that_wide_tiles_cannot_read_is_refused():
    """Rows of 68 elements: fine for few rows, refused where many share a prefix; never silently wrong."""
    from cascade_fd.hardware import PRESETS

    wide = torch.empty(1, 100, 2, 68, dtype=torch.float16, device="meta")[..., :64]
    store = cf.DenseKV(wide, wide)
    assert not store.aligned
    tree = cf.PrefixTree.from_levels([cf.Level([0, 40], [100])], causal=False)
    sizes = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 64, "dtype": torch.float16, "device": "meta"}
    made = cf.plan(tree, hardware=PRESETS["sm_90"], **sizes)
    q = torch.empty(40, 8, 64, dtype=torch.float16, device="meta")
    with pytest.raises(
        cf.UnsupportedError, match=r"start at multiples of 16 elements if 128 packed rows.*strides \[13600, 136, 68\]"
    ):
        cf.attend(q, store, made, backend="triton")


RAGGED = {
    "lists": (lambda: cf.PrefixTree.from_block_tables([[1, 2], [3]], [8, 4], 4), "block_tables"),
    "table": (lambda: cf.PageTable.from_block_table([[1, 2], [3]], 4), "block_table"),
    "objects": (lambda: cf.PageTable.from_block_table(np.array([[1, 2], [3]], object), 4), "block_table"),
    "lengths": (lambda: cf.PrefixTree.from_block_tables([[1, 2], [3, 4]], [[8], [8, 4]], 4), "seq_lens"),
}


@pytest.mark.parametrize("name", RAGGED)
def test_ragged_lists_are_refused_by_name(name):
    call, argument = RAGGED[name]
    with pytest.raises((ValueError, TypeError), match=f"^{argument}: expected"):
        call()


def test_a_table_of_no_rows_may_be_wide():
    assert cf.PrefixTree.from_block_tables(np.zeros((0, 2), np.int32), [], 4).num_requests == 0
