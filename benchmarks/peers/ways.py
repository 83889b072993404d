"""Which of FlashInfer's wrappers compute a case, in what combinations, and the index arrays that they are planned by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from benchmarks.peers.parts import Part
from cascade_fd.bench.cases import Case
from cascade_fd.hardware import H200

SPLITS = (64, 128, 256, 512)  # pages


@dataclass(frozen=True)
class Way:
    """One call.

    Attributes:
        kind: "decode" or "tensor-core decode" (the decode wrapper), "fa2", "fa3" (the prefill wrapper), "BatchAttention".
        split: fixed_split_size, in pages; None lets it choose.
        chunks: cut keys into so many sequences by hand, each with a copy of the rows.
    """

    kind: str
    split: int | None = None
    chunks: int = 1

    def __str__(self) -> str:
        return self.kind + (f" x {self.chunks}" if self.chunks > 1 else "") + (f" split {self.split}" if self.split else "")


FA2, FA3, CORES, PLAIN = Way("fa2"), Way("fa3"), Way("tensor-core decode"), Way("decode")


def flat_ways(case: Case) -> list[Way]:
    """For requests that share nothing: at most eight."""
    longest = int(case.seq_lens.max())
    splits = [replace(CORES, split=split) for split in SPLITS if split * case.page_size < longest]
    first = [FA2, FA3] if case.q_len > 1 else [PLAIN]
    return [CORES, *first, Way("BatchAttention"), *splits]


def composed_ways(case: Case, overlapping: bool) -> list[tuple[Way, ...]]:
    """Ways for the levels of a case, root first: at most nine for levels that overlap, three for levels in sequence."""
    inner, pages = len(case.levels) - 2, case.levels[0][1] // case.page_size
    splits = [replace(FA2, split=split) for split in reversed(SPLITS[:3]) if 2 * split <= pages][:2]
    roots = [FA3, *_chunked(case, pages), FA2, *splits]
    made = [(root, *inner * (Way(root.kind),), CORES) for root in roots]
    if not overlapping:
        return [ways for ways in made if ways[0] in (FA3, roots[1], FA2)]
    if inner:
        return [*made, (roots[1], *inner * (FA2,), CORES)]
    short = [(root, PLAIN) for root in roots[:2]] if case.q_len == 1 else []  # on short private ranges it is the fastest
    return [*made, (roots[1], FA2), *short]


def _chunked(case: Case, pages: int) -> Iterator[Way]:
    """fa3, which never splits keys by itself: in as many chunks as fill an H200 at most once, 2 to 8, and another number."""
    packed = case.rows * case.num_q_heads // case.num_kv_heads
    blocks, fill = case.num_kv_heads * -(-packed // 128), 2
    while fill < 8 and 2 * fill * blocks <= H200.num_sms:
        fill *= 2
    for chunks in (fill, fill // 2 if fill > 2 else 4) if blocks < H200.num_sms else ():
        if -(-pages // chunks) * (chunks - 1) < pages:  # else the last would be empty
            yield replace(FA3, chunks=chunks)


@dataclass(frozen=True)
class Pages:
    """A part as FlashInfer has it: all int32, only ``indices`` on the device."""

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor
    lens: torch.Tensor


def pages_of(part: Part, page_size: int) -> Pages:
    """The index arrays of a part; every node has keys."""
    lens = torch.from_numpy(part.lens)
    counts = -(-lens // page_size)
    used = torch.arange(part.table.shape[1]) < counts[:, None]
    indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    qo_indptr = torch.arange(part.nodes + 1) * part.rows
    indices = part.table[used.to(part.table.device)]
    return Pages(qo_indptr.int(), indptr.int(), indices, (lens - (counts - 1) * page_size).int(), lens.int())


def chopped(part: Part, chunks: int, page_size: int) -> Part:
    """Each node's keys in ``chunks`` sequences, as even as whole pages allow: the first of all nodes, then the second."""
    pages = -(-part.table.shape[1] // chunks)
    starts = range(0, chunks * pages, pages)
    tables = [part.table[:, start : start + pages] for start in starts]
    tables = [torch.nn.functional.pad(table, (0, pages - table.shape[1])) for table in tables]
    lens = [np.clip(part.lens - start * page_size, 0, pages * page_size) for start in starts]
    if min(map(np.min, lens)) < 1:
        raise ValueError(f"chunks: expected keys in each of {chunks} chunks of {part.lens.tolist()} keys")
    return Part(torch.cat(tables), np.concatenate(lens), part.rows, causal=False)
