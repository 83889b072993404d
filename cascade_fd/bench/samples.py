"""Times of plans that show what launches and tiles cost: which are taken, how, and the file that keeps them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from cascade_fd.bench.batches import Batch, Pool, plan_of, times_us, tree_of
from cascade_fd.bench.fit import Sample
from cascade_fd.bench.measure import machine
from cascade_fd.costs import Costs
from cascade_fd.hardware import H200, Hardware, hardware_of
from cascade_fd.planning.cost import Load
from cascade_fd.planning.facts import facts_of, loads_of, state_bytes
from cascade_fd.planning.worklist import Plan
from cascade_fd.tiles import NARROW, ON_HOPPER, SINGLE, tile_rows

POOL_BYTES = 8 << 30
MOST_FLAT = 9e6  # tokens that a call may read: more takes long, and nobody would share nothing there
ON_CPU = 4096  # the same for a rehearsal on a CPU

PREFIXES, GROUPS, SUFFIXES = (16, 256, 1024, 4096, 16384, 65536), (2, 4, 8, 16, 64, 256), (16, 64, 256, 1024, 4096)
# Each prefix with each group once, suffixes going round. Of an H200's sweep of 983 plans, the 116 of GRID and SEVERAL lead to
# constants that predict all of them to 4.3 % on average (4.6 % from a start twice off); those from all of them, to 4.2 %.
GRID = [Batch((g,), P, SUFFIXES[(2 * i + j) % 5]) for i, P in enumerate(PREFIXES) for j, g in enumerate(GROUPS)]
SEVERAL = [Batch((8,) * 8, 512, 64), Batch((2,) * 32, 64, 512), Batch((32,) * 2, 4096, 512), Batch((32,), 2048, 256, q_len=4)]
SEVERAL += [Batch((64,), 4096, 256, q_len=8)]  # several programs of one warp group on an SM
# Requests alone; several query rows fill larger tiles with nothing but their own keys.
FLAT = [Batch((1,) * B, 0, tokens) for B, tokens in ((1, 65536), (8, 4096), (64, 1024), (256, 256))]
FLAT += [
    Batch((1,) * B, 0, tokens, q_len=rows) for B, tokens, rows in ((16, 2048, 8), (64, 1024, 8), (16, 2048, 16), (16, 2048, 32))
]


@dataclass(frozen=True)
class Measured:
    """What ``cascade-fd tune`` keeps in a file of JSON lines: first where samples come from, then one sample a line.

    Attributes:
        hardware: the device, with the costs that plans were made by.
        triton, date: the compiler's version, and when.
        samples: what was measured.
    """

    hardware: Hardware
    triton: str
    date: str
    samples: tuple[Sample, ...]

    def save(self, path: Path) -> None:
        lines = [{"hardware": asdict(self.hardware), "triton": self.triton, "date": self.date}, *map(asdict, self.samples)]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    @classmethod
    def load(cls, path: Path) -> Measured:
        """Raises ValueError for a file that holds no samples."""
        try:
            head, *rest = map(json.loads, path.read_text().splitlines())
            hardware = Hardware(**{**head["hardware"], "costs": Costs.of(head["hardware"]["costs"])})
            samples = [Sample(**{**line, "loads": tuple(map(_load, line["loads"]))}) for line in rest]
            return cls(hardware, head["triton"], head["date"], tuple(samples))
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"samples: expected a file that cascade-fd tune wrote, got {path} ({error})") from error


def _load(fields: dict) -> Load:
    return Load(**{**fields, "reads": tuple(map(tuple, fields["reads"]))})


def measure(device: torch.device) -> Measured:
    """Time the designed batches. On a CPU, for a rehearsal: small ones, with an H200's plans."""
    gpu = device.type == "cuda"
    hw = hardware_of(device) if gpu else replace(H200, name="CPU")
    pool, samples = Pool.of(device, POOL_BYTES), []
    batches = [x for x in (*GRID, *SEVERAL, *FLAT) if pool.holds(x) and (gpu or x.flat_tokens <= ON_CPU)]
    for batch in track(batches, "Measuring", console=Console(stderr=True)):
        plans = plans_of(batch, device, hw)
        times = times_us(pool, batch, list(plans.values()))
        samples += [sample_of(f"{label}: {batch}", plan, us) for (label, plan), us in zip(plans.items(), times, strict=True)]
    where = machine(device)
    return Measured(hw, where["triton"], where["date"], tuple(samples))


def plans_of(batch: Batch, device: torch.device, hw: Hardware) -> dict[str, Plan]:
    """The plans to time, by ``share``, tile sizes, kernels.

    Each comes but once, also those that were to share, but do better without.
    """
    tree, plans = tree_of(batch, device), dict[str, Plan]()
    rows = tile_rows(hw, torch.bfloat16, (batch.head_dim, batch.head_dim))
    for share, sizes, kernel in variants(batch, rows, all(map(hw.costs.knows, ON_HOPPER))):
        plan = plan_of(batch, tree, hw, share, sizes, kernel)
        alike = any(_launches(plan) == _launches(other) for other in plans.values())
        if not alike and (share == "never" or not plan.choice.folded.any()):
            plans[f"{share} {'+'.join(map(str, sizes))} {kernel}".strip()] = plan
    return plans


def _launches(plan: Plan) -> tuple[object, ...]:
    """What tells plans of one batch apart."""
    return plan.slots_used, *((launch.tile, launch.count, launch.max_tokens) for launch in plan.launches)


def variants(batch: Batch, sizes: Sequence[int], hopper: bool = False) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """``share``, the tile sizes to keep to, () for all, so that each size also reads what larger ones would; and kernels."""
    few = hopper and batch.q_len * batch.num_q_heads // batch.num_kv_heads <= NARROW.block_m
    if batch.prefix and batch.flat_tokens <= MOST_FLAT:
        yield "never", (), "attend"
        if few:
            yield "never", (), "narrow"
    large: tuple[str, ...] = ()
    if hopper and batch.packed > SINGLE.block_m // 2:
        large = ("single",) if batch.packed <= SINGLE.block_m else ("hopper", "beside")
    for kernel in ("attend", *large):
        yield "always", (), kernel
        if few:
            yield "always", (), f"{kernel} narrow"
    smaller = [size for size in sizes if size < batch.packed][: len(sizes) - 1] if batch.prefix else []
    if smaller:
        yield "auto", (smaller[0],), "attend"
    if len(smaller) > 1:
        yield "auto", (smaller[0], smaller[-1]), "attend"
    if hopper and smaller and "single" not in large:
        yield "auto", (smaller[0], SINGLE.block_m), "single"


def sample_of(label: str, plan: Plan, us: float) -> Sample:
    """What the cost model sees of a plan, blocks with equally many readers as one."""
    loads = []
    for load in loads_of(plan, facts_of(plan)):
        blocks: dict[float, float] = defaultdict(float)
        for number, times in load.reads:
            blocks[times] += number
        loads.append(replace(load, reads=tuple((number, times) for times, number in blocks.items())))
    return Sample(label, tuple(loads), state_bytes(plan), us)
