"""The demo's text: a handbook that all requests share, and one question for each of them, as token ids."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import torch

SYSTEM = "You answer questions about the following handbook. Answer in one short sentence, with facts from the handbook.\n\n"


@dataclass(frozen=True)
class Task:
    """What the model is given.

    Attributes:
        prompt: ``[1, P]`` ids of the shared part: system message and handbook.
        questions: the private parts as text.
        private: their ids in the chat format: the question's turn and the header of the answer. ``[n]`` each.
    """

    prompt: torch.Tensor
    questions: list[str]
    private: list[torch.Tensor]

    @property
    def lens(self) -> list[int]:
        return [len(ids) for ids in self.private]

    @property
    def padded(self) -> torch.Tensor:
        """``[B, L]``, right-padded."""
        return torch.nn.utils.rnn.pad_sequence(self.private, batch_first=True)


def read(name: str) -> str:
    """A text file shipped with the demo."""
    return files("cascade_fd.demo").joinpath(name).read_text(encoding="utf-8")


def make_task(tokenizer: Any, num_questions: int, device: torch.device) -> Task:
    """Tokenize the shared part and the private parts on their own; chat markers are single tokens, so nothing merges across."""
    questions = read("questions.txt").splitlines()[:num_questions]
    system = [{"role": "system", "content": SYSTEM + read("handbook.txt")}]
    shared = tokenizer.apply_chat_template(system, tokenize=False)
    private = []
    for question in questions:
        chat = [*system, {"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert text.startswith(shared), "the chat template does not keep the system message first"
        private.append(_ids(tokenizer, text.removeprefix(shared), device))
    return Task(_ids(tokenizer, shared, device)[None], questions, private)


def _ids(tokenizer: Any, text: str, device: torch.device) -> torch.Tensor:
    return torch.tensor(tokenizer(text, add_special_tokens=False).input_ids, device=device)
