"""How a tile of keys or values is found and loaded: paged or dense, whole or masked, padded head dims."""

import triton
import triton.language as tl


@triton.jit
def page_ids(ids_ptr, pos, some, PAGE_SIZE: tl.constexpr):
    """The page of every position, if there are ``some``. Dense stores (PAGE_SIZE 0) have no pages."""
    if PAGE_SIZE == 0:
        return pos * 0
    else:
        return tl.load(ids_ptr + pos // PAGE_SIZE, mask=some, other=0).to(tl.int32)


@triton.jit
def key_offsets(page, pos, stride_p, stride_t, PAGE_SIZE: tl.constexpr, WIDE: tl.constexpr):
    """Element offset of every position from the store's (or the dense row's) start: int64 only where the store needs it."""
    if PAGE_SIZE == 0:
        if WIDE:
            return pos.to(tl.int64) * stride_t
        else:
            return pos * stride_t
    else:
        if WIDE:
            return page.to(tl.int64) * stride_p + (pos % PAGE_SIZE) * stride_t
        else:
            return page * stride_p + (pos % PAGE_SIZE) * stride_t


@triton.jit
def load_tile(ptr, offsets, owned, DIM: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """``[keys, BLOCK]`` with zeros past DIM and, if MASKED, in keys that are not ``owned``: nothing else is ever read."""
    d = tl.arange(0, BLOCK)
    ptrs = ptr + (offsets[:, None] + d[None, :])
    if MASKED:
        if DIM == BLOCK:
            return tl.load(ptrs, mask=owned[:, None], other=0.0)
        else:
            return tl.load(ptrs, mask=owned[:, None] & (d < DIM)[None, :], other=0.0)
    else:
        if DIM == BLOCK:
            return tl.load(ptrs)
        else:
            return tl.load(ptrs, mask=(d < DIM)[None, :], other=0.0)
