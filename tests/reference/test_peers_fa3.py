"""FlashAttention-3's two builds in the benchmark of other libraries: what they are asked for, by fakes in plain torch."""

import sys
from functools import partial
from types import ModuleType

import pytest
import torch

from benchmarks.peers import fa3, vllm_fa3
from benchmarks.peers.parts import levels, whole
from benchmarks.peers.provider import SkipError
from tests.reference.peer_cases import SMALL, Stream, attention, check, every_row, fake_streams, load_of, loads_of

UPSTREAM = {str(setting): setting for setting in fa3.FLAT + fa3.LEVELS}
VLLM = {str(setting): setting for setting in vllm_fa3.FLAT + vllm_fa3.LEVELS}


def over_pages(q, k_cache, v_cache, table, lens, causal):
    """``q [B, Q, Hq, D]`` over pages: ``o`` and ``lse [B, Hq, Q]``."""
    made = []
    for rows, pages, T in zip(q, table.long(), lens.tolist(), strict=True):
        k, v = (x[pages].flatten(0, 1)[:T] for x in (k_cache, v_cache))
        made.append(attention(rows, k, v, causal))
    return torch.stack([o for o, _ in made]), torch.stack([lse.T for _, lse in made])


class Fake(ModuleType):
    """FlashAttention-3's flash_attn_interface in plain torch, as far as its docstring says what it does."""

    def __init__(self):
        super().__init__("flash_attn_interface")
        self.calls, self.schedules = [], 0

    def get_scheduler_metadata(
        self, batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens,
        qkv_dtype=torch.bfloat16, cu_seqlens_q=None, page_size=None, causal=False, num_splits=0, pack_gqa=None,
    ):  # fmt: skip
        assert cache_seqlens.shape == (batch_size,) and cache_seqlens.dtype == torch.int32
        self.schedules += 1
        shape = (batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim)
        return *shape, qkv_dtype, cu_seqlens_q is not None, page_size, causal, num_splits, pack_gqa

    def flash_attn_with_kvcache(
        self, q, k_cache, v_cache, cache_seqlens=None, page_table=None, cu_seqlens_q=None, max_seqlen_q=None,
        causal=False, scheduler_metadata=None, num_splits=0, pack_gqa=None, return_softmax_lse=False,
    ):  # fmt: skip
        B, pages = page_table.shape
        assert page_table.dtype == cache_seqlens.dtype == torch.int32 and page_table.is_contiguous()
        assert cache_seqlens.shape == (B,) and (cu_seqlens_q is None) == (max_seqlen_q is None)
        packed = cu_seqlens_q is not None
        if packed:
            assert cu_seqlens_q.dtype == torch.int32 and set(cu_seqlens_q.diff().tolist()) == {max_seqlen_q}
            q = q.unflatten(0, (B, max_seqlen_q))
        _, Q, Hq, D = q.shape
        _, page, Hkv, _ = k_cache.shape
        if scheduler_metadata is not None:
            want = (B, Q, pages * page, Hq, Hkv, D, q.dtype, packed, page, causal, num_splits, pack_gqa)
            assert scheduler_metadata == want
        self.calls.append({"tokens": int(cache_seqlens.sum()), "rows": B * Q, "causal": causal, "packed": packed})
        o, lse = over_pages(q, k_cache, v_cache, page_table, cache_seqlens, causal)
        if packed:
            o, lse = o.flatten(0, 1), lse.transpose(0, 1).flatten(1, 2)  # [Hq, total_q]
        return (o, lse, None, None) if return_softmax_lse else o


# The operators' schemas, as their library registers them.
FWD = """fwd(Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor!? out, Tensor? cu_seqlens_q,
Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, int? max_seqlen_q, int? max_seqlen_k,
Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, Tensor? rotary_sin, Tensor? seqlens_rotary,
Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, float softmax_scale, bool is_causal, int window_size_left,
int window_size_right, float softcap, bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa,
int sm_margin, Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k) -> Tensor[]"""
METADATA = """get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, int num_heads_k,
int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k,
Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? leftpad_k, int? page_size, int max_seqlen_k_new, bool is_causal,
int window_size_left, int window_size_right, bool has_softcap, int num_splits, bool? pack_gqa, int sm_margin) -> Tensor"""


