"""When the kernels for Hopper are asked for, and what happens where they cannot run. What it computes: ``tests/gpu``."""

import json
import os
import subprocess
import sys
import warnings
from dataclasses import replace

import pytest
import torch

import cascade_fd as cf
from cascade_fd import Level, PageTable, PrefixTree
from cascade_fd.bench.cases import CASES, SHAPE_CASES
from cascade_fd.bench.workload import tree_of
from cascade_fd.hardware import PRESETS
from cascade_fd.tiles import HOPPER_SWITCH, hopper_lacks, hopper_tiles

pytest.importorskip("triton")

from cascade_fd.backends import triton as backend
from cascade_fd.kernels import hopper


def plan_of(requests=64, page=16, arch="sm_90", dim=128, dtype=torch.bfloat16, kernels="hopper"):
    table = PageTable.from_block_table(torch.empty(1, 128, dtype=torch.int32, device="meta"), page) if page else None
    tree = PrefixTree.from_levels([Level([0, requests], [640], table)])
    shape = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": dim, "dtype": dtype}
    hw = PRESETS[arch]
    hw = replace(hw, costs=hw.costs.only(*kernels.split()))
    return cf.plan(tree, **shape, device="meta", hardware=hw, share="always")


def kernels(made):
    return [launch.tile.kernel for launch in made.launches]


def pool(page=16, dim=128, dtype=torch.bfloat16):
    return torch.empty(100, page, 2, dim, dtype=dtype, device="meta")


def reasons(made, store, scale=1.0):
    return hopper.hopper_can(made, made.launches[0], store, scale)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(hopper, "_failed", {})
    monkeypatch.delenv(HOPPER_SWITCH, raising=False)


@pytest.fixture
def known_triton(monkeypatch):
    monkeypatch.setattr(hopper, "available", lambda device: ())


@pytest.mark.parametrize("page", [16, 48, 256])
def test_it_can(known_triton, page):
    store = cf.PagedKV(pool(page), pool(page))
    assert reasons(plan_of(page=page), store) == []


def test_what_a_plan_says(known_triton):
    store = cf.PagedKV(pool(), pool())
    assert reasons(plan_of(), store) == [] and kernels(plan_of()) == ["hopper"]
    assert reasons(plan_of(page=8), cf.PagedKV(pool(8), pool(8))) == ["the page size is a multiple of 16"]
    others = ({"requests": 4}, {"page": 8}, {"arch": "sm_100"}, {"dim": 96}, {"dtype": torch.float32})
    assert all(kernels(plan_of(**other)) == ["attend"] for other in others)
    lacks = hopper_lacks("sm_100", torch.float32, (96, 128), 1)
    assert lacks == (
        "the GPU is a Hopper GPU (sm_90)",
        "q and the cache are bfloat16 or float16",
        "head dims are in (64, 128, 256)",
        "the page size is a multiple of 16",
    )


def test_switch_and_scale(known_triton, monkeypatch):
    store = cf.PagedKV(pool(), pool())
    assert reasons(plan_of(), store, -1.0) == ["sm_scale is positive"]
    assert reasons(plan_of(), store, 0.0) == ["sm_scale is positive"]
    monkeypatch.setenv("CASCADE_FD_HOPPER", "0")
    assert reasons(plan_of(), store) == ["CASCADE_FD_HOPPER is not 0"]
    monkeypatch.setenv("CASCADE_FD_HOPPER", "1")
    assert reasons(plan_of(), store) == []


def test_stores_that_tma_cannot_read(known_triton):
    odd = torch.empty(100, 16, 2, 132, dtype=torch.bfloat16, device="meta")[..., :128]
    flat = pool()[:1].expand(100, -1, -1, -1)
    want = "starts, and has positive strides, at multiples of 16 bytes"
    assert reasons(plan_of(), cf.PagedKV(odd, pool())) == [f"k {want}; got strides of [8448, 528, 264] bytes"]
    assert reasons(plan_of(), cf.PagedKV(pool(), flat)) == [f"v {want}; got strides of [0, 512, 256] bytes"]
    assert reasons(plan_of(), cf.PagedKV(pool()[:0], pool()[:0])) == ["k is not empty", "v is not empty"]
    by_head = pool().transpose(1, 2).contiguous()
    assert reasons(plan_of(), cf.PagedKV(by_head, by_head, "HND")) == []


def test_strides_of_single_elements_do_not_matter(known_triton):
    single = torch.empty(100 * 16 * 128, dtype=torch.bfloat16, device="meta").as_strided((100, 16, 1, 128), (2048, 128, 1, 1))
    store = cf.PagedKV(single, single)
    assert hopper._tma_lacks("k", store.k) == []
    assert hopper._descriptors(store, 16)[0].strides == [2048, 128, 128, 1]


