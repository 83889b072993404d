"""torch's own attention in the benchmark of other libraries: it runs on a CPU, so nothing is faked."""

import importlib
import math

import pytest
import torch

from benchmarks.peers import flex
from benchmarks.peers.provider import SkipError, sdpa
from cascade_fd.bench.cases import Case
from cascade_fd.bench.workload import build_sets
from tests.reference.peer_cases import CPU, HEADS, SMALL, check, load_of, loads_of


def test_sdpa_is_for_flat_decode():
    flash, cudnn = sdpa(load_of("decode"))
    assert (flash.setting, cudnn.setting) == ("flash, contiguous KV", "cudnn, contiguous KV")
    check(flash.prepare, build_sets(Case("whole pages", ((3, 24),), **HEADS), CPU, torch.float32, 2))
    for name in ("verify", "skewed", "cascade"):
        with pytest.raises(SkipError, match="only for one row per request, one length and nothing shared"):
            sdpa(load_of(name))


@pytest.fixture
def uncompiled(monkeypatch):
    """flex_attention without the compiler's front end, which it starts on a CPU, too, and which takes many seconds."""
    module = importlib.import_module("torch.nn.attention.flex_attention")
    monkeypatch.setattr(module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)


@pytest.mark.parametrize("name", SMALL)
def test_flex_attention(name, uncompiled):
    (offered,) = flex.providers(load_of(name))
    way = "a batch" if name in ("decode", "one request", "verify") else "one sequence and a block mask"
    assert (offered.name, offered.setting) == ("torch flex", f"contiguous KV, {way}")
    check(offered.prepare, loads_of(name))


@pytest.mark.parametrize("name", ["decode", "verify"])
def test_flex_attention_as_one_sequence_is_the_same(name, uncompiled):
    check(flex.packed, loads_of(name))


def test_a_block_mask_has_as_many_pairs_as_the_case():
    for name in ("tree", "speculative tree"):
        case = SMALL[name]
        first, last, reach = flex._readers(case)
        assert len(first) == sum(int(lens.sum()) for lens in case.node_lens)
        pairs = sum(
            f <= i // case.q_len < end and i % case.q_len >= r
            for i in range(case.rows)
            for f, end, r in zip(first, last, reach, strict=True)
        )
        hidden = case.requests * math.comb(case.q_len, 2)  # of q_len draft rows each sees one key less than the next
        assert pairs == case.q_len * int(case.seq_lens.sum()) - hidden
