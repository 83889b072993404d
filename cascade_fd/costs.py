"""What launches and tiles cost on a GPU: the constants of the planner's cost model, as measured by ``cascade-fd tune``."""

from __future__ import annotations

import functools
import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

# A *block* is one step of the kernel's main loop over BLOCK_KEYS keys of D = Dv = 128 in 2-byte elements. Blocks of other
# sizes count in proportion to their bytes.
BLOCK_KEYS = 64
BLOCK_BYTES = BLOCK_KEYS * (128 + 128) * 2


@dataclass(frozen=True)
class TileCost:
    """Costs of one of the attend kernel's tiles.

    Attributes:
        rows, per_sm, kernel: packed rows per program, programs per SM, and which kernel: which tile.
        step: microseconds per block of a program, however empty the device is: the latency that one program cannot beat.
        start: microseconds of a whole SM per program, for its start and its end, when the device is full.
        warm: microseconds of a whole SM per block when the device is full and keys come from the cache.
        cold: the same for keys that come from memory.
    """

    rows: int
    per_sm: int
    step: float
    start: float
    warm: float
    cold: float
    kernel: str = "attend"


@dataclass(frozen=True)
class Costs:
    """The constants of one GPU.

    Attributes:
        launch: microseconds of an attend launch beside its blocks: its start, its plan's latency, its last store.
        follow: microseconds that every further launch of the same call adds.
        merge: microseconds that the merge launch adds.
        state: microseconds per MB of partial states, written once and read once.
        tiles: by rows, rising, then by programs per SM.
        source: where they come from.
    """

    launch: float
    follow: float
    merge: float
    state: float
    tiles: tuple[TileCost, ...]
    source: str = ""

    def tile(self, rows: int, per_sm: int, kernel: str = "attend") -> TileCost:
        """Costs of a tile: its own, or of the kernel's next with as many rows or more, or of its largest, or another's."""
        found = self._known.get((rows, per_sm, kernel))
        if found is None:
            tiles = [t for t in self.tiles if t.kernel == kernel] or list(self.tiles)
            as_large = [t for t in tiles if t.rows >= rows] or tiles[-1:]
            same_rows = [t for t in as_large if t.rows == as_large[0].rows]
            found = next((t for t in same_rows if t.per_sm >= per_sm), same_rows[-1])
            self._known[rows, per_sm, kernel] = found
        return found

    def knows(self, kernel: str) -> bool:
        """Whether there are constants for a kernel at all."""
        return any(t.kernel == kernel for t in self.tiles)

    def only(self, *kernels: str) -> Costs:
        """The same for a device with no other kernels than these and the portable one, and where these have tiles, they pay.

        The narrow tile stands for the smallest portable one.
        """
        tiles = [t for t in self.tiles if t.kernel in (*kernels, "attend")]
        rows = {t.rows for t in tiles if t.kernel != "attend"}
        if "narrow" in kernels:
            rows.add(min(t.rows for t in tiles if t.kernel == "attend"))
        dear = tuple(replace(t, start=1e9) if t.kernel == "attend" and t.rows in rows else t for t in tiles)
        return replace(self, tiles=dear)

    @functools.cached_property
    def _known(self) -> dict[tuple[int, int, str], TileCost]:
        return {}

    def scaled(self, factor: float, source: str) -> Costs:
        """The same constants with every block's time multiplied."""
        tiles = tuple(replace(t, step=t.step * factor, warm=t.warm * factor, cold=t.cold * factor) for t in self.tiles)
        return replace(self, state=self.state * factor, tiles=tiles, source=source)

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Costs:
        """From what ``asdict`` gives."""
        return cls(**{**fields, "tiles": tuple(TileCost(**tile) for tile in fields["tiles"])})

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Costs:
        """Raises ValueError for a file that is no record of costs."""
        try:
            return cls.of(json.loads(path.read_text()))
        except (TypeError, KeyError, json.JSONDecodeError) as error:
            raise ValueError(f"path: expected a record that cascade-fd tune wrote, got {path} ({error})") from error


def measured_path(gpu: str) -> Path:
    """Where ``cascade-fd tune`` keeps the costs of a GPU: in ``CASCADE_FD_COSTS``, or in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = os.environ.get("CASCADE_FD_COSTS") or Path(cache, "cascade_fd")
    return Path(folder) / f"{gpu.lower().replace(' ', '-').replace('/', '-')}.json"


def measured(gpu: str) -> Costs | None:
    """The costs that were measured here, if they were."""
    path = measured_path(gpu)
    return Costs.load(path) if path.exists() else None


# A CPU computes the same blocks whoever shares them, and has no launches to save: whatever is shared pays.
ON_CPU = Costs(0.0, 0.0, 0.0, 0.0, (TileCost(64, 1, 0.0, 0.0, 1.0, 1.0),), "work alone")

# As "tune" measured them, but for "single": its warm is that of two programs an SM (64 requests of 8 rows over 8,192 shared and
# 512 own keys: 168 us), of which tune had no batch then.
H200 = Costs(
    launch=3.23,
    follow=1.65,
    merge=1.16,
    state=0.484,
    tiles=(
        TileCost(16, 2, 1.2, 1.16, 0.456, 0.951),
        TileCost(16, 4, 2.36, 0.703, 0.456, 0.951),
        TileCost(16, 5, 1.5, 0.692, 0.456, 0.951),
        TileCost(32, 2, 1.33, 2.21, 0.336, 0.945),
        TileCost(32, 4, 3.5, 0.413, 0.336, 0.945),
        TileCost(64, 1, 0.915, 4.29, 0.421, 1.15),
        TileCost(128, 1, 1.32, 4.01, 0.601, 1.5),
        TileCost(128, 1, 0.802, 9.24, 0.336, 1.07, "hopper"),
        TileCost(128, 1, 1.03, 4.31, 0.55, 1.33, "beside"),
        TileCost(64, 1, 0.625, 3.8, 0.5, 0.951, "single"),
        TileCost(8, 4, 1.43, 0.302, 0.411, 0.948, "narrow"),
    ),
    source="measured on NVIDIA H200, 2026-11-30, triton 3.6.0",
)
