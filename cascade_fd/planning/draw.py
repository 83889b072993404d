"""A plan as a picture: the tree, and a schedule of its programs. Matplotlib is imported by ``draw`` only.

The schedule is simulated, not measured: a program takes as long as its range has keys, and each launch waits for the last.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cascade_fd.hardware import Hardware, hardware_of
from cascade_fd.planning.facts import Facts, facts_of
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
    ``hardware`` (default: of ``plan.device``) would run if programs were dealt out in order and took as long as their range.

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
    hw, facts = hardware or hardware_of(plan.device), facts_of(plan)
    with matplotlib.rc_context({"svg.hashsalt": "cascade_fd", "font.size": 8.5, "axes.titlesize": 9.5}):
        height = 2.9 + 1.6 * min(1.0, plan.tree.num_requests / 64)
        figure = Figure((11, height), layout="constrained")
        left, right = figure.subplots(1, 2)
        _draw_tree(left, plan, facts)
        _draw_schedule(right, plan, facts, hw)
        _legend(figure, plan, hw)
        figure.savefig(path, dpi=130, metadata=METADATA[path.suffix])


def _draw_tree(axes: Axes, plan: Plan, facts: Facts) -> None:
    nodes, B = plan.tree.nodes, plan.tree.num_requests
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
    begin, heads = 0, plan.shape.num_kv_heads
    parts = []
    for index, launch in enumerate(plan.launches):
        slots = hw.num_sms * launch.tile.per_sm
        node, tokens = items_of(plan, facts, index)
        boxes = schedule(np.repeat(tokens, heads), slots)
        boxes, item = _side_by_side(boxes, np.repeat(np.arange(len(node)), heads))
        scaled = boxes * [1, 1, 100 / slots, 100 / slots] + np.array([begin, begin, 0, 0])
        parts.append((scaled, np.full(len(item), index), facts.readers[node[item]] > 1))
        end = begin + int(boxes[:, 1].max())
        axes.fill([begin, end, end, begin], [0, 0, 100, 100], color=IDLE, linewidth=0)
        begin = end
    axes.set(xlim=(0, begin or 10), ylim=(100, 0), title=f"Schedule on {hw.name} (simulated)")
    axes.set(xlabel="keys that a slot has read, one launch after the other (relative time)", ylabel="slots, per cent")
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

    From the items where they are on the host. From a device they are not copied: nodes are taken as cut evenly.
    """
    launch = plan.launches[index]
    if launch.items.device.type == "cpu":
        items = launch.items.numpy()
        lens = np.arange(len(facts.tokens))
        if plan.num_private and plan.tree.order is not None:  # columns of the plan count private nodes in request order
            lens[plan.tree.num_shared + plan.tree.order] = np.arange(plan.tree.num_shared, len(lens))
        return lens[items[:, NODE]], items[:, STOP].astype(np.int64) - items[:, START]
    mine = np.flatnonzero(facts.launch == index)
    capacity = facts.tokens[mine] + np.where(mine >= plan.tree.num_shared, facts.growth if plan.num_private else 0, 0)
    counts = plan.splits[mine] * facts.row_tiles[mine]
    node, chunk = np.repeat(mine, counts), -(-capacity // plan.splits[mine])
    first = np.repeat(np.cumsum(counts) - counts, counts)
    split = (np.arange(len(node)) - first) // facts.row_tiles[node]
    tokens = np.minimum(np.repeat(chunk, counts), np.repeat(capacity, counts) - split * np.repeat(chunk, counts))
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
        slots, programs = hw.num_sms * launch.tile.per_sm, len(launch.items) * heads
        text = (
            f"launch {i}: {programs:,} programs of {launch.tile.block_m} rows on {slots:,} slots, {programs / slots:.2f} waves"
        )
        patches.append(Patch(color=COLOURS[i], label=text))
    patches.append(Patch(color=IDLE, label="idle slot; lighter colours: one reader"))
    figure.legend(handles=patches, loc="outside lower center", ncols=2, frameon=False)


def _strip(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_formatter("{x:,.0f}")
