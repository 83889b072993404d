"""Times that can be trusted: the result is checked first, the L2 is cold, and launches are replayed from a CUDA graph."""

from __future__ import annotations

import csv
import datetime
import functools
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from cascade_fd.bench.cases import Case
from cascade_fd.bench.workload import Workload, build_sets

COLD_BYTES = 420e6  # input sets together exceed the L2 (60 MB) several times
MAX_ERROR = 5e-3  # bf16 rounding gives 2e-3 to 3e-3
GRAPH_US = 20e3  # what a graph may take, unless one round takes longer


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


def measure(case: Case, device: torch.device, split: str | int = "balanced", provider: str = "cascade_fd") -> Row:
    """Check and time our side of ``case``. Raises RuntimeError instead of timing a wrong result."""
    loads = input_sets(case, device, split)
    error = max(load.error() for load in (loads[0], loads[-1]))
    if not error < MAX_ERROR:
        raise RuntimeError(f"{case.name}: relative error {error:.2e} exceeds {MAX_ERROR:.0e}; not timed")
    us = medians_us([timer([load.run for load in loads], device)], replays_on(device))[0]
    return row_of(case, provider, setting_of(loads[0], split), us, error, machine(device))


def input_sets(case: Case, device: torch.device, split: str | int = "balanced") -> list[Workload]:
    """On a GPU so many that together they exceed the L2 several times; for a CPU one. They share page table and plan."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    sets = max(2, int(COLD_BYTES // case.kv_bytes) + 1) if device.type == "cuda" else 1
    return build_sets(case, device, dtype, sets, split)


def setting_of(load: Workload, split: str | int) -> str:
    """What a row says of our plan: its launches by kernel and rows of the tile."""
    tiles = (f"{launch.tile.kernel} {launch.tile.block_m}" for launch in load.plan.launches)
    return f"split={split}, launches={' + '.join(tiles)}, items={load.plan.num_items}"


def row_of(case: Case, provider: str, setting: str, us: float, error: float, where: dict[str, str]) -> Row:
    """A row with the figures that follow from its time; ``where``: see ``machine``."""
    return Row(case.name, provider, setting, us, case.kv_bytes / us / 1e3, us / case.floor_us, error, **where)


def timer(calls: Sequence[Callable[[], object]], device: torch.device) -> Callable[[], float]:
    """What times ``calls`` once more, whenever it is called: microseconds per call.

    On a GPU that is one replay of a graph that goes round all ``calls``; slow calls make shorter graphs.
    """
    if device.type != "cuda":
        return lambda: wall_us(calls) / len(calls)
    stream = capture_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        once = gpu_us(calls[-1])  # with host time: an upper bound
    most = int(min(24.0, GRAPH_US / once))
    rounds = max(1, -(-most // len(calls)))
    replay = captured(rounds * [*calls])
    return lambda: gpu_us(replay) / (rounds * len(calls))


def medians_us(timers: Sequence[Callable[[], float]], replays: int) -> list[float]:
    """The median of each timer after two that warm up. They take turns, so that drifting clocks are fair to all."""
    times = [[time_once() for time_once in timers] for _ in range(replays + 2)]
    return [statistics.median(mine) for mine in zip(*times[2:], strict=True)]


def replays_on(device: torch.device) -> int:
    return 15 if device.type == "cuda" else 3


@functools.cache
def capture_stream() -> torch.cuda.Stream:
    """One for all: torch's streams are a few that come round again, so a new one could be one that a call forks to."""
    return torch.cuda.Stream()


def captured(calls: Sequence[Callable[[], object]]) -> Callable[[], None]:
    """What replays ``calls`` as one CUDA graph. They ran on ``capture_stream`` before, so that nothing is compiled here."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=capture_stream()):
        for call in calls:
            call()
    return graph.replay


def gpu_us(call: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def wall_us(calls: Sequence[Callable[[], object]]) -> float:
    begin = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - begin) * 1e6


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
