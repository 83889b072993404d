"""Checks and small steps on the way from page ids to a tree: what may be shared, and whether the ids make sense."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cascade_fd.checks import check_shape
from cascade_fd.discovery import Runs
from cascade_fd.kv import PageTable, as_ids, check_lengths, host_ints
from cascade_fd.nodes import row_counts


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


def seen_before(runs: Runs) -> np.ndarray:
    """Per tree position, how many leading pages an earlier position has too."""
    seen = np.zeros(len(runs.order), np.int64)
    for first, last, stop in zip(runs.first.tolist(), runs.last.tolist(), runs.stop.tolist(), strict=True):
        seen[first + 1 : last] = stop  # children come after their parents and reach further
    return seen


def check_pages(pages: np.ndarray, by_request: Callable[[], list[np.ndarray]]) -> None:
    """No negative id, and no id twice in one request.

    ``pages`` are all ids in use with shared runs once: if no id is there twice, which is the rule, no request can have one
    twice. Only otherwise is every request looked at.
    """
    if not len(pages):
        return
    if pages.min() < 0:
        raise ValueError(f"block_tables: expected page ids of at least 0, got {int(pages.min())}")
    seen = np.zeros(int(pages.max()) + 1, bool)
    seen[pages] = True
    if np.count_nonzero(seen) == len(pages):
        return
    for b, ids in enumerate(by_request()):
        values, counts = np.unique(ids, return_counts=True)
        if (counts > 1).any():
            twice = values[counts > 1][0]
            raise ValueError(f"block_tables: expected each page once in a request, got page {twice} twice (request {b})")
