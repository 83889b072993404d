"""Ahead-of-time compilation for a GPU that is not there: the real launch path, up to the binary, behind a stand-in driver.

Arguments are meta tensors, so Triton specialises them exactly as it would real ones; nothing runs.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from cascade_fd.hardware import Hardware
from cascade_fd.kernels.launch import compile_only


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of one variant.

    Attributes:
        name: kernel name.
        num_warps: as compiled.
        registers: per thread; None where no tool here can tell.
        spills: bytes of stack (NVIDIA) or spilled registers (AMD) per thread; None likewise.
        shared: bytes of shared memory per program.
        load_bytes: width of the narrowest async copy (NVIDIA; 128 for TMA), or, without any, of the widest global load.
    """

    name: str
    num_warps: int
    registers: int | None
    spills: int | None
    shared: int
    load_bytes: int

    def cells(self) -> tuple[str, ...]:
        """The columns of a printed table."""
        unknown = ["?" if n is None else str(n) for n in (self.registers, self.spills)]
        return self.name, str(self.num_warps), *unknown, str(self.shared), f"{self.load_bytes} B"


class _StandIn:
    """Answers what Triton's JIT asks a driver before it compiles."""

    def __init__(self, hw: Hardware):
        self.hw = hw
        self.utils = SimpleNamespace(get_device_properties=self._properties)

    def _properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": self.hw.smem, "multiprocessor_count": self.hw.num_sms}

    def get_current_target(self) -> GPUTarget:
        if self.hw.arch.startswith("gfx"):
            return GPUTarget("hip", self.hw.arch, 64)
        return GPUTarget("cuda", int(self.hw.arch.removeprefix("sm_")), 32)

    def get_current_device(self) -> str:
        return self.hw.arch  # Triton keys its caches by this, so every target needs its own

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def is_active(self) -> bool:
        return True


@contextlib.contextmanager
def target(hw: Hardware) -> Iterator[list[Any]]:
    """Inside the block, launches compile for ``hw``; yields the list of compiled kernels."""
    driver = triton.runtime.driver
    before = driver.__dict__.get("_active")
    driver.set_active(_StandIn(hw))
    try:
        with compile_only() as compiled:
            yield compiled
    finally:
        driver._active = before  # None on a machine without a GPU, where asking for the default driver fails


def describe(kernel: Any) -> Compiled:
    """Read registers, spills, shared memory and load widths off a compiled kernel."""
    meta = kernel.metadata
    if "cubin" in kernel.asm:
        registers, spills = _cuda_resources(kernel.asm["cubin"])
        width = _cuda_load_bytes(kernel.asm["ptx"])
    else:
        text = kernel.asm["amdgcn"]
        registers, spills = (_number(rf"\.{key}:\s*(\d+)", text) for key in ("vgpr_count", "vgpr_spill_count"))
        widths = {"dwordx4": 16, "b128": 16, "dwordx2": 8, "b64": 8}
        found = re.findall(r"(?:global|buffer)_load_(dwordx[24]|b128|b64)", text)
        width = max((widths[w] for w in found), default=4)
    return Compiled(meta.name, meta.num_warps, registers, spills, meta.shared, width)


def _cuda_load_bytes(ptx: str) -> int:
    if "cp.async.bulk.tensor" in ptx:
        return 128
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global.*?, (0x[0-9a-f]+|\d+)", ptx)
    if copies:
        return min(int(size, 0) for size in copies)
    vectors = re.findall(r"ld\.global\S*?\.v([248])\.b(\d+)", ptx)
    return max((int(n) * int(bits) // 8 for n, bits in vectors), default=4)


def _cuda_resources(cubin: bytes) -> tuple[int | None, int | None]:
    """Registers and stack (where ptxas spills to) from cuobjdump, which comes with Triton."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        return None, None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        shown = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=False)
    return _number(r"REG:(\d+)", shown.stdout), _number(r"STACK:(\d+)", shown.stdout)


def _number(pattern: str, text: str) -> int | None:
    found = re.search(pattern, text)
    return int(found.group(1)) if found else None
