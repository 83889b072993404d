"""Plans with room to spare, and plans copied into them: what lets one captured CUDA graph serve batch after batch."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch

from cascade_fd.planning.planner import plan_with_tiles
from cascade_fd.planning.worklist import Launch, Plan
from cascade_fd.tree import PrefixTree


def with_room(plan: Plan, factor: float) -> Plan:
    """See ``Plan.with_room``. Room is items without rows, merged rows of number -1, and workspace."""
    if not isinstance(factor, (int, float)) or not 1 <= factor < math.inf:
        raise ValueError(f"factor: expected a number of at least 1, got {factor!r}")

    def grown(n: int) -> int:
        return math.ceil(n * factor)

    T = plan.num_rows
    launches = [replace(x, items=_padded(x.items, grown(len(x.items)), 0), direct=True) for x in plan.launches]
    merge, merged = plan.merge, max(T, len(plan.merge))
    assert merge.rows is not None
    end = merge.indptr[-1:].expand(merged + 1 - len(merge.indptr))
    return replace(
        plan,
        launches=tuple(launches),
        merge=replace(merge, indptr=torch.cat([merge.indptr, end]), rows=_padded(merge.rows, merged, -1)),
        lens=_padded(plan.lens, grown(len(plan.lens)), 0),
        rows=plan.rows.clone(),
        floors=plan.floors.clone(),
        num_slots=grown(max(plan.num_slots, T)),
    )


def _padded(array: torch.Tensor, length: int, value: int) -> torch.Tensor:
    """A copy of ``array [n, ...]`` with rows of ``value`` up to ``length``."""
    padded = array.new_full((length, *array.shape[1:]), value)
    padded[: len(array)] = array
    return padded


def update(plan: Plan, new: Plan | PrefixTree) -> None:
    """See ``Plan.update_``."""
    if isinstance(new, PrefixTree):
        new = plan_with_tiles(new, plan)
    if not isinstance(new, Plan):
        raise TypeError(f"other: expected a Plan or a PrefixTree, got {type(new).__name__}")
    _check_frame(plan, new)
    place = _matches(plan, new)
    launches = list(plan.launches)
    for i, old in enumerate(plan.launches):
        if i not in place:
            old.items.zero_()
            level = (plan.tree.source(old.levels[0]),)
            launches[i] = replace(old, levels=level, max_tokens=0, id_range=None, max_row=-1, max_stop=0, count=0)
    for i, mine in zip(place, new.launches, strict=True):
        _fill(plan.launches[i].items, mine.items, 0)
        launches[i] = replace(mine, items=plan.launches[i].items, direct=plan.launches[i].direct)
    assert plan.merge.rows is not None and new.merge.rows is not None
    _fill(plan.merge.rows, new.merge.rows, -1)
    _fill(plan.merge.indptr, new.merge.indptr, new.slots_used)
    for to, source in ((plan.rows, new.rows), (plan.floors, new.floors), (plan.lens[: len(new.lens)], new.lens)):
        to.copy_(source)
    plan.launches = tuple(launches)
    plan.launch_of = np.array([*place, -1])[new.launch_of]  # -1 picks the last
    for name in ("tree", "nodes", "asked", "choice", "cuts", "slots_used", "max_new_tokens", "grown"):
        setattr(plan, name, getattr(new, name))


def _fill(array: torch.Tensor, source: torch.Tensor, value: int) -> None:
    array[: len(source)] = source
    array[len(source) :] = value


def _check_frame(plan: Plan, new: Plan) -> None:
    for name in ("shape", "device", "chained", "num_rows", "num_private"):
        if getattr(plan, name) != getattr(new, name):
            advice = "; fill a smaller batch up with requests of length 0" if name == "num_rows" else ""
            raise ValueError(
                f"other: expected a plan of the same {name} ({getattr(plan, name)}), got {getattr(new, name)}{advice}"
            )
    room = {
        "workspace slots": (plan.num_slots, new.slots_used),
        "merged rows": (len(plan.merge), len(new.merge)),
        "lengths": (len(plan.lens), len(new.lens)),
    }
    for what, (have, need) in room.items():
        if need > have:
            raise ValueError(f"other: expected at most {have} {what}, got {need}; with_room() makes room")


def _matches(plan: Plan, new: Plan) -> list[int]:
    """For every launch of ``new``, the launch of ``plan`` whose place it takes."""
    place: list[int] = []
    for mine in new.launches:
        same = (i for i, old in enumerate(plan.launches) if i not in place and _key(plan, old) == _key(new, mine))
        at = next(same, None)
        if at is None:
            raise ValueError(
                f"other: expected launches that the plan has too, got one of {mine.tile.block_m}-row tiles (levels "
                f"{list(mine.levels)}) whose tile, page table or store it has not; page ids must be in the same memory"
            )
        if len(mine.items) > len(plan.launches[at].items):
            raise ValueError(
                f"other: expected at most {len(plan.launches[at].items)} items of {mine.tile.block_m} rows, "
                f"got {len(mine.items)}; with_room() makes room"
            )
        if mine.direct and not plan.launches[at].direct:
            raise ValueError("other: expected no rows with a single state, as in the plan, got some; with_room() makes room")
        place.append(at)
    sizes = [0 if table is None else table.page_size for table in new.tree.tables]
    for i, old in enumerate(plan.launches):
        level = plan.tree.source(old.levels[0])
        if i not in place and sizes[level : level + 1] != [old.page_size]:  # it is launched all the same
            raise ValueError(
                f"other: expected pages of {old.page_size} (0: a dense store) at level {level} too, which the plan reads, got "
                f"levels of {sizes}"
            )
    return place


def _key(plan: Plan, launch: Launch) -> tuple[object, ...]:
    """What a captured launch cannot change."""
    table = None if launch.ids is None else (launch.ids.data_ptr(), launch.ids.dtype, launch.page_size, launch.table_stride)
    return launch.tile, table, plan.tree.source(launch.levels[0])  # the last: which of the stores is its own
