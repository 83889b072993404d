"""The specification in plain torch: the same plans, on any device, without a loop over requests or items.

It is the product's CPU path too. Work is cut into slabs of items only to bound memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from cascade_fd.kv import KVStore, flat_ids
from cascade_fd.planning.worklist import (
    FIRST_SLOT,
    NODE,
    NUM_ROWS,
    OUT_ROW,
    PRIVATE_NODE,
    PRIVATE_START,
    Q_END,
    ROW0,
    START,
    STATE,
    STOP,
    TABLE_ROW,
    Launch,
    MergeRows,
    Plan,
)
from cascade_fd.state import AttentionState, base_factor

_SLAB_BYTES = 1 << 28


def partial_states(
    q: torch.Tensor, stores: Sequence[KVStore], plan: Plan, sm_scale: float, out: AttentionState
) -> AttentionState:
    """The state of every item: rows with a single state straight into ``out``, the others into the returned partials."""
    shape = plan.shape
    partials = AttentionState.empty(plan.num_slots, shape.num_q_heads, shape.v_head_dim, device=q.device)
    out.o.zero_()
    out.lse.fill_(-math.inf)
    grouped = q.unflatten(1, (shape.num_kv_heads, shape.group))
    for launch in plan.launches:
        store = stores[launch.levels[0]]
        for items in _slabs(launch, plan, store):
            packed, valid = _packed_rows(items)
            row, head = packed // shape.group, packed % shape.group
            keys, values, position = _gather(items, launch, store)
            scores = _scores(grouped[plan.rows[row, OUT_ROW].long(), :, head], keys, sm_scale)  # [N, Hkv, M, L]
            _mask(scores, _limits(items, plan, row), position)
            o, lse = softmax_state(scores, values.movedim(2, 1).float())
            _scatter(o, lse, _Where(items, row, head, valid), plan, partials, out)
    return partials


def merge_rows(partials: AttentionState, rows: MergeRows, out: AttentionState, sink: torch.Tensor | None = None) -> None:
    """``out[rows[i]]`` = merge of states ``indptr[i] .. indptr[i + 1] - 1``; a row of none becomes the empty state."""
    first, last = rows.indptr[:-1].long(), rows.indptr[1:].long()
    most = int((last - first).max()) if len(rows) else 0
    slot = first[:, None] + torch.arange(most, device=first.device)
    live = slot < last[:, None]
    slot = torch.where(live, slot, 0)
    if partials.num_rows:
        o, lse = partials.o[slot].float(), partials.lse[slot].masked_fill(~live[..., None], -math.inf)
    else:
        o, lse = partials.o.new_zeros(len(rows), 0, *out.o.shape[1:]), out.lse.new_zeros(len(rows), 0, out.num_heads)
    o, lse = merge_states(o, lse, partials.base, sink)
    lse = lse * base_factor(partials.base, out.base)
    if rows.rows is None:
        out.o.copy_(o)
        out.lse.copy_(lse)
    else:
        real = rows.rows >= 0
        out.o[rows.rows[real].long()] = o[real].to(out.dtype)
        out.lse[rows.rows[real].long()] = lse[real]


def merge_pair(
    a: AttentionState,
    b: AttentionState,
    out: AttentionState,
    mask: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
) -> None:
    """``out = a + b`` row by row; ``out`` may be ``a``. Rows where ``mask`` is False are not written."""
    lse = torch.stack([a.lse, b.to_base(a.base).lse], 1)
    o, lse = merge_states(torch.stack([a.o.float(), b.o.float()], 1), lse, a.base, sink)
    lse = lse * base_factor(a.base, out.base)
    rows = slice(None) if mask is None else mask
    out.o[rows] = o[rows].to(out.dtype)
    out.lse[rows] = lse[rows]


def softmax_state(scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """State of ``scores [..., M, L]`` over ``values [..., L, Dv]``, natural log; rows that see no key come out empty.

    ``scores`` is used up.
    """
    top = scores.amax(-1, keepdim=True)
    top = torch.where(top == -math.inf, 0.0, top)
    weights = scores.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    o = torch.where(total > 0, weights @ values / total, 0.0)
    return o, (top + torch.log(total)).squeeze(-1)


def merge_states(
    o: torch.Tensor, lse: torch.Tensor, base: str, sink: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge over axis 1: ``o [M, S, Hq, Dv]``, ``lse [M, S, Hq]`` in ``base`` and so returned, sink logits ``[Hq]``.

    Only differences of lse are converted, so that large ones lose nothing. S may be 0.
    """
    if sink is not None:
        o = torch.cat([o, o.new_zeros(o.shape[0], 1, *o.shape[2:])], 1)
        lse = torch.cat([lse, (sink.float() * base_factor("e", base)).expand(lse.shape[0], 1, -1)], 1)
    if lse.shape[1] == 0:
        return o.sum(1), lse.new_full((lse.shape[0], lse.shape[2]), -math.inf)
    top = lse.amax(1, keepdim=True)
    top = torch.where(top == -math.inf, 0.0, top)
    weights = torch.exp((lse - top) * base_factor(base, "e"))
    total = weights.sum(1)
    o = torch.where((lse == -math.inf)[..., None], 0.0, o)  # whatever an empty state carries does not count
    mean = (weights[..., None] * o).sum(1) / torch.where(total > 0, total, 1.0)[..., None]
    return mean, top.squeeze(1) + torch.log(total) * base_factor("e", base)


