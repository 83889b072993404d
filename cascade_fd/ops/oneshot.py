"""One-shot forms that plan for themselves: decode, verify, cascade_decode."""

from __future__ import annotations

from typing import Any, Unpack

import numpy as np
import torch

from cascade_fd.checks import check_dtype, check_int, check_shape, check_tensor
from cascade_fd.kv import DenseKV, KVStore, PagedKV, PageTable, check_lengths, host_ints
from cascade_fd.levels import Level
from cascade_fd.ops.attend import attend
from cascade_fd.ops.options import Options, known_options
from cascade_fd.planning.planner import plan
from cascade_fd.state import AttentionState
from cascade_fd.tree import PrefixTree

KV = KVStore | tuple[torch.Tensor, torch.Tensor]


def decode(
    q: torch.Tensor,
    kv: KVStore | torch.Tensor,
    v: torch.Tensor | None = None,
    *,
    seq_lens: Any = None,
    block_table: Any = None,
    **options: Unpack[Options],
) -> AttentionState:
    """One query row per request over its own KV cache, split over the sequence (Flash-Decoding, Dao et al. 2023).

    Args:
        q: ``[B, Hq, D]``.
        kv, v: dense ``k, v`` (``[B, T, Hkv, D]`` by default), or one ``DenseKV`` or ``PagedKV``.
        seq_lens: ``[B]`` keys of each request. On the host they are checked and planned for; on the GPU they are read by the
            kernel, and work is laid out for the whole table. Default: all T keys of dense tensors; required with a
            ``PagedKV``. 0 gives ``o = 0, lse = -inf``.
        block_table: ``[B, max_pages]`` page ids, or any ``PageTable``; with a ``PagedKV`` only.
        options: see ``Options``.

    Returns:
        AttentionState of ``[B, Hq, Dv]``.

    Example:
        >>> q, k, v = torch.randn(2, 8, 64), torch.randn(2, 100, 2, 64), torch.randn(2, 100, 2, 64)
        >>> decode(q, k, v, seq_lens=[100, 7]).o.shape
        torch.Size([2, 8, 64])
    """
    B, _, _ = check_shape("q", q, "B Hq D")
    private = _Private.make(kv, v, block_table, seq_lens, B, "seq_lens", options)
    return _run(q, [private.store], [private.level], private.lens_on_device, 1, options)


def verify(
    q: torch.Tensor,
    kv: KVStore | torch.Tensor,
    v: torch.Tensor | None = None,
    *,
    seq_lens: Any = None,
    block_table: Any = None,
    prefix: KV | None = None,
    **options: Unpack[Options],
) -> AttentionState:
    """Several query rows per request, causal among themselves: speculative verify, short chunks of prefill.

    Args:
        q: ``[B, q_len, Hq, D]``: the last q_len tokens of each request, whose keys are already in the cache.
        kv, v, block_table: as for ``decode``.
        seq_lens: ``[B]`` keys of each request, draft rows included; without the prefix's, if one is given. 0 is a padded
            request; fewer than q_len is an error.
        prefix: keys before those, shared by all requests and read once: ``(k [P, Hkv, D], v [P, Hkv, Dv])`` or a ``DenseKV``.
        options: see ``Options``; ``out`` is ``[B * q_len, Hq, Dv]``.

    Returns:
        AttentionState of ``[B * q_len, Hq, Dv]``, row ``b * q_len + i`` for draft row i of request b.
    """
    B, q_len, _, _ = check_shape("q", q, "B q_len Hq D")
    private = _Private.make(kv, v, block_table, seq_lens, B, "seq_lens", options)
    stores, levels = [private.store], [private.level]
    if prefix is not None:
        if isinstance(prefix, PagedKV):
            raise ValueError(
                "prefix: expected (k, v) or a DenseKV, got a PagedKV; use PrefixTree and attend for paged prefixes"
            )
        store = _shared(prefix, options)
        stores, levels = [store, private.store], [_shared_level(store, B), private.level]
    return _run(_flat_rows(q), stores, levels, private.lens_on_device, q_len, options)


def cascade_decode(
    q: torch.Tensor,
    prefix: KV,
    suffix: KV,
    *,
    suffix_lens: Any = None,
    suffix_table: Any = None,
    prefix_table: Any = None,
    prefix_len: int | None = None,
    **options: Unpack[Options],
) -> AttentionState:
    """One query row per request over a prefix that all share (read once) and a private suffix.

    Args:
        q: ``[B, Hq, D]``.
        prefix: ``(k [P, Hkv, D], v [P, Hkv, Dv])``, a ``DenseKV`` of one row, or a ``PagedKV`` with ``prefix_table``.
        suffix: ``(k [B, T, Hkv, D], v)``, a ``DenseKV``, or a ``PagedKV`` with ``suffix_table``. May be the same pool.
        suffix_lens: ``[B]`` private keys of each request; default all of a dense suffix; required for a paged one.
        suffix_table: ``[B, max_pages]`` pages of the suffixes.
        prefix_table: ``[max_pages]`` pages of the prefix.
        prefix_len: tokens in the prefix; default all of a dense prefix; required for a paged one.
        options: see ``Options``.

    Returns:
        AttentionState of ``[B, Hq, Dv]``, equal to attention over each request's prefix and suffix joined.
    """
    B, _, _ = check_shape("q", q, "B Hq D")
    private = _Private.make(suffix, None, suffix_table, suffix_lens, B, "suffix_lens", options)
    store = _shared(prefix, options)
    level = _shared_level(store, B, prefix_table, prefix_len)
    return _run(q, [store, private.store], [level, private.level], private.lens_on_device, 1, options)


