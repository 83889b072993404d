"""Backends: modules with the same few functions, imported when first used. ``reference`` is the specification.

    partial_states(q, stores, plan, sm_scale, out) -> partials      one state per workspace slot; single-state rows go to out
    merge_rows(partials, rows, out, sink=None)                      ragged n-way merge, in index order
    merge_pair(a, b, out, mask=None, sink=None)                     the two-state merge that reads both where they lie

The first two are the whole seam between a plan and a backend.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import torch

from cascade_fd.checks import check_choice

NAMES = ("reference", "triton")


def get_backend(name: str | None, device: torch.device) -> ModuleType:
    """The backend called ``name``; by default "triton" for CUDA tensors and "reference" for all others."""
    if name is None:
        name = "triton" if device.type == "cuda" else "reference"
    check_choice("backend", name, NAMES)
    return _load(name)


@functools.cache
def _load(name: str) -> ModuleType:
    return importlib.import_module(f"cascade_fd.backends.{name}")