def _slabs(launch: Launch, plan: Plan, store: KVStore) -> Iterator[torch.Tensor]:
    """Items that are not empty, ``[N, 8]`` int64, in slabs whose gathered keys and values stay within a memory bound."""
    items = launch.items.long()
    items[:, STOP] = torch.minimum(items[:, STOP], plan.lens.long()[items[:, NODE]])
    items = items[items[:, STOP] > items[:, START]]
    per_item = launch.max_tokens * store.num_kv_heads * (sum(store.head_dims) + launch.tile.block_m) * 4
    if len(items):  # split() of nothing is one slab of nothing
        yield from items.split(max(1, _SLAB_BYTES // max(per_item, 1)))


def _packed_rows(items: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed row numbers ``[N, M]`` and which of them exist; the others repeat the item's last row."""
    offset = torch.arange(int(items[:, NUM_ROWS].max()), device=items.device)
    valid = offset < items[:, NUM_ROWS, None]
    return items[:, ROW0, None] + torch.minimum(offset, items[:, NUM_ROWS, None] - 1), valid


def _gather(items: torch.Tensor, launch: Launch, store: KVStore) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values ``[N, L, Hkv, D]`` of the items' ranges and their positions ``[N, L]``.

    Positions past the end repeat the last key of the item: nothing outside the range is read, so nothing leaks from there.
    """
    length = int((items[:, STOP] - items[:, START]).max())
    if len(items) == 1 and launch.ids is None:  # a long shared prefix, as a rule: look at it where it lies
        at, start = int(items[0, TABLE_ROW]), int(items[0, START])
        span = slice(start, start + length)
        position = torch.arange(start, start + length, device=items.device)[None]
        return store.k[at : at + 1, span], store.v[at : at + 1, span], position
    position = items[:, START, None] + torch.arange(length, device=items.device)
    token = torch.minimum(position, items[:, STOP, None] - 1)
    row = items[:, TABLE_ROW, None]
    if launch.ids is not None:
        entry = row * launch.table_stride + token // launch.page_size
        row, token = flat_ids(launch.ids)[entry].long(), token % launch.page_size
        _check_pages(row, store)
    return store.k[row, token], store.v[row, token], position


def _check_pages(page: torch.Tensor, store: KVStore) -> None:
    """On the CPU a look is free; tables may have changed since they were planned, and -1 would wrap around."""
    if page.device.type == "cpu" and not (page.min() >= 0 and page.max() < store.num_rows):
        raise ValueError(f"block_table: expected page ids in [0, {store.num_rows}), got {int(page.min())}..{int(page.max())}")


def _scores(q: torch.Tensor, keys: torch.Tensor, sm_scale: float) -> torch.Tensor:
    """``q [N, M, Hkv, D]`` against ``keys [N, L, Hkv, D]`` in float32: ``[N, Hkv, M, L]``."""
    return (q.movedim(2, 1).float() * sm_scale) @ keys.permute(0, 2, 3, 1).float()


def _limits(items: torch.Tensor, plan: Plan, row: torch.Tensor) -> torch.Tensor:
    """Packed row ``[N, M]`` of an item sees the keys before its limit. Rows of finished requests see none."""
    lens = plan.lens.long()
    end = lens[items[:, NODE], None]
    limit = torch.where(items[:, Q_END, None] > 0, end - items[:, Q_END, None] + row + 1, end)
    limit = torch.minimum(limit, items[:, STOP, None])
    private = plan.rows[row, PRIVATE_NODE].long()
    finished = (private >= 0) & (lens[private] < plan.rows[row, PRIVATE_START])
    return torch.where(finished, 0, limit)


def _mask(scores: torch.Tensor, limit: torch.Tensor, position: torch.Tensor) -> None:
    """Set ``scores [N, Hkv, M, L]`` of keys that a row does not see to -inf."""
    if scores.device.type == "cpu" and int(limit.min()) > int(position.max()):
        return  # all rows see all keys: on the CPU a look costs less than the mask
    scores.masked_fill_((position[:, None, :] >= limit[:, :, None]).unsqueeze(1), -math.inf)


class _Where(NamedTuple):
    """Where the packed rows of some items belong: all ``[N, M]`` but ``items [N, 8]``."""

    items: torch.Tensor
    row: torch.Tensor
    head: torch.Tensor
    valid: torch.Tensor


def _scatter(o: torch.Tensor, lse: torch.Tensor, at: _Where, plan: Plan, partials: AttentionState, out: AttentionState) -> None:
    """Put ``o [N, Hkv, M, Dv]`` and ``lse [N, Hkv, M]`` (natural log) where the items say."""
    heads = (plan.shape.num_kv_heads, plan.shape.group)
    o, lse = o.movedim(1, 2), lse.movedim(1, 2)
    state = at.items[:, STATE, None]
    direct = (state < 0).expand_as(at.valid)
    rows = plan.rows.long()[at.row]
    slot = rows[..., FIRST_SLOT] + state
    for target, mine, index in ((out, direct, rows[..., OUT_ROW]), (partials, ~direct, slot)):
        mine = mine & at.valid
        place = (index[mine], slice(None), at.head[mine])
        target.o.unflatten(1, heads)[place] = o[mine].to(target.dtype)
        target.lse.unflatten(1, heads)[place] = lse[mine] * base_factor("e", target.base)
