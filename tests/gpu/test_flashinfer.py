"""Live cross-check of our merges against FlashInfer's on the same GPU. Skipped where FlashInfer is not installed."""

import pytest
import torch

import cascade_fd as cf
from cascade_fd import AttentionState


@pytest.fixture(scope="module")
def flashinfer():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    return pytest.importorskip("flashinfer")


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def make(request):
    def state(rows, heads, dim, seed):
        g = torch.Generator(device="cuda").manual_seed(seed)
        o = torch.randn(rows, heads, dim, generator=g, device="cuda", dtype=request.param)
        lse = torch.randn(rows, heads, generator=g, device="cuda") * 4
        lse[seed % rows] = -torch.inf  # one empty row, another in each state
        return AttentionState(o, lse, "2")

    return state


def close(ours, o, lse):
    eps = torch.finfo(ours.dtype).eps
    assert (ours.o.float() - o.float()).abs().max() <= 2 * eps * o.float().abs().max()
    torch.testing.assert_close(ours.lse, lse, rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize(("rows", "heads", "dim"), [(256, 32, 128), (7, 5, 64), (3, 1, 256)])
def test_merge_state(flashinfer, make, rows, heads, dim):
    a, b = make(rows, heads, dim, 0), make(rows, heads, dim, 1)
    close(cf.merge(a, b, base="2"), *flashinfer.merge_state(a.o, a.lse, b.o, b.lse))


@pytest.mark.parametrize("masked", [False, True])
def test_merge_state_in_place(flashinfer, make, masked):
    a, b = make(33, 8, 128, 0), make(33, 8, 128, 1)
    o, lse = a.o.clone(), a.lse.clone()
    mask = torch.arange(33, device="cuda") % 3 == 0 if masked else None
    flashinfer.merge_state_in_place(o, lse, b.o, b.lse, mask)
    cf.merge_(a, b, mask=mask)
    close(a, o, lse)


@pytest.mark.parametrize("count", [1, 2, 5, 16, 40])
def test_merge_states(flashinfer, make, count):
    states = [make(65, 8, 128, i) for i in range(count)]
    o, lse = torch.stack([s.o for s in states], 1), torch.stack([s.lse for s in states], 1)
    theirs = flashinfer.merge_states(o, lse)
    if count == 1:  # FlashInfer's merge of the one empty row is not ours to copy
        theirs = tuple(t[1:] for t in theirs)
    ours = cf.merge(*states, base="2")
    close(ours[1:] if count == 1 else ours, *theirs)