class Operators:
    """vLLM's two operators in plain torch, called through the dispatcher by their own schemas."""

    def __init__(self):
        self.calls, self.schedules = [], 0
        self.library = torch.library.Library("_vllm_fa3_C", "FRAGMENT")
        for schema, made in ((FWD, self.fwd), (METADATA, self.metadata)):
            self.library.define(" ".join(schema.split()))
            self.library.impl(schema.split("(")[0], made, "CPU")

    def metadata(self, batch, max_q, max_k, heads, kv_heads, dim, dim_v, dtype, lens, cu_q, *rest):
        *unused, page_size, new, causal, left, right, cap, splits, pack, margin = rest
        assert unused == [None] * 4 and (new, left, right, cap, pack, margin) == (0, -1, -1, False, None, 0)
        assert cu_q.tolist() == list(range(0, (batch + 1) * max_q, max_q)) and len(lens) == batch and max_k == int(lens.max())
        self.schedules += 1
        # The schedule is made of all that the call must repeat.
        return torch.tensor(
            [batch, max_q, max_k, heads, kv_heads, dim, dim_v, page_size, causal, splits, dtype == torch.float32]
        )

    def fwd(self, q, k, v, *rest):
        names = [part.split()[-1] for part in FWD[FWD.index("(") + 1 : FWD.index(")")].replace("\n", " ").split(",")]
        given = dict(zip(names[3:], rest, strict=True))
        cu_q, lens, table, causal = (given[name] for name in ("cu_seqlens_q", "seqused_k", "page_table", "is_causal"))
        max_q, max_k, splits = (given[name] for name in ("max_seqlen_q", "max_seqlen_k", "num_splits"))
        assert cu_q.dtype == lens.dtype == table.dtype == torch.int32 and table.is_contiguous()
        assert set(cu_q.diff().tolist()) == {max_q} and max_k == int(lens.max())
        assert given["softmax_scale"] == q.shape[-1] ** -0.5 and given["cp_world_size"] == 1 and given["cp_rank"] == 0
        assert (given["window_size_left"], given["window_size_right"], given["softcap"]) == (-1, -1, 0.0)
        B, schedule = len(lens), given["scheduler_metadata"]
        if schedule is not None:
            heads = (q.shape[1], k.shape[2], q.shape[2], v.shape[3])
            assert schedule.tolist() == [B, max_q, max_k, *heads, k.shape[1], causal, splits, 1]
        o, lse = over_pages(q.unflatten(0, (B, max_q)), k, v, table, lens, causal)
        self.calls.append({"tokens": int(lens.sum()), "rows": len(q), "causal": causal, "splits": splits})
        return [o.flatten(0, 1), lse.transpose(0, 1).flatten(1, 2).contiguous(), q.new_empty(0), q.new_empty(0)]


@pytest.fixture
def fake(monkeypatch):
    module = Fake()
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    return module


@pytest.fixture
def operators(monkeypatch):
    made = Operators()
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", ModuleType("vllm.vllm_flash_attn"))
    monkeypatch.delenv(vllm_fa3.LIBRARY, raising=False)
    yield made
    made.library._destroy()


