"""What a plan needs to know of a device: a frozen record, with presets so that plans can be made and tested anywhere."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass, replace

import torch

from cascade_fd import costs
from cascade_fd.costs import Costs


@dataclass(frozen=True)
class Hardware:
    """A device as the planner sees it.

    Attributes:
        name: for people.
        arch: "sm_90", "gfx942", "cpu": picks rows of the launch table.
        num_sms: streaming multiprocessors (compute units on AMD); 1 for a CPU, which makes every range one split.
        smem: shared memory one program may use, in bytes.
        bandwidth: device memory read rate in bytes per second (measured where we could, else the data sheet's).
        matmul_rate: dense bf16 products in FLOP per second, from the same sources; only lower bounds of time use it.
        costs: what the planner decides by.
    """

    name: str
    arch: str
    num_sms: int
    smem: int
    bandwidth: float
    matmul_rate: float = math.inf  # unknown: no bound
    costs: Costs = costs.H200

    def __hash__(self) -> int:
        return hash((self.name, self.arch, self.num_sms))  # cheap: plans look things up by their hardware

    @functools.cached_property
    def overlaps(self) -> bool:
        """Whether a launch may enter while the one before it still runs (programmatic dependent launch: Hopper and later)."""
        found = re.match(r"sm_(\d+)", self.arch)
        return found is not None and int(found[1]) >= 90


def _guess(num_sms: int, bandwidth: float, arch: str = "") -> Costs:
    """The H200's costs with blocks slower in proportion to the bandwidth per SM: until ``cascade-fd tune`` has measured."""
    found = costs.H200.scaled((4.6e12 / 132) / (bandwidth / num_sms), "guessed from the bandwidth; cascade-fd tune measures")
    return found if arch == "sm_90" else replace(found, tiles=tuple(t for t in found.tiles if t.kernel == "attend"))


CPU = Hardware("CPU", "cpu", 1, 1 << 20, 2e10, costs=costs.ON_CPU)
A100 = Hardware("NVIDIA A100", "sm_80", 108, 166_912, 1.9e12, 312e12, _guess(108, 1.9e12))
H200 = Hardware("NVIDIA H200", "sm_90", 132, 232_448, 4.6e12, 770e12)
B200 = Hardware("NVIDIA B200", "sm_100", 148, 232_448, 7.7e12, 2250e12, _guess(148, 7.7e12))
MI300X = Hardware("AMD MI300X", "gfx942", 304, 65_536, 5.3e12, 1307e12, _guess(304, 5.3e12))
PRESETS = {hw.arch: hw for hw in (CPU, A100, H200, B200, MI300X)}


@functools.cache
def _of_cuda(index: int) -> Hardware:
    props = torch.cuda.get_device_properties(index)
    gcn = getattr(props, "gcnArchName", "")
    arch = gcn.split(":")[0] if gcn.startswith("gfx") else f"sm_{props.major}{props.minor}"
    smem = getattr(props, "shared_memory_per_block_optin", 65_536)
    known = PRESETS.get(arch)
    bandwidth, matmul_rate = (known.bandwidth, known.matmul_rate) if known else (1e12, math.inf)
    sms = props.multi_processor_count
    own = costs.measured(props.name)
    if own is None:
        own = known.costs if known and known.num_sms == sms else _guess(sms, bandwidth, arch)
    return Hardware(props.name, arch, sms, smem, bandwidth, matmul_rate, own)


def hardware_of(device: torch.device | str) -> Hardware:
    """The record of ``device``. CUDA and ROCm devices are asked once; anything else counts as a CPU."""
    device = torch.device(device)
    if device.type != "cuda":
        return CPU
    return _of_cuda(torch.cuda.current_device() if device.index is None else device.index)
