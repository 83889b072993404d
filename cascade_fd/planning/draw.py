"""A plan as a picture: the tree, and a schedule of its programs. Matplotlib is imported by ``draw`` only.

The schedule is simulated, not measured: a program takes the time that the cost model gives each key of its range. Launches that
may overlap are drawn one above the other, each on its own slots; others one after the other.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cascade_fd.hardware import Hardware
from cascade_fd.planning.facts import Facts, facts_of
from cascade_fd.planning.layout import lens_index
from cascade_fd.planning.worklist import NODE, START, STOP, Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# One colour per launch (Okabe and Ito's, which colour-blind people can tell apart), used again beyond seven.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8C7A00")
PRIVATE = 0.5  # strength of the colour of a node with one reader
IDLE = "#ECECEC"
METADATA: dict[str, dict[str, Any]] = {".png": {}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}  # no dates
Boxes = np.ndarray  # [n, 4]: left, right, top, bottom


def draw(plan: Plan, path: str | Path, hardware: Hardware | None = None) -> None:
    """Draw ``plan`` into ``path``, a ``.png``, ``.svg`` or ``.pdf``; equal plans give equal files.

    Left, the tree: a bar per node, from its first token to its last, as high as it has requests. Right, what each slot of
    ``hardware`` (default: what it was made for) would run if programs were dealt out in order.

    Raises:
        ValueError: another suffix.
        ModuleNotFoundError: matplotlib is not installed.
    """
    path = Path(path)
    if path.suffix not in METADATA:
        raise ValueError(f"path: expected a name that ends in {', '.join(METADATA)}, got {path.name!r}")
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError('draw: needs matplotlib; pip install "cascade_fd[bench]"', name=error.name) from error
    hw, facts = hardware or plan.hardware, facts_of(plan)
    with matplotlib.rc_context({"svg.hashsalt": "cascade_fd", "font.size": 8.5, "axes.titlesize": 9.5}):
        height = 2.9 + 1.6 * min(1.0, plan.tree.num_requests / 64)
        figure = Figure((11, height), layout="constrained")
        left, right = figure.subplots(1, 2)
        _draw_tree(left, plan, facts)
        _draw_schedule(right, plan, facts, hw)
        _legend(figure, plan, hw)
        figure.savefig(path, dpi=130, metadata=METADATA[path.suffix])


def _draw_tree(axes: Axes, plan: Plan, facts: Facts) -> None:
    nodes, B = plan.nodes, plan.tree.num_requests
    boxes = np.stack([facts.offset, facts.offset + facts.tokens, nodes.first, nodes.last], 1)
    end = int(boxes[:, 1].max(initial=0))
    axes.set(xlim=(0, end or 10), ylim=(B or 1, 0), title="Who reads which tokens", xlabel="token of the context")
    _add(axes, boxes, facts.launch, facts.readers > 1)
    axes.set_ylabel("request" if plan.tree.order is None else "request, sharers side by side")
    step = -(-B // 16) or 1
    shown = np.arange(0, B, step)
    names = shown if plan.tree.order is None else plan.tree.order[shown]
    axes.set_yticks(shown + 0.5, [str(name) for name in names])
    for i in facts.shared.tolist():
        left, right, first, last = boxes[i].tolist()
        wide, high = (right - left) / end, (last - first) / B
        if (wide > 0.2 and high > 0.06) or (wide > 0.03 and high > 0.6):  # as much room as the words need, lying or standing
            text = f"{right - left:,} tokens, {facts.readers[i]} requests"
            style = {"ha": "center", "va": "center", "color": "white", "fontsize": 7.5, "rotation": 0 if wide > 0.2 else 90}
            axes.text((left + right) / 2, (first + last) / 2, text, style)
    _strip(axes)


def _draw_schedule(axes: Axes, plan: Plan, facts: Facts, hw: Hardware) -> None:
    heads, count = plan.shape.num_kv_heads, max(1, len(plan.launches))
    band = 100 / count if plan.chained else 100  # launches that overlap one above the other, others one after the other
    begin = end = 0.0
    parts = []
    for index, launch in enumerate(plan.launches):
        if not launch.count:
            continue
        slots, top = hw.num_sms * launch.tile.per_sm, band * index if plan.chained else 0
        node, tokens = items_of(plan, facts, index)
        boxes = schedule(np.repeat(tokens, heads), slots)
        boxes, item = _side_by_side(boxes, np.repeat(np.arange(len(node)), heads))
        step = hw.costs.tile(launch.tile.block_m, launch.tile.per_sm).step / launch.tile.block_n or 1.0  # time per key
        scaled = boxes * [step, step, band / slots, band / slots] + np.array([begin, begin, top, top])
        parts.append((scaled, np.full(len(item), index), facts.readers[node[item]] > 1))
        last = begin + step * int(boxes[:, 1].max())
        axes.fill([begin, last, last, begin], [top, top, top + band, top + band], color=IDLE, linewidth=0)
        begin, end = 0.0 if plan.chained else last, max(end, last)
    axes.set(xlim=(0, end or 10), ylim=(100, 0), title=f"Schedule on {hw.name} (simulated)")
    how = "launches share the SMs" if plan.chained and count > 1 else "one launch after the other"
    axes.set(xlabel=f"us, if no program waits for memory that others use; {how}", ylabel="slots of each launch, per cent")
    if parts:
        _add(axes, *map(np.concatenate, zip(*parts, strict=True)))
    _strip(axes)


def _side_by_side(boxes: Boxes, item: np.ndarray) -> tuple[Boxes, np.ndarray]:
    """Programs of one item that run side by side as one box: the boxes, and the item of each."""
    joined = (np.diff(item) == 0) & (boxes[1:, 0] == boxes[:-1, 0]) & (boxes[1:, 2] == boxes[:-1, 3])
    first = np.flatnonzero(np.append(True, ~joined))
    merged = boxes[first]
    merged[:, 3] = boxes[np.append(first[1:], len(boxes)) - 1, 3]
    return merged, item[first]


def items_of(plan: Plan, facts: Facts, index: int) -> tuple[np.ndarray, np.ndarray]:
    """Node and tokens of every item of a launch, in its order.

    From the items where they are on the host; from a device they are not copied, but counted again from the cuts.
    """
    launch = plan.launches[index]
    if launch.items.device.type == "cpu":
        items = launch.items[: launch.count].numpy()
        node_of = np.argsort(lens_index(plan.tree))  # the plan counts private nodes first, in request order
        return node_of[items[:, NODE]], items[:, STOP].astype(np.int64) - items[:, START]
    mine = np.flatnonzero(facts.launch == index)
    growth = np.where(np.arange(len(facts.tokens)) >= plan.tree.num_shared, facts.growth, 0)
    capacity, cuts = facts.tokens + growth, plan.cuts
    counts = cuts.splits[mine] * facts.row_tiles[mine]
    node = np.repeat(mine, counts)
    split = (np.arange(len(node)) - np.repeat(np.cumsum(counts) - counts, counts)) // facts.row_tiles[node]
    begin = split * cuts.chunk[node] - cuts.lead[node]
    tokens = np.minimum(begin + cuts.chunk[node], capacity[node]) - np.maximum(begin, 0)
    if plan.asked.split == "stream_k":
        return node, tokens
    longest = np.argsort(-tokens, kind="stable")
    return node[longest], tokens[longest]


def schedule(durations: Sequence[int] | np.ndarray, slots: int) -> Boxes:
    """Deal out programs in order, each to the slot that is free first (the lowest of several)."""
    free = [(0, slot) for slot in range(slots)]
    boxes = np.empty((len(durations), 4), np.int64)
    for i, duration in enumerate(np.asarray(durations).tolist()):
        begin, slot = free[0]
        heapq.heapreplace(free, (begin + duration, slot))
        boxes[i] = begin, begin + duration, slot, slot + 1
    return boxes


def _add(axes: Axes, boxes: Boxes, launch: np.ndarray, shared: np.ndarray) -> None:
    """Boxes in the colours of their launches, lighter for a single reader, with thin gaps between them."""
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import to_rgb

    keep = (boxes[:, 1] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 2])
    left, right, top, bottom = boxes[keep].T
    right = right - np.minimum(0.2 * (right - left), 0.002 * np.ptp(axes.get_xlim()))
    bottom = bottom - np.minimum(0.2 * (bottom - top), 0.005 * np.ptp(axes.get_ylim()))
    corners = np.stack([left, top, left, bottom, right, bottom, right, top], 1).reshape(-1, 4, 2)
    palette = np.array([to_rgb(COLOURS[i % len(COLOURS)]) for i in range(int(launch.max(initial=0)) + 1)])
    strength = np.where(shared[keep], 1.0, PRIVATE)[:, None]
    colours = 1 - strength * (1 - palette[launch[keep]])
    many = len(colours) > 3000  # boxes that a vector file could not show quickly
    axes.add_collection(PolyCollection(list(corners), facecolors=colours, linewidths=0, rasterized=many))


def _legend(figure: Any, plan: Plan, hw: Hardware) -> None:
    from matplotlib.patches import Patch

    heads = plan.shape.num_kv_heads
    patches = []
    for i, launch in enumerate(plan.launches[: len(COLOURS)]):
        slots, programs = hw.num_sms * launch.tile.per_sm, launch.count * heads
        text = (
            f"launch {i}: {programs:,} programs of {launch.tile.block_m} rows on {slots:,} slots, {programs / slots:.2f} waves"
        )
        patches.append(Patch(color=COLOURS[i], label=text))
    patches.append(Patch(color=IDLE, label="idle slot; lighter colours: one reader"))
    figure.legend(handles=patches, loc="outside lower center", ncols=2, frameon=False)


def _strip(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_formatter("{x:,.0f}")
