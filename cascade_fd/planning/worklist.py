"""A plan: plain arrays that say which program computes what, and which partial states make up which row.

A plan holds no page ids and no KV: it names table rows and token ranges, and lengths are read on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from cascade_fd.hardware import Hardware
from cascade_fd.tiles import AttendTile
from cascade_fd.tree import PrefixTree

# Columns of Launch.items.
ROW0, NUM_ROWS, TABLE_ROW, START, STOP, NODE, Q_END, STATE = range(8)
# Columns of Plan.rows.
OUT_ROW, FIRST_SLOT, PRIVATE_NODE, PRIVATE_START = range(4)


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
    """The work items that one launch of the attend kernel computes, one program per item and KV head.

    *Rows* are query tokens in tree order. A *packed row* is one row and one query head of a KV head: packed row r is row
    ``r // G``, head ``r % G`` of the KV head's G. The loop that decodes the arrays (and that both backends implement):

        for item in items:
            stop = min(item[STOP], lens[item[NODE]])              # capacity of the plan, length of this step
            for r in range(item[ROW0], item[ROW0] + item[NUM_ROWS]):
                row = r // G
                limit = min(stop, lens[item[NODE]] - item[Q_END] + row + 1) if item[Q_END] else stop
                state = attention of q[rows[row, OUT_ROW]] over tokens item[START] .. limit - 1 of table row item[TABLE_ROW]
                if lens[rows[row, PRIVATE_NODE]] < rows[row, PRIVATE_START]: state = empty         # a finished request
                if item[STATE] < 0: out[rows[row, OUT_ROW]] = state
                else: partials[rows[row, FIRST_SLOT] + item[STATE]] = state

    Example: two requests of 1 and 9 keys, one query row each, G = 4, two splits each where there are keys for them, dense
    rows: request 0 has one state, which goes straight to the output; request 1 has two, in slots 0 and 1.

        ROW0 NUM_ROWS TABLE_ROW START STOP NODE Q_END STATE
           4        4         1     0    5    1     2     0
           4        4         1     5    9    1     2     1
           0        4         0     0    1    0     1    -1      the longest come first

    Attributes:
        items: ``[N, 8]`` int32, columns as above. ``Q_END`` is one past the request's last row, or 0 where no causal limit
            applies (a shared node).
        ids, page_size, table_stride: the caller's page ids; item row r starts at ``ids[r * table_stride]``. None and 0 for
            dense stores.
        levels: the tree levels whose items are here; more than one only if they use the same table.
        tile: launch settings.
        max_tokens: longest capacity range of an item.
        id_range: smallest and largest page id in use, if ids were on the host; else None.
        max_row, max_stop: largest row and capacity, which a dense store must have.
    """

    items: torch.Tensor
    ids: torch.Tensor | None
    page_size: int
    table_stride: int
    levels: tuple[int, ...]
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
        launches: shared nodes before private ones.
        merge: rows whose states go through the workspace; rows with one state are written directly.
        rows: ``[T, 4]`` int32, per row in tree order: ``OUT_ROW`` in q and in the output, ``FIRST_SLOT`` in the workspace,
            ``PRIVATE_NODE`` of the row's request (-1: it has none) and where that starts.
        lens: ``[nodes]`` int32: live tokens of each node's table row. The only array that changes from step to step; its
            last ``num_private`` entries are the private nodes in request order.
        num_slots: rows of the workspace ``[num_slots, Hq, Dv]`` float32.
        num_private: B, or 0 if the tree has no private nodes.
        shape, device: what q and the stores must match.
        tree: what was planned (host).
        splits, launch_of: ``[nodes]`` splits of each node of the tree, and the launch that computes it (-1: none); on the
            host, for explanations and tests.
        max_new_tokens: how far private nodes may grow.
    """

    launches: tuple[Launch, ...]
    merge: MergeRows
    rows: torch.Tensor
    lens: torch.Tensor
    num_slots: int
    num_private: int
    shape: Shape
    device: torch.device
    tree: PrefixTree
    splits: np.ndarray
    launch_of: np.ndarray
    max_new_tokens: int

    @property
    def num_rows(self) -> int:
        """T."""
        return len(self.rows)

    @property
    def num_items(self) -> int:
        return sum(len(launch.items) for launch in self.launches)

    def set_lengths(self, lens: torch.Tensor) -> None:
        """Set the live length of every request's private table row, on the device: ``[B]`` integers, no synchronisation.

        Lengths count tokens of the private node's table row: the prefix too, where one table names both. A length beyond the
        plan's capacity is clipped to it. A length below the start of the private node says that the request is finished: its
        rows become empty, whatever it shared. So 0 finishes a request of a table that starts with the shared tokens, and -1
        one whose private tokens have a row of their own (there, 0 leaves the row with what it shares).
        """
        if not isinstance(lens, torch.Tensor):
            raise TypeError(f"lens: expected a tensor, got {type(lens).__name__}")
        if not self.num_private:
            raise ValueError("lens: expected a plan with private nodes (a last level of one node per request), got one without")
        want = self.lens[len(self.lens) - self.num_private :]
        if lens.shape != want.shape or lens.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"lens: expected {len(want)} integers, got {lens.dtype} of shape {list(lens.shape)}")
        if lens.device.type != want.device.type:
            raise ValueError(f"lens: expected a tensor on {want.device} (a copy would synchronise), got one on {lens.device}")
        want.copy_(lens if lens.dtype == torch.int32 else lens.clamp(-1, 2**31 - 1))

    def explain(self, hardware: Hardware | None = None) -> str:
        """What is shared with whom, what is read and launched, and a lower bound of the time, as text. Host only.

        ``hardware``: whose slots and rates count (default: the plan's device); name it for a plan made for another device.
        """
        from cascade_fd.planning.explain import explain

        return explain(self, hardware)

    def draw(self, path: str | Path, hardware: Hardware | None = None) -> None:
        """Draw the tree and a simulated schedule into ``path``: ``.png``, ``.svg`` or ``.pdf``. Needs matplotlib."""
        from cascade_fd.planning.draw import draw

        draw(self, path, hardware)
