"""Who shares what: a forest of KV ranges over a batch of requests.

A *node* is a range of tokens of one table row, read by a run of requests that are neighbours in *tree order*. A request's
context is its chain of nodes from a root down; the last one, its *private* node, is read by it alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from cascade_fd.discovery import Runs, discover, discover_ragged, flat_rows
from cascade_fd.kv import PageTable, check_indptr, host_ints
from cascade_fd.levels import Level, check_drafts, check_nesting, level_nodes
from cascade_fd.nodes import NO_LIMIT, Nodes, check_room, nodes_of_runs, offsets_of, row_counts
from cascade_fd.prefix_index import PrefixIndex
from cascade_fd.sharing import check_context, check_pages, host_page_ids, shareable_pages


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """Nodes over a batch, and how many query rows each request has.

    Attributes:
        nodes: see ``Nodes``. The last B of them are the private nodes in tree order, if the tree has any.
        tables: page ids per level; None for a dense store.
        q_lens: ``[B]`` query rows of each request, in tree order.
        order: ``[B]`` request at each position of tree order; None if they are the same.
        has_private: whether every request has a private node.
        causal: whether a request's rows are causal among themselves: the last row sees every key of its private node,
            the one before it all but the last, and so on. One row per request sees all.
        declared: whether the caller said what is shared; else it was found in the batch.
    """

    nodes: Nodes
    tables: tuple[PageTable | None, ...]
    q_lens: np.ndarray
    order: np.ndarray | None
    has_private: bool
    causal: bool
    declared: bool

    @property
    def num_requests(self) -> int:
        return len(self.q_lens)

    @property
    def num_rows(self) -> int:
        return int(self.q_lens.sum())

    @property
    def num_shared(self) -> int:
        """Nodes that are not private."""
        return len(self.nodes) - (self.num_requests if self.has_private else 0)

    def source(self, level: int) -> int:
        """The first level that reads the same table as ``level``. A dense level is its own: its store may be another."""
        table = self.tables[level]
        return level if table is None else next(i for i, other in enumerate(self.tables) if other is table)

    @property
    def sources(self) -> np.ndarray:
        """``source`` of every level."""
        return np.array([self.source(level) for level in range(len(self.tables))])

    @classmethod
    def from_levels(
        cls, levels: Sequence[Level], *, q_lens: Any = 1, table: PageTable | None = None, causal: bool = True
    ) -> PrefixTree:
        """A tree from explicit levels, root first, private level last; tree order is request order.

        Args:
            levels: see ``Level``. Their ``indptr`` must cover the same requests and nest. The last level is private if it has
                one node per request.
            q_lens: query rows per request: one number, or ``[B]``.
            table: page ids with one row per *request*, counted from the request's first token. A shared node then reads
                the row of its first request, and starts where the level above it ends. Where sharing does not pay, every
                request reads the tokens in its own row: all rows must name the shared pages.
            causal: see ``PrefixTree``.

        Raises:
            ValueError: levels that do not nest, negative lengths, a table too short, or more draft rows than keys.

        Example:
            >>> tree = PrefixTree.from_levels([Level([0, 4], [4096]), Level([0, 1, 2, 3, 4], [7, 9, 0, 16])])
            >>> tree.num_requests, len(tree.nodes), tree.num_shared
            (4, 5, 1)
        """
        if not levels:
            raise ValueError("levels: expected at least one level, got none")
        ptrs = [check_indptr(f"levels[{i}].indptr", level.indptr) for i, level in enumerate(levels)]
        B = int(ptrs[0][-1])
        check_nesting(ptrs, B)
        parts = level_nodes(levels, ptrs, table)
        rows = row_counts(q_lens, B)
        has_private = len(ptrs[-1]) == B + 1 and bool((np.diff(ptrs[-1]) == 1).all())
        if causal:
            check_drafts(parts[-1], rows, has_private)
        tables = tuple(table if level.table is None else level.table for level in levels)
        return cls(Nodes.concatenate(parts), tables, rows, None, has_private, causal, declared=True)

    @classmethod
    def from_block_tables(
        cls, block_tables: Any, seq_lens: Any, page_size: int, *, q_lens: Any = 1, table: PageTable | None = None
    ) -> PrefixTree:
        """Find what is shared in a batch from its page ids alone: every run of whole pages that requests have in common.

        Groups of any sizes side by side, nested to any depth, requests in any order. The page that a request's query rows
        are in is never shared, however equal.

        Args:
            block_tables: ``[B, max_pages]`` page ids on the host; padding entries are never read.
            seq_lens: ``[B]`` keys of each request on the host, its query rows included; 0 is a padded request.
            page_size: tokens per page.
            q_lens: query rows per request: one number, or ``[B]``.
            table: the same rows where the kernels read them, if that is another tensor (a GPU's); default: ``block_tables``.

        Raises:
            ValueError: lengths beyond the table, negative page ids, a page twice in one request, more query rows than keys.

        Example:
            >>> tree = PrefixTree.from_block_tables([[7, 8, 9], [7, 8, 4], [5, 6, 0]], [40, 35, 20], 16)
            >>> tree.num_shared, tree.nodes.stop.tolist()
            (1, [32, 40, 35, 20])
        """
        ids = host_page_ids("block_tables", block_tables, "B max_pages")
        table = table or PageTable.from_block_table(torch.from_numpy(ids), page_size)
        lens, rows = check_context(seq_lens, q_lens, table, len(ids), page_size)
        tree = cls._of_runs(discover(ids, shareable_pages(lens, rows, page_size)), lens, rows, table)
        flat, step = flat_rows(ids)
        check_pages(flat, np.arange(len(ids)) * step, lens, tree.nodes, page_size)
        return tree

    @classmethod
    def from_csr(
        cls,
        indices: Any,
        indptr: Any,
        seq_lens: Any,
        page_size: int,
        *,
        q_lens: Any = 1,
        table: PageTable | None = None,
    ) -> PrefixTree:
        """As ``from_block_tables``, from page ids in one list: request b's are ``indices[indptr[b]:indptr[b + 1]]``."""
        ids = host_page_ids("indices", indices, "nnz")
        ptr = check_indptr("indptr", indptr, total=len(ids))
        table = table or PageTable.from_csr(torch.from_numpy(ids), ptr, page_size)
        lens, rows = check_context(seq_lens, q_lens, table, len(ptr) - 1, page_size)
        runs = discover_ragged(ids, ptr, shareable_pages(lens, rows, page_size))
        tree = cls._of_runs(runs, lens, rows, table)
        check_pages(ids, ptr[:-1], lens, tree.nodes, page_size)
        return tree

    @classmethod
    def from_token_ids(cls, token_ids: Sequence[Any], *, q_lens: Any = 1, table: PageTable | None = None) -> PrefixTree:
        """Find what is shared from the tokens themselves, where equal prefixes have equal keys wherever they lie.

        A shared node reads the keys of its first request: in ``table`` (a row per request), or in row b of a dense store. Where
        sharing does not pay, every request reads its own: all keys must be there.
        ``token_ids`` are the tokens of each request so far, query rows included.
        """
        tokens = [host_ints(f"token_ids[{b}]", ids) for b, ids in enumerate(token_ids)]
        lens = np.array([len(ids) for ids in tokens], np.int64)
        rows = row_counts(q_lens, len(tokens))
        ptr = offsets_of(lens)
        runs = discover_ragged(np.concatenate([*tokens, np.empty(0, np.int64)]), ptr, shareable_pages(lens, rows, 1))
        return cls._of_runs(runs, lens, rows, table, page_size=1)

    @classmethod
    def from_index(
        cls, index: PrefixIndex, seq_lens: Mapping[Any, int], table: PageTable, *, q_lens: int = 1
    ) -> tuple[list[Any], PrefixTree]:
        """The tree of an index that is kept up to date as requests come, grow and go, and its keys in request order.

        ``seq_lens[key]`` are a request's keys; its whole pages, without those that query rows are in, are in the index. Row b
        of ``table`` belongs to the b-th of the returned keys' order of arrival, see ``PrefixIndex.keys``.
        """
        order = {key: i for i, key in enumerate(index.keys())}
        keys, runs = index.runs()
        runs = replace(runs, order=np.array([order[key] for key in keys], np.int64))
        lens = np.array([seq_lens[key] for key in order], np.int64)
        rows = row_counts(q_lens, len(lens))
        if len(lens) and (runs.own * table.page_size > (lens - rows)[runs.order]).any():
            raise ValueError("seq_lens: expected at least the indexed whole pages and the query rows, got fewer keys")
        return list(order), cls._of_runs(runs, lens, rows, table)

    @classmethod
    def _of_runs(
        cls, runs: Runs, lens: np.ndarray, q_lens: np.ndarray, table: PageTable | None, page_size: int = 0
    ) -> PrefixTree:
        room = np.full(len(lens), NO_LIMIT) if table is None else table.room
        nodes = nodes_of_runs(runs, page_size or (table.page_size if table else 1), lens, room)
        check_room("seq_lens", nodes, nodes.stop)
        in_order = bool((runs.order == np.arange(len(lens))).all())
        return cls(nodes, (table,), q_lens[runs.order], None if in_order else runs.order, True, True, declared=False)
