"""Attention states of other libraries: one importer and one exporter each, named after the library.

Base, layout and empty rows of each library are one record in a table; nothing is guessed from values or sizes.
NaN is not repaired: it comes in and goes out as it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from cascade_fd.checks import FLOAT_DTYPES, check_dtype, check_last_axis, check_same, check_shape, check_tensor
from cascade_fd.state import AttentionState, check_state

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Layout:
    """Axes of ``o`` and ``lse``. Rows are ``T``, or ``B Q`` (row ``b * Q + i``); heads are ``Hq``, or ``Hkv G``."""

    o: str
    lse: str


@dataclass(frozen=True)
class Library:
    """How one library hands out a state.

    Attributes:
        name: for people.
        base: of its lse, "e" or "2".
        layouts: one per rank of ``o``.
        empty: the lse that its exporter writes for an empty row.
        marks: closed range of lse values that mean an empty row, beside -inf; None if -inf is the only one.
    """

    name: str
    base: str
    layouts: tuple[Layout, ...]
    empty: float = -math.inf
    marks: tuple[float, float] | None = None


_INF = (math.inf, math.inf)
_PACKED = Layout("T Hq Dv", "Hq T")
_BATCHED = Layout("B Q Hq Dv", "B Hq Q")
_ROW_MAJOR = Layout("T Hq Dv", "T Hq")

# FlashInfer before August 2026 has -5e4 in place of -inf; merging n such rows gives -5e4 + log2(n), and its merge kernels
# -49997. SGLang's and vLLM's own merge kernels read +inf as empty; xformers passes on what FlashAttention-2 wrote.
LIBRARIES = {
    "flashinfer": Library("FlashInfer", "2", (_ROW_MAJOR,), marks=(-5e4, -49_900.0)),
    "flash_attention_2": Library("FlashAttention-2", "e", (_PACKED, _BATCHED), empty=math.inf, marks=_INF),
    "flash_attention_3": Library("FlashAttention-3", "e", (_PACKED, _BATCHED)),
    "flex_attention": Library("flex_attention", "e", (Layout("B Hq Q Dv", "B Hq Q"),)),
    "xformers": Library("xformers, MSLK", "e", (_BATCHED, Layout("B Q Hkv G Dv", "B Hkv G Q")), marks=_INF),
    "vllm": Library("vLLM", "e", (_PACKED,), marks=_INF),
    "sglang": Library("SGLang", "e", (_ROW_MAJOR,), marks=_INF),
}

_ORDER = ("T", "B", "Q", "Hq", "Hkv", "G", "Dv")


def from_flashinfer(o: torch.Tensor, lse: torch.Tensor, *, repair_empty: bool = True) -> AttentionState:
    """State of FlashInfer: ``o [T, Hq, Dv]``, ``lse [T, Hq]``; the state has base "2".

    Versions before August 2026 mark an empty row with an lse of about -5e4. Every row with an lse in [-50000, -49900] becomes
    ``(0, -inf)``; all others, lower ones too, stay. A real row in that window would be lost: its scores would all be near
    -34600 in natural log. ``repair_empty=False`` turns the repair off; then nothing is copied.

    Example:
        >>> state = from_flashinfer(torch.zeros(2, 1, 8), torch.tensor([[-5e4], [-5.2e4]]))
        >>> state.base, state.lse.flatten().tolist()
        ('2', [-inf, -52000.0])
    """
    return _import(LIBRARIES["flashinfer"], o, lse, repair=repair_empty)


def to_flashinfer(state: AttentionState) -> Pair:
    """``(o [T, Hq, Dv], lse [T, Hq])`` in base 2, -inf for an empty row.

    FlashInfer before August 2026 gives NaN where it merges two empty rows; merge here first.
    """
    return _export(LIBRARIES["flashinfer"], state)


def from_flash_attention_2(o: torch.Tensor, lse: torch.Tensor) -> AttentionState:
    """State of FlashAttention-2: ``o [T, Hq, Dv]``, ``lse [Hq, T]`` (varlen) or ``o [B, Q, Hq, Dv]``, ``lse [B, Hq, Q]``.

    An lse of +inf is its mark of an empty row and becomes -inf. Copies. The padded lse ``[B, Hq, max_q]`` that old versions
    return with a varlen ``o`` is refused.
    """
    return _import(LIBRARIES["flash_attention_2"], o, lse)


def to_flash_attention_2(state: AttentionState, batch: int | None = None) -> Pair:
    """The varlen layout, or the batched one of ``batch`` requests; +inf for an empty row."""
    return _export(LIBRARIES["flash_attention_2"], state, batch)


def from_flash_attention_3(o: torch.Tensor, lse: torch.Tensor) -> AttentionState:
    """State of FlashAttention-3: laid out as FlashAttention-2's, with -inf for an empty row. Views where strides allow.

    Example:
        >>> o, lse = torch.zeros(2, 3, 4, 8), torch.zeros(2, 4, 3)
        >>> from_flash_attention_3(o, lse).o.shape
        torch.Size([6, 4, 8])
    """
    return _import(LIBRARIES["flash_attention_3"], o, lse)


def to_flash_attention_3(state: AttentionState, batch: int | None = None) -> Pair:
    """The varlen layout, or the batched one of ``batch`` requests; -inf for an empty row."""
    return _export(LIBRARIES["flash_attention_3"], state, batch)


def from_flex_attention(o: torch.Tensor, lse: torch.Tensor) -> AttentionState:
    """State of torch's flex_attention: ``o [B, Hq, Q, Dv]``, ``lse [B, Hq, Q]`` (``return_aux=AuxRequest(lse=True)``).

    A view where B or Q is 1, else a copy.
    """
    return _import(LIBRARIES["flex_attention"], o, lse)


def to_flex_attention(state: AttentionState, batch: int) -> Pair:
    """``(o [B, Hq, Q, Dv], lse [B, Hq, Q])`` for ``batch`` requests of equal row counts."""
    return _export(LIBRARIES["flex_attention"], state, batch)


def from_xformers(o: torch.Tensor, lse: torch.Tensor) -> AttentionState:
    """State of xformers or MSLK: ``o [B, Q, Hq, Dv]``, ``lse [B, Hq, Q]``. Copies.

    With grouped heads ``o [B, Q, Hkv, G, Dv]``, ``lse [B, Hkv, G, Q]`` (axes called B, M, G, H, K there); head ``h * G + g``.

    +inf, which their FlashAttention-2 operators pass on for an empty row, becomes -inf.
    """
    return _import(LIBRARIES["xformers"], o, lse)


def to_xformers(state: AttentionState, batch: int, num_kv_heads: int | None = None) -> Pair:
    """The layout without groups, or with ``num_kv_heads`` groups; -inf for an empty row."""
    return _export(LIBRARIES["xformers"], state, batch, num_kv_heads)


def from_vllm(o: torch.Tensor, lse: torch.Tensor) -> AttentionState:
    """State in vLLM's ``merge_attn_states`` convention: ``o [T, Hq, Dv]``, ``lse [Hq, T]``; +inf is empty too. Copies."""
    return _import(LIBRARIES["vllm"], o, lse)


