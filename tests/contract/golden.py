"""Our merges against recorded outputs of FlashInfer's merge_state, merge_state_in_place and merge_states.

Rows whose states are all empty differ by design: FlashInfer's file holds NaN or about -5e4 there, ours must be (0, -inf).
"""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

import cascade_fd as cf
from cascade_fd import AttentionState

FILE = Path(__file__).parents[1] / "data" / "golden_merge.npz"


@cache
def arrays():
    return dict(np.load(FILE))


def cases():
    return json.loads(bytes(arrays()["index"]))["cases"]


def tensor(name, device):
    array = arrays()[name]
    t = (
        torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
        if array.dtype == np.uint16
        else torch.from_numpy(array)
    )
    return t.to(device)


@pytest.mark.parametrize("case", cases(), ids=lambda c: c["name"])
def test_golden_merge(place, case):
    backend, device = place
    name = case["name"]
    get = lambda key: tensor(f"{name}/{key}", device)  # noqa: E731
    if case["op"] == "merge_states":
        o, lse = get("v"), get("s")  # [rows, states, H, D]
        n = o.shape[1]
        states = [AttentionState(o[:, i].contiguous(), lse[:, i], "2") for i in range(n)]
        flat = AttentionState(o.flatten(0, 1), lse.flatten(0, 1), "2")
        got = cf.merge_ragged(flat, range(0, len(flat) + 1, n), base="2", backend=backend)
    else:
        states = [AttentionState(get("v" + x), get("s" + x), "2") for x in "ab"]
        if case["op"] == "merge_state":
            got = cf.merge(*states, base="2", backend=backend)
        else:
            got = AttentionState(states[0].o.clone(), states[0].lse.clone(), "2")
            cf.merge_(got, states[1], mask=get("mask") if case["mask"] else None, backend=backend)
    compare(got, states, get("vo"), get("so"), case["mask"])


def compare(got, states, their_o, their_lse, masked):
    empty = torch.stack([s.lse for s in states]).amax(0) == -torch.inf
    assert (got.o[empty] == 0).all()
    assert (got.lse[empty] == -torch.inf).all()
    eps = torch.finfo(got.dtype).eps
    size = torch.stack([s.o.float().abs() for s in states]).amax()
    difference = (got.o.float() - their_o.float())[~empty].abs()
    assert not difference.numel() or difference.max() <= 2 * eps * size
    torch.testing.assert_close(got.lse[~empty], their_lse[~empty], rtol=1e-6, atol=1e-4)
    if masked:
        assert torch.equal(got.o[1::2], their_o[1::2])


def test_the_file_has_every_case():
    assert len(cases()) == 86
    assert {c["op"] for c in cases()} == {"merge_state", "merge_state_in_place", "merge_states"}
