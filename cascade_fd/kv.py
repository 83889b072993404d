"""Where keys and values live: paged pools, dense tensors, and the tables that name a request's pages.

Layouts are documented here, once. "NHD" keeps a token's heads together, "HND" a head's tokens; either is only a view:
``.k`` and ``.v`` are always ``[rows, tokens, Hkv, D]`` with whatever strides the caller's tensor has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cascade_fd.checks import FLOAT_DTYPES, check_choice, check_dtype, check_int, check_last_axis, check_same, check_shape

LAYOUTS = ("NHD", "HND")


class KVStore:
    """What the backends read: ``k [rows, tokens, Hkv, D]``, ``v [rows, tokens, Hkv, Dv]``, any strides but the last.

    ``page_size`` says what a row is: a page of so many tokens that tables point at, or (0) the whole context of a table row.
    ``reach`` is the largest element offset within one KV head: kernels need 64-bit offsets where it exceeds 2^31 - 1.
    ``aligned`` says that the strides put every token's keys and values at multiples of 16 elements, which lets kernels copy 16
    bytes at a time.
    """

    def __init__(self, k: torch.Tensor, v: torch.Tensor, page_size: int):
        self.k, self.v, self.page_size = k, v, page_size
        self.reach = max(_reach(k), _reach(v))
        self.aligned = all(n % 16 == 0 for n in (*k.stride()[:3], *v.stride()[:3], k.data_ptr(), v.data_ptr()))

    @property
    def num_rows(self) -> int:
        return self.k.shape[0]

    @property
    def num_kv_heads(self) -> int:
        return self.k.shape[2]

    @property
    def head_dims(self) -> tuple[int, int]:
        """(D, Dv)."""
        return self.k.shape[3], self.v.shape[3]


def _reach(x: torch.Tensor) -> int:
    return sum((size - 1) * abs(stride) for size, stride in zip(x.shape[:2], x.stride()[:2], strict=True)) + x.shape[3]


class PagedKV(KVStore):
    """A paged pool: ``[P, page, Hkv, D]`` ("NHD") or ``[P, Hkv, page, D]`` ("HND"); ``v_pages`` may have another Dv.

    Strides are honoured, so slices of an interleaved pool ``[P, 2, page, Hkv, D]`` work as they are.
    Raises ValueError or TypeError if ranks, sizes, dtypes or devices disagree, or the last axis is not contiguous.
    """

    def __init__(self, k_pages: torch.Tensor, v_pages: torch.Tensor, kv_layout: str = "NHD"):
        axes = "P page Hkv {}" if _check_layout(kv_layout) == "NHD" else "P Hkv page {}"
        k, v = _canonical(("k_pages", k_pages), ("v_pages", v_pages), axes, kv_layout)
        if k.shape[1] < 1:
            raise ValueError("k_pages: expected a page size of at least 1, got 0")
        super().__init__(k, v, k.shape[1])


class DenseKV(KVStore):
    """Dense keys and values: ``[B, T, Hkv, D]`` ("NHD") or ``[B, Hkv, T, D]`` ("HND").

    Without the first axis (``[P, Hkv, D]`` or ``[Hkv, P, D]``) it is one row, as a shared prefix has.
    """

    def __init__(self, k: torch.Tensor, v: torch.Tensor, kv_layout: str = "NHD"):
        axes = "B T Hkv {}" if _check_layout(kv_layout) == "NHD" else "B Hkv T {}"
        if isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor) and k.dim() == 3 and v.dim() == 3:
            k, v = k.unsqueeze(0), v.unsqueeze(0)
        super().__init__(*_canonical(("k", k), ("v", v), axes, kv_layout), 0)

    @property
    def num_tokens(self) -> int:
        return self.k.shape[1]


def _check_layout(kv_layout: str) -> str:
    check_choice("kv_layout", kv_layout, LAYOUTS)
    return kv_layout


def _canonical(k: tuple[str, Any], v: tuple[str, Any], axes: str, kv_layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Check both tensors and view them as [rows, tokens, Hkv, D]."""
    shape = check_shape(*k, axes.format("D"))
    sizes: dict[str, Any] = dict(zip(axes.split()[:3], shape[:3], strict=True))
    check_shape(*v, axes.format("Dv"), **sizes)
    for name, tensor in (k, v):
        check_dtype(name, tensor, FLOAT_DTYPES)
        check_last_axis(name, tensor)
    check_same("dtype", **dict((k, v)))
    check_same("device", **dict((k, v)))
    if kv_layout == "HND":
        return k[1].transpose(1, 2), v[1].transpose(1, 2)
    return k[1], v[1]


