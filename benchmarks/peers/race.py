"""All providers of a case in one process: each result is checked, then their graphs are replayed in turn.

A provider that fails or is wrong is left out; it ends no run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.peers import fa3, flashinfer, flex, provider, vllm_fa3
from benchmarks.peers.provider import Provider, SkipError
from cascade_fd.bench.cases import MATMUL_RATE, READ_RATE, Case
from cascade_fd.bench.measure import MAX_ERROR, Row, input_sets, medians_us, replays_on, row_of, timer, write_csv
from cascade_fd.bench.workload import Workload

Say = Callable[[str], object]
Where = dict[str, str]
Wanted = Callable[[Provider], bool]
PROVIDERS: dict[str, Callable[[Workload], list[Provider]]] = {
    "flashinfer": flashinfer.providers,
    "fa3": fa3.providers,
    "vllm": vllm_fa3.providers,
    "sdpa": provider.sdpa,
    "ours": provider.ours,
    "flex": flex.providers,
}
USUAL = tuple(name for name in PROVIDERS if name != "flex")  # which compiles for each case, and is slow


def race(
    case: Case, names: Sequence[str], device: torch.device, where: Where, say: Say, wanted: Wanted = lambda each: True
) -> list[Row]:
    """Rows of all providers in ``names`` that are wanted and give the right result; ``say`` is told why another is left out."""
    loads = input_sets(case, device)
    ready = []
    for each in filter(wanted, _known(case, names, loads[0], say)):
        try:
            runs = each.prepare(loads)
            error = max(_error(runs[i], loads[i]) for i in (0, -1))
            if not error < MAX_ERROR:
                raise SkipError(f"relative error {error:.2e} exceeds {MAX_ERROR:.0e}; not timed")
            ready.append((each, error, timer(runs, device)))
        except Exception as fault:
            say(f"{case.name}, {each.name}, {each.setting}: {reason(fault)}")
    times = medians_us([time_once for *_, time_once in ready], replays_on(device))
    return [row_of(case, e.name, e.setting, us, error, where) for (e, error, _), us in zip(ready, times, strict=True)]


def attempt(what: str, make: Callable[[], list[Row]], rows: list[Row], out: Path | None, say: Say) -> None:
    """Add what ``make`` measures to ``rows``, and to the file ``out``; a fault ends nothing, and is told in a line."""
    try:
        new = make()
        rows.extend(new)
        if out is not None and new:
            write_csv(out, new)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    except Exception as fault:
        say(f"{what}: {reason(fault)}")


def reason(fault: Exception) -> str:
    """In one line."""
    text = " ".join(str(fault).split())[:200]
    return text if isinstance(fault, SkipError) else f"{type(fault).__name__}: {text}"


def _known(case: Case, names: Sequence[str], load: Workload, say: Say) -> list[Provider]:
    found = []
    for name in names:
        try:
            found += PROVIDERS[name](load)
        except SkipError as fault:
            say(f"{case.name}, {name}: {fault}")
    return found


def _error(run: Callable[[], torch.Tensor], load: Workload) -> float:
    """Of one result; memory that it may be written to is poisoned before, ours and what the allocator hands out next."""
    load.out.o.fill_(torch.nan)
    stale = [torch.full_like(load.q, torch.nan) for _ in range(8)]
    del stale
    return load.error_of(run())


def ceilings(device: torch.device, where: Where, gib: float = 4, side: int = 8192) -> list[Row]:
    """What the device does at most: reads (``gbs``) and a bf16 matrix product (in ``setting``).

    ``over_floor`` is over the rates that floors are made of.
    """
    data = torch.zeros(int(gib * 2**30), dtype=torch.uint8, device=device)
    a, b = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    c = torch.empty_like(a)
    dtypes = (torch.bfloat16, torch.float32)
    calls: list[Callable[[], object]] = [data.view(dtype).sum for dtype in dtypes] + [lambda: torch.mm(a, b, out=c)]
    *sums, product = medians_us([timer([call], device) for call in calls], replays_on(device))
    rows = []
    for dtype, us in zip(dtypes, sums, strict=True):
        setting = f"sum of {gib:g} GiB {str(dtype).removeprefix('torch.')}"
        rows.append(_ceiling(setting, us, data.numel(), data.numel() / READ_RATE, where))
    flops, size = 2 * side**3, 3 * a.numel() * a.element_size()
    setting = f"{side}^3 bf16 matmul, {flops / product / 1e6:.0f} TFLOP/s"
    return [*rows, _ceiling(setting, product, size, flops / MATMUL_RATE, where)]


def _ceiling(setting: str, us: float, size: int, floor: float, where: Where) -> Row:
    return Row("ceiling", "torch", setting, us, size / us / 1e3, us / (floor * 1e6), math.nan, **where)
