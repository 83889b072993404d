"""An index of which requests share which leading pages, kept up to date as requests come, grow and go.

A radix tree whose edges are arrays of page ids. Every node but the root ends a request or branches, so a node that two or
more requests pass through is a maximal run in the sense of ``Runs``, and the others are private rests.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from cascade_fd.discovery import Runs, check_ids


class _Node:
    """``edge``: ids from the parent to here; ``keys``: requests that end here, in order of arrival; ``size``: and below."""

    __slots__ = ("children", "edge", "keys", "parent", "size")

    def __init__(self, edge: np.ndarray, parent: _Node | None, size: int):
        self.edge, self.parent, self.size = edge, parent, size
        self.children: dict[int, _Node] = {}
        self.keys: dict[Hashable, None] = {}


class PrefixIndex:
    """What ``discover`` finds, without comparing the whole batch again: a change walks one path of the tree.

    Give it whole pages only: a page that is still written to is not shared. As in ``discover``, a page id that occurs twice in
    one request is not looked for here.

    Example:
        >>> index = PrefixIndex()
        >>> index.add("a", [7, 8, 9])
        >>> index.add("b", [7, 8])
        >>> index.append_pages("b", [4])
        >>> keys, runs = index.runs()
        >>> keys, runs.stop.tolist(), runs.own.tolist()
        (['a', 'b'], [2], [2, 2])
    """

    def __init__(self) -> None:
        self._root = _Node(np.empty(0, np.int64), None, 0)
        self._ends: dict[Hashable, _Node] = {}  # node where each request ends

    def __len__(self) -> int:
        return len(self._ends)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._ends

    def keys(self) -> list[Hashable]:
        """All requests, in order of arrival."""
        return list(self._ends)

    def add(self, key: Hashable, page_ids: Any) -> None:
        """Add a request with its ``[n]`` page ids, which are copied.

        Raises:
            ValueError: a key that is in the index, a negative id, or a wrong rank.
            TypeError: ids that are not int32 or int64.
        """
        if key in self._ends:
            raise ValueError(f"key: expected one that is not in the index, got {key!r}, which is")
        ids = _page_ids(page_ids)
        _add_to_path(self._root, 1)
        self._ends[key] = self._insert(self._root, key, ids)

    def remove(self, key: Hashable) -> None:
        """Remove a request. Raises KeyError if the index has no such key."""
        end = self._end(key)
        del self._ends[key], end.keys[key]
        _add_to_path(end, -1)
        self._tidy(end)

    def append_pages(self, key: Hashable, page_ids: Any) -> None:
        """Add ``[n]`` page ids to the end of a request.

        Raises:
            KeyError: the index has no such key.
            ValueError, TypeError: as ``add``.
        """
        end, ids = self._end(key), _page_ids(page_ids)
        if end.size == 1 and end.parent is not None:  # nobody else passes here
            end.edge = np.concatenate((end.edge, ids))
            return
        del end.keys[key]
        self._ends[key] = self._insert(end, key, ids)
        self._tidy(end)

    def runs(self) -> tuple[list[Hashable], Runs]:
        """The keys in tree order, and the runs of the batch in that order (``runs.order`` counts up from 0).

        The same partition as ``discover`` finds, up to the order of siblings. Takes time in proportion to nodes and requests.
        """
        keys: list[Hashable] = []
        own: list[int] = []
        nodes: list[tuple[int, int, int, int, int]] = []  # parent, first, last, start, stop
        todo = [(self._root, -1, 0)]  # node, innermost shared node above it, and where that one stops
        while todo:
            node, above, stop = todo.pop()
            if node.size > 1 and node.parent is not None:
                start, stop = stop, stop + len(node.edge)
                nodes.append((above, len(keys), len(keys) + node.size, start, stop))
                above = len(nodes) - 1
            keys += node.keys
            own += [stop] * len(node.keys)
            todo += [(child, above, stop) for child in reversed(node.children.values())]
        parents, firsts, lasts, starts, stops = np.array(nodes, np.int64).reshape(-1, 5).T.copy()
        return keys, Runs(np.arange(len(keys)), parents, firsts, lasts, starts, stops, np.array(own, np.int64))

    def _end(self, key: Hashable) -> _Node:
        if key not in self._ends:
            raise KeyError(f"key: expected one of the {len(self)} in the index, got {key!r}")
        return self._ends[key]

    def _insert(self, node: _Node, key: Hashable, ids: np.ndarray) -> _Node:
        """Walk down from ``node``, which counts the request already, along ``ids``; return the node where it ends."""
        while len(ids):
            child = node.children.get(int(ids[0]))
            if child is None:
                child = node.children[int(ids[0])] = _Node(ids.copy(), node, 0)  # the caller keeps theirs
            common = _common(child.edge, ids)
            if common < len(child.edge):
                child = self._split(child, common)
            child.size += 1
            node, ids = child, ids[common:]
        node.keys[key] = None
        return node

    def _split(self, node: _Node, at: int) -> _Node:
        """Put a new node ``at`` ids into the edge of ``node``, and return it."""
        assert node.parent is not None
        upper = _Node(node.edge[:at].copy(), node.parent, node.size)  # copies: a view would keep the whole edge alive
        node.parent.children[int(upper.edge[0])] = upper
        node.edge, node.parent = node.edge[at:].copy(), upper
        upper.children[int(node.edge[0])] = node
        return upper

    def _tidy(self, node: _Node) -> None:
        """Drop a node that ends no request and has no children; join one that has a single child with it."""
        parent = node.parent
        if parent is None or node.keys or len(node.children) > 1:
            return
        if node.children:
            (child,) = node.children.values()
            child.edge, child.parent = np.concatenate((node.edge, child.edge)), parent
            parent.children[int(child.edge[0])] = child
        else:
            del parent.children[int(node.edge[0])]
            self._tidy(parent)  # once: the parent has another child, or ends a request, or is left with one child


def _page_ids(value: Any) -> np.ndarray:
    ids = check_ids("page_ids", value, "n").astype(np.int64, copy=False)
    if len(ids) and ids.min() < 0:
        at = int(ids.argmin())
        raise ValueError(f"page_ids: expected ids of at least 0, got {ids[at]} at position {at}")
    return ids


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Leading ids that two lists have in common."""
    n = min(len(a), len(b))
    differs = (a[:n] != b[:n]).nonzero()[0]
    return int(differs[0]) if len(differs) else n


def _add_to_path(node: _Node | None, count: int) -> None:
    while node is not None:
        node.size += count
        node = node.parent
