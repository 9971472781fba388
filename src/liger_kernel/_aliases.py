"""Module paths other projects import, and where their names really live: one table, no stub files.

Each line of `TABLE` makes one module, relative to `liger_kernel`: importable, found by `find_spec`,
and open to monkey-patching like any other. To add a path, add a line. The modules are made on first
import by a finder that is asked last, so a real file of the same name would win.
"""

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

ROOT = __package__ or "liger_kernel"

# path -> {module: names}
TABLE: dict[str, dict[str, str]] = {
    "ops.grpo_loss": {
        "ops.selective_log_softmax": "fused_selective_log_softmax",
        "transformers.grpo_loss": "GrpoLossFunction",
    },
    "ops.experimental": {"ops.embedding": "LigerEmbeddingFunction"},
    "ops.experimental.embedding": {"ops.embedding": "LigerEmbeddingFunction"},
    "ops.experimental.mm_int8int2": {"ops.mm_int8int2": "matmul pack_weights unpack_weights"},
    "transformers.cross_entropy": {
        "transformers.loss": "LigerCrossEntropyLoss",
        "ops.cross_entropy": "CrossEntropyOutput LigerCrossEntropyFunction",
    },
    "transformers.dyt": {
        "transformers.activation": "LigerDyT",
        "ops.dyt": "LigerDyTFunction",
    },
    "transformers.fused_linear_cross_entropy": {
        "transformers.loss": "LigerFusedLinearCrossEntropyLoss",
        "ops.cross_entropy": "CrossEntropyOutput",
        "ops.fused_linear_cross_entropy": "LigerFusedLinearCrossEntropyFunction",
    },
    "transformers.experimental": {"transformers.embedding": "LigerEmbedding"},
    "transformers.experimental.embedding": {
        "transformers.embedding": "LigerEmbedding",
        "ops.embedding": "LigerEmbeddingFunction",
    },
    "transformers.fused_ce_tvd": {
        "transformers.divergence": "LigerFusedCETVDLoss",
        "ops.fused_ce_tvd": "LigerFusedCETVDFunction",
    },
    "transformers.fused_linear_jsd": {
        "transformers.divergence": "LigerFusedLinearJSD",
        "ops.fused_linear_jsd": "LigerFusedLinearJSDFunction",
    },
    "transformers.fused_linear_kl_div": {
        "transformers.divergence": "LigerFusedLinearKLDivLoss",
        "ops.fused_linear_kl_div": "LigerFusedLinearKLDivFunction",
    },
    "transformers.fused_neighborhood_attention": {
        "transformers.attention": (
            "LigerFusedNeighborhoodAttention LigerFusedNeighborhoodAttentionConfig "
            "LigerFusedNeighborhoodAttentionLayer"
        ),
        "ops.fused_neighborhood_attention": "LigerFusedNeighborhoodAttentionFunction",
    },
    "transformers.geglu": {
        "transformers.mlp": "LigerGEGLUMLP LigerGEGLUMLPForGemma4",
        "ops.geglu": "LigerGELUMulFunction",
    },
    "transformers.jsd": {
        "transformers.divergence": "LigerJSD",
        "ops.jsd": "LigerJSDFunction",
    },
    "transformers.kl_div": {
        "transformers.divergence": "LigerKLDIVLoss",
        "ops.kl_div": "LigerKLDivLossFunction",
    },
    "transformers.llama4_rope": {
        "transformers.rope": (
            "apply_liger_llama4_rope_full liger_llama4_text_rotary_pos_emb "
            "liger_llama4_vision_rotary_pos_emb"
        ),
        "ops.llama4_rope": "LigerLlama4RopeFunction",
    },
    "transformers.multi_token_attention": {
        "transformers.attention": "LigerMultiTokenAttention",
        "ops.multi_token_attention": "LigerMultiTokenAttentionFunction",
    },
    "transformers.poly_norm": {
        "transformers.activation": "LigerPolyNorm",
        "ops.poly_norm": "LigerPolyNormFunction",
    },
    "transformers.qwen2vl_mrope": {
        "transformers.rope": "liger_multimodal_rotary_pos_emb",
        "ops.qwen2vl_mrope": "LigerQwen2VLMRopeFunction",
    },
    "transformers.fused_add_rms_norm": {
        "transformers.norm": "LigerFusedAddRMSNorm",
        "ops.fused_add_rms_norm": "LigerFusedAddRMSNormFunction",
    },
    "transformers.layer_norm": {
        "transformers.norm": "LigerLayerNorm",
        "ops.layer_norm": "LigerLayerNormFunction",
    },
    "transformers.modulated_rms_norm": {
        "transformers.norm": "LigerModulatedRMSNorm",
        "ops.modulated_rms_norm": "LigerModulatedRMSNormFunction",
    },
    "transformers.relu_squared": {
        "transformers.activation": "LigerReLUSquared",
        "ops.relu_squared": "LigerReLUSquaredFunction",
    },
    "transformers.rms_norm": {
        "transformers.norm": (
            "LigerRMSNorm LigerRMSNormForGemma LigerRMSNormForGemma2 LigerRMSNormForGemma3 "
            "LigerRMSNormForGemma4 LigerRMSNormForGlm4 LigerRMSNormForMuseGlimmer "
            "LigerRMSNormForMuseGlimmerTextCentered LigerRMSNormForOlmo2 LigerRMSNormForQwen3Next"
        ),
        "ops.rms_norm": "LigerRMSNormFunction",
    },
    "transformers.softmax": {
        "transformers.activation": "LigerSoftmax",
        "ops.softmax": "LigerSoftmaxFunction",
    },
    "transformers.sparsemax": {
        "transformers.activation": "LigerSparsemax",
        "ops.sparsemax": "LigerSparsemaxFunction",
    },
    "transformers.swiglu": {
        "transformers.mlp": (
            "LigerBlockSparseTop2MLP LigerFalconH1SwiGLUMLP LigerHunyuanV1SwiGLUMLP "
            "LigerPhi3SwiGLUMLP LigerQwen3MoeSwiGLUMLP LigerSwiGLUMLP LigerSwiGLUMLPForMuseGlimmer"
        ),
        "transformers.experts": "LigerExperts",
        "ops.fused_moe": "LigerFusedMoEFunction",
        "ops.swiglu": "LigerSiLUMulFunction",
    },
    "transformers.tiled_mlp": {
        "transformers.mlp": "LigerTiledGEGLUMLP LigerTiledSwiGLUMLP",
        "ops.geglu": "LigerGELUMulFunction",
        "ops.swiglu": "LigerSiLUMulFunction",
        "ops.tiled_mlp": "apply_tiled_mlp",
    },
    "transformers.tvd": {
        "transformers.divergence": "LigerTVDLoss",
        "ops.tvd": "LigerTVDLossFunction",
    },
    "transformers.vocab_parallel_cross_entropy": {
        "transformers.loss": "LigerVocabParallelCrossEntropy",
        "ops.vocab_parallel_cross_entropy": "LigerVocabParallelCEFunction validate_formula_and_mode",
    },
    "transformers.trainer_integration": {"transformers.monkey_patch": "_apply_liger_kernel"},
}


class _AliasFinder(MetaPathFinder, Loader):
    """Finds and makes the modules of `TABLE`."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        name = fullname.removeprefix(f"{ROOT}.")
        if name not in TABLE or not fullname.startswith(f"{ROOT}."):
            return None
        has_modules = any(other.startswith(f"{name}.") for other in TABLE)
        return ModuleSpec(fullname, self, origin=f"{ROOT}._aliases", is_package=has_modules)

    def exec_module(self, module: ModuleType) -> None:
        sources = TABLE[module.__name__.removeprefix(f"{ROOT}.")]
        module.__doc__ = f"Names that live in {', '.join(f'{ROOT}.{s}' for s in sources)}."
        exported: list[str] = []
        for source, names in sources.items():
            real = importlib.import_module(f"{ROOT}.{source}")
            for name in names.split():
                setattr(module, name, getattr(real, name))
                exported.append(name)
        module.__dict__["__all__"] = exported


def install() -> None:
    """Put the finder behind Python's own, once."""
    if not any(isinstance(finder, _AliasFinder) for finder in sys.meta_path):
        sys.meta_path.append(_AliasFinder())
