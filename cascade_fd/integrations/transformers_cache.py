"""The cache of the transformers integration: a shared prompt once per layer, and what each request adds to it.

The cache tags the keys that it hands back to the model, and the attention function finds it by that tag.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from cascade_fd.checks import UnsupportedError, check_shape
from cascade_fd.kv import DenseKV, host_ints
from cascade_fd.levels import Level
from cascade_fd.ops.attend import attend
from cascade_fd.planning.planner import plan
from cascade_fd.planning.worklist import Plan
from cascade_fd.tree import PrefixTree

NAME = "cascade_fd"
_TAG = "cascade_fd_source"
Slots = tuple[torch.Tensor, torch.Tensor]  # [B] requests, [B] token slots


class CascadeCache(Cache):
    """Keys and values of B requests that continue one prompt: the prompt once, and a private suffix buffer per request.

    The prompt is one forward of batch 1. ``open`` starts requests on it (again, if others were open: the prompt stays). The
    next forward takes their first tokens, right-padded; every later one takes one token per request. Neither has an
    ``attention_mask``: the cache knows the lengths.

    Attributes:
        layers: one ``CascadeLayer`` per layer of the model.
        prefix_len: P, tokens of the prompt.

    Raises:
        UnsupportedError: the config asks for attention that this integration does not compute; lists every reason.

    Example:
        model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="cascade_fd")
        cache = CascadeCache(model.config)
        model(prompt_ids, past_key_values=cache)  # [1, P]
        cache.open([5, 9], max_new_tokens=32)
        logits = model(questions, position_ids=cache.position_ids(), past_key_values=cache).logits  # [2, 9]: 5 and 9 tokens
        tokens = ...  # [2, 1]: chosen from logits[0, 4] and logits[1, 8]
        logits = model(tokens, position_ids=cache.position_ids(), past_key_values=cache).logits  # and so on
    """

    def __init__(self, config: Any):
        text = config.get_text_config(decoder=True)
        reasons = _config_reasons(text)
        if reasons:
            raise UnsupportedError(f"{type(text).__name__} with a CascadeCache", reasons)
        super().__init__(layers=[CascadeLayer() for _ in range(text.num_hidden_layers)])
        self._num_q_heads = 0  # known once the prompt's attention has run
        self._requests: _Requests | None = None

    @property
    def prefix_len(self) -> int:
        return self.layers[0].get_seq_length()

    def open(self, lens: Any, max_new_tokens: int) -> None:
        """Start ``len(lens)`` requests of ``lens[b]`` tokens each, with room for ``max_new_tokens`` more. Plans once for all.

        ``lens`` is on the host; every request has at least one token of its own.
        """
        sizes = host_ints("lens", lens)
        if len(sizes) < 1 or sizes.min() < 1:
            raise ValueError(f"lens: expected at least one request of at least 1 token, got {sizes[:8].tolist()}")
        if not self._num_q_heads:
            raise ValueError("open: expected a forward of the shared prompt first, got an empty cache")
        if len({layer.shape for layer in self.layers}) > 1:
            raise UnsupportedError("this model with a CascadeCache", ["layers: one plan needs equal heads and dims in all"])
        for layer in self.layers:
            layer.open(len(sizes), int(sizes.max()) + max_new_tokens)
        self._requests = _Requests.start(self.layers[0], sizes, max_new_tokens, self._num_q_heads)

    def position_ids(self) -> torch.Tensor:
        """``[B, L]`` positions of the next forward's tokens: each request counts on from the prompt by itself."""
        requests = self._open_requests("position_ids")
        offset = torch.arange(requests.next_width, device=requests.lens.device)
        first = requests.lens.long() if requests.started else torch.zeros_like(requests.lens).long()
        return self.prefix_len + first[:, None] + offset

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values ``[B, Hkv, L, D]``; hand the same tensors back, tagged for the attention function."""
        if self._requests is None:
            self.layers[layer_idx].store_prefix(key_states, value_states)
        else:
            if layer_idx == 0:
                self._requests.begin(key_states.shape[0], key_states.shape[2])
            self.layers[layer_idx].store_suffix(key_states, value_states, self._requests.slots)
        setattr(key_states, _TAG, (self, layer_idx))
        return key_states, value_states

    def attend(self, layer_idx: int, query: torch.Tensor, sm_scale: float | None) -> torch.Tensor:
        """Attention of the open requests' query rows ``[B, Hq, L, D]`` in one layer: ``[B, L, Hq, Dv]``, padding rows 0."""
        requests = self._open_requests("attend")
        B, Hq, L, _ = query.shape
        q = query.transpose(1, 2).flatten(0, 1)
        if requests.rows is not None:
            q = q.index_select(0, requests.rows)
        o = attend(q, self.layers[layer_idx].stores, requests.plan, sm_scale=sm_scale).o
        if requests.rows is not None:
            o = o.new_zeros(B * L, Hq, o.shape[-1]).index_copy_(0, requests.rows, o)
        return o.unflatten(0, (B, L))

    def saw_prefix(self, num_q_heads: int) -> bool:
        """Whether this forward is the prompt's; remembers Hq, which only the attention function sees."""
        if self._requests is None:
            self._num_q_heads = num_q_heads
        return self._requests is None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """P before ``open``. Refused after it: models ask when they were given no position_ids, and would guess them wrong."""
        if self._requests is not None:
            raise ValueError("position_ids: expected cache.position_ids(), got none: open requests have no common length")
        return int(self.layers[layer_idx].get_seq_length())

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """The mask builder asks; no mask is built from the answer."""
        return int(self.layers[layer_idx].get_seq_length())

    def reset(self) -> None:
        """Forget the prompt and all requests."""
        self.__dict__.update(layers=[CascadeLayer() for _ in self.layers], _num_q_heads=0, _requests=None)

    def _open_requests(self, what: str) -> _Requests:
        if self._requests is None:
            raise ValueError(f"{what}: expected open requests, got none; call open(lens, max_new_tokens) after the prompt")
        return self._requests


