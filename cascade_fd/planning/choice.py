"""What the planner was asked for and what it decided about sharing: records for ``Plan``, ``explain`` and tests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Asked:
    """The options of ``plan`` that decide how work is shared and cut."""

    split: str | int = "balanced"
    share: str = "auto"
    batch_invariant: bool = False


@dataclass(frozen=True, eq=False)
class Choice:
    """Which nodes are computed once, and what was weighed.

    Attributes:
        folded: ``[nodes]`` whether a node is read by each of its children instead of once for all of them.
        sizes: rows of the tiles that nodes may use, rising.
        kernels: the kernels for Hopper that launches use, see ``tiling.options``; None where nothing was weighed.
        once, each: ``[shared nodes]`` predicted microseconds of the whole device to compute a node once, and with each of its
            children; None where nothing was weighed.
        rule: why nothing was weighed ("" if it was).
        stuck: ``[shared nodes]`` whether a node cannot be folded: its tokens are not in its children's table rows.
        compared: predicted microseconds of the whole call, by what would be shared.
    """

    folded: np.ndarray
    sizes: tuple[int, ...]
    kernels: tuple[str, ...] | None = None
    once: np.ndarray | None = None
    each: np.ndarray | None = None
    rule: str = ""
    stuck: np.ndarray | None = None
    compared: tuple[tuple[str, float], ...] = ()
