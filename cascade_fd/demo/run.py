"""Greedy decoding of one batch with an engine, timed step by step, and the demo's sequence of runs."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from cascade_fd.demo.engines import Cascade, Engine, Flat, held_bytes
from cascade_fd.demo.model import find_model, load
from cascade_fd.demo.prompt import Task, make_task

Tick = Callable[[], object]


@dataclass
class Result:
    """What one engine did.

    Attributes:
        tokens: per request, the tokens up to its stop token (included).
        gaps: per request and token, how far apart the best two logits were.
        seconds: of each decode step (the prompt and the questions are not in it).
        held: bytes of keys and values in memory at the end.
    """

    tokens: list[list[int]]
    gaps: list[list[float]]
    seconds: list[float] = field(default_factory=list)
    held: int = 0

    @property
    def ms_per_step(self) -> float:
        return 1000 * statistics.median(self.seconds) if self.seconds else float("nan")


@torch.inference_mode()
def generate(engine: Engine, max_tokens: int, stop: set[int], tick: Tick = lambda: None) -> Result:
    """Decode all requests together until each has stopped or has ``max_tokens``; finished ones ride along and are ignored."""
    logits = engine.first()
    B = len(logits)
    result = Result([[] for _ in range(B)], [[] for _ in range(B)])
    for n in range(max_tokens):
        best = logits.float().topk(2)
        live = [b for b in range(B) if not (result.tokens[b] and result.tokens[b][-1] in stop)]
        tokens, gap = best.indices[:, 0], (best.values[:, 0] - best.values[:, 1]).tolist()
        chosen = tokens.tolist()
        for b in live:
            result.tokens[b].append(chosen[b])
            result.gaps[b].append(gap[b])
        tick()
        if n + 1 == max_tokens or all(result.tokens[b][-1] in stop for b in live):
            break
        logits, seconds = _timed(engine, tokens)
        result.seconds.append(seconds)
    result.held = held_bytes(engine.cache)
    return result


def _timed(engine: Engine, tokens: torch.Tensor) -> tuple[torch.Tensor, float]:
    """One step and its wall time, with nothing left running on a GPU before or after."""
    sync = torch.cuda.synchronize if tokens.is_cuda else lambda: None
    sync()
    start = time.perf_counter()
    logits = engine.step(tokens)
    sync()
    return logits, time.perf_counter() - start


@torch.inference_mode()
def try_caches(model: Any, task: Task, prompt: Any, steps: int = 2) -> tuple[str, float]:
    """Which of transformers' own caches decodes this batch faster, and the milliseconds of a step without padding.

    A batch that needs no padding needs no mask, and then transformers' attention makes no copies of keys and values.
    """

    def fastest(kind: str, lens: list[int]) -> float:
        brief = replace(task, private=[ids[:n] for ids, n in zip(task.private, lens, strict=True)])
        return min(generate(Flat(model, brief, steps + 1, kind, prompt), steps + 1, set()).seconds)

    B = len(task.private)
    ragged, even = [1 + b % 2 for b in range(B)], [1] * B  # the questions' length hardly counts beside the prompt's
    kind = min(("StaticCache", "DynamicCache"), key=lambda kind: fastest(kind, ragged))
    return kind, 1000 * fastest("DynamicCache", even)


def run_demo(args: argparse.Namespace) -> int:
    """``cascade-fd demo``: exit status 0 if every token equals plain attention's, 1 if not, 2 without a model."""
    from cascade_fd.demo import report

    torch.set_float32_matmul_precision("highest")  # no TF32: float32 tokens must match
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        path = find_model(args.model)
    except FileNotFoundError as error:
        report.fail(str(error))
        return 2
    with report.Progress() as progress:
        progress.stage(f"load {path.name}")
        model, tokenizer = load(path, getattr(torch, args.dtype), device)
        task = make_task(tokenizer, args.questions, device)
        stop = _stop_ids(model)
        with torch.inference_mode():
            progress.stage("cascade: prefill the prompt once")
            engine: Engine = Cascade(model, task, args.tokens)
            progress.stage("cascade: decode", args.tokens)
            cascade = generate(engine, args.tokens, stop, progress.tick)
            progress.stage("flat: prefill the prompt once")
            prompt = Flat.prefill(model, task)
            progress.stage("flat: which of transformers' caches is faster?")
            kind, unpadded_ms = try_caches(model, task, prompt)
            engine = Flat(model, task, args.tokens, kind, prompt)
            progress.stage(f"flat: decode with {kind}", args.tokens)
            flat = generate(engine, args.tokens, stop, progress.tick)
    report.show(report.Outcome(model, tokenizer, task, cascade, flat, kind, unpadded_ms))
    return 0 if cascade.tokens == flat.tokens or args.dtype != "float32" else 1


def _stop_ids(model: Any) -> set[int]:
    ids = model.generation_config.eos_token_id
    return set(ids) if isinstance(ids, list) else {ids}
