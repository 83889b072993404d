"""The demo's text: a handbook that all requests share, and one question for each of them, as token ids."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import torch


@dataclass(frozen=True)
class Task:
    """What the model is given.

    Attributes:
        prompt: ``[1, P]`` ids of the shared part: the model's system message, and the user's turn as far as the handbook goes.
        questions: what each request asks.
        private: the rest of each request: its question, and the header of the answer. ``[n]`` ids each.
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
    """The shared part and the private parts, tokenized apart, so that the shared ids are the same for all."""
    questions = read("questions.txt").splitlines()[:num_questions]
    handbook = read("handbook.txt")
    chats = [_chat(tokenizer, f"{handbook}\nUsing the text above, answer this question: {q}") for q in questions]
    shared = chats[0][: chats[0].index(handbook) + len(handbook) + 1]
    assert all(chat.startswith(shared) for chat in chats)
    private = [_ids(tokenizer, chat.removeprefix(shared), device) for chat in chats]
    return Task(_ids(tokenizer, shared, device)[None], questions, private)


def _chat(tokenizer: Any, message: str) -> str:
    """One user turn in the model's chat format, with the system message of its template and the header of an answer."""
    turns = [{"role": "user", "content": message}]
    return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))


def _ids(tokenizer: Any, text: str, device: torch.device) -> torch.Tensor:
    return torch.tensor(tokenizer(text, add_special_tokens=False).input_ids, device=device)
