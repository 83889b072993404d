"""The demo's parts with a tiny model: both engines agree, and a disagreement would be reported."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("rich")

from transformers import LlamaConfig, LlamaForCausalLM

from cascade_fd import cli
from cascade_fd.demo import report
from cascade_fd.demo.engines import Cascade, Flat, held_bytes
from cascade_fd.demo.model import find_model
from cascade_fd.demo.prompt import Task, make_task, read
from cascade_fd.demo.run import generate, try_caches

KINDS = ("DynamicCache", "StaticCache")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.4,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def task():
    torch.manual_seed(1)
    private = [torch.randint(3, 97, (n,)) for n in (4, 1, 7)]
    return Task(torch.randint(3, 97, (1, 30)), ["a", "b", "c"], private)


@torch.inference_mode()
def decode(engine, model, task, stop, tokens=9):
    made = Cascade(model, task, tokens) if engine == "Cascade" else None
    made = made or Flat(model, task, tokens, engine, Flat.prefill(model, task))
    return generate(made, tokens, stop)


@pytest.mark.parametrize("kind", KINDS)
def test_both_engines_give_the_same_tokens(model, task, kind):
    plain = decode(kind, model, task, stop=set())
    assert decode("Cascade", model, task, stop=set()).tokens == plain.tokens
    assert [len(row) for row in plain.tokens] == [9, 9, 9] and len(plain.seconds) == 8


def test_a_request_keeps_its_tokens_up_to_the_first_stop_token(model, task):
    free = decode("Cascade", model, task, stop=set()).tokens
    stop = free[1][3]
    cut = decode("Cascade", model, task, stop={stop}).tokens
    assert cut == [row[: row.index(stop) + 1] if stop in row else row for row in free]
    assert cut[1][-1] == stop and len(cut[1]) <= 4


def test_decoding_ends_when_all_have_stopped(model, task):
    result = decode("Cascade", model, task, stop=set(range(97)))
    assert [len(row) for row in result.tokens] == [1, 1, 1] and not result.seconds


@torch.inference_mode()
def test_memory_is_counted_from_real_tensors(model, task):
    prompt = Flat.prefill(model, task)
    per_token = 2 * 2 * 2 * 8 * 4  # K and V, layers, Hkv, D, bytes
    assert held_bytes(prompt) == 30 * per_token
    assert held_bytes(Flat(model, task, 9, "StaticCache", prompt).cache) == 3 * (30 + 7 + 9) * per_token
    assert held_bytes(Cascade(model, task, 9).cache) == (30 + 3 * (7 + 9)) * per_token


@torch.inference_mode()
def test_the_caches_are_tried(model, task):
    kind, unpadded_ms = try_caches(model, task, Flat.prefill(model, task))
    assert kind in KINDS and unpadded_ms > 0


def test_the_verdict_names_where_tokens_differ(model, task):
    flat = decode("StaticCache", model, task, stop=set())
    same = report.Outcome(model, None, task, flat, flat, "StaticCache", 1.0)
    assert "All 27 tokens equal" in report.verdict(same)[0]
    changed = [list(row) for row in flat.tokens]
    changed[2][5] += 1
    lines = report.verdict(dataclasses.replace(same, cascade=dataclasses.replace(flat, tokens=changed)))
    assert "26 of 27 tokens (96.3%), 2 of 3 answers equal" in lines[0]
    assert lines[1:] == [
        f"  request 2 differs from token 5 on; there, plain attention's two best logits are {flat.gaps[2][5]:.2g} apart"
    ]


def test_bytes_read_follow_from_the_shapes(model, task):
    flat = decode("StaticCache", model, task, stop=set())
    outcome = report.Outcome(model, None, task, flat, flat, "StaticCache", 1.0)
    assert outcome.token_bytes() == 2 * 2 * 2 * 8 * 4
    assert outcome.tokens_read() == (3 * 30 + 12 + 3 * 8, 30 + 12 + 3 * 8)


class WordTokenizer:
    """One id per word; enough of a chat format to see where the parts are cut."""

    def apply_chat_template(self, turns, tokenize, add_generation_prompt):
        assert not tokenize and add_generation_prompt
        return f"<sys> <user> {turns[0]['content']} <assistant>"

    def __call__(self, text, add_special_tokens):
        return SimpleNamespace(input_ids=[hash(word) % 1000 for word in text.split()])


def test_shared_and_private_parts_join_to_the_whole_chat():
    tokenizer = WordTokenizer()
    task = make_task(tokenizer, 16, torch.device("cpu"))
    assert len(task.questions) == len(set(task.questions)) == 16 and len(set(task.lens)) > 4
    for question, ids in zip(task.questions, task.private, strict=True):
        message = f"{read('handbook.txt')}\nUsing the text above, answer this question: {question}"
        whole = tokenizer(f"<sys> <user> {message} <assistant>", add_special_tokens=False).input_ids
        assert torch.cat([task.prompt[0], ids]).tolist() == whole


def test_a_missing_model_says_how_to_get_one(tmp_path, capsys):
    with pytest.raises(FileNotFoundError, match="run `make demo`"):
        find_model(str(tmp_path / "none.gguf"))
    assert cli.main(["demo", "--model", str(tmp_path / "none.gguf")]) == 2
    assert "none.gguf" in capsys.readouterr().err.replace("\n", "")


@pytest.mark.parametrize(("dtype", "changed", "status"), [("float32", 0, 0), ("float32", 1, 1), ("bfloat16", 1, 0)])
def test_exit_status(model, task, monkeypatch, tmp_path, dtype, changed, status):
    from cascade_fd.demo import run

    real = run.generate

    def wrong(engine, *args):
        result = real(engine, *args)
        result.tokens[0][0] += changed * isinstance(engine, Cascade)
        return result

    monkeypatch.setattr(run, "generate", wrong)
    monkeypatch.setattr(run, "find_model", lambda path: tmp_path)
    monkeypatch.setattr(run, "load", lambda *args: (model, SimpleNamespace(decode=lambda *a, **k: "text")))
    monkeypatch.setattr(run, "make_task", lambda *args: task)
    assert cli.main(["demo", "--tokens", "3", "--dtype", dtype, "--device", "cpu"]) == status