def test_machines(monkeypatch):
    check = hopper.available.__wrapped__
    monkeypatch.setattr(hopper, "TRITON", (3, 5))
    assert check(torch.device("meta")) == ("Triton is one of 3.6 to 3.9, got 3.5",)
    monkeypatch.setattr(hopper, "TRITON", (3, 6))
    assert check(torch.device("cpu")) == ("tensors are on a GPU",)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert check(torch.device("cuda")) == ("the GPU has compute capability 9.0",)
    monkeypatch.setattr(hopper.importlib.util, "find_spec", lambda name: None)
    assert check(torch.device("meta")) == ("Triton has Gluon",)


def test_descriptors_live_as_long_as_their_store():
    store = cf.PagedKV(pool(), pool())
    before = len(hopper._described)
    assert hopper._descriptors(store, 16) is hopper._descriptors(store, 16)
    assert len(hopper._described) == before + 1
    del store
    assert len(hopper._described) == before


def launched(monkeypatch, hopper_launch):
    """Names of the kernels that ``partial_states`` launches for a plan that the Hopper kernel could take."""
    seen = []
    monkeypatch.setattr(hopper, "available", lambda device: ())
    monkeypatch.setattr(hopper, "_kernel", lambda name: None)
    monkeypatch.setattr(hopper, "run", lambda *args: seen.append("hopper") or hopper_launch())
    monkeypatch.setattr(backend, "launch_attend", lambda *args: seen.append("attend"))
    made, store = plan_of(), cf.PagedKV(pool(), pool())
    q = torch.empty(64, 8, 128, dtype=torch.bfloat16, device="meta")
    out = cf.AttentionState(q, torch.empty(64, 8, device="meta"), "e")
    for _ in range(3):
        backend.partial_states(q, [store], made, 1.0, out)
    return seen


@pytest.mark.parametrize(("kernel", "grid"), [("hopper", 132), ("beside", 132), ("single", 256)])
def test_programs_stay_where_an_sm_holds_but_one(monkeypatch, kernel, grid):
    """256 units: were there 132 programs of one warp group, of which an SM holds two, they would run one after the other."""
    grids = []
    monkeypatch.setattr(hopper, "_kernel", lambda name: None)
    monkeypatch.setattr(hopper, "run", lambda kernel, grid, *rest: grids.append(grid))
    made, store = plan_of(requests=4096), cf.PagedKV(pool(), pool())
    launch = replace(made.launches[0], tile=hopper_tiles((128, 128))[kernel])
    q = torch.empty(4096, 8, 128, dtype=torch.bfloat16, device="meta")
    state = cf.AttentionState(q, torch.empty(4096, 8, device="meta"), "e")
    hopper.launch_hopper(q, store, made, launch, state, state, (1.0, 1.0))
    assert launch.count * 2 == 256 and grids == [grid]


@pytest.mark.parametrize(
    ("release", "dims", "halved"),
    [((3, 6), (64, 64), ()), ((3, 9), (128, 128), ()), ((3, 9), (64, 64), ("beside", "single", "narrow"))],
)
def test_steps_are_shorter_where_a_compiler_would_spill(monkeypatch, release, dims, halved):
    monkeypatch.setattr(hopper, "TRITON", release)
    for name, tile in hopper_tiles(dims).items():
        want = tile.block_n // 2 if name in halved else tile.block_n
        assert hopper._without_spills(tile, dims) == replace(tile, block_n=want)


def test_it_runs_instead_of_the_portable_kernel(monkeypatch):
    assert launched(monkeypatch, lambda: None) == ["hopper"] * 3


def test_the_portable_kernel_runs_after_a_failure_with_one_warning(monkeypatch):
    def fail():
        raise RuntimeError("PTXAS error: no registers\nand more")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert launched(monkeypatch, fail) == ["hopper", "attend", "attend", "attend"]
    want = "cascade_fd: the Hopper kernel 'hopper' failed, the portable one runs instead: PTXAS error: no registers"
    assert [str(w.message) for w in caught] == [want]
    store = cf.PagedKV(pool(), pool())
    assert reasons(plan_of(), store) == ["it has not failed before (PTXAS error: no registers)"]
    assert reasons(plan_of(requests=16, kernels="single"), store) == []  # another kernel is still tried


def test_the_switch_keeps_to_the_portable_kernel(monkeypatch):
    monkeypatch.setenv("CASCADE_FD_HOPPER", "0")
    assert launched(monkeypatch, lambda: None) == ["attend"] * 3


