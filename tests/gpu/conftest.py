"""The Triton backend on a real GPU; skipped where there is none."""

from pathlib import Path

import pytest
import torch

from tests.contract.target import Target

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        mine = [item for item in items if item.path.is_relative_to(Path(__file__).parent)]  # pytest hands over all items
        for item in mine:
            item.add_marker(pytest.mark.skip(reason="no GPU"))


@pytest.fixture(params=DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def target(request):
    return Target("triton", "cuda", request.param)


@pytest.fixture
def place():
    """(backend, device), for tests that bring their own dtypes."""
    return "triton", "cuda"
