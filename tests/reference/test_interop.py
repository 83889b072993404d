"""Foreign states in and out: base, layout, empty rows; live against flex_attention and against plain torch."""

import math

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

import cascade_fd as cf
from cascade_fd import interop
from cascade_fd.testing.inputs import Model, contexts, dense, generator, queries
from cascade_fd.testing.numerics import max_error
from cascade_fd.testing.oracle import attention

B, Q, Hkv, G, D = 3, 2, 2, 4, 24
SIZES = {"T": B * Q, "B": B, "Q": Q, "Hq": Hkv * G, "Hkv": Hkv, "G": G, "Dv": D}
INF = math.inf

# (importer, exporter, what the exporter needs): one entry per layout of the table.
CASES = {
    "flashinfer": (interop.from_flashinfer, interop.to_flashinfer, {}),
    "flash_attention_2/0": (interop.from_flash_attention_2, interop.to_flash_attention_2, {}),
    "flash_attention_2/1": (interop.from_flash_attention_2, interop.to_flash_attention_2, {"batch": B}),
    "flash_attention_3/0": (interop.from_flash_attention_3, interop.to_flash_attention_3, {}),
    "flash_attention_3/1": (interop.from_flash_attention_3, interop.to_flash_attention_3, {"batch": B}),
    "flex_attention": (interop.from_flex_attention, interop.to_flex_attention, {"batch": B}),
    "xformers/0": (interop.from_xformers, interop.to_xformers, {"batch": B}),
    "xformers/1": (interop.from_xformers, interop.to_xformers, {"batch": B, "num_kv_heads": Hkv}),
    "vllm": (interop.from_vllm, interop.to_vllm, {}),
    "sglang": (interop.from_sglang, interop.to_sglang, {}),
}


def layout_of(case):
    name, _, number = case.partition("/")
    library = interop.LIBRARIES[name]
    return library, library.layouts[int(number or 0)]


def foreign(case, seed=0):
    """Contiguous random ``o`` and ``lse`` in the library's layout."""
    _, layout = layout_of(case)
    g = generator(seed)
    o, lse = (torch.randn([SIZES[a] for a in axes.split()], generator=g) for axes in (layout.o, layout.lse))
    return o, lse


def random_state(seed=0, base="e", empty=()):
    g = generator(seed)
    o, lse = torch.randn(B * Q, Hkv * G, D, generator=g), torch.randn(B * Q, Hkv * G, generator=g)
    for row, head in empty:
        o[row, head], lse[row, head] = 0, -INF
    return cf.AttentionState(o, lse, base)


