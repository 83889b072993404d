"""Times that can be trusted: the result is checked first, the L2 is cold, and launches are replayed from a CUDA graph."""

from __future__ import annotations

import csv
import datetime
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from cascade_fd.bench.cases import Case
from cascade_fd.bench.workload import build

COLD_BYTES = 420e6  # input sets together exceed the L2 (60 MB) several times
MAX_ERROR = 5e-3  # bf16 rounding gives 2e-3 to 3e-3


@dataclass(frozen=True)
class Row:
    """One line of a result file. ``us``: median microseconds per call; ``gbs``: unique KV bytes over that time."""

    case: str
    provider: str
    setting: str
    us: float
    gbs: float
    over_floor: float
    err: float
    gpu: str
    driver: str
    torch: str
    triton: str
    commit: str
    date: str


def measure(case: Case, device: torch.device, split: str | int = "wave", provider: str = "cascade_fd") -> Row:
    """Check and time our side of ``case``. Raises RuntimeError instead of timing a wrong result."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    sets = max(2, int(COLD_BYTES // case.kv_bytes) + 1) if device.type == "cuda" else 1
    loads = [build(case, device, dtype, split, seed) for seed in range(sets)]
    error = max(load.error() for load in (loads[0], loads[-1]))
    if not error < MAX_ERROR:
        raise RuntimeError(f"{case.name}: relative error {error:.2e} exceeds {MAX_ERROR:.0e}; not timed")
    us = (graph_us if device.type == "cuda" else wall_us)([load.run for load in loads])
    setting = f"split={split}, launches={len(loads[0].plan.launches)}, items={loads[0].plan.num_items}"
    gbs = case.kv_bytes / us / 1e3
    return Row(case.name, provider, setting, us, gbs, us / case.floor_us, error, **machine(device))


def graph_us(calls: Sequence[Callable[[], object]], replays: int = 15) -> float:
    """Median microseconds per call of graph replays that go round all ``calls``."""
    rounds = max(1, -(-24 // len(calls)))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(rounds):
            for call in calls:
                call()
    times = []
    for _ in range(replays + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / (rounds * len(calls)))
    return statistics.median(times[2:])


def wall_us(calls: Sequence[Callable[[], object]], repeats: int = 5) -> float:
    """Median microseconds per call on the CPU."""
    times = []
    for _ in range(repeats):
        for call in calls:
            begin = time.perf_counter()
            call()
            times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times)


def machine(device: torch.device) -> dict[str, str]:
    """The columns that say where a row was measured."""
    import triton

    gpu, driver = "CPU", ""
    if device.type == "cuda":
        gpu = torch.cuda.get_device_name(device)
        driver = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0"])
    commit = os.environ.get("CASCADE_FD_COMMIT") or _output(["git", "rev-parse", "--short", "HEAD"])
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {
        "gpu": gpu,
        "driver": driver,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit,
        "date": today,
    }


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Append ``rows``; a new file gets the header."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(Row.__dataclass_fields__))
        if new:
            writer.writeheader()
        for row in rows:
            fields = asdict(row)
            fields.update(us=f"{row.us:.2f}", gbs=f"{row.gbs:.0f}", over_floor=f"{row.over_floor:.3f}", err=f"{row.err:.2e}")
            writer.writerow(fields)
