"""Host time to find shared runs, for shapes of sharing that differ: ``python benchmarks/discovery.py``. Needs rich."""

import argparse
from collections.abc import Callable, Iterator
from statistics import median
from time import perf_counter

import numpy as np
from rich.console import Console
from rich.table import Table

from cascade_fd.discovery import discover, discover_ragged
from cascade_fd.prefix_index import PrefixIndex

SIZES = ((256, 2048), (1024, 512))


def shapes(B: int, W: int) -> Iterator[tuple[str, np.ndarray]]:
    """Block tables [B, W] int32; an id never occurs in two places unless the pages up to there are shared."""
    alone = np.arange(B * W, dtype=np.int32).reshape(B, W)
    mixed = np.random.default_rng(0).permutation(B)
    request = np.arange(B)
    yield "nothing shared", alone
    yield "all identical", np.repeat(alone[:1], B, 0)
    yield "all but the last page", share(alone, np.zeros(B, int), np.full(B, W - 1))
    yield "one prefix of half", share(alone, np.zeros(B, int), np.full(B, W // 2))
    yield "groups of 1, 5, 58, mixed up", share(alone, groups(B), np.full(B, W // 2))[mixed]
    tree = binary_tree(alone)
    yield "binary tree", tree
    yield "binary tree, mixed up", tree[mixed]
    chain = share(alone, np.zeros(B, int), (request + 1) * W // (B + 1))
    yield "chain", chain
    yield "chain, backwards", chain[::-1].copy()
    yield "chain, mixed up", chain[mixed]


def share(table: np.ndarray, owner: np.ndarray, pages: np.ndarray) -> np.ndarray:
    """Each request takes its first ``pages`` from its ``owner``."""
    return np.where(np.arange(table.shape[1]) < pages[:, None], table[owner], table)


def groups(B: int) -> np.ndarray:
    """First request of each request's group, for sizes 1, 5, 58, 1, 5, 58, ..."""
    first = np.cumsum([0] + [1, 5, 58] * (B // 64))
    return first[np.searchsorted(first, np.arange(B), side="right") - 1]


def binary_tree(table: np.ndarray) -> np.ndarray:
    B, W = table.shape
    depth = B.bit_length() - 1
    level = np.minimum(np.arange(W) * (depth + 1) // W, depth)  # of each page
    owner = np.arange(B)[:, None] >> (depth - level) << (depth - level)
    return table[owner, np.arange(W)]


def milliseconds(call: Callable[[], object], repeats: int) -> float:
    call()
    times = []
    for _ in range(repeats):
        begin = perf_counter()
        call()
        times.append(perf_counter() - begin)
    return median(times) * 1e3


def index_times(table: np.ndarray, repeats: int) -> tuple[float, float]:
    """One request leaves and comes back with a new page; and reading the runs."""
    index = PrefixIndex()
    for key, row in enumerate(table):
        index.add(key, row[:-1])

    def change() -> None:
        index.remove(0)
        index.add(0, table[0, :-1])
        index.append_pages(0, table[0, -1:])

    return milliseconds(change, repeats), milliseconds(index.runs, repeats)


def measure(B: int, W: int, repeats: int) -> Table:
    report = Table(title=f"{B} requests x {W:,} pages, median of {repeats} in ms")
    for column in ("sharing", "nodes", "discover", "int64", "ragged", "index: leave, join, grow", "index: runs"):
        report.add_column(column, justify="left" if column == "sharing" else "right")
    counts, indptr = np.full(B, W), np.arange(B + 1) * W
    for name, table in shapes(B, W):
        wide, flat = table.astype(np.int64), table.ravel()
        times = [
            milliseconds(lambda table=table: discover(table, counts), repeats),
            milliseconds(lambda wide=wide: discover(wide, counts), repeats),
            milliseconds(lambda flat=flat: discover_ragged(flat, indptr, counts), repeats),
            *index_times(table, repeats),
        ]
        report.add_row(name, f"{len(discover(table, counts)):,}", *(f"{t:.2f}" for t in times))
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=50)
    repeats = parser.parse_args().repeats
    for B, W in SIZES:
        Console().print(measure(B, W, repeats))


if __name__ == "__main__":
    main()
