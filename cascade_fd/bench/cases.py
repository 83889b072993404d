"""The benchmark cases as data, and the traffic model that says what each of them cannot beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

READ_RATE = 4.6e12  # bytes per second a Triton kernel reads on an H200 (8 GiB, measured)
MATMUL_RATE = 770e12  # bf16 FLOP per second of an 8192^3 matmul on an H200 (measured: 738-802)


@dataclass(frozen=True)
class Case:
    """A batch: ``levels`` are (nodes, tokens per node), root first; the last level has one node per request.

    bf16, head dim 128, page size 16, NHD pages in random order. ``lens``: tokens of each request's node of the last level,
    where they are not all the same; ``levels`` then has room for the longest.
    """

    name: str
    levels: tuple[tuple[int, int], ...]
    q_len: int = 1
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    lens: tuple[int, ...] | None = None

    @property
    def requests(self) -> int:
        return self.levels[-1][0]

    @property
    def rows(self) -> int:
        return self.requests * self.q_len

    @property
    def node_lens(self) -> list[np.ndarray]:
        """Tokens of each node, by level."""
        lens = [np.full(nodes, tokens) for nodes, tokens in self.levels]
        return lens if self.lens is None else [*lens[:-1], np.array(self.lens)]

    @property
    def seq_lens(self) -> np.ndarray:
        """``[requests]`` keys of each request."""
        return np.sum([np.repeat(lens, self.requests // len(lens)) for lens in self.node_lens], 0)

    @property
    def kv_bytes(self) -> int:
        """Unique bytes of keys and values in 2-byte elements: what must be read at least once."""
        return sum(int(lens.sum()) for lens in self.node_lens) * self.num_kv_heads * self.head_dim * 2 * 2

    @property
    def flops(self) -> int:
        """4 * rows * Hq * D * keys: two products over every key that a row sees."""
        return 4 * self.q_len * self.num_q_heads * self.head_dim * int(self.seq_lens.sum())

    @property
    def floor_us(self) -> float:
        """Microseconds below which no kernel can be on an H200."""
        return max(self.kv_bytes / READ_RATE, self.flops / MATMUL_RATE) * 1e6


def _flat(name: str, B: int, T: int, **kwargs: Any) -> Case:
    return Case(name, ((B, T),), **kwargs)


def _cascade(name: str, B: int, P: int, S: int, **kwargs: Any) -> Case:
    return Case(name, ((1, P), (B, S)), **kwargs)


def _skewed(name: str, B: int, longest: int) -> Case:
    """Requests of 128 to 8192 keys beside one very long one."""
    lens = np.random.default_rng(0).integers(128, 8192, B, endpoint=True)
    lens[0] = longest
    return Case(name, ((B, longest),), lens=tuple(lens.tolist()))


CASES = {
    case.name: case
    for case in (
        _flat("d1", 1, 131072),
        _flat("d2", 4, 32768),
        _flat("d3", 16, 8192),
        _flat("d4", 64, 4096),
        _skewed("d5", 128, 131072),
        _flat("d6", 256, 1024),
        _flat("d7", 1, 131072, num_q_heads=8, num_kv_heads=1),
        _flat("v1", 16, 8192, q_len=4),
        _flat("v2", 4, 32768, q_len=8),
        _cascade("c1", 16, 8192, 256),
        _cascade("c2", 64, 8192, 256),
        _cascade("c3", 64, 32768, 1024),
        _cascade("c4", 256, 8192, 512),
        _cascade("c5", 256, 32768, 128),
        _cascade("c6", 1024, 2048, 128),
        _cascade("c7", 8, 131072, 512),
        Case("t1", ((1, 4096), (8, 2048), (64, 512))),
        Case("t2", ((1, 8192), (4, 4096), (16, 1024), (128, 256))),
        _cascade("s1", 64, 8192, 512, q_len=4),
    )
}

CONTEXT_BYTES = 40e9  # of keys and values at most: two input sets and workspaces fit an H200
CONTEXT_CASES = {
    case.name: case
    for case in (_flat(f"b{B}t{2**i}", B, 2**i) for B in (1, 16, 128) for i in range(9, 18))
    if case.kv_bytes <= CONTEXT_BYTES
}

SHAPE_CASES = {  # other models' heads, and more rows a request
    case.name: case
    for case in (
        _cascade("g1", 256, 8192, 256, num_q_heads=16, head_dim=256),  # Gemma 2 9B, Gemma 3 12B
        _cascade("g2", 128, 32768, 64, num_q_heads=32, head_dim=256),
        _cascade("g3", 256, 2048, 128, num_q_heads=16, head_dim=256),
        _cascade("h1", 256, 8192, 512, num_q_heads=64, head_dim=64),  # gpt-oss
        _flat("l1", 64, 8192, num_q_heads=128, num_kv_heads=1),  # as many rows on one KV head as latent attention has
        _cascade("l2", 64, 8192, 1024, num_q_heads=128, num_kv_heads=1),
        _cascade("s2", 64, 8192, 512, q_len=8),
    )
}
