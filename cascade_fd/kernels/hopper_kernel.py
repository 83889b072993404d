"""The attend kernel for Hopper, in Gluon: one warp fetches keys and values by TMA, one or two warp groups of 64 rows multiply.

What it computes is what ``attend_kernel`` computes (see ``planning.worklist.Launch``). Tiles of keys and of values go through
rings of stages in shared memory. A stage has a barrier "full", which TMA completes, and a barrier "empty", at which the warp
groups arrive. Tiles that need no masks come first; their scores are computed together with the output of the tile before.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cascade_fd.kernels.hopper_fetch import PANEL, produce
from cascade_fd.kernels.hopper_multiply import BAND, ROWS, consume

RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))  # in Triton 3.9


@gluon.jit
def pieces(ring, shape: gl.constexpr, layout: gl.constexpr):
    """The memory of a ring, seen as one of smaller pieces."""
    if RENAMED:
        return ring.reinterpret(ring.dtype, shape, layout)
    else:
        return ring._reinterpret(ring.dtype, shape, layout)


@gluon.jit
def boxes_of(ring, BOX: gl.constexpr):
    """The memory of a ring ``[stages, tokens, columns]``, as the boxes of ``hopper_fetch.fetch``."""
    NUM_BOXES: gl.constexpr = ring.shape[0] * (ring.shape[1] // BOX) * (ring.shape[2] // PANEL)
    return pieces(ring, [NUM_BOXES, 1, BOX, 1, PANEL], gl.NVMMASharedLayout(128, 16, 4))


@gluon.jit(do_not_specialize=["stride_ids", "stride_lse_t", "stride_lse_h", "num_units"])
def hopper_kernel(
    k_desc,
    v_desc,
    q_ptr,
    ids_ptr,
    items_ptr,
    lens_ptr,
    rows_ptr,
    part_o_ptr,
    part_lse_ptr,
    out_ptr,
    lse_ptr,
    stride_q_t,
    stride_q_h,
    stride_ids,
    stride_out_t,
    stride_out_h,
    stride_lse_t,
    stride_lse_h,
    qk_scale,
    lse_scale,
    num_units,
    HKV: gl.constexpr,
    G: gl.constexpr,
    D: gl.constexpr,
    DV: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    GROUPS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BOX: gl.constexpr,
    STAGES: gl.constexpr,
    Q_IN_REGISTERS: gl.constexpr,
    CONSUMER_REGS: gl.constexpr,
    PRODUCER_REGS: gl.constexpr,
    CHAIN: gl.constexpr,
):
    """Arguments as in ``attend_kernel``; qk_scale is positive.

    The descriptors have the axes of the stores, ``[rows, tokens, Hkv, D]``, and boxes of ``[1, BOX, 1, 64]``.
    """
    if CHAIN > 0:
        gdc_launch_dependents()
    tile: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], tile)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, DV], tile)
    if Q_IN_REGISTERS:
        q_tiles = k_ring
    else:
        q_tiles = gl.allocate_shared_memory(dtype, [GROUPS, ROWS, D], tile)
    BANDS: gl.constexpr = STAGES * (BLOCK_N // BAND)
    fetched = (boxes_of(k_ring, BOX), boxes_of(v_ring, BOX))
    v_bands = pieces(v_ring, [BANDS * (DV // PANEL), BAND, PANEL], tile)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=GROUPS)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=GROUPS)
    barriers = (k_full, k_empty, v_full, v_empty)
    ALIGN: gl.constexpr = BOX if PAGE_SIZE else 1
    pointers = (q_ptr, items_ptr, lens_ptr, rows_ptr, part_o_ptr, part_lse_ptr, out_ptr, lse_ptr)
    strides = (stride_q_t, stride_q_h, stride_out_t, stride_out_h, stride_lse_t, stride_lse_h)
    scales = (qk_scale, lse_scale)
    sources = (k_desc, v_desc, ids_ptr, items_ptr, lens_ptr, stride_ids)
    work = (num_units, pointers, strides, scales)
    memory = (q_tiles, (k_ring, v_ring, v_bands), barriers)
    if GROUPS == 1:  # All arguments again: in a tuple with a name, constexprs would become tensors.
        gl.warp_specialize(
            [
                (consume, (0, work, memory, HKV, G, D, DV, ALIGN, BLOCK_N, STAGES, Q_IN_REGISTERS)),
                (produce, (num_units, sources, fetched, barriers, HKV, D, DV, PAGE_SIZE, BLOCK_N, BOX, STAGES)),
            ],
            [1],
            [PRODUCER_REGS],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (0, work, memory, HKV, G, D, DV, ALIGN, BLOCK_N, STAGES, Q_IN_REGISTERS)),
                (consume, (1, work, memory, HKV, G, D, DV, ALIGN, BLOCK_N, STAGES, Q_IN_REGISTERS)),
                (produce, (num_units, sources, fetched, barriers, HKV, D, DV, PAGE_SIZE, BLOCK_N, BOX, STAGES)),
            ],
            [4, 1],
            [CONSUMER_REGS, PRODUCER_REGS],
        )
    if CHAIN == 2:  # Whoever waits for this launch then waits for the one before it too.
        if gl.program_id(0) == gl.num_programs(0) - 1:
            gdc_wait()
