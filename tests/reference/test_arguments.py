"""Wrong arguments are refused by name, before anything is written; nothing is guessed."""

import math

import pytest
import torch

import cascade_fd as cf
from cascade_fd.testing.inputs import Model, contexts, dense, paged, queries

MODEL = Model()
ROWS = contexts(MODEL, [9, 4])
Q = queries(MODEL, 2)
KV, TABLE = paged(ROWS, 4)
K, V = dense(ROWS)
TREE = cf.PrefixTree.from_levels([cf.Level([0, 1, 2], [5, 4])])


def plan(tree=TREE, **options):
    sizes = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 32, "dtype": torch.float32, "device": "cpu"}
    return cf.plan(tree, **{**sizes, **options})


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: cf.decode(Q, KV, block_table=TABLE), ValueError, "seq_lens: expected the number of keys of each request"),
        (lambda: cf.verify(Q[:, None], KV, block_table=TABLE), ValueError, "seq_lens: expected the number of keys"),
        (
            lambda: cf.cascade_decode(Q, (K[0], V[0]), KV, suffix_table=TABLE),
            ValueError,
            "suffix_lens: expected the number of keys",
        ),
        (
            lambda: cf.cascade_decode(Q, KV, (K, V), prefix_table=TABLE, prefix_len=4),
            ValueError,
            r"prefix_table: expected one row \[max_pages\], got 2 rows",
        ),
        (lambda: cf.decode(Q, (K, V), V), ValueError, r"v: expected None beside \(k, v\)"),
        (lambda: cf.decode(Q, K, V, num_splits=0), ValueError, "num_splits: expected an integer of at least 1, got 0"),
        (lambda: cf.decode(Q, K, V, num_splits="wave"), ValueError, "num_splits: expected an integer"),
        (lambda: cf.decode(Q, K, V, out=Q), ValueError, "out: expected memory of its own, got q itself"),
        (
            lambda: cf.decode(Q, K, V, out=torch.zeros(1, 4, 32).expand(2, 4, 32)),
            ValueError,
            "out: expected memory of its own for every element",
        ),
        (
            lambda: cf.decode(Q, K, V, lse_out=torch.zeros(2, 1).expand(2, 4)),
            ValueError,
            "lse_out: expected memory of its own for every element",
        ),
        (lambda: plan("tree"), TypeError, "tree: expected a PrefixTree, got str"),
        (lambda: plan(num_q_heads=4.0), TypeError, "num_q_heads: expected an integer"),
        (lambda: plan(head_dim=(32, 32, 32)), TypeError, r"head_dim: expected an integer or \(D, Dv\)"),
        (lambda: plan(head_dim=[32, 32]), TypeError, r"head_dim: expected an integer or \(D, Dv\)"),
        (lambda: plan(share="sometimes"), ValueError, "share: expected one of 'auto', 'always', 'never', got 'sometimes'"),
        (lambda: plan(share=None), ValueError, "share: expected one of 'auto', 'always', 'never', got None"),
        (lambda: plan(split="streams"), ValueError, "split: expected 'balanced', 'wave', 'fixed', 'stream_k' or a number of"),
        (lambda: plan(split=0), ValueError, "split: expected .* or a number of splits of at least 1, got 0"),
        (lambda: plan(split=True), ValueError, "split: expected .* or a number of splits of at least 1, got True"),
        (lambda: plan(max_new_tokens=-1), ValueError, r"max_new_tokens: expected an integer in \[0, 2147483647\], got -1"),
        (lambda: plan(max_new_tokens=2.0), ValueError, "max_new_tokens: expected an integer in"),
        (
            lambda: cf.PrefixTree.from_levels([cf.Level([0, 2], [7])], q_lens=2),
            ValueError,
            "levels: expected one private node per request in the last level",
        ),
    ],
)
def test_refused_by_name(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_a_one_row_prefix_table_may_have_its_first_axis():
    want = cf.cascade_decode(Q, KV, (K[:, :1], V[:, :1]), prefix_table=TABLE[0], prefix_len=9)
    assert torch.equal(cf.cascade_decode(Q, KV, (K[:, :1], V[:, :1]), prefix_table=TABLE[:1], prefix_len=9).o, want.o)


def test_a_plan_whose_live_lengths_are_all_zero():
    """Every item is clipped to nothing: the rows are empty, and no stale work is read."""
    made = plan(max_new_tokens=2, split=2)
    made.set_lengths(torch.tensor([0, 0]))
    state = cf.attend(Q, cf.DenseKV(K, V), made)
    assert (state.o == 0).all() and (state.lse == -math.inf).all()
