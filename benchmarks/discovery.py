"""Host time to find shared runs, for shapes of sharing that differ: ``python benchmarks/discovery.py [--out x.csv]``.

On one core; set OMP_NUM_THREADS=1. Needs rich.
"""

import argparse
import csv
import platform
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
from rich.console import Console
from rich.table import Table

from cascade_fd.discovery import discover, discover_ragged
from cascade_fd.prefix_index import PrefixIndex
from cascade_fd.tree import PrefixTree

SIZES = ((256, 2048), (1024, 512))
PAGE = 16
# Column of the file: heading of the printed table.
TIMES = {
    "discover_ms": "discover",
    "int64_ms": "int64",
    "ragged_ms": "ragged",
    "index_change_ms": "index:\nleave,\njoin, grow",
    "index_runs_ms": "index:\nruns",
    "from_block_tables_ms": "from_\nblock_\ntables",
    "from_csr_ms": "from_\ncsr",
}


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


def measure(B: int, W: int, repeats: int) -> Iterator[dict[str, object]]:
    """A record per shape of sharing, times in ms as the median of ``repeats``."""
    counts, lens, indptr = np.full(B, W), np.full(B, W * PAGE), np.arange(B + 1) * W
    for name, table in shapes(B, W):
        wide, flat = table.astype(np.int64), table.ravel()
        calls = [
            lambda table=table: discover(table, counts),
            lambda wide=wide: discover(wide, counts),
            lambda flat=flat: discover_ragged(flat, indptr, counts),
            lambda table=table: PrefixTree.from_block_tables(table, lens, PAGE),
            lambda flat=flat: PrefixTree.from_csr(flat, indptr, lens, PAGE),
        ]
        discover_ms, int64_ms, ragged_ms, *tree_ms = [milliseconds(call, repeats) for call in calls]
        times = (discover_ms, int64_ms, ragged_ms, *index_times(table, repeats), *tree_ms)
        nodes = len(discover(table, counts))
        yield {"requests": B, "pages": W, "sharing": name, "nodes": nodes, **dict(zip(TIMES, times, strict=True))}


def report(records: list[dict[str, object]], title: str) -> Table:
    table = Table(title=title)
    for column in ("sharing", "nodes", *TIMES.values()):
        table.add_column(column, justify="left" if column == "sharing" else "right")
    for record in records:
        table.add_row(record["sharing"], f"{record['nodes']:,}", *(f"{record[name]:.2f}" for name in TIMES))
    return table


def write(path: Path, records: list[dict[str, object]]) -> None:
    where = {"cpu": cpu(), "numpy": np.__version__, "date": datetime.now(UTC).date().isoformat()}
    rows = [{**record, **{name: f"{record[name]:.3f}" for name in TIMES}, **where} for record in records]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def cpu() -> str:
    """The name the kernel has for it, and what tells apart those that share a name."""
    info = Path("/proc/cpuinfo")
    fields = dict(line.split(":", 1) for line in info.read_text().split("\n\n")[0].splitlines()) if info.exists() else {}
    fields = {name.strip(): value.strip() for name, value in fields.items()}
    if "model name" not in fields:
        return platform.processor() or platform.machine()
    return f"{fields['model name']}, family {fields['cpu family']} model {fields['model']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--out", type=Path, help="write the times to this CSV file")
    options = parser.parse_args()
    records = []
    for B, W in SIZES:
        records.append(list(measure(B, W, options.repeats)))
        Console().print(report(records[-1], f"{B} requests x {W:,} pages, median of {options.repeats} in ms"))
    if options.out:
        write(options.out, [record for size in records for record in size])


if __name__ == "__main__":
    main()
