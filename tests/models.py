"""Tiny Hugging Face models, one line each: every family in two layers and a hundred words."""

from typing import Any

import torch

from liger_kernel.coverage.build import awake
from liger_kernel.coverage.shrink import shrunk

VOCAB = 99
_SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEADS = {"head_dim": 8}
_EXPERTS = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
}

# model type -> what differs from _SMALL
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 16},
    "mixtral": {**_EXPERTS, "sliding_window": None},
    "qwen2": {"use_sliding_window": False},
    "qwen3": _HEADS,
    "gemma": _HEADS,
    "gemma2": {
        **_HEADS,
        "query_pre_attn_scalar": 8,
        "sliding_window": 16,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {**_HEADS, "query_pre_attn_scalar": 8, "sliding_window": 16},
    "phi3": {},
    "olmo2": {},
    "granite": {"logits_scaling": 4.0, "residual_multiplier": 0.7},
}

# Families that differ in something the patcher meets: a training step of each, shrunk as `liger-kernel models` does it.
MORE: dict[str, dict[str, Any]] = {
    "cohere": {},  # scaled logits, interleaved rotary pairs
    "deepseek_v2": {},  # complex rotary numbers
    "deepseek_v3": {},
    "exaone4": {},
    "ernie4_5": {},
    "falcon_h1": {"mlp_multipliers": [0.7, 1.3]},
    "gemma4_text": {},
    "glm4": {},
    "gpt2": dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),  # LayerNorm, Conv1D
    "gpt_oss": {"output_router_logits": True},
    "granitemoe": {"output_router_logits": True},
    "llama4_text": {},
    "nanochat": {},  # rotates the other way: refused, and right all the same
    "nemotron": {},
    "olmoe": {"output_router_logits": True},
    "phi": {},  # LayerNorm, part of each head rotated
    "qwen3_moe": {"output_router_logits": True},
    "qwen3_next": {"output_router_logits": True},
    "smollm3": {},
}


def config_of(model_type: str, **changes: Any) -> Any:
    """The tiny config of a family."""
    from transformers import CONFIG_MAPPING, AutoConfig

    if model_type in FAMILIES:
        return AutoConfig.for_model(model_type, **{**_SMALL, **FAMILIES[model_type], **changes})
    config = shrunk(CONFIG_MAPPING[model_type]())
    config.update({**MORE[model_type], **changes})
    return config


def tiny(model_type: str, seed: int = 0, **changes: Any) -> Any:
    """A tiny fp32 model in training mode, with eager attention and weights large enough to tell layers apart."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        config_of(model_type, **changes), attn_implementation="eager"
    )
    return awake(model)


def batch(seed: int = 1, rows: int = 2, tokens: int = 12) -> dict[str, torch.Tensor]:
    """input_ids and labels `[rows, tokens]`, the first quarter of the labels ignored."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (rows, tokens), generator=generator)
    labels = ids.clone()
    labels[:, : tokens // 4] = -100
    return {"input_ids": ids, "labels": labels}


def step(model: Any, **inputs: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """(outputs, gradients by name) of one training step from zero gradients."""
    model.zero_grad()
    outputs = model(**inputs)
    outputs.loss.backward()
    return outputs, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same_step(plain: Any, patched: Any, tolerance: float = 1e-5, **inputs: Any) -> Any:
    """Equal loss and equal gradients of every parameter, relative to their norms; returns the patched outputs."""
    expected, wanted = step(plain, **inputs)
    outputs, found = step(patched, **inputs)
    torch.testing.assert_close(outputs.loss, expected.loss, rtol=tolerance, atol=0.0)
    assert found.keys() == wanted.keys()
    largest = max(float(g.norm()) for g in wanted.values())
    for name, gradient in wanted.items():
        error = float((found[name] - gradient).norm())
        assert error <= tolerance * (float(gradient.norm()) + 1e-3 * largest), name
    return outputs
