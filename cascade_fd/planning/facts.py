"""Counts about a plan, per node as it is computed: what ``explain`` says in words and ``draw`` in a picture.

Everything comes from the host (the tree, the splits, shapes of arrays), so a plan whose arrays are on a GPU costs no
synchronisation. Lengths are those that the plan was made with.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cascade_fd.hardware import Hardware
from cascade_fd.nodes import offsets_of
from cascade_fd.planning.cost import Load, Prediction, predict
from cascade_fd.planning.layout import states_of
from cascade_fd.planning.worklist import Plan


@dataclass(frozen=True, eq=False)
class Facts:
    """Counts with one entry per node of ``plan.nodes``, and sums over them.

    Attributes:
        tokens: keys of the node; 0 if no query row reads it, or its children read it.
        first: tree position of its first request.
        readers: requests that read it (with at least one query row).
        packed: packed query rows that read it.
        depth, offset: nodes, and tokens, above it on the way to its root.
        launch: index of the launch that computes it; -1: it has nothing to compute.
        row_tiles: how many programs per KV head read each of its keys; 0 without a launch.
        bytes_per_token: keys and values of one token, all KV heads.
        flops: of the two products, over every key that a row sees.
        growth: tokens that private nodes may grow by.
        repeated: tokens that nodes read again although another has them: those of a folded node, with each child but one.
    """

    tokens: np.ndarray
    first: np.ndarray
    readers: np.ndarray
    packed: np.ndarray
    depth: np.ndarray
    offset: np.ndarray
    launch: np.ndarray
    row_tiles: np.ndarray
    bytes_per_token: int
    flops: int
    growth: int
    repeated: int

    @property
    def shared(self) -> np.ndarray:
        """Nodes with tokens and several readers in preorder: parents before children, siblings in tree order."""
        found = np.flatnonzero((self.readers > 1) & (self.tokens > 0))
        return found[np.lexsort((self.depth[found], self.first[found]))]

    @property
    def flat_bytes(self) -> int:
        """KV bytes if every request reads its whole context."""
        return int((self.tokens * self.readers).sum()) * self.bytes_per_token

    @property
    def planned_bytes(self) -> int:
        """KV bytes if every node is read once as it is computed."""
        return int(self.tokens.sum()) * self.bytes_per_token

    @property
    def unique_bytes(self) -> int:
        """KV bytes if every token is read once."""
        return self.planned_bytes - self.repeated * self.bytes_per_token

    @property
    def tile_bytes(self) -> int:
        """KV bytes that programs ask for: every node once per row tile. What repeats may come from a cache."""
        return int((self.tokens * self.row_tiles).sum()) * self.bytes_per_token

    def floor(self, hw: Hardware) -> tuple[float, float]:
        """Seconds to read every token once from memory, and to multiply, at the device's rates. Neither can be beaten."""
        return self.unique_bytes / hw.bandwidth, self.flops / hw.matmul_rate


def facts_of(plan: Plan) -> Facts:
    """Count."""
    tree, shape = plan.tree, plan.shape
    nodes = plan.nodes
    packed = _between(tree.q_lens, nodes.first, nodes.last) * shape.group
    tokens = np.where(packed > 0, nodes.stop - nodes.start, 0)
    width = shape.num_kv_heads * sum(shape.head_dims)
    return Facts(
        tokens=tokens,
        first=nodes.first,
        readers=_between(tree.q_lens > 0, nodes.first, nodes.last),
        packed=packed,
        depth=nodes.sum_above(np.ones_like(tokens)),
        offset=nodes.sum_above(tokens),
        launch=plan.launch_of,
        row_tiles=_row_tiles(plan, packed),
        bytes_per_token=width * shape.dtype.itemsize,
        flops=_pairs(plan, packed, tokens) * 2 * width,
        growth=plan.max_new_tokens,
        repeated=int(tokens.sum() - ((tree.nodes.stop - tree.nodes.start) * (packed > 0)).sum()),
    )


def predicted(plan: Plan, facts: Facts, hw: Hardware) -> Prediction:
    """What the cost model says of a plan, at the lengths it was made with."""
    return predict(loads_of(plan, facts), state_bytes(plan), hw)


def loads_of(plan: Plan, facts: Facts) -> list[Load]:
    """The launches of a plan as the cost model sees them."""
    shape, loads = plan.shape, []
    own, where, times = _readers(plan, facts)
    for i, launch in enumerate(plan.launches):
        mine, tile, block = (where == i) & (own > 0), launch.tile, launch.tile.block_n
        reads = list(zip((shape.num_kv_heads / block * own[mine]).tolist(), times[mine].tolist(), strict=True))
        programs, longest = launch.count * shape.num_kv_heads, launch.max_tokens / block
        loads.append(Load.of(tile, shape, programs, reads, longest))
    return loads


def state_bytes(plan: Plan) -> int:
    """Bytes of all partial states, which are written once and read once."""
    return plan.slots_used * plan.shape.num_q_heads * plan.shape.state_bytes


def merged_rows(plan: Plan) -> int:
    """Query rows that the merge writes: those of several states, or of none. ``plan.merge`` has room for others too."""
    _, _, is_direct = states_of(plan.nodes, plan.splits, plan.tree.num_requests)
    return int(plan.tree.q_lens[~is_direct].sum())


def _readers(plan: Plan, facts: Facts) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Per node of the tree its tokens, the launch that reads them, and how many programs do, for each KV head and split."""
    nodes = plan.tree.nodes
    own = np.where(facts.packed > 0, nodes.stop - nodes.start, 0)
    where, times = facts.launch.copy(), facts.row_tiles.copy()
    for i in reversed(np.flatnonzero(plan.choice.folded).tolist()):  # children come after their parents
        children = np.flatnonzero((nodes.parent == i) & (times > 0))
        where[i], times[i] = (where[children[-1]], times[children].sum()) if len(children) else (-1, 0)
    return own, where, times


def _between(counts: np.ndarray, first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Sums of ``counts[first:last]``."""
    total = offsets_of(counts)
    return total[last] - total[first]


def _row_tiles(plan: Plan, packed: np.ndarray) -> np.ndarray:
    """Programs per split and KV head of every node; 0 without a launch."""
    block_m = np.array([1, *(x.tile.block_m for x in plan.launches)])[plan.launch_of + 1]
    return np.where(plan.launch_of >= 0, -(-packed // block_m), 0)


def _pairs(plan: Plan, packed: np.ndarray, tokens: np.ndarray) -> int:
    """Packed rows x keys, without the keys that later rows of the same request hide."""
    pairs = int((packed * tokens).sum())
    if plan.tree.causal and plan.tree.has_private:
        q_lens = plan.tree.q_lens[tokens[plan.tree.num_shared :] > 0]
        pairs -= int((q_lens * (q_lens - 1) // 2).sum()) * plan.shape.group
    return pairs
