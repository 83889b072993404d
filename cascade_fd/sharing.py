"""Checks and small steps on the way from page ids to a tree: what may be shared, and whether the ids make sense."""

from __future__ import annotations

from typing import Any

import numpy as np

from cascade_fd.checks import check_shape
from cascade_fd.kv import PageTable, as_ids, check_lengths, host_ints
from cascade_fd.nodes import Nodes, row_counts

# Whether ids differ is found by marking them in a list as long as the largest, or by sorting if that would be so many times
# as long as theirs. Marked in chunks, because as indices they are 64 bits wide and should not leave the core's cache.
_SPARSE, _CHUNK = 32, 1 << 14


def host_page_ids(name: str, value: Any, axes: str) -> np.ndarray:
    ids = as_ids(name, value)
    check_shape(name, ids, axes)
    if ids.device.type != "cpu":
        raise ValueError(f"{name}: expected page ids on the host, got a tensor on {ids.device}; pass it as table=")
    return ids.numpy()


def check_context(seq_lens: Any, q_lens: Any, table: PageTable, B: int, page_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Lengths and query rows of a batch, checked against each other and against its table."""
    lens, rows = host_ints("seq_lens", seq_lens), row_counts(q_lens, B)
    if len(lens) != B or table.num_rows != B:
        raise ValueError(
            f"seq_lens: expected one length and one table row per request ({B}), got {len(lens)}, {table.num_rows}"
        )
    if table.page_size != page_size:
        raise ValueError(f"table: expected pages of {page_size}, got {table.page_size}")
    check_lengths("seq_lens", lens, table.room)
    bad = np.flatnonzero((lens > 0) & (rows > lens))
    if len(bad):
        b = bad[0]
        raise ValueError(
            f"q_lens: expected at most as many query rows as keys, got {rows[b]} rows, {lens[b]} keys (request {b})"
        )
    return lens, rows


def shareable_pages(lens: np.ndarray, q_lens: np.ndarray, page_size: int) -> np.ndarray:
    """Leading whole pages that hold no query row."""
    return np.maximum(lens - np.maximum(q_lens, 1), 0) // page_size


def check_pages(ids: np.ndarray, begin: np.ndarray, seq_lens: np.ndarray, nodes: Nodes, page_size: int) -> None:
    """No negative id, and no id twice in one request, whose ids start at ``ids[begin[b]]``.

    Reads the pages of each node once: if no id is there twice, which is the rule, no request can have one twice.
    """
    row, start, stop = begin[nodes.row], nodes.start // page_size, -(-nodes.stop // page_size)
    spans = zip((row + start).tolist(), (row + stop).tolist(), strict=True)
    pages = np.concatenate([ids[a:b] for a, b in spans] or [ids[:0]])
    if not len(pages):
        return
    if pages.min() < 0:
        raise ValueError(f"block_tables: expected page ids of at least 0, got {int(pages.min())}")
    if _all_differ(pages) or not _read_twice(pages, stop - start, nodes):
        return
    for b, (a, count) in enumerate(zip(begin.tolist(), (-(-seq_lens // page_size)).tolist(), strict=True)):
        values, times = np.unique(ids[a : a + count], return_counts=True)
        if (times > 1).any():
            twice = values[times > 1][0]
            raise ValueError(f"block_tables: expected each page once in a request, got page {twice} twice (request {b})")


def _all_differ(pages: np.ndarray) -> bool:
    top = int(pages.max())
    if top > _SPARSE * len(pages):
        pages = np.sort(pages)
        return bool((pages[1:] != pages[:-1]).all())
    seen = np.zeros(top + 1, bool)
    for i in range(0, len(pages), _CHUNK):
        seen[pages[i : i + _CHUNK].astype(np.intp, copy=False)] = True
    return np.count_nonzero(seen) == len(pages)


def _read_twice(pages: np.ndarray, counts: np.ndarray, nodes: Nodes) -> bool:
    """Whether a request reads an id twice, in one node or in two; node i has the next ``counts[i]`` of the pages."""
    node = np.repeat(np.arange(len(nodes)), counts)
    ordered = np.sort(pages)
    some = np.isin(pages, ordered[1:][ordered[1:] == ordered[:-1]])
    pages, node = pages[some], node[some]
    by = np.lexsort((nodes.first[node], pages))
    pages, first, last = pages[by], nodes.first[node[by]], nodes.last[node[by]]
    # Of two overlapping ranges with others that begin between them, the first overlaps the next one too.
    return bool(((pages[1:] == pages[:-1]) & (first[1:] < last[:-1])).any())