def source_of(key: torch.Tensor) -> tuple[CascadeCache, int] | None:
    """The cache and the layer that handed ``key`` out; None if none did, or a model has changed the keys since."""
    return getattr(key, _TAG, None)


class CascadeLayer(CacheLayerMixin):
    """One layer: ``keys, values [Hkv, P, D]`` of the prompt, ``suffix_keys, suffix_values [B, Hkv, capacity, D]``.

    Slots past a request's length hold whatever was there; nothing reads them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.suffix_keys: torch.Tensor | None = None
        self.suffix_values: torch.Tensor | None = None
        self.stores: tuple[DenseKV, ...] = ()

    @property
    def shape(self) -> tuple[int, int, int]:
        """(Hkv, D, Dv)."""
        return self.keys.shape[0], self.keys.shape[2], self.values.shape[2]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take ``[1, Hkv, P, D]`` as the prompt. Copies: a view would keep a fused projection's whole output alive."""
        self.keys, self.values = (x[0].clone(memory_format=torch.contiguous_format) for x in (key_states, value_states))
        self.is_initialized = True

    def store_prefix(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """The prompt, once."""
        if self.is_initialized:
            raise ValueError("past_key_values: expected open(lens, max_new_tokens) after the prompt, got a second forward")
        check_shape("the prompt's keys", key_states, "B Hkv P D", B=1)
        self.lazy_initialization(key_states, value_states)

    def open(self, num_requests: int, capacity: int) -> None:
        """New suffix buffers."""
        Hkv, D, Dv = self.shape
        self.suffix_keys = self.keys.new_empty(num_requests, Hkv, capacity, D)
        self.suffix_values = self.values.new_empty(num_requests, Hkv, capacity, Dv)
        pairs = ((self.keys, self.values), (self.suffix_keys, self.suffix_values))
        self.stores = tuple(DenseKV(k, v, kv_layout="HND") for k, v in pairs)

    def store_suffix(self, key_states: torch.Tensor, value_states: torch.Tensor, slots: Slots | None) -> None:
        """Write the first L slots of every request or, of one token each, the slots given."""
        for buffer, new in ((self.suffix_keys, key_states), (self.suffix_values, value_states)):
            assert buffer is not None
            if slots is None:
                buffer[:, :, : new.shape[2]] = new
            else:
                buffer[slots[0], :, slots[1]] = new[:, :, 0]

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError("CascadeLayer.update", ["a layer does not know the batch: use CascadeCache.update"])

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        raise UnsupportedError("CascadeCache.reorder_cache", ["beam search: suffixes would have to be copied every step"])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self.keys.shape[1] if self.is_initialized else 0

    def get_max_length(self) -> int:
        return -1


@dataclass
class _Requests:
    """Requests in flight: how long they are, where the next keys go, and the two plans that every layer shares.

    Attributes:
        lens: ``[B]`` int32 on the device: private tokens of each request; at first the lengths of its first tokens.
        width: L, the longest of the first tokens.
        steps_left: forwards of one token that still fit.
        first_plan, decode_plan: for the first tokens (all valid rows, causal), and for one row per request.
        first_rows: valid rows of the right-padded ``[B * L]``.
        started: whether the first tokens have been seen.
        slots: where this forward's keys go; None for the first tokens, which start at 0.
    """

    lens: torch.Tensor
    width: int
    steps_left: int
    first_plan: Plan
    decode_plan: Plan
    first_rows: torch.Tensor
    started: bool = False
    slots: Slots | None = None

    @classmethod
    def start(cls, layer: CascadeLayer, sizes: np.ndarray, max_new_tokens: int, num_q_heads: int) -> _Requests:
        Hkv, D, Dv = layer.shape
        device = layer.keys.device
        B, L = len(sizes), int(sizes.max())
        levels = [Level([0, B], [layer.get_seq_length()]), Level(range(B + 1), sizes)]
        model: Any = {"num_q_heads": num_q_heads, "num_kv_heads": Hkv, "head_dim": (D, Dv), "dtype": layer.keys.dtype}
        valid = np.flatnonzero((np.arange(L) < sizes[:, None]).ravel())
        return cls(
            lens=torch.from_numpy(sizes).to(device, torch.int32),
            width=L,
            steps_left=max_new_tokens,
            first_plan=plan(PrefixTree.from_levels(levels, q_lens=sizes), device=device, **model),
            decode_plan=plan(PrefixTree.from_levels(levels), device=device, max_new_tokens=max_new_tokens, **model),
            first_rows=torch.from_numpy(valid).to(device),
        )

    @property
    def next_width(self) -> int:
        return 1 if self.started else self.width

    @property
    def plan(self) -> Plan:
        """Of the forward that has begun; so is ``rows``."""
        return self.first_plan if self.slots is None else self.decode_plan

    @property
    def rows(self) -> torch.Tensor | None:
        return self.first_rows if self.slots is None else None

    def begin(self, num_requests: int, width: int) -> None:
        """A forward begins: say where its keys go, and count them in so that its own rows see them."""
        if (num_requests, width) != (len(self.lens), self.next_width):
            raise ValueError(f"input_ids: expected shape [{len(self.lens)}, {self.next_width}], got [{num_requests}, {width}]")
        if self.started:
            if not self.steps_left:
                raise ValueError("max_new_tokens: expected no more tokens than open() made room for, got one more")
            self.steps_left -= 1
            self.slots = (torch.arange(len(self.lens), device=self.lens.device), self.lens.long())
            self.lens += 1
            self.decode_plan.set_lengths(self.lens)
        self.started = True


def _config_reasons(config: Any) -> list[str]:
    """Why a model of this config cannot run with a CascadeCache."""
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    got = {name: getattr(config, name, None) for name in _REFUSED}
    reasons = [f"{name}: {_REFUSED[name]}, got {value!r}" for name, value in got.items() if value]
    if kinds:
        reasons.append(f"layer_types: expected full_attention in every layer, got {', '.join(sorted(kinds))} too")
    if not getattr(config, "is_causal", True):
        reasons.append("is_causal: expected a causal decoder, got False")
    if config._attn_implementation != NAME:
        reasons.append(f"attn_implementation: expected {NAME!r}, got {config._attn_implementation!r}")
    return reasons


_REFUSED = {
    "sliding_window": "expected no sliding window",
    "attention_chunk_size": "expected no chunked attention",
    "attn_logit_softcapping": "expected no soft cap on the scores",
    "is_encoder_decoder": "expected a decoder",
    "num_kv_shared_layers": "expected every layer to have its own keys and values",
    "output_attentions": "expected no attention weights to be asked for (they are never formed)",
}
