"""A plan in words and numbers: what is shared with whom, what is read, what is launched, and what no kernel can beat."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cascade_fd.hardware import Hardware
from cascade_fd.planning.facts import Facts, facts_of, merged_rows, predicted, state_bytes
from cascade_fd.planning.worklist import Plan
from cascade_fd.tiles import AttendTile

MOST = 8  # groups, and launches, that are listed


def explain(plan: Plan, hardware: Hardware | None = None) -> str:
    """``plan`` as plain text of at most about 40 lines. Host only: a plan whose arrays are on a GPU is not waited for.

    Lengths are those that the plan was made with; rates and the number of slots are those of ``hardware`` (default: what the
    plan was made for).
    """
    hw = hardware or plan.hardware
    facts = facts_of(plan)
    lines = _batch(plan, hw)
    lines += _shared(plan, facts)
    lines += _folded(plan, facts)
    lines += _private(plan, facts)
    lines += _reads(facts)
    lines += _launches(plan, facts, hw)
    lines += _merge(plan)
    lines += _capacity(plan, facts)
    lines += _time_of(plan, facts, hw)
    lines += _floor(facts, hw)
    return "\n".join(lines)


def reason(plan: Plan, node: int) -> str:
    """Why a node is computed once for all its requests, or with each of its children."""
    tree, choice = plan.tree, plan.choice
    if np.count_nonzero(tree.q_lens[tree.nodes.first[node] : tree.nodes.last[node]]) < 2:
        return "one reader"
    if choice.rule:
        return choice.rule
    if choice.stuck is not None and choice.stuck[node]:
        return "its tokens lie apart from its readers'"
    if choice.once is None or choice.each is None:
        return "shared"
    return f"once {choice.once[node]:.3g} us, with each child {choice.each[node]:.3g} us"


def _batch(plan: Plan, hw: Hardware) -> list[str]:
    tree, shape = plan.tree, plan.shape
    dims = f"D {shape.head_dim}" if shape.head_dim == shape.v_head_dim else f"D {shape.head_dim}, Dv {shape.v_head_dim}"
    dtype = str(shape.dtype).removeprefix("torch.")
    sms = _count(hw.num_sms, "SM")
    return [
        f"Batch     {_count(tree.num_requests, 'request')}, {_count(tree.num_rows, 'query row')}, "
        f"{_count(len(tree.nodes), 'node')}",
        f"Model     Hq {shape.num_q_heads}, Hkv {shape.num_kv_heads}, {dims}, {dtype}",
        f"Hardware  {hw.name}: {sms}, {_si(hw.bandwidth, 'B/s')}"
        + (f", {_si(hw.matmul_rate, 'FLOP/s')}" if np.isfinite(hw.matmul_rate) else ""),
    ]


def _shared(plan: Plan, facts: Facts) -> list[str]:
    shared = facts.shared
    if not len(shared):
        return ["Shared    nothing: no node with tokens has more than one reader"]
    shown = _weightiest(facts, shared)
    rows = [["node", "depth", "requests", "tokens", "row tiles", "splits", "why", "which"]]
    for i in shown.tolist():
        counts = (i, facts.depth[i], facts.readers[i], facts.tokens[i], facts.row_tiles[i], plan.splits[i])
        rows.append([*(f"{n:,}" for n in counts), reason(plan, i), abbreviate(_requests(plan, i))])
    lines = [f"Shared    {_count(len(shared), 'node')}; each is read once for all its requests", *_table(rows, words=2)]
    return lines + _rest(np.setdiff1d(shared, shown), facts.readers, facts.tokens)


def _folded(plan: Plan, facts: Facts) -> list[str]:
    """Nodes that several requests have in common and that are not computed once."""
    tree = plan.tree
    tokens = tree.nodes.stop - tree.nodes.start
    away = np.flatnonzero(plan.choice.folded & (tokens > 0) & (facts.readers > 0))
    if not len(away):
        return []
    shown = away[np.argsort(-(tokens * facts.readers)[away], kind="stable")[:MOST]]
    rows = [["node", "requests", "tokens", "why", "which"]]
    for i in np.sort(shown).tolist():
        rows.append([f"{i:,}", f"{facts.readers[i]:,}", f"{tokens[i]:,}", reason(plan, i), abbreviate(_requests(plan, i))])
    lines = [f"Folded    {_count(len(away), 'node')}; each is read with each of its children", *_table(rows, words=2)]
    return lines + _rest(np.setdiff1d(away, shown), facts.readers, tokens)


def _rest(nodes: np.ndarray, readers: np.ndarray, tokens: np.ndarray) -> list[str]:
    """A line for the nodes that are not listed, if there are any."""
    if not len(nodes):
        return []
    return [f"          and {len(nodes):,} more of {_range(readers[nodes])} requests and {_range(tokens[nodes])} tokens"]


def _weightiest(facts: Facts, shared: np.ndarray) -> np.ndarray:
    """The nodes whose sharing saves most, in preorder."""
    saved = facts.tokens[shared] * (facts.readers[shared] - 1)
    return shared[np.sort(np.argsort(-saved, kind="stable")[:MOST])]


def _requests(plan: Plan, node: int) -> np.ndarray:
    """Requests that read a node, rising."""
    tree = plan.tree
    positions = np.arange(tree.nodes.first[node], tree.nodes.last[node])
    positions = positions[tree.q_lens[positions] > 0]
    return np.sort(positions if tree.order is None else tree.order[positions])


def abbreviate(numbers: Sequence[int] | np.ndarray, most: int = 5) -> str:
    """Rising numbers as runs, ``0-57, 60``; of more than ``most`` runs, the first and an ellipsis."""
    values = np.asarray(numbers, np.int64)
    runs = np.split(values, np.flatnonzero(np.diff(values) != 1) + 1) if len(values) else []
    text = [f"{r[0]}" if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs[:most]]
    return ", ".join(text + ["..."] * (len(runs) > most))


def _private(plan: Plan, facts: Facts) -> list[str]:
    single = np.flatnonzero((facts.readers == 1) & (facts.tokens > 0))
    if not len(single):
        return ["Private   nothing: no node with tokens has one reader"]
    tokens, tiles = facts.tokens[single], facts.row_tiles[single]
    of = f"{_count(len(single), 'node')} of {_range(tokens)} tokens" + (f", {tokens.sum():,} in all" if len(single) > 1 else "")
    work = f"row tiles {_range(tiles)}, splits {_range(plan.splits[single])}"
    return [f"Private   {of}; {work}; why: {reason(plan, int(single[0]))}"]


def _reads(facts: Facts) -> list[str]:
    flat, once = facts.flat_bytes, facts.planned_bytes
    if not flat:
        return ["KV read   nothing"]
    less = f", {flat / once:.2f} times less" if once < flat else ", the same"
    lines = [
        f"KV read   flat, every request its whole context: {_si(flat, 'B')}",
        f"          as planned, every node once: {_si(once, 'B')}{less}",
    ]
    if facts.repeated:
        lines.append(f"          every token once: {_si(facts.unique_bytes, 'B')}; repeats come from cache where they fit")
    again = np.flatnonzero((facts.row_tiles > 1) & (facts.tokens > 0))
    if len(again):
        worst = again[np.argmax(facts.row_tiles[again])]
        by = f"{_count(len(again), 'node')} up to {facts.row_tiles[worst]} times (node {worst})"
        lines.append(f"          once per row tile: {_si(facts.tile_bytes, 'B')}, {by}; repeats come from cache where it fits")
    return lines


def _launches(plan: Plan, facts: Facts, hw: Hardware) -> list[str]:
    if not plan.launches:
        return ["Launches  none"]
    heads = plan.shape.num_kv_heads
    rows = [["launch", "nodes", "splits", "items", "programs", "slots", "waves", "longest item", "tile"]]
    for i, launch in enumerate(plan.launches[:MOST]):
        splits, items = plan.splits[facts.launch == i], launch.count
        slots = hw.num_sms * launch.tile.per_sm
        counts = [f"{n:,}" for n in (items, items * heads, slots)]
        use = [f"{items * heads / slots:.2f}", f"{launch.max_tokens:,} tokens", _tile(launch.tile)]
        rows.append([f"{i}", f"{len(splits):,}", _range(splits), *counts, *use])
    how = "each may enter before the one before it ends" if plan.chained and len(plan.launches) > 1 else "in this order"
    lines = [f"Launches  {len(plan.launches):,}, {how}; an item is a program for each of {_count(heads, 'KV head')}"]
    lines += _table(rows, words=1)
    if len(plan.launches) > MOST:
        lines.append(f"          and {len(plan.launches) - MOST:,} more")
    return lines


KERNELS = {
    "attend": "",
    "hopper": ", Hopper kernel",
    "beside": ", Hopper kernel in half an SM",
    "single": ", Hopper kernel of one warp group",
    "narrow": ", narrow Hopper kernel",
}


def _tile(tile: AttendTile) -> str:
    return f"{tile.block_m} rows x {tile.block_n} keys{KERNELS[tile.kernel]}"


def _merge(plan: Plan) -> list[str]:
    merged = merged_rows(plan)
    slots = f"{_count(plan.slots_used, 'workspace slot')} ({_si(state_bytes(plan), 'B')})"
    return [f"Merge     {_count(merged, 'row')} merged from {slots}, {_count(plan.num_rows - merged, 'row')} written directly"]


def _capacity(plan: Plan, facts: Facts) -> list[str]:
    if not plan.num_private:
        return ["Capacity  nothing can grow: no private nodes"]
    if not facts.growth:
        return ["Capacity  the present lengths: any new token needs a new plan"]
    now = int(plan.tree.nodes.stop[plan.tree.num_shared :].max())
    used = f", {plan.grown:,} of them used" if plan.grown else ""
    return [
        f"Capacity  {_count(facts.growth, 'more token')} per request{used}; "
        f"the longest table row may go from {now:,} to {now + facts.growth:,}"
    ]


def _time_of(plan: Plan, facts: Facts, hw: Hardware) -> list[str]:
    """The cost model's word, and what it was weighed against."""
    said = predicted(plan, facts, hw)
    if not said.us:
        return []
    lines = [f"Predicted {_time(said.us / 1e6)}, most of it {said.bound}; constants: {hw.costs.source}"]
    if len(plan.choice.compared) > 1:
        weighed = ", ".join(f"{name} {us:.3g} us" for name, us in plan.choice.compared)
        lines.append(f"          {weighed}, before splitting")
    return lines


def _floor(facts: Facts, hw: Hardware) -> list[str]:
    read, multiply = facts.floor(hw)
    if not read:
        return ["Floor     nothing to read, nothing to multiply"]
    bound = "reading" if read >= multiply else "multiplying"
    products = f"{_si(facts.flops, 'FLOP')} {_time(multiply) if multiply else 'at a rate not known'}"
    return [
        f"Floor     {_time(max(read, multiply))}, bound by {bound}; a lower bound with cold caches, not a prediction",
        f"          every token once from memory {_time(read)}, {products}",
    ]


def _table(rows: list[list[str]], words: int) -> list[str]:
    """Columns: numbers to the right, the last ``words`` to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = len(widths) - words
    cells = [[c.ljust(w) if i >= left else c.rjust(w) for i, (c, w) in enumerate(zip(r, widths, strict=True))] for r in rows]
    return ["          " + "  ".join(row).rstrip() for row in cells]


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def _range(values: np.ndarray) -> str:
    if not len(values):
        return "none"
    low, high = int(values.min()), int(values.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _si(value: float, unit: str) -> str:
    """Three digits and a decimal prefix."""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} us" if seconds < 0.9995e-3 else f"{seconds * 1e3:.3g} ms"
