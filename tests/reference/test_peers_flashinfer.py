"""FlashInfer in the benchmark of other libraries: index arrays, masks, merges and memory, by a fake in plain torch."""

import math
import sys
from functools import partial
from types import ModuleType

import pytest
import torch

from benchmarks.peers import flashinfer
from benchmarks.peers.parts import levels, whole
from benchmarks.peers.provider import SkipError
from benchmarks.peers.ways import CORES, FA2, FA3, Way, chopped, composed_ways, flat_ways, pages_of
from cascade_fd.bench.cases import CASES, CONTEXT_CASES
from tests.reference.peer_cases import SMALL, Stream, attention, check, every_row, fake_streams, load_of, loads_of

FLAT = [name for name, case in SMALL.items() if len(case.levels) == 1]
SHARED = [name for name in SMALL if name not in FLAT]


class Wrapper:
    """What FlashInfer's wrappers have in common: pages are planned once, then run with any keys; lse has base 2."""

    made: tuple = ()

    def __init__(self, space, layout, backend="auto", **kind):
        assert space.dtype == torch.uint8 and layout == "NHD"
        self.space, self._backend, self.kind, self.planned, self.runs = space, backend, kind, None, 0
        Wrapper.made.append(self)

    def keep(self, qo_indptr, kv_indptr, indices, lens, heads, page, causal, types):
        assert self.planned is None, "planned twice"
        assert types == {"q_data_type": torch.float32, "kv_data_type": torch.float32}
        assert all(x.dtype == torch.int32 and x.device.type == "cpu" for x in (qo_indptr, kv_indptr, indices, lens))
        assert kv_indptr[0] == qo_indptr[0] == 0 and kv_indptr[-1] == len(indices) and len(kv_indptr) == len(qo_indptr)
        assert kv_indptr.diff().tolist() == [-(-n // page) for n in lens.tolist()]
        self.planned = (qo_indptr.tolist(), kv_indptr.tolist(), indices.long(), lens.tolist(), heads, page, causal)

    def run(self, q, kv, out=None, lse=None, return_lse=False):
        qo, pages, indices, lens, heads, page, causal = self.planned
        k, v = kv
        assert heads == (q.shape[1], k.shape[2], q.shape[2]) and page == k.shape[1] and len(q) == qo[-1]
        out = torch.empty_like(q) if out is None else out
        own = torch.empty(q.shape[:2]) if lse is None else lse
        assert out.shape == q.shape and own.shape == q.shape[:2] and own.dtype == torch.float32
        assert out.is_contiguous() and own.is_contiguous() and (return_lse or lse is None)
        self.runs += 1
        for i, n in enumerate(lens):
            ids, rows = indices[pages[i] : pages[i + 1]], slice(qo[i], qo[i + 1])
            keys = (x[ids].flatten(0, 1)[:n] for x in (k, v))
            o, ln = attention(q[rows], *keys, causal)
            out[rows], own[rows] = o, ln / math.log(2)
        return (out, own) if return_lse else out


def lengths(kv_indptr, last_page_len, page):
    assert last_page_len.dtype == torch.int32 and ((last_page_len >= 1) & (last_page_len <= page)).all()
    return (kv_indptr.diff() - 1) * page + last_page_len


class Prefill(Wrapper):
    def plan(self, qo, kv, ids, last, Hq, Hkv, D, page, causal=False, fixed_split_size=None, **types):
        assert fixed_split_size is None or self._backend == "fa2"  # the others pay no heed to it
        self.keep(qo, kv, ids, lengths(kv, last, page), (Hq, Hkv, D), page, causal, types)


class Decode(Wrapper):
    def __init__(self, space, layout, use_tensor_cores=False, backend="auto"):
        super().__init__(space, layout, backend, use_tensor_cores=use_tensor_cores)

    def plan(self, kv, ids, last, Hq, Hkv, D, page, fixed_split_size=None, q_len_per_req=1, **types):
        cores, lens = self.kind["use_tensor_cores"], lengths(kv, last, page)
        assert cores or (fixed_split_size is None and q_len_per_req == 1)
        assert int(lens.min()) >= q_len_per_req
        qo = torch.arange(len(kv), dtype=torch.int32) * q_len_per_req
        self.keep(qo, kv, ids, lens, (Hq, Hkv, D), page, q_len_per_req > 1, types)


class BatchAttention(Wrapper):
    def __init__(self, layout, device):
        super().__init__(torch.empty(1, dtype=torch.uint8, device=device), layout)

    def plan(self, qo, kv, ids, lens, Hq, Hkv, D, Dv, page, causal=False, **types):
        assert Dv == D
        self.keep(qo, kv, ids, lens, (Hq, Hkv, D), page, causal, types)

    def run(self, q, kv, out=None, lse=None):
        return super().run(q, kv, out, lse, return_lse=True)


def merge_state_in_place(v, s, v_other, s_other):
    top = torch.maximum(s, s_other)
    a, b = torch.exp2(s - top), torch.exp2(s_other - top)
    v.copy_((v * a[..., None] + v_other * b[..., None]) / (a + b)[..., None])
    s.copy_(torch.log2(a + b) + top)


class MultiLevel:
    def __init__(self, levels, space, layout):
        self._batch_prefill_wrappers = [Prefill(space, layout) for _ in range(levels)]

    def plan(self, qo, kv, ids, last, *sizes, causal=False, **types):
        for i, wrapper in enumerate(self._batch_prefill_wrappers):
            wrapper.plan(qo[i], kv[i], ids[i], last[i], *sizes, causal=causal and i == len(qo) - 1, **types)

    def run(self, q, kv):
        *others, own = (wrapper.run(q, kv, return_lse=True) for wrapper in self._batch_prefill_wrappers)
        for other in others:
            merge_state_in_place(*own, *other)
        return own[0]


@pytest.fixture
def fake(monkeypatch):
    module = ModuleType("flashinfer")
    module.__version__ = "0.6"
    module.BatchPrefillWithPagedKVCacheWrapper, module.BatchDecodeWithPagedKVCacheWrapper = Prefill, Decode
    module.BatchAttention, module.MultiLevelCascadeAttentionWrapper = BatchAttention, MultiLevel
    module.merge_state_in_place = merge_state_in_place
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(Wrapper, "made", [])
    return module


def planned():
    """Of each wrapper: keys, rows, whether causal."""
    return [(sum(lens), qo[-1], causal) for qo, _, _, lens, _, _, causal in (each.planned for each in Wrapper.made)]


@pytest.mark.parametrize("name", FLAT)
def test_single_calls_compute_the_same(name, fake):
    loads, case = loads_of(name), SMALL[name]
    for way in [*flat_ways(case), FA2, FA3, Way("fa2", split=2)]:
        Wrapper.made.clear()
        check(partial(flashinfer.flat, way), loads)
        assert planned() == [(int(case.seq_lens.sum()), case.rows, case.q_len > 1)]
        for i, run in enumerate(flashinfer.flat(way, loads)):
            assert run() is loads[i].out.o


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("overlapping", [False, True])
def test_compositions_compute_the_same(name, overlapping, fake):
    loads, case = loads_of(name), SMALL[name]
    ways = [*composed_ways(case, overlapping), (FA2,) * len(case.levels)]
    for each in ways:
        Wrapper.made.clear()
        check(partial(flashinfer.composed, flashinfer.Composed(each)), loads)
        keys = [int(lens.sum()) for lens in case.node_lens]
        rows = [way.chunks * case.rows for way in each]
        causal = [False] * (len(each) - 1) + [case.q_len > 1]
        assert planned() == list(zip(keys, rows, causal, strict=True))
        assert len({wrapper.space.data_ptr() for wrapper in Wrapper.made}) == min(len(each), 4)  # they may run at once


@pytest.mark.parametrize(
    ("name", "chunks"),
    [
        ("cascade", 2),
        ("cascade", 3),
        ("cascade", 4),
        ("cascade of 2 groups", 2),
        ("cascade of 2 groups", 4),
        ("speculative", 4),
    ],
)
def test_keys_split_by_hand(name, chunks, fake):
    loads = loads_of(name)
    check(partial(flashinfer.composed, flashinfer.Composed((Way("fa3", chunks=chunks), CORES))), loads)
    page, root = loads[0].case.page_size, levels(loads[0])[0]
    part = chopped(root, chunks, page)
    assert part.nodes == chunks * root.nodes and part.rows == root.rows and not part.causal
    ids = pages_of(part, page).indices.tolist()
    assert sorted(ids) == sorted(root.table.flatten().tolist()) and part.lens.sum() == root.lens.sum()


def test_chunks_are_even_and_none_is_empty():
    load = load_of("cascade")  # 8 pages of prefix
    assert chopped(levels(load)[0], 3, 4).lens.tolist() == [12, 12, 8]
    with pytest.raises(ValueError, match=r"chunks: expected keys in each of 5 chunks of \[32\] keys"):
        chopped(levels(load)[0], 5, 4)  # of 2 pages each


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("backend", [None, "fa2"])
def test_the_multi_level_wrapper(name, backend, fake):
    loads, case = loads_of(name), SMALL[name]
    check(partial(flashinfer.multi_level, backend), loads)
    causal = [False] * (len(case.levels) - 1) + [case.q_len > 1]
    assert planned() == [(int(lens.sum()), case.rows, own) for lens, own in zip(case.node_lens, causal, strict=True)]
    assert {wrapper._backend for wrapper in Wrapper.made} == {backend or "auto"}


def test_levels_on_streams_fork_and_join(fake, monkeypatch):
    fake_streams(monkeypatch)
    load = load_of("tree")
    (run,) = flashinfer.composed(flashinfer.Composed((FA3, FA2, FA2, CORES), streams=True), [load])
    torch.testing.assert_close(run(), every_row(load), rtol=1e-5, atol=1e-5)
    sides = ["side 1", "side 2", "side 3"]
    assert Stream.log == [(side, "main") for side in sides] + [("main", side) for side in sides]


def test_wrappers_have_their_kinds(fake):
    load = load_of("decode")
    for way in (Way("decode"), CORES, FA2, FA3):
        flashinfer.flat(way, [load])
    plain, cores, fa2, fa3 = Wrapper.made
    assert (plain.kind, cores.kind) == ({"use_tensor_cores": False}, {"use_tensor_cores": True}) and cores._backend == "fa2"
    assert (type(fa2), fa2._backend, type(fa3), fa3._backend) == (Prefill, "fa2", Prefill, "fa3")


def test_index_arrays_of_unequal_lengths():
    load = load_of("skewed")
    pages = pages_of(whole(load), 4)
    assert pages.lens.tolist() == [50, 1, 4, 7, 32] and pages.last_page_len.tolist() == [2, 1, 4, 3, 4]
    assert pages.kv_indptr.tolist() == [0, 13, 14, 15, 17, 25] and pages.qo_indptr.tolist() == [0, 1, 2, 3, 4, 5]
    assert sorted(pages.indices.tolist()) == list(range(25)) and pages.indices[15:17].tolist() == load.table[3, :2].tolist()


def test_settings_of_every_case():
    for case in [*CASES.values(), *CONTEXT_CASES.values()]:
        if len(case.levels) == 1:
            names = list(map(str, flat_ways(case)))
        else:
            made = [flashinfer.Composed(ways, on) for on in (True, False) for ways in composed_ways(case, on)]
            assert all(len(each.ways) == len(case.levels) for each in made)
            names = [*map(str, made), "multi-level wrapper", "multi-level wrapper, fa2"]
        assert len(set(names)) == len(names) and 3 <= len(names) <= 14
    prefix = {name: [ways[0].chunks for ways in composed_ways(CASES[name], True) if ways[0].chunks > 1] for name in CASES}
    assert prefix["c2"] == [8, 4, 8, 8] and prefix["c4"] == [2, 4, 2, 2] and prefix["c6"] == []  # 16, 64, 256 blocks; 132 SMs


def test_providers(fake, monkeypatch):
    offered = flashinfer.providers(load_of("cascade"))
    assert {each.name for each in offered} == {"flashinfer 0.6"}
    assert [each.setting for each in offered][:3] == [
        "multi-level wrapper",
        "multi-level wrapper, fa2",
        "per level: fa3 + tensor-core decode",
    ]
    assert not any("streams" in each.setting for each in offered)  # a CPU has none
    assert [each.setting for each in flashinfer.providers(load_of("verify"))] == [
        "tensor-core decode", "fa2", "fa3", "BatchAttention",
    ]  # fmt: skip
    load = load_of("tree")
    for each in flashinfer.providers(load):
        check(each.prepare, [load])

    class Broken:
        def find_spec(self, name, *rest):
            if name == "flashinfer":
                raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.delitem(sys.modules, "flashinfer")
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(SkipError, match=r"cannot be imported \(AssertionError: Torch not compiled"):
        flashinfer.providers(load)
