"""FlashInfer's times, from the result file of a script of its own: it needs a process per group of settings."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cascade_fd.bench.cases import Case
from cascade_fd.bench.measure import MAX_ERROR, Row, row_of

SHIPPED = "mlc_auto"  # MultiLevelCascadeAttentionWrapper as it comes


def flashinfer_rows(path: Path, cases: Iterable[Case]) -> list[Row]:
    """Rows of each case: the shipped call for shared prefixes, and the fastest of all; one row if they are the same.

    A line of the file is ``{"info": {"flashinfer", "gpu", "driver", "torch"}}``, or a result ``{"workload", "setting", "kind",
    "us", "err"}``. Of several results of a workload and setting the last counts; none counts that is wrong or only a part.
    Raises ValueError if a line is no JSON object.
    """
    lines = [_parsed(path, i, line) for i, line in enumerate(path.read_text().splitlines(), 1) if line.strip()]
    info: dict[str, Any] = next((line["info"] for line in lines if "info" in line), {})
    name, where = f"flashinfer {info.get('flashinfer', '')}".strip(), _where(info, path)
    rows = []
    for case in cases:
        results = {line["setting"]: line for line in lines if line.get("workload") == case.name}
        right = sorted(filter(_counts, results.values()), key=lambda line: line["us"])
        shipped = [line for line in right if line["setting"].startswith(SHIPPED)]
        chosen = {line["setting"]: line for line in shipped[:1] + right[:1]}
        rows += [row_of(case, name, setting, line["us"], line["err"], where) for setting, line in chosen.items()]
    return rows


def _parsed(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"{path}, line {number}: expected a JSON object, got {line[:40]!r}")
    return value


def _counts(line: dict[str, Any]) -> bool:
    return line.get("kind") == "full" and "us" in line and line.get("err") is not None and line["err"] < MAX_ERROR


def _where(info: dict[str, Any], path: Path) -> dict[str, str]:
    """As ``cascade_fd.bench.measure.machine`` has it, for where the file was made."""
    date = datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.UTC).date().isoformat()
    driver = str(info.get("driver", "")).split(",")[0].strip()
    known = {"gpu": info.get("gpu", ""), "driver": driver, "torch": info.get("torch", "")}
    return known | {"triton": "", "commit": "", "date": date}