def test_plans_say_which_kernel_takes_a_launch():
    assert "128 rows x 128 keys, Hopper kernel" in plan_of().explain()
    assert "128 rows x 64 keys, Hopper kernel" in plan_of(dim=256, kernels="hopper narrow").explain()
    assert "Hopper kernel" not in plan_of(requests=4).explain()
    text = plan_of(kernels="beside narrow").explain()
    assert "128 rows x 64 keys, Hopper kernel in half an SM" in text
    assert "64 rows x 64 keys, Hopper kernel of one warp group" in plan_of(requests=16, kernels="single").explain()
    assert "Hopper kernel" not in plan_of(page=8).explain()


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("d3", ["attend"]),
        ("d5", ["attend"]),  # one request is 30 times as long as the others: too long for one warp
        ("d6", ["narrow"]),
        ("d7", ["attend"]),
        ("v1", ["attend"]),
        ("c1", ["single", "narrow"]),
        ("c3", ["beside", "attend"]),
        ("c4", ["beside", "narrow"]),
        ("c5", ["hopper", "narrow"]),
        ("c6", ["beside", "narrow"]),
        ("c7", ["single", "narrow"]),
        ("t1", ["attend", "narrow"]),
        ("t2", ["hopper", "single", "narrow"]),
        ("s1", ["beside", "attend"]),
        ("g1", ["hopper", "attend"]),
        ("g2", ["hopper", "attend"]),
        ("g3", ["hopper", "attend"]),
        ("h1", ["beside", "narrow"]),
        ("l1", ["hopper"]),
        ("l2", ["hopper"]),
        ("s2", ["hopper", "attend"]),
    ],
)
def test_what_was_fastest_is_chosen(name, want):
    """On an H200, see benchmarks/NOTES.md."""
    assert kernels(plan_case(name)) == want


def plan_case(name):
    case = (CASES | SHAPE_CASES)[name]
    table = torch.zeros(case.requests, -(-int(case.seq_lens.max()) // case.page_size), dtype=torch.int32)
    shape = {"num_q_heads": case.num_q_heads, "num_kv_heads": case.num_kv_heads, "head_dim": case.head_dim}
    return cf.plan(tree_of(case, table), **shape, device="cpu", hardware=PRESETS["sm_90"])


@pytest.mark.parametrize(("name", "programs"), [("g1", 64), ("g2", 128), ("g3", 32), ("c5", 128), ("t2", 96), ("c1", 104)])
def test_a_first_launch_leaves_what_others_need(name, programs):
    """Of 132 SMs: where suffixes take much longer than prefixes (g1, g3), few programs, which take longer."""
    made = plan_case(name)
    assert made.launches[0].count * made.shape.num_kv_heads == programs


def test_a_batch_that_is_planned_into_a_plan_keeps_its_kernel():
    """A captured graph holds the Hopper kernel: other batches are planned for it too, whatever would pay."""
    ids = torch.arange(64 * 60, dtype=torch.int32).view(64, 60)

    def tree(requests):
        lens = [640] * requests + [0] * (64 - requests)
        table = PageTable.from_block_table(ids, 16)
        return PrefixTree.from_levels([Level([0, 64], [320]), Level(range(65), [max(n - 320, 0) for n in lens])], table=table)

    hw = replace(PRESETS["sm_90"], costs=PRESETS["sm_90"].costs.only("hopper"))
    shape = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 128}
    made = cf.plan(tree(64), **shape, device="cpu", hardware=hw, share="always").with_room()
    assert kernels(made) == ["hopper", "attend"]
    made.update_(tree(40))
    assert kernels(made) == ["hopper", "attend"] and made.num_items > 40


def test_gluon_is_imported_when_it_is_needed():
    code = "import cascade_fd.backends.triton, sys; print('cascade_fd.kernels.hopper_kernel' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


CODE = """
import json
from dataclasses import replace
from cascade_fd.precompile import CASES, compile_case, problems
variants = compile_case(replace(CASES[0], batches=((64, 1),)), "sm_90")
print(json.dumps([[v.name, v.registers, v.spills, problems(v, "sm_90")] for v in variants]))
"""


@pytest.mark.slow
def test_they_compile_ahead_of_time():
    """And beside it the portable kernel for the same launch, which is what runs where this one is switched off."""
    if hopper.available(torch.device("meta")):
        pytest.skip("not with this Triton")
    env = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", HOPPER_SWITCH)}
    run = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False, env=env)
    assert run.returncode == 0, run.stderr[-3000:]
    variants = json.loads(run.stdout.splitlines()[-1])
    compiled = {(name, registers) for name, registers, *_ in variants}
    assert {("hopper_kernel", 168), ("hopper_kernel", 128), ("narrow_kernel", 128)} <= compiled
    assert "attend_kernel" in dict(compiled)
    assert not any(found for *_, found in variants)
