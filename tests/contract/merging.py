"""The algebra's laws, and merges of every form against float64."""

import pytest
import torch

import cascade_fd as cf
from cascade_fd import AttentionState


def empty_like(s):
    return AttentionState.empty(s.num_rows, s.num_heads, s.head_dim, dtype=s.dtype, device=s.device, base=s.base)


@pytest.mark.parametrize(("heads", "dim"), [(1, 128), (3, 40), (5, 64), (2, 192)])
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_merge_of_some(target, heads, dim, count):
    states = [target.state(6, heads, dim, seed=i, base="e2"[i % 2]) for i in range(count)]
    target.check_merge(cf.merge(*states, backend=target.backend), states)
    target.check_merge(cf.merge(*states, backend=target.backend, base="2"), states)


def test_empty_is_the_identity(target):
    a = target.state(4, 3, 40)
    for merged in (
        cf.merge(a, empty_like(a), backend=target.backend),
        cf.merge(empty_like(a), a, backend=target.backend),
        cf.merge(empty_like(a), a, empty_like(a), backend=target.backend),
    ):
        assert torch.equal(merged.o, a.o)
        torch.testing.assert_close(merged.lse, a.lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_merge_of_empties_is_empty_whatever_they_carry(target, count):
    a = target.state(4, 3, 40)
    poisoned = AttentionState(torch.full_like(a.o, torch.nan), torch.full_like(a.lse, -torch.inf), "e")
    state = cf.merge(*[poisoned] * count, backend=target.backend)
    assert (state.o == 0).all()
    assert (state.lse == -torch.inf).all()
    with_one = cf.merge(poisoned, a, poisoned, backend=target.backend)
    assert torch.equal(with_one.o, a.o)


def test_merge_commutes_and_associates(target):
    a, b, c = (target.state(4, 3, 40, seed=i) for i in range(3))
    merge = lambda *s: cf.merge(*s, backend=target.backend)  # noqa: E731
    for state in (merge(a, b, c), merge(c, a, b)):
        target.check_merge(state, [a, b, c])
    if target.dtype == torch.float32:  # nested merges round twice in 16 bits
        for state in (merge(merge(a, b), c), merge(a, merge(b, c))):
            target.check_merge(state, [a, b, c])


def test_shifting_all_scores_shifts_the_lse_only(target):
    a, b = target.state(4, 3, 40), target.state(4, 3, 40, seed=1)
    shifted = [AttentionState(s.o, s.lse + 64.0, "e") for s in (a, b)]
    plain, moved = cf.merge(a, b, backend=target.backend), cf.merge(*shifted, backend=target.backend)
    torch.testing.assert_close(moved.lse - 64.0, plain.lse, rtol=0, atol=5e-5)
    torch.testing.assert_close(moved.o, plain.o, rtol=1e-2 if target.dtype != torch.float32 else 1e-4, atol=1e-4)


def test_large_lse_does_not_overflow(target):
    """exp(lse) overflows float32 above 88.7; +-1e4 must merge too."""
    for lse in ([95.0, 97.5, 91.2], [1e4, 1e4 - 1, -1e4], [-1e4, -1e4 - 2, -2e4]):
        outputs = [target.state(2, 1, 16, seed=i).o for i in range(3)]
        for base in "e2":
            states = [
                AttentionState(o, torch.full((2, 1), x, device=o.device), base) for o, x in zip(outputs, lse, strict=True)
            ]
            for some in (states, states[:2]):
                target.check_merge(cf.merge(*some, base=base, backend=target.backend), some)


def test_ragged_set(target):
    counts = [0, 1, 2, 0, 33, 5, 70]  # more than one step of any tile, and rows of nothing
    all_states = target.state(sum(counts), 3, 40)
    indptr = torch.tensor([0, *counts]).cumsum(0)
    for offsets in (indptr.tolist(), target.put(indptr), target.put(indptr.int())):
        for hint in (1, 32, 128):
            got = cf.merge_ragged(all_states, offsets, max_states=hint, backend=target.backend)
            for row, n in enumerate(counts):
                part = [all_states[i : i + 1] for i in range(int(indptr[row]), int(indptr[row]) + n)]
                target.check_merge(got[row : row + 1], part or [empty_like(got[row : row + 1])])


@pytest.mark.parametrize("dim", [128, 64])
def test_rows_do_not_feel_how_many_are_merged(target, dim):
    """Many rows of few states share programs, by heads; each row keeps its bits."""
    heads, rows = 32, 70  # more rows x heads than one head per program is for
    states = target.state(2 * rows, heads, dim)
    many = cf.merge_ragged(states, list(range(0, 2 * rows + 1, 2)), max_states=2, backend=target.backend)
    few = cf.merge_ragged(states[:6], [0, 2, 4, 6], max_states=2, backend=target.backend)
    target.check_merge(many[:1], [states[:1], states[1:2]])
    assert torch.equal(many[:3].o, few.o)
    assert torch.equal(many[:3].lse, few.lse)


def test_stack_is_the_order_that_ragged_merges_read(target):
    states = [target.state(3, 2, 16, seed=i) for i in range(4)]
    stacked = AttentionState.stack(states)
    target.check_merge(cf.merge_ragged(stacked, [0, 4, 8, 12], backend=target.backend), states)


def test_in_place_with_and_without_mask(target):
    a, b = target.state(5, 3, 40, base="2"), target.state(5, 3, 40, seed=1)
    before = AttentionState(a.o.clone(), a.lse.clone(), "2")
    mask = target.put(torch.tensor([True, False, True, False, True]))
    result = cf.merge_(a, b, mask=mask, backend=target.backend)
    assert result is a
    assert torch.equal(a.o[1::2], before.o[1::2])
    assert torch.equal(a.lse[1::2], before.lse[1::2])
    target.check_merge(a[0::2], [before[0::2], b[0::2]])
    a = AttentionState(before.o.clone(), before.lse.clone(), "2")
    target.check_merge(cf.merge_(a, b, backend=target.backend), [before, b])


@pytest.mark.parametrize("count", [1, 2, 3])
def test_sink_counts_once_and_has_no_value(target, count):
    states = [target.state(4, 3, 40, seed=i) for i in range(count)]
    states[0].lse[1] = -torch.inf  # the first state empty: the sink still counts
    sink = target.put(torch.tensor([0.5, -3.0, 8.0]))
    target.check_merge(cf.merge(*states, sink=sink, backend=target.backend), states, sink)
    nothing = cf.merge(*[empty_like(states[0])] * count, sink=sink, backend=target.backend)
    assert (nothing.o == 0).all()
    torch.testing.assert_close(nothing.lse, sink.expand(4, 3), rtol=1e-6, atol=1e-6)


def test_strided_and_transposed_lse(target):
    a, b = target.state(5, 3, 40), target.state(5, 3, 40, seed=1)
    turned = AttentionState(a.o, a.lse.T.contiguous().T, "e")  # stored [H, T]
    packed = torch.zeros(5, 7, 40, dtype=a.dtype, device=a.device)
    packed[:, 2:5] = b.o
    sliced = AttentionState(packed[:, 2:5], b.lse, "e")
    lse_out = torch.full((3, 5), torch.nan, device=a.device)
    got = cf.merge(turned, sliced, lse_out=lse_out.T, backend=target.backend)
    assert got.lse.data_ptr() == lse_out.data_ptr()
    target.check_merge(got, [a, b])
    target.check_merge(cf.merge_ragged(turned, [0, 2, 5], backend=target.backend)[:1], [a[:1], a[1:2]])


def test_output_of_another_dtype(target):
    a, b = target.state(5, 3, 40), target.state(5, 3, 40, seed=1)
    out = torch.empty(5, 3, 40, device=a.device, dtype=torch.float32)
    for states in ([a, b], [a, b, b]):
        target.check_merge(cf.merge(*states, out=out, backend=target.backend), states)


def test_wrong_base_is_visible_and_the_right_one_right(target):
    """512 and 4096 keys, one lse in log2: declared it is exact, declared wrongly the weights are far off."""
    a, b = target.state(4, 3, 40), target.state(4, 3, 40, seed=1)
    lse_a, lse_b = (torch.full_like(a.lse, torch.log(torch.tensor(n)).item()) for n in (512.0, 4096.0))
    a, b = AttentionState(a.o, lse_a, "e"), AttentionState(b.o, lse_b, "e")
    right = cf.merge(a.to_base("2"), b, backend=target.backend)
    target.check_merge(right, [a, b])
    wrong = cf.merge(AttentionState(a.o, a.to_base("2").lse, "e"), b, backend=target.backend)
    assert (wrong.o.float() - right.o.float()).abs().max() > 0.05


def test_no_rows(target):
    a = target.state(0, 3, 40)
    assert cf.merge(a, a, backend=target.backend).num_rows == 0
    assert cf.merge_ragged(a, [0], backend=target.backend).num_rows == 0
    assert (cf.merge_ragged(a, [0, 0], backend=target.backend).lse == -torch.inf).all()
