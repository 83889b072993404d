"""The Triton backend in Triton's interpreter: needs TRITON_INTERPRET=1 before triton is imported, so a run of its own."""

import os

import numpy as np
import pytest
import torch

from tests.contract.target import Target

# bfloat16 is left out: the interpreter multiplies it wrongly.
DTYPES = [torch.float32, torch.float16]

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(params=DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def target(request):
    return Target("triton", "cpu", request.param)


@pytest.fixture(autouse=True)
def fixed_order(request, monkeypatch):
    """For tests of bits. On some CPUs NumPy's matmul adds up a row differently by where it is; einsum does not."""
    if "does_not_feel" not in request.node.name:
        return
    from triton.runtime import interpreter

    def dot(self, a, b, d, *rest):
        product = np.einsum("ik,kj->ij", a.data.astype(d.data.dtype), b.data.astype(d.data.dtype))
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


@pytest.fixture
def place():
    """(backend, device), for tests that bring their own dtypes."""
    return "triton", "cpu"
