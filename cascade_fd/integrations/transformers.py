"""transformers: ``attn_implementation="cascade_fd"``, for models that keep keys and values in a ``CascadeCache``.

Importing this module registers the implementation. Nothing but ``past_key_values=cache`` has to be passed, and there is no
global state: the cache reaches the attention function with the keys (see ``source_of``).
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

from cascade_fd.checks import UnsupportedError
from cascade_fd.integrations.transformers_cache import NAME, CascadeCache, CascadeLayer, source_of

__all__ = ["NAME", "CascadeCache", "CascadeLayer", "cascade_attention", "cascade_mask"]


def cascade_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in every layer: ``query [B, Hq, L, D]`` and the new keys and values, to ``[B, L, Hq, Dv]``."""
    source = source_of(key)
    reasons = _call_reasons(query, attention_mask, dropout, kwargs)
    if source is None:
        reasons.append("past_key_values: expected a CascadeCache whose keys the model hands on unchanged")
    if source is None or reasons:
        raise UnsupportedError('this call with attn_implementation="cascade_fd"', reasons)
    cache, layer_idx = source
    if cache.saw_prefix(query.shape[1]):
        return AttentionInterface()["sdpa"](module, query, key, value, None, scaling=scaling, is_causal=True)
    return cache.attend(layer_idx, query, scaling), None


def cascade_mask(
    *, attention_mask: torch.Tensor | None = None, mask_function: Any = causal_mask_function, **kwargs: Any
) -> torch.Tensor | None:
    """No dense mask is ever built. A caller's mask is handed on, for the attention function to refuse."""
    if mask_function is not causal_mask_function:
        raise UnsupportedError('attn_implementation="cascade_fd"', ["mask: expected plain causal attention, got another mask"])
    return attention_mask


def _call_reasons(query: torch.Tensor, attention_mask: Any, dropout: float, kwargs: dict[str, Any]) -> list[str]:
    """Why this call of the attention function cannot be served."""
    reasons = []
    if attention_mask is not None:
        reasons.append("attention_mask: expected None (CascadeCache.open is told the lengths), got a mask")
    if dropout:
        reasons.append(f"dropout: expected 0, got {dropout}")
    if torch.is_grad_enabled() and query.requires_grad:
        reasons.append("gradients: expected torch.no_grad(), got a query that requires them")
    for name in ("sliding_window", "softcap", "s_aux", "position_bias", "output_attentions"):
        if kwargs.get(name) is not None and kwargs[name] is not False:
            reasons.append(f"{name}: expected none, got one")
    if kwargs.get("is_causal") is False:
        reasons.append("is_causal: expected a causal decoder, got False")
    return reasons


AttentionInterface.register(NAME, cascade_attention)
AttentionMaskInterface.register(NAME, cascade_mask)
