"""A plan: plain arrays that say which program computes what, and which partial states make up which row.

A plan holds no page ids and no KV: it names table rows and token ranges, and lengths are read on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from cascade_fd.checks import check_int
from cascade_fd.hardware import Hardware
from cascade_fd.nodes import Nodes
from cascade_fd.planning.choice import Asked, Choice
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

    @property
    def state_bytes(self) -> int:
        """Bytes of one row and head of a partial state: o and lse, float32."""
        return (self.v_head_dim + 1) * 4


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

    An item without rows or keys computes nothing: a plan with room for more work than it has is filled up with them.

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
        count: items that compute something; the others are room.
        direct: whether some of them may write to the output.
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
    count: int
    direct: bool


@dataclass(frozen=True, eq=False)
class Cuts:
    """How nodes are cut: ``[nodes]`` each, on the host. Split s ends ``(s + 1) * chunk - lead`` tokens after the node's start.

    Attributes:
        chunk: tokens per split.
        lead: by how many tokens the first split is shorter.
        splits: how many that makes; 0 for a node without keys or rows.
    """

    chunk: np.ndarray
    lead: np.ndarray
    splits: np.ndarray


@dataclass(frozen=True, eq=False)
class MergeRows:
    """Which states make up which output row: output row ``rows[i]`` merges states ``indptr[i] .. indptr[i + 1] - 1`` in order.

    Attributes:
        indptr: ``[M + 1]`` int32 or int64.
        rows: ``[M]`` int32 output rows, -1 for none, or None for all rows in order.
        max_states: most states of any row, if known on the host; sizes the merge's tile, not its result.
        chained: whether the merge may enter while the launches before it still run, see ``Plan``.
    """

    indptr: torch.Tensor
    rows: torch.Tensor | None
    max_states: int
    chained: bool = False

    def __len__(self) -> int:
        return self.indptr.shape[0] - 1  # Tensor.__len__ is slow


@dataclass(eq=False)
class Plan:
    """What ``attend`` runs: the launches, then one merge of the rows that have more (or less) than one state.

    Only ``set_lengths``, ``advance`` and ``update_`` change a plan, and never the memory that its arrays lie in: a captured
    CUDA graph sees the changes.

    Attributes:
        launches: shared nodes before private ones.
        merge: rows whose states go through the workspace; rows with one state are written directly.
        rows: ``[T, 4]`` int32, per row in tree order: ``OUT_ROW`` in q and in the output, ``FIRST_SLOT`` in the workspace,
            ``PRIVATE_NODE``, where in ``lens`` the length of the row's request is (-1: it has none), and where its private
            tokens start.
        lens: ``[B + shared nodes]`` int32: live tokens of each node's table row, first those of the B private nodes in request
            order (none, if the tree has no private nodes). The only array that changes from step to step.
        floors: ``[B]`` int32: a request shorter than this is finished, and ``advance`` leaves it so.
        num_slots, slots_used: rows of the workspace ``[num_slots, Hq, Dv]`` float32, and how many of them are used.
        chained: whether each launch may enter while the one before it still runs.
        shape, device, hardware: what q and the stores must match, and what was planned for.
        tree: what was planned (host).
        nodes: the tree's nodes as they are computed: where sharing does not pay, a node is empty and its children start at
            its start.
        asked: the options that it was planned with.
        choice: what was decided about sharing, and why.
        cuts: how its nodes are split.
        launch_of: ``[nodes]`` the launch that computes each node (-1: none), on the host.
        max_new_tokens: how far private nodes may grow.
        grown: tokens by which ``advance`` has let them grow.
    """

    launches: tuple[Launch, ...]
    merge: MergeRows
    rows: torch.Tensor
    lens: torch.Tensor
    floors: torch.Tensor
    num_slots: int
    slots_used: int
    chained: bool
    shape: Shape
    device: torch.device
    hardware: Hardware
    tree: PrefixTree
    nodes: Nodes
    asked: Asked
    choice: Choice
    cuts: Cuts
    launch_of: np.ndarray
    max_new_tokens: int
    grown: int = 0

    @property
    def num_rows(self) -> int:
        """T."""
        return self.rows.shape[0]

    @property
    def num_items(self) -> int:
        """Items that compute something."""
        return sum(launch.count for launch in self.launches)

    @property
    def splits(self) -> np.ndarray:
        """``[nodes]`` splits of each node."""
        return self.cuts.splits

    @property
    def num_private(self) -> int:
        """B, or 0 if the tree has no private nodes."""
        return len(self.floors)

    def set_lengths(self, lens: torch.Tensor) -> None:
        """Set the live length of every request's private table row, on the device: ``[B]`` integers, no synchronisation.

        Lengths count tokens of the private node's table row: the prefix too, where one table names both. A length beyond the
        plan's capacity is clipped to it. A length below the start of the private node says that the request is finished: its
        rows become empty, whatever it shared. So 0 finishes a request of a table that starts with the shared tokens, and -1
        one whose private tokens have a row of their own (there, 0 leaves the row with what it shares). Of several query rows, a
        live length counts all.
        """
        if not isinstance(lens, torch.Tensor):
            raise TypeError(f"lens: expected a tensor, got {type(lens).__name__}")
        if not self.num_private:
            raise ValueError("lens: expected a plan with private nodes (a last level of one node per request), got one without")
        want = self.lens[: self.num_private]
        if lens.shape != want.shape or lens.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"lens: expected {len(want)} integers, got {lens.dtype} of shape {list(lens.shape)}")
        if lens.device.type != want.device.type:
            raise ValueError(f"lens: expected a tensor on {want.device} (a copy would synchronise), got one on {lens.device}")
        want.copy_(lens if lens.dtype == torch.int32 else lens.clamp(-1, 2**31 - 1))

    def advance(self, num_tokens: int = 1) -> None:
        """Let every live request grow by ``num_tokens``, on the device; finished ones (see ``set_lengths``) stay finished.

        Raises:
            ValueError: more tokens than ``max_new_tokens`` leaves room for. Steps are counted on the host: a length that
                ``set_lengths`` raised is not known here, and replays of a graph that holds an ``advance`` are not counted.
        """
        check_int("num_tokens", num_tokens, 0)
        if not self.num_private:
            raise ValueError("num_tokens: expected a plan with private nodes, which can grow, got one without")
        if self.grown + num_tokens > self.max_new_tokens:
            raise ValueError(
                f"num_tokens: expected at most {self.max_new_tokens - self.grown} more tokens in a plan for max_new_tokens="
                f"{self.max_new_tokens}, of which {self.grown} are used; got {num_tokens}"
            )
        own = self.lens[: self.num_private]
        own.add_(own >= self.floors, alpha=num_tokens)
        self.grown += num_tokens

    def with_room(self, factor: float = 2.0) -> Plan:
        """The same plan with arrays ``factor`` times as large, so that plans of other batches can be copied into it."""
        from cascade_fd.planning.update import with_room

        return with_room(self, factor)

    def update_(self, other: Plan | PrefixTree) -> None:
        """Make this plan compute what ``other`` does, in its own memory: graphs that were captured with it follow.

        Device copies, no synchronisation. Lengths and growth are ``other``'s. A tree is planned with this plan's options and
        tiles, so that it asks for no launch that this plan has not; a plan may have been made with others.

        Raises:
            ValueError: ``other`` needs another launch, another page table, or more room than ``with_room`` gave. Nothing is
                changed then.
        """
        from cascade_fd.planning.update import update

        update(self, other)

    def explain(self, hardware: Hardware | None = None) -> str:
        """What is shared with whom and why, what is read and launched, predicted time and a lower bound, as text. Host only.

        ``hardware``: whose slots and rates count (default: what the plan was made for).
        """
        from cascade_fd.planning.explain import explain

        return explain(self, hardware)

    def draw(self, path: str | Path, hardware: Hardware | None = None) -> None:
        """Draw the tree and a simulated schedule into ``path``: ``.png``, ``.svg`` or ``.pdf``. Needs matplotlib."""
        from cascade_fd.planning.draw import draw

        draw(self, path, hardware)
