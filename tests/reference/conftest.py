"""The reference backend on the CPU."""

import pytest
import torch

from tests.contract.target import Target

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def target(request):
    return Target("reference", "cpu", request.param)


@pytest.fixture
def place():
    """(backend, device), for tests that bring their own dtypes."""
    return "reference", "cpu"
