"""The transformers integration against the same tiny models with plain attention and no cache at all."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, DynamicCache, GraniteConfig, LlamaConfig, MistralConfig, Qwen3Config
from transformers.masking_utils import create_causal_mask

from cascade_fd.checks import UnsupportedError
from cascade_fd.integrations import transformers_cache
from cascade_fd.integrations.transformers import CascadeCache

P, LENS, STEPS = 37, (1, 6, 3, 5), 7  # LENS: first tokens of each request; 1 and unequal ones on purpose
SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,  # no power of two; G = 3
    "max_position_embeddings": 128,
    "initializer_range": 0.4,  # far from ties between the best tokens
}
FAMILIES = {
    "llama": (LlamaConfig, {}),
    "llama-mha": (LlamaConfig, {"num_key_value_heads": 6}),
    "qwen3": (Qwen3Config, {}),  # normalises q and k
    "granite": (GraniteConfig, {"attention_multiplier": 0.31}),  # a scale that is not 1 / sqrt(D)
}


def make_model(family: str = "llama", implementation: str = "cascade_fd", **extra):
    kind, own = FAMILIES[family]
    torch.manual_seed(0)
    config = kind(**{**SIZES, **own, **extra})
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()


def make_tokens():
    torch.manual_seed(1)
    return torch.randint(3, 97, (1, P)), [torch.randint(3, 97, (n,)) for n in LENS]


def right_padded(rows):
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


@torch.no_grad()
def prefilled(model, prompt):
    cache = CascadeCache(model.config)
    model(prompt, past_key_values=cache)
    return cache


@torch.no_grad()
def continue_greedily(model, cache, questions, steps=STEPS):
    """Tokens ``[B, steps]`` and the logits ``[B, steps, vocab]`` they were chosen from, all requests in one batch."""
    ids = right_padded(questions)
    last = torch.tensor([len(q) - 1 for q in questions])
    tokens, logits = [], []
    for _ in range(steps):
        out = model(ids, position_ids=cache.position_ids(), past_key_values=cache).logits
        logits.append(out[torch.arange(len(ids)), last])
        tokens.append(logits[-1].argmax(-1))
        ids, last = tokens[-1][:, None], torch.zeros_like(last)
    return torch.stack(tokens, 1), torch.stack(logits, 1)


@torch.no_grad()
def expected(model, prompt, question, steps=STEPS):
    """The same for one request, from whole sequences: no cache, no batch, no padding."""
    ids, logits = torch.cat([prompt[0], question])[None], []
    for _ in range(steps):
        logits.append(model(ids, use_cache=False).logits[0, -1])
        ids = torch.cat([ids, logits[-1].argmax(-1).view(1, 1)], 1)
    return ids[0, -steps:], torch.stack(logits)


def run(model, poison=False):
    prompt, questions = make_tokens()
    cache = prefilled(model, prompt)
    cache.open(LENS, max_new_tokens=STEPS)
    if poison:
        for layer in cache.layers:
            layer.suffix_keys.fill_(torch.nan)
            layer.suffix_values.fill_(torch.nan)
    return continue_greedily(model, cache, questions)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_logits_equal_plain_attention(family):
    tokens, logits = run(make_model(family))
    plain = make_model(family, "sdpa")
    prompt, questions = make_tokens()
    for b, question in enumerate(questions):
        want_tokens, want_logits = expected(plain, prompt, question)
        assert tokens[b].tolist() == want_tokens.tolist()
        torch.testing.assert_close(logits[b], want_logits, rtol=1e-4, atol=1e-4 * want_logits.abs().max().item())


def test_the_tiny_models_generate_something_worth_comparing():
    tokens, _ = run(make_model())
    assert len({tuple(row) for row in tokens.tolist()}) == len(LENS)
    assert len(set(tokens.flatten().tolist())) > 8


def test_unused_slots_do_not_leak():
    model = make_model()
    tokens, logits = run(model)
    poisoned_tokens, poisoned_logits = run(model, poison=True)
    assert torch.equal(poisoned_tokens, tokens) and torch.equal(poisoned_logits, logits)


@torch.no_grad()
def test_padding_rows_are_finite_and_do_not_matter():
    model, (prompt, questions) = make_model(), make_tokens()
    outs = []
    for filler in (0, 55):
        cache = prefilled(model, prompt)
        cache.open(LENS, max_new_tokens=1)
        ids = torch.nn.utils.rnn.pad_sequence(questions, batch_first=True, padding_value=filler)
        outs.append(model(ids, position_ids=cache.position_ids(), past_key_values=cache).logits)
    valid = torch.arange(max(LENS)) < torch.tensor(LENS)[:, None]
    assert torch.isfinite(outs[0]).all()
    assert torch.equal(outs[0][valid], outs[1][valid]) and not torch.equal(outs[0], outs[1])


@torch.no_grad()
def test_the_prompt_is_stored_once():
    model, (prompt, questions) = make_model(), make_tokens()
    cache = prefilled(model, prompt)
    cache.open(LENS, max_new_tokens=STEPS)
    continue_greedily(model, cache, questions)
    for layer in cache.layers:
        tensors = [t for t in vars(layer).values() if isinstance(t, torch.Tensor)]
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() // 4 for t in tensors}
        assert sum(held.values()) == 2 * 2 * 12 * (P + len(LENS) * (max(LENS) + STEPS))
        prefix, suffix = layer.stores
        assert prefix.k.data_ptr() == layer.keys.data_ptr() and suffix.k.data_ptr() == layer.suffix_keys.data_ptr()


def test_plans_are_made_once_per_generation(monkeypatch):
    made, used = [], []

    def counting_plan(*args, **kwargs):
        made.append(real_plan(*args, **kwargs))
        return made[-1]

    def counting_attend(q, stores, plan, **options):
        used.append(plan)
        return real_attend(q, stores, plan, **options)

    real_plan, real_attend = transformers_cache.plan, transformers_cache.attend
    monkeypatch.setattr(transformers_cache, "plan", counting_plan)
    monkeypatch.setattr(transformers_cache, "attend", counting_attend)
    run(make_model())
    first, decode = made  # exactly two: the ragged first tokens, and every later step
    layers = SIZES["num_hidden_layers"]
    assert used == [first] * layers + [decode] * layers * (STEPS - 1)
    assert (first.num_rows, decode.num_rows) == (sum(LENS), len(LENS))


def test_new_requests_can_be_opened_on_a_kept_prompt():
    model, (prompt, questions) = make_model(), make_tokens()
    cache = prefilled(model, prompt)
    cache.open(LENS, max_new_tokens=STEPS)
    continue_greedily(model, cache, questions)
    cache.open(LENS[:0:-1], max_new_tokens=STEPS)
    again, _ = continue_greedily(model, cache, questions[:0:-1])
    assert torch.equal(again, run(model)[0].flip(0)[:-1])


def test_no_dense_mask_is_built():
    model, (prompt, _) = make_model(), make_tokens()
    cache = prefilled(model, prompt)
    cache.open(LENS, max_new_tokens=1)
    embeds = torch.zeros(len(LENS), max(LENS), SIZES["hidden_size"])
    assert create_causal_mask(model.config, embeds, None, cache, cache.position_ids()) is None
    plain = make_model(implementation="sdpa")
    padded = torch.ones(len(LENS), max(LENS)).tril()
    assert create_causal_mask(plain.config, embeds, padded, None).shape == (len(LENS), 1, max(LENS), max(LENS))


def test_an_unsupported_config_lists_every_reason():
    config = MistralConfig(**SIZES, sliding_window=16)
    config.attn_logit_softcapping = 30.0
    config.layer_types = ["full_attention", "sliding_attention", "full_attention"]
    with pytest.raises(UnsupportedError) as caught:
        CascadeCache(config)
    assert str(caught.value).splitlines() == [
        "MistralConfig with a CascadeCache is not supported:",
        "  - sliding_window: expected no sliding window, got 16",
        "  - attn_logit_softcapping: expected no soft cap on the scores, got 30.0",
        "  - layer_types: expected full_attention in every layer, got sliding_attention too",
        "  - attn_implementation: expected 'cascade_fd', got None",
    ]


def test_an_unsupported_call_lists_every_reason():
    model, (prompt, _) = make_model(attention_dropout=0.25).train(), make_tokens()
    with pytest.raises(UnsupportedError) as caught:
        model(prompt, attention_mask=torch.ones(1, P), past_key_values=DynamicCache(), output_attentions=True)
    assert str(caught.value).splitlines() == [
        'this call with attn_implementation="cascade_fd" is not supported:',
        "  - attention_mask: expected None (CascadeCache.open is told the lengths), got a mask",
        "  - dropout: expected 0, got 0.25",
        "  - gradients: expected torch.no_grad(), got a query that requires them",
        "  - output_attentions: expected none, got one",
        "  - past_key_values: expected a CascadeCache whose keys the model hands on unchanged",
    ]


@torch.no_grad()
def test_a_sliding_window_is_refused_while_the_mask_is_made():
    model = AutoModelForCausalLM.from_config(MistralConfig(**SIZES, sliding_window=16), attn_implementation="cascade_fd")
    with pytest.raises(UnsupportedError, match="mask: expected plain causal attention"):
        model(make_tokens()[0])


@torch.no_grad()
def test_misuse_is_named():
    model, (prompt, questions) = make_model(), make_tokens()
    cache = CascadeCache(model.config)
    with pytest.raises(ValueError, match="expected a forward of the shared prompt first"):
        cache.open(LENS, max_new_tokens=1)
    with pytest.raises(ValueError, match=r"the prompt's keys: expected shape \[B=1, Hkv, P, D\], got \[2, 2, 37, 12\]"):
        model(prompt.expand(2, -1), past_key_values=cache)
    cache = prefilled(model, prompt)
    with pytest.raises(ValueError, match="got a second forward"):
        model(prompt, past_key_values=cache)
    with pytest.raises(ValueError, match=r"lens: expected at least one request of at least 1 token, got \[2, 0\]"):
        cache.open([2, 0], max_new_tokens=1)
    cache.open(LENS, max_new_tokens=1)
    with pytest.raises(ValueError, match=r"position_ids: expected cache\.position_ids\(\), got none"):
        model(right_padded(questions), past_key_values=cache)
    with pytest.raises(ValueError, match=r"input_ids: expected shape \[4, 6\], got \[4, 1\]"):
        model(prompt[0, :4, None], position_ids=prompt[0, :4, None], past_key_values=cache)
    with pytest.raises(ValueError, match="max_new_tokens: expected no more tokens"):
        continue_greedily(model, cache, questions, steps=3)
    cache.reset()
    assert cache.prefix_len == 0
    model(prompt, past_key_values=cache)
    assert cache.prefix_len == P