def to_vllm(state: AttentionState) -> Pair:
    """``(o [T, Hq, Dv], lse [Hq, T])``, -inf for an empty row."""
    return _export(LIBRARIES["vllm"], state)


def from_sglang(o: torch.Tensor, lse: torch.Tensor) -> AttentionState:
    """State in SGLang's ``merge_state`` convention: ``o [T, Hq, Dv]``, ``lse [T, Hq]``; +inf is empty too. Copies."""
    return _import(LIBRARIES["sglang"], o, lse)


def to_sglang(state: AttentionState) -> Pair:
    """``(o [T, Hq, Dv], lse [T, Hq])``, -inf for an empty row."""
    return _export(LIBRARIES["sglang"], state)


def _import(library: Library, o: torch.Tensor, lse: torch.Tensor, repair: bool = True) -> AttentionState:
    layout = _layout_of(library, o)
    sizes = dict(zip(layout.o.split(), check_shape("o", o, layout.o), strict=True))
    check_shape("lse", lse, layout.lse, **sizes)
    check_dtype("o", o, FLOAT_DTYPES)
    check_dtype("lse", lse, (torch.float32,))
    check_same("device", o=o, lse=lse)
    check_last_axis("o", o)
    o, lse = _rows_and_heads(o, layout.o), _rows_and_heads(lse, layout.lse)
    if library.marks and repair:
        low, high = library.marks
        empty = (lse == -math.inf) | ((lse >= low) & (lse <= high))
        # The mask depends on data: without a copy it could only be applied after reading it back.
        o, lse = o.masked_fill(empty[..., None], 0.0), lse.masked_fill(empty, -math.inf)
    return AttentionState(o, lse, library.base)


