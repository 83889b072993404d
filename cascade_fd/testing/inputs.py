"""Random inputs for tests and benchmarks: paged pools with poison where nobody may read, and dense contexts beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cascade_fd.kv import PagedKV
from cascade_fd.testing.oracle import Rows


@dataclass(frozen=True)
class Model:
    """Head counts and dims of a made-up model."""

    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    v_head_dim: int = 32
    dtype: torch.dtype = torch.float32


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def contexts(model: Model, lens: Sequence[int], seed: int = 0) -> Rows:
    """Random ``(k [t, Hkv, D], v [t, Hkv, Dv])`` per length."""
    g = generator(seed)
    return [
        (
            torch.randn(t, model.num_kv_heads, model.head_dim, generator=g).to(model.dtype),
            torch.randn(t, model.num_kv_heads, model.v_head_dim, generator=g).to(model.dtype),
        )
        for t in lens
    ]


def queries(model: Model, rows: int, seed: int = 1, gain: float = 1.0) -> torch.Tensor:
    """Random ``[rows, Hq, D]``; ``gain`` makes logits large."""
    return (torch.randn(rows, model.num_q_heads, model.head_dim, generator=generator(seed)) * gain).to(model.dtype)


def join(prefix: tuple[torch.Tensor, torch.Tensor], suffixes: Rows) -> Rows:
    """Each request's whole context: the shared prefix, then its own suffix."""
    return [(torch.cat([prefix[0], k]), torch.cat([prefix[1], v])) for k, v in suffixes]


def paged(rows: Rows, page_size: int, *, layout: str = "NHD", seed: int = 2, extra: int = 3) -> tuple[PagedKV, torch.Tensor]:
    """Scatter contexts over a pool in random page order; every slot that no context owns is NaN.

    Returns the pool and its block table ``[B, max_pages]`` int32; padding entries name a poisoned page.
    """
    pages = [-(-len(k) // page_size) for k, _ in rows]
    total = sum(pages) + extra
    order = torch.randperm(total, generator=generator(seed)).to(torch.int32)
    table = order[-1].repeat(len(rows), max([1, *pages]))
    pools = []
    for part in (0, 1):
        heads, dim = rows[0][part].shape[1:]
        pool = torch.full((total, page_size, heads, dim), torch.nan, dtype=rows[0][part].dtype)
        at = 0
        for r, context in enumerate(rows):
            table[r, : pages[r]] = order[at : at + pages[r]]
            for p in range(pages[r]):
                chunk = context[part][p * page_size : (p + 1) * page_size]
                pool[order[at + p], : len(chunk)] = chunk
            at += pages[r]
        pools.append(pool if layout == "NHD" else pool.transpose(1, 2).contiguous())
    return PagedKV(pools[0], pools[1], layout), table


def dense(rows: Rows, width: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Contexts padded with NaN to ``[B, T, Hkv, D]``."""
    width = max([1, *(len(k) for k, _ in rows)]) if width is None else width
    out = []
    for part in (0, 1):
        tensor = torch.full((len(rows), width, *rows[0][part].shape[1:]), torch.nan, dtype=rows[0][part].dtype)
        for r, context in enumerate(rows):
            tensor[r, : len(context[part])] = context[part]
        out.append(tensor)
    return out[0], out[1]
