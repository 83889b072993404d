"""The Triton backend in Triton's interpreter: needs TRITON_INTERPRET=1 before triton is imported, so a run of its own."""

import os

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


@pytest.fixture
def place():
    """(backend, device), for tests that bring their own dtypes."""
    return "triton", "cpu"