def _layout_of(library: Library, o: torch.Tensor) -> Layout:
    """The layout whose rank ``o`` has; the last one if none has, so that the shape check names it."""
    rank = check_tensor("o", o).dim()
    fitting = [layout for layout in library.layouts if len(layout.o.split()) == rank]
    if not fitting and len(library.layouts) > 1:
        want = " or ".join(f"[{', '.join(layout.o.split())}]" for layout in library.layouts)
        raise ValueError(f"o: expected shape {want}, got {list(o.shape)}")
    return fitting[0] if fitting else library.layouts[-1]


def _rows_and_heads(tensor: torch.Tensor, axes: str) -> torch.Tensor:
    """``[T, Hq]`` or ``[T, Hq, Dv]`` from a foreign layout: a view where strides allow."""
    names = axes.split()
    tensor = tensor.permute(sorted(range(len(names)), key=lambda i: _ORDER.index(names[i])))
    if "B" in names:
        tensor = tensor.flatten(0, 1)
    return tensor.flatten(1, 2) if "G" in names else tensor


def _export(library: Library, state: AttentionState, batch: int | None = None, num_kv_heads: int | None = None) -> Pair:
    """Contiguous tensors in the library's layout; copies only what is not there already."""
    state = check_state("state", state).to_base(library.base)
    lse = state.lse
    if library.empty != -math.inf:
        lse = lse.masked_fill(lse == -math.inf, library.empty)
    splits = {
        "B": _parts("batch", batch, "T", state.num_rows),
        "G": _parts("num_kv_heads", num_kv_heads, "Hq", state.num_heads),
    }
    given = {name for name, parts in splits.items() if parts}
    fitting = [x for x in library.layouts if {n for n in x.o.split() if n in splits} == given]
    if not fitting:
        raise ValueError("batch: expected the number of requests, got None")
    layout = fitting[0]
    return _foreign(state.o, layout.o, splits), _foreign(lse, layout.lse, splits)


def _parts(name: str, parts: int | None, axis: str, size: int) -> tuple[int, int] | None:
    """The axis of ``size`` cut into ``parts`` equal parts."""
    if parts is None:
        return None
    if not isinstance(parts, int) or isinstance(parts, bool) or parts < 1 or size % parts:
        raise ValueError(f"{name}: expected a divisor of {axis}={size}, got {parts!r}")
    return parts, size // parts


def _foreign(tensor: torch.Tensor, axes: str, splits: dict[str, tuple[int, int] | None]) -> torch.Tensor:
    names = axes.split()
    for dim, name in ((1, "G"), (0, "B")):
        parts = splits[name]
        tensor = tensor.unflatten(dim, parts) if parts else tensor
    canonical = sorted(names, key=_ORDER.index)
    return tensor.permute([canonical.index(name) for name in names]).contiguous()
