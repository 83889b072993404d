"""A plan in the making: what the planner and the layout hand to each other. Host only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cascade_fd.hardware import Hardware
from cascade_fd.nodes import Nodes, check_room, offsets_of
from cascade_fd.planning.choice import Asked
from cascade_fd.planning.worklist import Shape
from cascade_fd.tiles import AttendTile
from cascade_fd.tree import PrefixTree


@dataclass(eq=False)
class Work:
    """A plan in the making: arrays with one entry per node.

    Attributes:
        nodes: as they are computed; the planner folds what does not pay.
        stop: capacity: the nodes' stop, plus max_new_tokens for private nodes.
        tokens: ``stop - start``; 0 if nobody reads the node.
        growth: max_new_tokens.
        offsets: ``[B + 1]`` query rows before each request in tree order.
        row0, num_rows: packed rows.
        chunk, lead, splits: tokens per split, by how many the first one is shorter, and how many that makes; 0 splits for a
            node without keys or rows. Set by the planner.
    """

    nodes: Nodes
    stop: np.ndarray
    growth: int
    tokens: np.ndarray
    offsets: np.ndarray
    row0: np.ndarray
    num_rows: np.ndarray
    chunk: np.ndarray
    lead: np.ndarray
    splits: np.ndarray

    @classmethod
    def measure(cls, tree: PrefixTree, shape: Shape, growth: int) -> Work:
        nodes = tree.nodes
        stop = nodes.stop
        if growth:
            stop = stop.copy()
            stop[tree.num_shared :] += growth
            check_room("max_new_tokens", nodes, stop)
        offsets = offsets_of(tree.q_lens)
        row0 = offsets[nodes.first] * shape.group
        num_rows = offsets[nodes.last] * shape.group - row0
        tokens = (stop - nodes.start) * (num_rows > 0)
        zeros = np.zeros_like(stop)
        return cls(nodes, stop, growth, tokens, offsets, row0, num_rows, zeros, zeros, zeros)

    def fold(self, folded: np.ndarray) -> None:
        """Let the children of some nodes read them."""
        self.nodes = self.nodes.fold(folded)
        self.stop = np.where(folded, self.nodes.start, self.stop)
        self.tokens = (self.stop - self.nodes.start) * (self.num_rows > 0)


@dataclass(frozen=True, eq=False)
class Group:
    """The nodes ``[n]`` of one launch, its tile, and the programs that one split of each node makes."""

    tile: AttendTile
    nodes: np.ndarray
    programs: np.ndarray


@dataclass(frozen=True, eq=False)
class Frame:
    """What a plan is made for, apart from its nodes.

    Attributes:
        tiles: the tiles there are, by their rows, if another plan's are to be used; else None.
    """

    shape: Shape
    device: torch.device
    hardware: Hardware
    asked: Asked
    tiles: dict[int, AttendTile] | None = None


def ceil(a: Any, b: Any) -> Any:
    return -(-a // b)
