"""Launches that repeat an earlier one: never with another variant than Triton would pick, always with this call's arguments."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch

from cascade_fd.hardware import PRESETS

pytest.importorskip("triton")

import triton
import triton.language as tl

from cascade_fd.kernels import launch
from cascade_fd.kernels.aot import target


class Memory:
    """Stands for a tensor: launches ask for no more than this."""

    def __init__(self, address=1 << 20, dtype=torch.float16, device=-1):
        self.address, self.dtype, self.device = address, dtype, device

    def data_ptr(self):
        return self.address

    def get_device(self):
        return self.device


class Kernel:
    """Stands for a Triton kernel of two pointers, two strides, a float and a constexpr; keeps what was launched how."""

    def __init__(self, backend="cuda"):
        self.backend, self.made, self.calls = backend, [], []
        names = ("a", "b", "s", "t", "scale", "SIZE")
        self.params = [SimpleNamespace(name=name, is_constexpr=name == "SIZE") for name in names]

    def __getitem__(self, grid):
        return lambda *args, **meta: self.compile(grid, args)

    def compile(self, grid, args):
        self.calls.append(("triton", grid, args))
        if self.backend is None:
            return None
        self.made.append(Compiled(self, len(self.made)))
        return self.made[-1]


class Compiled:
    def __init__(self, kernel, number):
        self.kernel, self.function, self.packed_metadata = kernel, f"function {number}", "packed"
        self.metadata = SimpleNamespace(target=SimpleNamespace(backend=kernel.backend))

    def run(self, *args):
        self.kernel.calls.append(("direct", *args))

    def __getitem__(self, grid):
        return lambda *args: self.kernel.calls.append((self.function, grid, args))


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(launch, "_compiled", {})
    monkeypatch.setattr(launch, "_repeats", {})
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: 7)))


def arguments(s, t, size):
    return (s, t), {"SIZE": size, "num_warps": 2}


def call(kernel, a=None, b=None, layout=(64, 8, 16), grid=3, scale=0.5):
    launch.run(kernel, grid, (a or Memory(), b or Memory()), layout, (scale,), arguments)


def test_a_repeated_launch_has_its_own_grid_addresses_and_floats():
    kernel = Kernel()
    call(kernel)
    call(kernel, Memory(160), Memory(320), grid=5, scale=0.25)
    call(kernel, Memory(480), Memory(640), grid=9, scale=0.125)
    nothing = (None, None, None)
    assert [c[0] for c in kernel.calls] == ["triton", "direct", "direct"]
    assert kernel.calls[1][1:] == (5, 1, 1, 7, "function 0", "packed", *nothing, 160, 320, 64, 8, 0.25, 16)
    assert kernel.calls[2][1:] == (9, 1, 1, 7, "function 0", "packed", *nothing, 480, 640, 64, 8, 0.125, 16)


DIFFERENT = {
    "dtype of the first": {"a": Memory(dtype=torch.bfloat16)},
    "dtype of the second": {"b": Memory(dtype=torch.bfloat16)},
    "first unaligned": {"a": Memory(8)},
    "second unaligned": {"b": Memory(8)},
    "both unaligned": {"a": Memory(8), "b": Memory(8)},
    "stride of 1": {"layout": (1, 8, 16)},
    "other stride of 1": {"layout": (64, 1, 16)},
    "stride no multiple of 16": {"layout": (65, 8, 16)},
    "stride of 64 bits": {"layout": (1 << 31, 8, 16)},
    "constexpr": {"layout": (64, 8, 32)},
}


def test_layouts_that_need_other_code_never_share_it():
    kernel = Kernel()
    for _ in range(3):
        call(kernel)
        for options in DIFFERENT.values():
            call(kernel, **options)
    assert len(kernel.made) == 1 + len(DIFFERENT)
    used = [c[5] for c in kernel.calls if c[0] == "direct"]
    assert used == 2 * [f"function {n}" for n in range(1 + len(DIFFERENT))]


def test_layouts_that_need_the_same_code_share_it_with_their_own_strides():
    kernel = Kernel()
    for s in (64, 128, 64):
        call(kernel, layout=(s, 8, 16))
    assert len(kernel.made) == 1
    assert [c[-4] for c in kernel.calls[1:]] == [128, 64]


def test_two_kernels_share_nothing():
    one, other = Kernel(), Kernel()
    call(one)
    call(other)
    assert len(other.made) == 1


@pytest.mark.parametrize("backend", ["hip", None])
def test_what_must_not_be_reused_goes_through_triton_every_time(backend):
    """On AMD Triton looks at more than is looked at here; its interpreter compiles nothing."""
    kernel = Kernel(backend)
    for _ in range(3):
        call(kernel)
    assert [c[0] for c in kernel.calls] == 3 * ["triton"]


@pytest.mark.parametrize("unusual", ["enter hook", "exit hook", "one function as hook", "unknown Triton"])
def test_triton_launches_where_more_than_the_launch_is_wanted(monkeypatch, unusual):
    kernel = Kernel()
    for _ in range(2):
        call(kernel)
    none = SimpleNamespace(calls=[])
    enter = {"enter hook": SimpleNamespace(calls=[print]), "one function as hook": print}.get(unusual, none)
    leave = SimpleNamespace(calls=[print]) if unusual == "exit hook" else None
    runtime = SimpleNamespace(launch_enter_hook=enter, launch_exit_hook=leave)
    monkeypatch.setattr(launch, "knobs", SimpleNamespace(runtime=runtime))
    monkeypatch.setattr(launch, "_KNOWN_TRITON", unusual != "unknown Triton")
    call(kernel, Memory(160), Memory(320), grid=5)
    assert kernel.calls[-1] == ("function 0", (5, 1, 1), (160, 320, 64, 8, 0.5, 16))


def test_layouts_are_forgotten_before_they_are_too_many(monkeypatch):
    monkeypatch.setattr(launch, "_MAX_LAYOUTS", 4)
    kernel = Kernel()
    for s in range(16, 16 * 40, 16):
        call(kernel, layout=(s, 8, 16))
    assert len(launch._repeats) <= 4
    assert len(kernel.made) == 1
    assert [c[-4] for c in kernel.calls[1:]] == list(range(32, 16 * 40, 16))


def test_launches_on_the_device_of_the_tensors(monkeypatch):
    """Not the current one; variants of two devices are two."""
    current = [0]

    class Device:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            self.before, current[0] = current[0], self.index

        def __exit__(self, *_):
            current[0] = self.before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", Device)
    streams = SimpleNamespace(get_current_stream=lambda device: (device, current[0]))
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=streams))
    kernel = Kernel()
    for _, index in product(range(2), (0, 1)):
        call(kernel, Memory(device=index), Memory(device=index))
    assert [c[4] for c in kernel.calls if c[0] == "direct"] == [(0, 0), (1, 1)]
    assert len(kernel.made) == 2
    assert current == [0]


@triton.jit
def small_kernel(a, b, s, t, scale, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(b + at * t, tl.load(a + at * s) * scale)


def test_never_coarser_than_triton_itself():
    """Whenever Triton compiles two calls differently, they are two variants here."""
    room = torch.zeros(256, dtype=torch.float32)
    half, brain = room.half(), room.bfloat16()
    tensors = [room, room[1:], room[2:], room[3:], room[4:], half, half[1:], half[4:], half[8:], brain]
    strides = [0, 1, 2, 8, 15, 16, 17, 32, 2**31 - 1, 2**31, 2**31 + 1]
    calls = [(a, room, 16, 2, 16) for a in tensors] + [(room, b, 16, 2, 16) for b in tensors]
    calls += [(room, room, s, 2, 16) for s in strides] + [(room, room, 16, t, 32) for t in strides]
    with target(PRESETS["sm_90"]) as compiled:
        for a, b, *layout in calls:
            launch.run(small_kernel, 1, (a, b), tuple(layout), (0.5,), arguments)
    ours = []
    for a, b, *layout in calls:
        facts = (a.dtype, b.dtype, a.data_ptr() & 15, b.data_ptr() & 15)
        ours.append(launch._variant(facts, *arguments(*layout)))
    theirs = [kernel.hash for kernel in compiled]
    assert len(set(zip(ours, theirs, strict=True))) == len(set(ours))
    assert len(set(theirs)) > 10
