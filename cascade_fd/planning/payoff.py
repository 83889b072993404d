"""Which shared nodes pay: for every node, computed once for all its requests, or folded into its children.

Computing a node once reads it once, but costs every row one more state to merge, and often a launch of larger tiles. So a
few whole plans are compared with the cost model: everything shared, nothing, and each node by its own costs, each with every
sensible set of tile sizes.
"""

from __future__ import annotations

import functools

import numpy as np

from cascade_fd.planning.choice import Choice
from cascade_fd.planning.tiling import known_tiles
from cascade_fd.planning.weigh import Kind, Private, Scale, Verdict, Where
from cascade_fd.planning.work import Frame, Work
from cascade_fd.tiles import NARROW, ON_HOPPER, hopper_lacks, tile_rows
from cascade_fd.tree import PrefixTree

SHARE = ("auto", "always", "never")
TOKENS = 16  # private lengths are weighed in units of so many
RULES = {
    "always": 'share="always"',
    "never": 'share="never"',
    "invariant": "batch_invariant: only what was declared decides",
}


def choose(tree: PrefixTree, work: Work, frame: Frame) -> Choice:
    """Weigh the shared nodes of ``tree``, if that was asked for."""
    shape, hw, share = frame.shape, frame.hardware, frame.asked.share
    sizes = tuple(sorted(frame.tiles)) if frame.tiles else tile_rows(hw, shape.dtype, shape.head_dims)
    hopper = has_hopper(tree, frame)
    if hopper and NARROW.kernel in known_tiles(hw, shape):
        sizes = (NARROW.block_m, *sizes)
    keep = np.zeros(len(tree.nodes), bool)
    if not tree.num_shared or share == "always":
        return Choice(keep, sizes, rule=RULES["always"] if tree.num_shared else "")
    stuck = ~foldable(tree)
    if share == "never":
        if (stuck & (work.tokens[: tree.num_shared] > 0)).any():
            raise ValueError(
                'share: expected a tree whose shared tokens are also in the table rows of those who read them with "never", '
                "and keys for every query row, got tokens with a store or table rows of their own, or rows without keys"
            )
        keep[: tree.num_shared] = True
        return Choice(keep, sizes, rule=RULES["never"], stuck=stuck)
    kind_of, kinds = _kinds(tree, work, stuck)
    counts = tuple(np.bincount(kind_of, minlength=len(kinds)).tolist())
    S = tree.num_shared
    where = Where(shape, hw, sizes, hopper)
    verdict = _decide(kinds, counts, _private(work.num_rows[S:], work.tokens[S:]), where)
    keep[:S] = verdict.folded[kind_of]
    return Choice(
        keep,
        verdict.sizes,
        kernels=verdict.kernels,
        once=verdict.once[kind_of],
        each=verdict.each[kind_of],
        stuck=stuck,
        compared=verdict.compared,
    )


def has_hopper(tree: PrefixTree, frame: Frame) -> bool:
    """Whether launches may be planned for the kernels for Hopper: what stores and the machine say against it is seen later.

    Where the tiles are another plan's there is nothing to choose.
    """
    shape, hw = frame.shape, frame.hardware
    if frame.tiles or not any(map(hw.costs.knows, ON_HOPPER)):
        return False
    pages = {0 if table is None else table.page_size for table in tree.tables}
    return not any(hopper_lacks(hw.arch, shape.dtype, shape.head_dims, page) for page in pages)


def foldable(tree: PrefixTree) -> np.ndarray:
    """``[shared nodes]`` whether every child's table row holds the node's tokens just before its own.

    And whether it has keys for its query rows: without, they are a padded request's, and see shared tokens without a causal
    limit, which the private node has.
    """
    nodes, S = tree.nodes, tree.num_shared
    child = np.flatnonzero(nodes.parent >= 0)
    parent = nodes.parent[child]
    adjoins = nodes.start[child] == nodes.stop[parent]
    if len(tree.tables) > 1:
        source = tree.sources
        adjoins &= source[nodes.level[child]] == source[nodes.level[parent]]
    if tree.causal and tree.has_private and (tree.q_lens > 1).any():
        short = (nodes.stop[S:] - nodes.start[S:] < tree.q_lens) & (tree.q_lens > 1)
        adjoins &= (child < S) | ~short[child - S]
    found = np.zeros(S, bool)
    found[parent] = True
    found[parent[~adjoins]] = False
    return found


def _private(num_rows: np.ndarray, tokens: np.ndarray) -> tuple[Private, ...]:
    """Private nodes by packed rows; nodes without rows are left out."""
    if len(num_rows) and (num_rows == num_rows[0]).all():
        groups = [(int(num_rows[0]), len(tokens), int(tokens.sum()))]
    else:
        kinds = [(int(rows), num_rows == rows) for rows in np.unique(num_rows)]
        groups = [(rows, int(mask.sum()), int(tokens[mask].sum())) for rows, mask in kinds]
    return tuple(Private(rows, n, -(-total // (n * TOKENS)) * TOKENS) for rows, n, total in groups if rows)


def _kinds(tree: PrefixTree, work: Work, stuck: np.ndarray) -> tuple[list[int], tuple[Kind, ...]]:
    """The kind of every shared node, and the kinds, see ``Scale``."""
    S = tree.num_shared
    parent = tree.nodes.parent
    own = parent[S:][(work.num_rows[S:] > 0) & (parent[S:] >= 0)]
    columns = (parent[:S], work.num_rows[:S], work.tokens[:S], np.bincount(own, minlength=S), stuck)
    kinds: dict[Kind, int] = {}
    kind_of: list[int] = []
    for above, rows, tokens, readers, fixed in zip(*(column.tolist() for column in columns), strict=True):
        key = (kind_of[above] if above >= 0 else -1, rows, tokens, readers, fixed)
        kind_of.append(kinds.setdefault(key, len(kinds)))
    return kind_of, tuple(kinds)


@functools.lru_cache(1024)
def _decide(kinds: tuple[Kind, ...], counts: tuple[int, ...], private: tuple[Private, ...], where: Where) -> Verdict:
    """Batches that differ by less than ``TOKENS`` tokens a request are decided alike, and only once."""
    return Scale(kinds, counts, private, where).decide()