@dataclass(frozen=True, eq=False)
class PageTable:
    """The caller's own page ids, and where in them each table row starts. Ids are never copied into a plan, except that a
    plan for a GPU brings ids from the host over once: keep them on the GPU if pages are to be appended later.

    Token p of row r is in page ``ids[starts[r] * stride + p // page_size]``.

    Attributes:
        ids: int32 or int64, on any device. On the host they are checked; on a GPU they are trusted.
        page_size: tokens per page.
        starts: ``[R]`` int64 on the host.
        stride: entries of ``ids`` per unit of ``starts``.
        widths: ``[R]`` int64 on the host: entries a row may use.
    """

    ids: torch.Tensor
    page_size: int
    starts: np.ndarray
    stride: int
    widths: np.ndarray

    def __post_init__(self) -> None:
        check_int("page_size", self.page_size, 1)

    @property
    def num_rows(self) -> int:
        return len(self.starts)

    @property
    def room(self) -> np.ndarray:
        """``[R]`` tokens that each row has entries for."""
        return self.widths * self.page_size

    @classmethod
    def from_block_table(cls, block_table: Any, page_size: int, rows: Any = None) -> PageTable:
        """``[B, max_pages]``, as vLLM and FlashAttention use it; padding entries are never read.

        ``rows`` picks and orders rows (default: all).
        """
        ids = as_ids("block_table", block_table)
        R, width = check_shape("block_table", ids, "B max_pages")
        check_last_axis("block_table", ids)
        starts = np.arange(R, dtype=np.int64) if rows is None else host_ints("rows", rows)
        if len(starts) and (starts.min() < 0 or starts.max() >= R):
            raise ValueError(f"rows: expected row numbers in [0, {R}), got {int(starts.min())}..{int(starts.max())}")
        stride = ids.stride(0) if R > 1 else max(width, 1)
        return cls(ids, page_size, starts, stride, np.full(len(starts), width, np.int64))

    @classmethod
    def from_token_map(cls, token_map: Any, rows: Any) -> PageTable:
        """A request-to-token map ``[max_requests, max_tokens]`` (SGLang's ``req_to_token``): page size 1, a row per request."""
        return cls.from_block_table(token_map, 1, rows)

    @classmethod
    def from_csr(cls, indices: Any, indptr: Any, page_size: int) -> PageTable:
        """Page ids of all rows in one list, row r in ``indices[indptr[r]:indptr[r + 1]]``, as FlashInfer uses it."""
        ids = as_ids("indices", indices)
        check_shape("indices", ids, "nnz")
        check_last_axis("indices", ids)
        ptr = check_indptr("indptr", indptr, total=len(ids))
        return cls(ids, page_size, ptr[:-1], 1, np.diff(ptr))

    def host_range(self, rows: np.ndarray, first: np.ndarray, last: np.ndarray) -> tuple[int, int] | None:
        """Smallest and largest id in entries ``[first, last)`` of ``rows``; None if ids are on a GPU or nothing is used."""
        counts = np.maximum(last - first, 0)
        if self.ids.device.type != "cpu" or not counts.sum():
            return None
        begin = np.repeat(self.starts[rows] * self.stride + first - (np.cumsum(counts) - counts), counts)
        entries = torch.from_numpy(begin + np.arange(counts.sum()))
        used = flat_ids(self.ids)[entries]
        return int(used.min()), int(used.max())


def as_ids(name: str, value: Any) -> torch.Tensor:
    """An integer tensor from a tensor, array or list; device tensors stay where they are."""
    tensor = value if isinstance(value, torch.Tensor) else torch.from_numpy(as_array(name, value))
    check_dtype(name, tensor, (torch.int32, torch.int64))
    return tensor


def as_array(name: str, value: Any) -> np.ndarray:
    """An array of an array or nested lists, whose rows must be equally long."""
    try:
        array = np.asarray(value)
    except ValueError:
        array = np.empty(0, object)
    if array.dtype == object:
        raise ValueError(f"{name}: expected integers in rows of equal length, got a ragged list; pad it")
    return array


def flat_ids(ids: torch.Tensor) -> torch.Tensor:
    """Page ids by storage offset from the table's first entry, whatever the table's strides. A view."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(ids.shape, ids.stride(), strict=True))
    return torch.as_strided(ids, (span,), (1,))


def check_lengths(name: str, lens: np.ndarray, room: np.ndarray) -> None:
    """Every request's length is within ``[0, room]``."""
    bad = np.flatnonzero((lens < 0) | (lens > room))
    if len(bad):
        b = bad[0]
        raise ValueError(f"{name}: expected lengths in [0, {room[b]}], got {lens[b]} for request {b}")


def host_ints(name: str, value: Any) -> np.ndarray:
    """``[n]`` int64 on the host from a list, array or CPU tensor. A GPU tensor is refused: reading it would synchronise."""
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise ValueError(f"{name}: expected host integers (list, NumPy or CPU tensor), got a tensor on {value.device}")
        value = value.numpy()
    array = as_array(name, value)
    if array.size == 0:
        array = array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TypeError(f"{name}: expected a list of integers, got {array.dtype} of shape {list(array.shape)}")
    return array.astype(np.int64)


def check_indptr(name: str, value: Any, total: int | None = None) -> np.ndarray:
    """``[n + 1]`` offsets: start at 0, never fall, end at ``total`` if that is known."""
    ptr = host_ints(name, value)
    if len(ptr) < 1 or ptr[0] != 0 or (np.diff(ptr) < 0).any() or (total is not None and ptr[-1] != total):
        end = "" if total is None else f" and end at {total}"
        raise ValueError(f"{name}: expected offsets that start at 0, never fall{end}, got {ptr[:8].tolist()}...")
    return ptr
