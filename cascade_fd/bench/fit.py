"""From measured times to the constants of the cost model, which is called as it is: ``planning.cost.predict``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cascade_fd.costs import Costs
from cascade_fd.hardware import Hardware
from cascade_fd.planning.cost import Load, predict

CALL = ("launch", "follow", "merge", "state")  # constants of a call
OWN, COMMON = ("step", "start"), ("warm", "cold")  # of a tile, and of all tiles with as many rows
PRIOR = 1e-4  # what a constant e times its first value costs, in mean log error: only what no sample shows stays where it was
BEND = 5e-3  # below this error the loss is quadratic
# Steps of a search: at most so many, until one gains less; and no constant's logarithm goes farther in one.
STEPS, ENOUGH, FARTHEST = 60, 1e-6, 2.0
NUDGE = 1e-4  # for derivatives

Name = tuple[str, int, int, str]  # field, rows, programs per SM, kernel; 0 and "" where a constant is of all


@dataclass(frozen=True)
class Sample:
    """A plan's launches and partial states, as the cost model sees them, and the microseconds that a call of it took."""

    label: str
    loads: tuple[Load, ...]
    state_bytes: float
    us: float


def fit(samples: Sequence[Sample], hw: Hardware) -> Costs:
    """The constants that predict ``samples`` best, in mean absolute log error, beginning with those of ``hw``.

    Deterministic; constants have three digits.
    """
    if not samples:
        raise ValueError("samples: expected at least one")
    problem = _Problem(samples, hw)
    return problem.costs(_descend(problem, problem.first), digits=3)


class _Problem:
    """What is minimised, as a function of the logs of the constants."""

    def __init__(self, samples: Sequence[Sample], hw: Hardware):
        self.samples, self.hw, self.names = samples, hw, _names(hw.costs)
        self.first = np.log([max(_get(hw.costs, name), 1e-3) for name in self.names])  # a logarithm has no 0

    def costs(self, x: np.ndarray, digits: int = 15) -> Costs:
        values = [float(f"{value:.{digits}g}") for value in np.exp(x)]
        return _record(self.hw.costs, dict(zip(self.names, values, strict=True)))

    def errors(self, x: np.ndarray) -> np.ndarray:
        return log_errors(self.samples, self.hw, self.costs(x))

    def loss(self, x: np.ndarray, r: np.ndarray) -> float:
        return float(np.sqrt(r**2 + BEND**2).mean() + PRIOR * ((x - self.first) ** 2).sum())


def _descend(problem: _Problem, x: np.ndarray) -> np.ndarray:
    """Levenberg-Marquardt. Each step is on the squares that touch the loss from above where it stands (reweighted squares)."""
    r, damping = problem.errors(x), 1e-2
    now = problem.loss(x, r)
    for _ in range(STEPS):
        slopes = np.stack([(problem.errors(x + step) - r) / NUDGE for step in NUDGE * np.eye(len(x))], 1)
        weights = 1 / np.sqrt(r**2 + BEND**2) / len(r)
        curve = slopes.T @ (slopes * weights[:, None]) + 2 * PRIOR * np.eye(len(x))
        down = slopes.T @ (r * weights) + 2 * PRIOR * (x - problem.first)
        before = now
        while not now < before and damping < 1e6:
            to = x - np.clip(np.linalg.solve(curve + damping * np.diag(np.diag(curve)), down), -FARTHEST, FARTHEST)
            there = problem.errors(to)
            now = problem.loss(to, there)
            damping *= 4
        if not now < before:
            return x
        x, r, damping = to, there, damping / 12
        if before - now < ENOUGH:
            break
    return x


def log_errors(samples: Sequence[Sample], hw: Hardware, costs: Costs) -> np.ndarray:
    """``[samples]`` log of the predicted over the measured time."""
    return np.log(_said(samples, hw, costs)) - np.log([sample.us for sample in samples])


def regrets(samples: Sequence[Sample], hw: Hardware, costs: Costs) -> np.ndarray:
    """``[batches]`` time of the plan that should be a batch's fastest over that of the one that was. Labels end with it."""
    plans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for sample, said in zip(samples, _said(samples, hw, costs), strict=True):
        plans[sample.label.rpartition(": ")[2]].append((said, sample.us))
    return np.array([min(times)[1] / min(us for _, us in times) for times in plans.values()])


def _said(samples: Sequence[Sample], hw: Hardware, costs: Costs) -> list[float]:
    """Predicted microseconds."""
    return [predict(sample.loads, sample.state_bytes, hw, costs).us for sample in samples]


def _names(costs: Costs) -> list[Name]:
    own = [(field, tile.rows, tile.per_sm, tile.kernel) for tile in costs.tiles for field in OWN]
    sizes = dict.fromkeys((tile.rows, tile.kernel) for tile in costs.tiles)
    common = [(field, rows, 0, kernel) for rows, kernel in sizes for field in COMMON]
    return [*((field, 0, 0, "") for field in CALL), *own, *common]


def _get(costs: Costs, name: Name) -> float:
    field, rows, per_sm, kernel = name
    return float(getattr(costs.tile(rows, per_sm, kernel) if rows else costs, field))


def _record(like: Costs, values: dict[Name, float]) -> Costs:
    tiles = []
    for tile in like.tiles:
        own: dict[str, Any] = {field: values[field, tile.rows, tile.per_sm, tile.kernel] for field in OWN}
        common: dict[str, Any] = {field: values[field, tile.rows, 0, tile.kernel] for field in COMMON}
        tiles.append(replace(tile, **own, **common))
    call: dict[str, Any] = {field: values[field, 0, 0, ""] for field in CALL}
    return replace(like, tiles=tuple(tiles), **call)
