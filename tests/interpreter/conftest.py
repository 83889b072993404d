"""The Triton backend in Triton's interpreter: needs TRITON_INTERPRET=1 before triton is imported, so a run of its own."""

import os

import pytest
import torch

from tests.contract.target import Target

# bfloat16 is left out: the interpreter multiplies it wrongly.
DTYPES = [torch.float32, torch.float16]

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
else:
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    _binary_op = InterpreterBuilder.binary_op

    def _binary_op_of_masks(self, lhs, rhs, op):
        """What is compared says int32 of itself: splat, that is no mask, and Triton 3.9 refuses to load and store by it."""
        result = _binary_op(self, lhs, rhs, op)
        return TensorHandle(result.data, tl.int1) if result.data.dtype == bool else result

    InterpreterBuilder.binary_op = _binary_op_of_masks


@pytest.fixture(params=DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def target(request):
    return Target("triton", "cpu", request.param)


@pytest.fixture
def place():
    """(backend, device), for tests that bring their own dtypes."""
    return "triton", "cpu"