def by_hand(o, lse, layout):
    """Rows and heads one by one, straight from the axis names: row b * Q + i, head h * G + g."""
    rows, heads = B * Q, Hkv * G
    out_o, out_lse = torch.empty(rows, heads, D), torch.empty(rows, heads)
    for t in range(rows):
        for h in range(heads):
            at = {"T": t, "B": t // Q, "Q": t % Q, "Hq": h, "Hkv": h // G, "G": h % G, "Dv": slice(None)}
            out_o[t, h] = o[tuple(at[a] for a in layout.o.split())]
            out_lse[t, h] = lse[tuple(at[a] for a in layout.lse.split())]
    return out_o, out_lse


def test_every_layout_of_the_table_has_a_case():
    assert {c.partition("/")[0] for c in CASES} == set(interop.LIBRARIES)
    assert len(CASES) == sum(len(lib.layouts) for lib in interop.LIBRARIES.values())


@pytest.mark.parametrize("case", CASES)
def test_import_puts_every_row_and_head_in_its_place(case):
    library, layout = layout_of(case)
    o, lse = foreign(case)
    state = CASES[case][0](o, lse)
    want_o, want_lse = by_hand(o, lse, layout)
    assert state.base == library.base
    assert torch.equal(state.o, want_o) and torch.equal(state.lse, want_lse)


@pytest.mark.parametrize("case", CASES)
def test_there_and_back(case):
    read, write, sizes = CASES[case]
    o, lse = foreign(case)
    back = write(read(o, lse), **sizes)
    assert torch.equal(back[0], o) and torch.equal(back[1], lse)
    assert back[0].is_contiguous() and back[1].is_contiguous()


@pytest.mark.parametrize("case", CASES)
def test_a_state_goes_out_and_comes_back(case):
    read, write, sizes = CASES[case]
    state = random_state(base="e", empty=[(0, 0), (3, 5)])
    back = read(*write(state, **sizes))
    assert torch.equal(back.o, state.o)
    assert torch.allclose(back.to_base("e").lse, state.lse, rtol=1e-6, atol=1e-6)
    assert back.lse[0, 0] == -INF and back.lse[3, 5] == -INF


@pytest.mark.parametrize("case", CASES)
def test_strides_are_honoured(case):
    o, lse = foreign(case)
    names = list(range(lse.dim()))[::-1]
    spread = torch.full((*lse.shape, 3), math.nan)
    spread[..., 1] = lse
    wide = torch.full((*o.shape[:-1], 2 * D), math.nan)
    wide[..., :D] = o
    plain = CASES[case][0](o, lse)
    for strided in (spread[..., 1], lse.permute(names).contiguous().permute(names)):
        got = CASES[case][0](wide[..., :D], strided)
        assert torch.equal(got.o, plain.o) and torch.equal(got.lse, plain.lse)
    assert torch.equal(CASES[case][0](o.transpose(0, 1).contiguous().transpose(0, 1), lse).o, plain.o)


@pytest.mark.parametrize("case", CASES)
def test_export_of_a_strided_state_is_contiguous(case):
    _, write, sizes = CASES[case]
    state = random_state()
    strided = cf.AttentionState(state.o.repeat(1, 1, 2)[..., :D], state.lse.T.contiguous().T, "e")
    for got, want in zip(write(strided, **sizes), write(state, **sizes), strict=True):
        assert got.is_contiguous() and torch.equal(got, want)


@pytest.mark.parametrize("case", [c for c in CASES if interop.LIBRARIES[c.partition("/")[0]].marks == (INF, INF)])
def test_plus_infinity_is_an_empty_row_whatever_o_holds(case):
    read, write, sizes = CASES[case]
    state = random_state(empty=[(0, 0), (3, 5)])
    state.o[state.lse == -INF] = math.nan
    o, lse = write(state, **sizes)
    got = read(o, lse.masked_fill(lse == -INF, INF))
    assert torch.equal(got.lse, state.lse)
    assert (got.o[got.lse == -INF] == 0).all() and not got.o.isnan().any()


def test_flash_attention_2_writes_plus_infinity_and_3_minus_infinity():
    state = random_state(empty=[(1, 2)])
    assert interop.to_flash_attention_2(state)[1][2, 1] == INF
    assert interop.to_flash_attention_3(state)[1][2, 1] == -INF
    assert state.lse[1, 2] == -INF, "the caller's tensor must not change"


def test_old_flashinfer_empties_are_repaired_in_a_narrow_window_only():
    values = [-5e4, -49_997.0, -49_900.0, -49_899.0, -5.01e4, -5.2e4, -6e4, -1e30, 3.0, -INF]
    lse = torch.tensor(values)[:, None]
    o = torch.ones(len(values), 1, 8)
    state = interop.from_flashinfer(o, lse)
    empty = torch.tensor([v in values[:3] or v == -INF for v in values])
    assert (state.lse[empty] == -INF).all() and (state.o[empty] == 0).all()
    assert torch.equal(state.lse[~empty], lse[~empty]) and (state.o[~empty] == 1).all()
    assert lse[0, 0] == -5e4 and o[0, 0, 0] == 1, "the caller's tensors must not change"


def test_rows_below_the_window_keep_their_weight_in_a_merge():
    row = interop.from_flashinfer(torch.full((1, 1, 8), 2.0), torch.tensor([[-5.2e4]]))
    gone = interop.from_flashinfer(torch.full((1, 1, 8), 7.0), torch.tensor([[-5e4]]))
    merged = cf.merge(row, gone, base="2")
    assert torch.equal(merged.o, row.o) and merged.lse.item() == pytest.approx(-5.2e4)


def test_repair_can_be_switched_off_and_then_nothing_is_copied():
    o, lse = torch.ones(2, 1, 8), torch.tensor([[-5e4], [1.0]])
    state = interop.from_flashinfer(o, lse, repair_empty=False)
    assert state.o.data_ptr() == o.data_ptr() and state.lse.data_ptr() == lse.data_ptr()


def test_nan_is_not_repaired():
    state = interop.from_flashinfer(torch.full((1, 1, 8), math.nan), torch.tensor([[math.nan]]))
    assert state.lse.isnan().all() and state.o.isnan().all()


@pytest.mark.parametrize("case", ["flash_attention_3/0", "flash_attention_3/1"])
def test_documented_views_share_memory(case):
    o, lse = foreign(case)
    assert CASES[case][0](o, lse).o.data_ptr() == o.data_ptr()


def halves(left, right, rows=4):
    """Plain torch over two key ranges of the same queries: per half ``o [T, Hq, D]`` and natural-log ``lse [T, Hq]``."""
    model = Model(head_dim=D, v_head_dim=D)
    q = queries(model, rows)
    parts = [contexts(model, [n] * rows, seed=n) for n in (left, right)]
    both = [(torch.cat([a[0], b[0]]), torch.cat([a[1], b[1]])) for a, b in zip(*parts, strict=True)]
    return [tuple(x.float() for x in attention(q, p)) for p in parts], attention(q, both)


def test_wrong_base_is_visibly_wrong_and_right_base_right():
    (a, b), exact = halves(512, 4096)
    log2 = a[1] * math.log2(math.e)
    right = cf.merge(interop.from_flashinfer(a[0], log2), interop.from_sglang(*b))
    wrong = cf.merge(interop.from_sglang(a[0], log2), interop.from_sglang(*b))
    assert max_error(right.o, exact[0]) < 1e-6 and max_error(right.lse, exact[1]) < 1e-5
    assert max_error(wrong.o, exact[0]) > 1e-2 and max_error(wrong.lse, exact[1]) > 0.5


@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3", "vllm", "sglang"])
def test_halves_from_plain_torch_merge_to_the_whole(name):
    (a, b), exact = halves(37, 100)
    read = getattr(interop, f"from_{name}")
    turn = (lambda x: x) if name == "sglang" else (lambda x: x.T)  # [T, Hq] is what torch gave; the others want [Hq, T]
    merged = cf.merge(*(read(o, turn(lse)) for o, lse in (a, b)))
    assert max_error(merged.o, exact[0]) < 1e-6 and max_error(merged.lse, exact[1]) < 1e-5


def test_square_lse_is_read_as_the_importer_says():
    """T == Hq: sizes cannot tell [T, Hq] from [Hq, T], names can."""
    (a, b), exact = halves(5, 60, rows=4)
    assert a[1].shape == (4, 4)
    right = cf.merge(interop.from_vllm(a[0], a[1].T), interop.from_sglang(*b))
    wrong = cf.merge(interop.from_vllm(*a), interop.from_sglang(*b))
    assert max_error(right.o, exact[0]) < 1e-6
    assert max_error(wrong.o, exact[0]) > 1e-2


def flex(q, k, v, mask=None):
    """flex_attention as it is on a CPU, without compilation: ``o [B, Hq, Q, D]``, ``lse [B, Hq, Q]``."""
    n, heads, rows, keys = q.shape[0], q.shape[2], q.shape[1], k.shape[1]
    block_mask = create_block_mask(mask, n, heads, rows, keys, device="cpu") if mask else None
    args = (x.transpose(1, 2) for x in (q, k, v))
    o, aux = flex_attention(*args, block_mask=block_mask, enable_gqa=True, return_aux=AuxRequest(lse=True))
    return o, aux.lse


pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
LENS = [40, 7, 0]


def dense_inputs(rows):
    model = Model(num_q_heads=Hkv * G, num_kv_heads=Hkv, head_dim=D, v_head_dim=D)
    k, v = (x.nan_to_num() for x in dense(contexts(model, LENS, seed=3)))
    return queries(model, B * rows).view(B, rows, Hkv * G, D), k, v


def test_flex_attention_equals_decode():
    q, k, v = dense_inputs(1)
    lens = torch.tensor(LENS)
    theirs = interop.from_flex_attention(*flex(q, k, v, lambda b, h, i, j: j < lens[b]))
    ours = cf.decode(q[:, 0], k, v, seq_lens=LENS)
    assert max_error(theirs.o, ours.o) < 1e-6 and max_error(theirs.lse, ours.lse) < 1e-5
    assert (theirs.lse[2] == -INF).all() and (theirs.o[2] == 0).all()


def test_flex_attention_equals_verify():
    q, k, v = dense_inputs(Q)
    lens = torch.tensor(LENS)
    theirs = interop.from_flex_attention(*flex(q, k, v, lambda b, h, i, j: j < lens[b] - Q + i + 1))
    ours = cf.verify(q, k, v, seq_lens=LENS)
    assert max_error(theirs.o, ours.o) < 1e-6 and max_error(theirs.lse, ours.lse) < 1e-5


def test_flex_attention_over_a_prefix_merges_with_ours_over_the_suffix():
    q, k, v = dense_inputs(Q)
    full = cf.verify(q, k, v, seq_lens=[40, 40, 40])
    prefix = interop.from_flex_attention(*flex(q, k[:, :30], v[:, :30]))
    suffix = cf.verify(q, k[:, 30:], v[:, 30:], seq_lens=[10, 10, 10])
    merged = cf.merge(prefix, suffix)
    assert max_error(merged.o, full.o) < 1e-6 and max_error(merged.lse, full.lse) < 1e-5


OUT, LSE = torch.zeros(6, 8, 4), torch.zeros(8, 6)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: interop.from_vllm(OUT, LSE.T), ValueError, r"lse: expected shape \[Hq=8, T=6\], got \[6, 8\]"),
        (lambda: interop.from_flashinfer(OUT, LSE), ValueError, r"lse: expected shape \[T=6, Hq=8\], got \[8, 6\]"),
        (lambda: interop.from_sglang(OUT[0], LSE.T), ValueError, r"o: expected shape \[T, Hq, Dv\], got \[8, 4\]"),
        (
            lambda: interop.from_flash_attention_2(OUT[0], LSE),
            ValueError,
            r"o: expected shape \[T, Hq, Dv\] or \[B, Q, Hq, Dv\], got \[8, 4\]",
        ),
        (lambda: interop.from_flash_attention_2(OUT, LSE[None]), ValueError, r"lse: expected shape \[Hq=8, T=6\], got"),
        (lambda: interop.from_flex_attention(OUT[None], LSE), ValueError, r"lse: expected shape \[B=1, Hq=6, Q=8\]"),
        (lambda: interop.from_vllm(OUT, LSE.int()), TypeError, "lse: expected dtype float32, got int32"),
        (lambda: interop.from_vllm(OUT, LSE.double()), TypeError, "lse: expected dtype float32, got float64"),
        (lambda: interop.from_vllm(OUT.int(), LSE), TypeError, "o: expected dtype float32 or float16 or bfloat16, got int32"),
        (lambda: interop.from_vllm(None, LSE), TypeError, "o: expected a torch.Tensor, got NoneType"),
        (lambda: interop.from_vllm(OUT, None), TypeError, "lse: expected a torch.Tensor, got NoneType"),
        (lambda: interop.from_vllm(OUT.repeat(1, 1, 2)[..., ::2], LSE), ValueError, "o: expected a contiguous last axis"),
        (lambda: interop.from_vllm(OUT.to("meta"), LSE), ValueError, "o, lse: expected one device"),
        (lambda: interop.to_vllm((OUT, LSE)), TypeError, r"state: expected an AttentionState, got a bare \(o, lse\) pair"),
        (lambda: interop.to_flash_attention_3(random_state(), 4), ValueError, "batch: expected a divisor of T=6, got 4"),
        (lambda: interop.to_flex_attention(random_state(), None), ValueError, "batch: expected the number of requests"),
        (lambda: interop.to_xformers(random_state(), True), ValueError, "batch: expected a divisor of T=6, got True"),
        (lambda: interop.to_xformers(random_state(), 3, 3), ValueError, "num_kv_heads: expected a divisor of Hq=8, got 3"),
    ],
)
def test_errors_name_the_argument(call, error, text):
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize("case", CASES)
def test_no_rows_at_all(case):
    read, write, sizes = CASES[case]
    assert read(*write(cf.AttentionState.empty(0, Hkv * G, D), **sizes)).o.shape == (0, Hkv * G, D)
