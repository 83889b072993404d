"""A plan: plain arrays that say which program computes what, and which partial states make up which row.

A plan holds no page ids and no KV: it names table rows and token ranges, and lengths are read on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from cascade_fd.tiles import AttendTile

# Columns of Launch.items.
ROW0, NUM_ROWS, TABLE_ROW, START, STOP, NODE, Q_END, STATE = range(8)


@dataclass(frozen=True)
class Shape:
    """What a plan must know of the model: head counts Hq and Hkv, head dims D and Dv, and the dtype of q and the cache."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype

    @property
    def group(self) -> int:
        """Query heads per KV head, G."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def head_dims(self) -> tuple[int, int]:
        return self.head_dim, self.v_head_dim


@dataclass(frozen=True, eq=False)
class Launch:
    """The work items of one tree level: one launch of the attend kernel, one program per item and KV head.

    A *packed row* is one query token and one query head of a KV head: packed row r is token ``r // G``, head ``r % G`` of the
    KV head's G. The loop that decodes the arrays (and that both backends implement):

        for item in items:
            stop = min(item[STOP], lens[item[NODE]])              # capacity of the plan, length of this step
            for r in range(item[ROW0], item[ROW0] + item[NUM_ROWS]):
                token = r // G
                limit = min(stop, lens[item[NODE]] - item[Q_END] + token + 1) if item[Q_END] else stop
                state = attention of q[token] over tokens item[START] .. limit - 1 of table row item[TABLE_ROW]
                if item[STATE] < 0: out[token] = state
                else: partials[row_first[token] + item[STATE]] = state

    Example: two requests of 5 and 9 keys, one query row each, G = 4, splits of 8 keys, dense rows:

        ROW0 NUM_ROWS TABLE_ROW START STOP NODE Q_END STATE
           0        4         0     0    5    0     1    -1      request 0 fits one split: straight to the output
           4        4         1     0    8    1     2     0      request 1: two partial states
           4        4         1     8    9    1     2     1

    Attributes:
        items: ``[N, 8]`` int32, columns as above. ``Q_END`` is 0 where no causal limit applies (a shared node).
        lens: ``[nodes]`` int32: live tokens in each node's table row. The only array that changes from step to step.
        ids, page_size, table_stride: the caller's page ids; item row r starts at ``ids[r * table_stride]``. None and 0 for
            dense stores.
        level: which level of the tree, and which KV store where ``attend`` is given one per level.
        tile: launch settings.
        max_tokens: longest capacity range of an item.
        id_range: smallest and largest page id in use, if ids were on the host; else None.
        max_row, max_stop: largest row and capacity, which a dense store must have.
    """

    items: torch.Tensor
    lens: torch.Tensor
    ids: torch.Tensor | None
    page_size: int
    table_stride: int
    level: int
    tile: AttendTile
    max_tokens: int
    id_range: tuple[int, int] | None
    max_row: int
    max_stop: int


@dataclass(frozen=True, eq=False)
class MergeRows:
    """Which states make up which output row: output row ``rows[i]`` merges states ``indptr[i] .. indptr[i + 1] - 1`` in order.

    Attributes:
        indptr: ``[M + 1]`` int32 or int64.
        rows: ``[M]`` int32 output rows, or None for all rows in order.
        max_states: most states of any row, if known on the host; sizes the merge's tile, not its result.
    """

    indptr: torch.Tensor
    rows: torch.Tensor | None
    max_states: int

    def __len__(self) -> int:
        return len(self.indptr) - 1


@dataclass(frozen=True, eq=False)
class Plan:
    """What ``attend`` runs: the launches, then one merge of the rows that have more (or less) than one state.

    Attributes:
        launches: one per tree level that has work.
        merge: rows whose states go through the workspace; rows with one state are written directly.
        row_first: ``[T]`` int32: first workspace slot of each query row.
        num_slots: rows of the workspace ``[num_slots, Hq, Dv]`` float32.
        num_rows, shape, device: what q and the stores must match.
        splits: per level of the tree, the splits of each node (host), for explanations and tests.
    """

    launches: tuple[Launch, ...]
    merge: MergeRows
    row_first: torch.Tensor
    num_slots: int
    num_rows: int
    shape: Shape
    device: torch.device
    splits: tuple[np.ndarray, ...]

    @property
    def num_items(self) -> int:
        return sum(len(launch.items) for launch in self.launches)

    def set_lengths(self, lens: torch.Tensor) -> None:
        """Set the live length of every private table row, on the device: ``[B]`` integers, no synchronisation.

        Lengths count tokens of the private level's table row (so the prefix too, where one table names both). A length
        beyond the plan's capacity is clipped to it; 0 leaves a request without private keys.
        """
        if not isinstance(lens, torch.Tensor):
            raise TypeError(f"lens: expected a tensor, got {type(lens).__name__}")
        private = [launch.lens for launch in self.launches if launch.level == len(self.splits) - 1]
        if not private:
            raise ValueError("lens: expected a plan with private work, got one whose last level is empty")
        want = private[0]
        if lens.shape != want.shape or lens.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"lens: expected {len(want)} integers, got {lens.dtype} of shape {list(lens.shape)}")
        if lens.device.type != want.device.type:
            raise ValueError(f"lens: expected a tensor on {want.device} (a copy would synchronise), got one on {lens.device}")
        want.copy_(lens if lens.dtype == torch.int32 else lens.clamp(0, 2**31 - 1))
