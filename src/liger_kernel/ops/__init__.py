"""Operators: one file each. The contract's names are found here too and loaded when first used."""

import importlib
from typing import Any

# module -> the names it offers here
_NAMES = {
    "attn_res": "LigerAttnResFunction attn_res_backward attn_res_forward",
    "cross_entropy": "LigerCrossEntropyFunction cross_entropy_backward cross_entropy_forward",
    "dyt": "LigerDyTFunction",
    "embedding": "LigerEmbeddingFunction",
    "fused_linear_cross_entropy": (
        "LigerFusedLinearCrossEntropyFunction fused_linear_cross_entropy_backward "
        "fused_linear_cross_entropy_forward"
    ),
    "fused_ce_tvd": "LigerFusedCETVDFunction fused_ce_tvd_backward fused_ce_tvd_forward",
    "fused_linear_jsd": (
        "LigerFusedLinearJSDFunction fused_linear_jsd_backward fused_linear_jsd_forward"
    ),
    "fused_linear_kl_div": (
        "LigerFusedLinearKLDivFunction fused_linear_kl_div_backward fused_linear_kl_div_forward"
    ),
    "fused_linear_scaled_cross_entropy": (
        "LigerFusedLinearScaledCrossEntropyFunction LigerFusedLinearScaledCrossEntropyTPFunction"
    ),
    "fused_moe": "LigerFusedMoEFunction",
    "fused_neighborhood_attention": "LigerFusedNeighborhoodAttentionFunction",
    "geglu": "LigerGELUMulFunction geglu_backward geglu_forward",
    "group_norm": "LigerGroupNormFunction group_norm_backward group_norm_forward",
    "jsd": "LigerJSDFunction jsd_backward jsd_forward",
    "kl_div": "LigerKLDivLossFunction",
    "grpo_loss": "GrpoLossFunction",
    "llama4_rope": "LigerLlama4RopeFunction",
    "mhc": "LigerMHCCoeffsFunction LigerMHCPostResFunction LigerMHCPreFunction",
    "mlp": "LigerMLPFunction",
    "multi_token_attention": "LigerMultiTokenAttentionFunction",
    "poly_norm": "LigerPolyNormFunction poly_norm_backward poly_norm_forward",
    "qwen2vl_mrope": "LigerQwen2VLMRopeFunction",
    "fused_add_rms_norm": (
        "LigerFusedAddRMSNormFunction fused_add_rms_norm_backward fused_add_rms_norm_forward"
    ),
    "layer_norm": "LigerLayerNormFunction layer_norm_backward layer_norm_forward",
    "modulated_rms_norm": (
        "LigerModulatedRMSNormFunction modulated_rms_norm_backward modulated_rms_norm_forward"
    ),
    "relu_squared": "LigerReLUSquaredFunction relu_squared_backward relu_squared_forward",
    "rms_norm": "LigerRMSNormFunction rms_norm_backward rms_norm_forward",
    "rope": "LigerRopeFunction rope_backward rope_forward",
    "softmax": "LigerSoftmaxFunction",
    "sparsemax": "LigerSparsemaxFunction",
    "swiglu": (
        "LigerFusedGateUpSiLUMulFunction LigerSiLUMulFunction swiglu_backward swiglu_forward"
    ),
    "tiled_mlp": "LigerTiledMLPFunction apply_tiled_mlp",
    "tvd": "LigerTVDLossFunction",
    "vocab_parallel_cross_entropy": "LigerVocabParallelCEFunction",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