def follows_the_case(made, setting, case):
    """The calls of one run: all rows each, every node's keys once, private ones causally."""
    assert all(call["rows"] == case.rows for call in made)
    if setting.by_level:
        assert [call["tokens"] for call in made] == [int(lens.sum()) for lens in case.node_lens]
        assert [call["causal"] for call in made] == [False] * (len(made) - 1) + [case.q_len > 1]
    else:
        assert [(call["tokens"], call["causal"]) for call in made] == [(int(case.seq_lens.sum()), case.q_len > 1)]


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("setting", [name for name, s in UPSTREAM.items() if not s.streams])
def test_the_upstream_build_computes_the_same(name, setting, fake):
    loads, setting = loads_of(name), UPSTREAM[setting]
    check(partial(fa3.prepare, fa3._call, setting), loads)
    follows_the_case(fake.calls[: len(fake.calls) // 3], setting, loads[0].case)
    assert fake.schedules == setting.ahead * len(fake.calls) // 3  # one for all input sets
    assert setting.by_level or not any(made["packed"] for made in fake.calls)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("setting", [name for name, s in VLLM.items() if not s.streams])
def test_vllms_build_computes_the_same(name, setting, operators):
    loads, setting = loads_of(name), VLLM[setting]
    check(partial(fa3.prepare, vllm_fa3._call, setting), loads)
    calls = operators.calls[: len(operators.calls) // 3]
    follows_the_case(calls, setting, loads[0].case)
    assert operators.schedules == setting.ahead * len(calls)
    parts = levels(loads[0]) if setting.by_level else [whole(loads[0])]
    assert [call["splits"] for call in calls] == [fa3.splits_of(setting, loads[0], part) for part in parts]


def test_vllms_build_is_looked_for_in_two_places(monkeypatch, tmp_path):
    load = load_of("cascade")
    monkeypatch.delenv(vllm_fa3.LIBRARY, raising=False)
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(SkipError, match="neither VLLM_FA3_LIBRARY names a library that loads nor is vllm installed"):
        vllm_fa3.providers(load)
    monkeypatch.setenv(vllm_fa3.LIBRARY, str(tmp_path / "missing.so"))
    with pytest.raises(SkipError, match=r"missing\.so"):
        vllm_fa3.providers(load)
    loaded = []
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    offered = vllm_fa3.providers(load)
    assert loaded == [str(tmp_path / "missing.so")] and {each.name for each in offered} == {"vllm fa3"}
    assert [each.setting for each in offered] == [str(s) for s in vllm_fa3.LEVELS if not s.streams]
    assert [each.setting for each in vllm_fa3.providers(load_of("verify"))] == [str(s) for s in vllm_fa3.FLAT]


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("cascade", [False, False]),
        ("speculative", [False, True]),
        ("tree", [False, True, True, False]),
        ("cascade of 2 groups", [True, False]),
    ],
)
def test_no_lse_is_copied_to_be_merged(name, want, fake, monkeypatch):
    load, seen = load_of(name), []
    importer = fa3.from_flash_attention_3

    def spy(o, lse):
        state = importer(o, lse)
        seen.append(state.lse.data_ptr() == lse.data_ptr() and state.o.data_ptr() == o.data_ptr())
        return state

    monkeypatch.setattr(fa3, "from_flash_attention_3", spy)
    (run,) = fa3.prepare(fa3._call, fa3.Setting(by_level=True), [load])
    run()
    assert [made["packed"] for made in fake.calls] == want
    assert seen == [True] * len(want)


def test_levels_on_streams_fork_and_join(fake, monkeypatch):
    fake_streams(monkeypatch)
    load = load_of("tree")
    (run,) = fa3.prepare(fa3._call, fa3.Setting(by_level=True, streams=True), [load])
    torch.testing.assert_close(run(), every_row(load), rtol=1e-5, atol=1e-5)
    sides = ["side 1", "side 2", "side 3"]
    assert Stream.log == [(side, "main") for side in sides] + [("main", side) for side in sides]
    (again,) = fa3.prepare(fa3._call, fa3.Setting(by_level=True, streams=True), [load])
    again()
    assert len(Stream.made) == 4  # no setting makes more of them


def test_settings_have_names_of_their_own_and_fill_the_device(monkeypatch):
    for settings in (fa3.FLAT, fa3.LEVELS, vllm_fa3.FLAT, vllm_fa3.LEVELS):
        assert len({str(setting) for setting in settings}) == len(settings)
    assert str(fa3.LEVELS[4]) == "per level + merge, num_splits=auto, schedule ahead, streams"
    h200 = type("Device", (), {"num_sms": 132})
    monkeypatch.setattr(fa3, "hardware_of", lambda device: h200)
    d1 = load_of("one request")
    assert [fa3.splits_of(fa3.Setting(num_splits=None, fill=n), d1, whole(d1)) for n in (1, 2)] == [128, 128]
    tree = load_of("tree")
    assert [fa3.splits_of(fa3.Setting(num_splits=None), tree, part) for part in levels(tree)] == [66, 33, 16, 5]
