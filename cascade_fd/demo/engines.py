"""Two ways to run one model over the same task: flat (transformers' own attention and cache) and cascade.

Both prefill the prompt once with batch 1 and answer all questions in one right-padded batch; they differ in how the prompt's
keys and values are held and read, and in nothing else.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from cascade_fd.demo.prompt import Task


class Engine(Protocol):
    """Logits ``[B, vocab]`` of the next token of every request."""

    cache: Any

    def first(self) -> torch.Tensor: ...

    def step(self, tokens: torch.Tensor) -> torch.Tensor: ...


class Cascade:
    """The prompt's keys and values once per layer, for all requests."""

    def __init__(self, model: Any, task: Task, max_tokens: int):
        from cascade_fd.integrations.transformers import NAME, CascadeCache

        model.set_attn_implementation(NAME)
        self.model, self.task = model, task
        self.cache = CascadeCache(model.config)
        model(task.prompt, past_key_values=self.cache, logits_to_keep=1)
        self.cache.open(task.lens, max_new_tokens=max_tokens)

    def first(self) -> torch.Tensor:
        return _last_valid(self._forward(self.task.padded), self.task)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._forward(tokens[:, None])[:, -1]

    def _forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids, position_ids=self.cache.position_ids(), past_key_values=self.cache).logits


class Flat:
    """transformers' ``sdpa`` attention; the prompt's keys and values are held once per request, as its caches need them.

    ``kind`` is the cache: "DynamicCache" (grows by concatenation) or "StaticCache" (written in place). ``prompt`` is what
    ``prefill`` returned; it is copied, once per request.
    """

    def __init__(self, model: Any, task: Task, max_tokens: int, kind: str, prompt: Any):
        from transformers import DynamicCache, StaticCache

        B, P, L = len(task.private), task.prompt.shape[1], max(task.lens)
        self.model, self.task = model, task
        static = kind == "StaticCache"
        self.cache = (
            StaticCache(model.config, max_cache_len=P + L + max_tokens) if static else DynamicCache(config=model.config)
        )
        for i, layer in enumerate(prompt.layers):
            self.cache.update(*(x.expand(B, -1, -1, -1) for x in (layer.keys, layer.values)), i)
        device = task.prompt.device
        lens = torch.tensor(task.lens, device=device)
        self.position = P + lens[:, None]  # of the next token: padding is skipped
        self.mask = torch.ones(B, P + L + max_tokens, dtype=torch.long, device=device)
        self.mask[:, P : P + L] = torch.arange(L, device=device) < lens[:, None]
        self.seen = P + L

    @staticmethod
    def prefill(model: Any, task: Task) -> Any:
        """The prompt's keys and values with batch 1, by transformers alone."""
        from transformers import DynamicCache

        model.set_attn_implementation("sdpa")
        cache = DynamicCache(config=model.config)
        model(task.prompt, past_key_values=cache, logits_to_keep=1)
        return cache

    def first(self) -> torch.Tensor:
        P = self.task.prompt.shape[1]
        position = torch.arange(P, self.seen, device=self.mask.device).expand(len(self.task.private), -1)
        return _last_valid(self._forward(self.task.padded, position), self.task)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        logits = self._forward(tokens[:, None], self.position)[:, -1]
        self.position = self.position + 1
        return logits

    def _forward(self, ids: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        mask = self.mask[:, : self.seen]
        return self.model(ids, attention_mask=mask, position_ids=position, past_key_values=self.cache).logits


def held_bytes(cache: Any) -> int:
    """Memory of a cache's keys and values, each storage counted once."""
    tensors = (t for layer in cache.layers for t in vars(layer).values() if isinstance(t, torch.Tensor))
    storages = (t.untyped_storage() for t in tensors if t.is_floating_point())  # a counter is no key and no value
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _last_valid(logits: torch.Tensor, task: Task) -> torch.Tensor:
    """``[B, vocab]`` at the last token of every question from right-padded ``[B, L, vocab]``."""
    last = torch.tensor(task.lens, device=logits.device) - 1
    return logits[torch.arange(len(logits), device=logits.device), last]