class _Private:
    """The private level of a one-shot call: its store, its level, and lengths that only the device knows."""

    def __init__(self, store: KVStore, level: Level, lens_on_device: torch.Tensor | None):
        self.store, self.level, self.lens_on_device = store, level, lens_on_device

    @classmethod
    def make(cls, kv: Any, v: Any, block_table: Any, seq_lens: Any, B: int, lens_name: str, options: Options) -> _Private:
        store = _store(kv, v, options)
        table = _table("block_table", block_table, store)
        if table is not None and table.num_rows != B:
            raise ValueError(f"block_table: expected one row per request ({B}), got {table.num_rows}")
        if isinstance(store, DenseKV) and store.num_rows != B:
            raise ValueError(f"k: expected one row per request ({B}), got {store.num_rows}")
        if table is not None and seq_lens is None:  # a table's last page, and its padding, are not the request's
            raise ValueError(f"{lens_name}: expected the number of keys of each request of a PagedKV, got None")
        room = table.room if table else np.full(B, store.k.shape[1])
        on_device = isinstance(seq_lens, torch.Tensor) and seq_lens.device.type != "cpu"
        if on_device:
            check_shape(lens_name, seq_lens, "B", B=B)
            check_dtype(lens_name, seq_lens, (torch.int32, torch.int64))
        lens = host_ints(lens_name, room if seq_lens is None or on_device else seq_lens)
        if len(lens) != B:
            raise ValueError(f"{lens_name}: expected one length per request ({B}), got {len(lens)}")
        check_lengths(lens_name, lens, room)
        return cls(store, Level(range(B + 1), lens, table), seq_lens if on_device else None)


def _run(
    q: torch.Tensor,
    stores: list[KVStore],
    levels: list[Level],
    lens_on_device: torch.Tensor | None,
    q_len: int,
    options: Options,
) -> AttentionState:
    """Plan the levels and attend."""
    known: Any = known_options("options", options, Options)
    num_splits = known.pop("num_splits", None)
    known.pop("kv_layout", None)
    if num_splits is not None:
        check_int("num_splits", num_splits, 1)
    tree = PrefixTree.from_levels(levels, q_lens=q_len)
    store = stores[-1]
    made = plan(
        tree,
        num_q_heads=q.shape[1],
        num_kv_heads=store.num_kv_heads,
        head_dim=store.head_dims,
        dtype=store.k.dtype,
        device=q.device,
        split="balanced" if num_splits is None else num_splits,
    )
    if lens_on_device is not None and made.launches:
        made.set_lengths(lens_on_device)
    return attend(q, stores, made, **known)


def _store(kv: Any, v: Any, options: Options) -> KVStore:
    if isinstance(kv, KVStore):
        if v is not None:
            raise ValueError(f"v: expected None beside a {type(kv).__name__}, got a second argument")
        return kv
    if isinstance(kv, tuple) and v is not None:
        raise ValueError("v: expected None beside (k, v), got a second argument")
    pair = kv if isinstance(kv, tuple) and len(kv) == 2 else (kv, v)
    return DenseKV(check_tensor("k", pair[0]), check_tensor("v", pair[1]), options.get("kv_layout", "NHD"))


def _shared(prefix: Any, options: Options) -> KVStore:
    if not isinstance(prefix, (KVStore, tuple)):
        raise TypeError(f"prefix: expected (k, v), a DenseKV or a PagedKV, got {type(prefix).__name__}")
    store = _store(prefix, None, options)
    if isinstance(store, DenseKV) and store.num_rows != 1:
        raise ValueError(f"prefix: expected one shared row [P, Hkv, D], got {store.num_rows} rows")
    return store


def _shared_level(store: KVStore, B: int, prefix_table: Any = None, prefix_len: int | None = None) -> Level:
    ids = prefix_table
    if isinstance(store, PagedKV) and ids is not None and not isinstance(ids, PageTable):
        ids = ids if isinstance(ids, torch.Tensor) else torch.tensor(ids)
        ids = ids[None] if ids.dim() == 1 else ids
    table = _table("prefix_table", ids, store)
    if table is not None and table.num_rows != 1:
        raise ValueError(f"prefix_table: expected one row [max_pages], got {table.num_rows} rows")
    room = int(table.room[0]) if table else store.k.shape[1]
    if prefix_len is None and table is not None:
        raise ValueError("prefix_len: expected the number of prefix tokens of a paged prefix, got None")
    length = room if prefix_len is None else prefix_len
    return Level([0, B], [check_int("prefix_len", length, 0, room)], table)


def _table(name: str, value: Any, store: KVStore) -> PageTable | None:
    if isinstance(store, DenseKV):
        if value is not None:
            raise ValueError(f"{name}: expected None with dense keys and values, got a table")
        return None
    if value is None:
        raise ValueError(f"{name}: expected page ids for a PagedKV, got None")
    return value if isinstance(value, PageTable) else PageTable.from_block_table(value, store.page_size)


def _flat_rows(q: torch.Tensor) -> torch.Tensor:
    B, q_len, Hq, D = q.shape
    try:
        return q.view(B * q_len, Hq, D)
    except RuntimeError:
        raise ValueError(
            f"q: expected [B, q_len, Hq, D] whose first two axes can be viewed as one, got strides {list(q.stride())}; "
            "call .contiguous()"
        ) from None
