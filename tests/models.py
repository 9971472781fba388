"""Tiny Hugging Face models, one line each: every family in two layers and a hundred words."""

from typing import Any

import torch

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

_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 4,
    "first_k_dense_replace": 1,
}
_ROUTED = {**_HEADS, **_EXPERTS, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
_LINEAR_HEADS = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_MIXED_LAYERS = {"layer_types": ["linear_attention", "full_attention"]}

# Families that differ in something the patcher meets: a training step of each.
MORE: dict[str, dict[str, Any]] = {
    "cohere": {},  # scaled logits, interleaved rotary pairs
    "deepseek_v3": {**_HEADS, **_LATENT, "moe_intermediate_size": 16, "num_experts_per_tok": 2},
    "exaone4": {"sliding_window": 16, "sliding_window_pattern": 2},
    "falcon_h1": {
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mlp_multipliers": [0.7, 1.3],
    },
    "gemma4_text": {
        **_HEADS,
        "global_head_dim": 8,
        "num_global_key_value_heads": 2,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "glm4": _HEADS,
    "gpt_oss": _HEADS | _EXPERTS,
    "llama4_text": {
        **_HEADS,
        "num_local_experts": 2,
        "intermediate_size_mlp": 48,
        "interleave_moe_layer_step": 2,
    },
    "nanochat": {},  # rotates the other way: refused, and right all the same
    "nemotron": _HEADS,
    "qwen3_moe": {**_ROUTED, "decoder_sparse_step": 1},
    "qwen3_next": {**_ROUTED, **_LINEAR_HEADS, **_MIXED_LAYERS},
    "smollm3": {},
}


def config_of(model_type: str, **changes: Any) -> Any:
    """The tiny config of a family."""
    from transformers import AutoConfig

    return AutoConfig.for_model(
        model_type, **{**_SMALL, **{**FAMILIES, **MORE}[model_type], **changes}
    )


def tiny(model_type: str, seed: int = 0, **changes: Any) -> Any:
    """A tiny fp32 model in training mode, with eager attention and weights large enough to tell layers apart."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        config_of(model_type, **changes), attn_implementation="eager"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    return model.train()


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
