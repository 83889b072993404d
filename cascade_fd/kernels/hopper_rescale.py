"""Scaling of an accumulator where the score that weights are relative to was raised, and else nothing, warp by warp.

Scores rarely grow by more than ``algebra.SLACK`` after the first tiles (FlashAttention-4 has the idea), and the scaling lies
between two products: without it a step of the wide kernel has up to a fifth fewer instructions. A branch of Triton's own would
be of all warps at once, who would have to wait for each other.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_N = 32  # elements of a thread at a time; in the layout of warp-group MMA they belong to two rows, two elements of each in turn


def _assembly() -> str:
    """The first 32 operands become the second 32, times the third 32 if one of these is not 1 in any thread of the warp."""
    copies = "".join(f"mov.f32 ${i}, ${_N + i};\n" for i in range(_N))
    products = "".join(f"mul.f32 ${i}, ${i}, ${2 * _N + i};\n" for i in range(_N))
    return f"""{{
        .reg .pred grown, any;
        {copies}
        setp.neu.f32 grown, ${2 * _N}, 0f3F800000;
        setp.neu.or.f32 grown, ${2 * _N + 2}, 0f3F800000, grown;
        vote.sync.any.pred any, grown, 0xffffffff;
        @!any bra DONE;
        {products}
        DONE:
    }}"""


_AT_ONCE = gl.constexpr(_N)
_ASSEMBLY = gl.constexpr(_assembly())
_OPERANDS = gl.constexpr(",".join(["=f"] * _N + ["f"] * 2 * _N))


@gluon.jit
def rescale(acc, alpha):
    """``acc [M, N] * alpha [M]``, for a layout of warp-group MMA."""
    factors = gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]
    return gl.inline_asm_elementwise(_ASSEMBLY, _OPERANDS, [acc, factors], gl.float32, True, _AT_ONCE)
