"""``cascade-fd plan``: the same text from .npz and .json; one line and status 2 for whatever is wrong."""

import json

import numpy as np
import pytest

from cascade_fd import cli
from cascade_fd.hardware import H200
from tests.reference.test_explain import BATCHES, PAGE, plan_of


def run(capsys, path, *options):
    status = cli.main(["plan", "--block-tables", str(path), "--page-size", "16", *options])
    return status, *capsys.readouterr()


def test_command_reads_npz_and_json(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    tables, lens = BATCHES["nested"]
    np.savez(tmp_path / "batch.npz", block_tables=tables, seq_lens=lens)
    ragged = [row[: -(-n // PAGE)] for row, n in zip(tables, lens, strict=True)]
    (tmp_path / "batch.json").write_text(json.dumps({"block_tables": ragged, "seq_lens": lens}))
    want = plan_of("nested").explain(H200) + "\n"
    assert run(capsys, tmp_path / "batch.npz") == (0, want, "")
    picture = tmp_path / "plan.png"
    assert run(capsys, tmp_path / "batch.json", "--draw", str(picture)) == (0, want, "")
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = run(capsys, tmp_path / "batch.npz", "--target", "sm_80", "--q-len", "2", "--num-q-heads", "16", "--head-dim", "64")[
        1
    ]
    assert "28 requests, 56 query rows" in text and "NVIDIA A100" in text and "Hq 16, Hkv 8, D 64" in text


GOOD = {"block_tables": [[1, 2, 3], [1, 2, 4, 5]], "seq_lens": [40, 60]}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{", "bad.json: not JSON: "),
        ("[1]", "bad.json: expected an object with block_tables and seq_lens"),
        (GOOD | {"seq_lens": [40, 65]}, "seq_lens: expected lengths in [0, 64], got 65 for request 1"),
        (GOOD | {"seq_lens": [40]}, "seq_lens: expected one length and one table row per request (2), got 1, 2"),
        (GOOD | {"seq_lens": 40}, "seq_lens: expected a list of lengths below 2**31"),
        (GOOD | {"block_tables": [[1, 2.5, 3], [4] * 4]}, "block_tables: expected a list of lists of page ids below 2**31"),
        (GOOD | {"block_tables": [[1, 2, -3], [1, 2, 4, 5]]}, "block_tables: expected page ids of at least 0, got -3"),
        (GOOD | {"block_tables": [[1, 2, 1], [1, 2, 4, 5]]}, "expected each page once in a request, got page 1 twice"),
    ],
)  # fmt: skip
def test_command_names_what_is_wrong_in_json(tmp_path, capsys, content, text):
    path = tmp_path / "bad.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    status, out, err = run(capsys, path)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("cascade-fd plan: ") and text in err


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        (None, "bad.npz: not an .npz file"),
        ({"block_tables": np.ones((2, 3), int)}, "expected arrays block_tables and seq_lens"),
        ({"block_tables": np.ones((2, 3)), "seq_lens": [4, 4]}, "block_tables: expected dtype int32 or int64, got float64"),
        ({"block_tables": np.ones(3, int), "seq_lens": [4, 4]}, "block_tables: expected shape [B, max_pages], got [3]"),
        ({"block_tables": np.array([[1], [2, 3]], object), "seq_lens": [4, 4]}, "bad.npz: expected plain arrays: "),
    ],
)
def test_command_names_what_is_wrong_in_npz(tmp_path, capsys, arrays, text):
    path = tmp_path / "bad.npz"
    if arrays is None:
        path.write_bytes(b"no archive")
    else:
        np.savez(path, **arrays)
    status, out, err = run(capsys, path)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert text in err


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--target", "sm_70"], "target: expected one of 'cpu', "),
        (["--num-kv-heads", "7"], "num_q_heads: expected a multiple of the number of KV heads (Hkv=7), got Hq=32"),
        (["--q-len", "50"], "q_lens: expected at most as many query rows as keys, got 50 rows, 40 keys (request 0)"),
        (["--draw", "plan.gif"], "path: expected a name that ends in .png, .svg, .pdf, got 'plan.gif'"),
        (["--draw", "no/such/folder/plan.png"], "no/such/folder/plan.png"),
    ],
)
def test_command_names_the_wrong_option(tmp_path, capsys, options, text):
    path = tmp_path / "good.json"
    path.write_text(json.dumps(GOOD))
    status, out, err = run(capsys, path, *options)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert text in err


@pytest.mark.parametrize("name", ["none.npz", "none.json", "none.txt"])
def test_command_names_a_file_that_is_not_there_or_of_no_known_kind(tmp_path, capsys, name):
    status, _, err = run(capsys, tmp_path / name)
    assert status == 2 and name in err and err.count("\n") == 1
