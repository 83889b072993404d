"""The Triton backend on a real GPU; skipped where there is none."""

import pytest
import torch

from tests.contract.target import Target

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            item.add_marker(pytest.mark.skip(reason="no GPU"))


@pytest.fixture(params=DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def target(request):
    return Target("triton", "cuda", request.param)


@pytest.fixture
def place():
    """(backend, device), for tests that bring their own dtypes."""
    return "triton", "cuda"
