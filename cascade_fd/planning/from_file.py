"""The tree of a batch whose page ids and lengths are in a file, as ``cascade-fd plan`` reads it."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from cascade_fd.tree import PrefixTree

FIELDS = ("block_tables", "seq_lens")


def read_tree(path: Path, page_size: int, q_len: int = 1) -> PrefixTree:
    """The tree of a file with ``block_tables`` ``[B, max_pages]`` and ``seq_lens`` ``[B]``.

    ``.npz``: two integer arrays. ``.json``: an object with two lists; rows of ``block_tables`` may differ in length.

    Raises:
        OSError, ValueError, TypeError: the file or a field of it is wrong; the text names which.
    """
    if path.suffix == ".npz":
        tables, lens = _read_npz(path)
        return PrefixTree.from_block_tables(tables, lens, page_size, q_lens=q_len)
    if path.suffix != ".json":
        raise ValueError(f"{path}: expected a name that ends in .npz or .json")
    rows, lens = _read_json(path)
    ids = np.array([page for row in rows for page in row], np.int64)
    return PrefixTree.from_csr(ids, np.cumsum([0, *map(len, rows)]), lens, page_size, q_lens=q_len)


def _read_npz(path: Path) -> tuple[np.ndarray, np.ndarray]:
    with path.open("rb") as stream:
        if not zipfile.is_zipfile(stream):
            raise ValueError(f"{path}: not an .npz file")
    try:
        with np.load(path) as file:
            tables, lens = (file[name] for name in FIELDS)
    except KeyError as error:
        raise ValueError(f"{path}: expected arrays {' and '.join(FIELDS)}; {error.args[0]}") from error
    except (ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: expected plain arrays: {error}") from error
    return tables, lens


def _read_json(path: Path) -> tuple[list[list[int]], np.ndarray]:
    try:
        content = json.loads(path.read_text())
    except ValueError as error:  # also of bytes that are not text
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict) or not all(name in content for name in FIELDS):
        raise ValueError(f"{path}: expected an object with {' and '.join(FIELDS)}")
    tables, lens = (content[name] for name in FIELDS)
    if not isinstance(tables, list) or not all(map(_is_row, tables)):
        raise ValueError("block_tables: expected a list of lists of page ids below 2**31")
    if not _is_row(lens):
        raise ValueError("seq_lens: expected a list of lengths below 2**31")
    return tables, np.array(lens, np.int64)


def _is_row(value: Any) -> bool:
    return isinstance(value, list) and all(type(x) is int and abs(x) < 2**31 for x in value)
