"""Attention-like operators and hyper-connections."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from liger_kernel.bench.row import Bench
from liger_kernel.bench.work import Function, Inputs, Make


def _scores(make: Make, batch: int, heads: int, length: int) -> Inputs:
    return {
        "scores": make(batch, heads, length, length),
        "weight": make(heads, heads, 3, 3) * 0.1,
        "bias": make(heads),
    }


def _convolved(function: Function) -> Function:
    return lambda scores, weight, bias: function(scores, weight, bias, padding=1)


def _heads(make: Make, batch: int, heads: int, length: int, dim: int) -> Inputs:
    """Heads as projections leave them: `[B, S, H, D]` in memory."""
    return {n: make(batch, length, heads, dim).transpose(1, 2) for n in ("query", "key", "value")}


def _blocks(make: Make, blocks: int, tokens: int, width: int) -> Inputs:
    """A query short enough that several blocks have a share."""
    query, norm = make(width) * width**-0.5, 1 + 0.1 * make(width)
    return {"V": make(blocks, tokens, width), "w_query": query, "w_norm": norm}


def _streams(make: Make, tokens: int, hc: int, width: int) -> Inputs:
    """The defaults of the layer: 16-bit streams, fp16 phi, fp32 for the rest."""
    out = 2 * hc + hc * hc
    phi = (0.02 * make(hc * width, out)).half()
    return {
        "x": make(tokens, hc, width),
        "f_out": make(tokens, width),
        "phi": phi,
        "b": make(out).float(),
        "alpha": make(1).float(),
    }


def _connection(coeffs: Function, pre: Function, post_res: Function, **options: Any) -> Function:
    """All of a connection but the layer in it."""

    def call(x: Tensor, f_out: Tensor, phi: Tensor, b: Tensor, alpha: Tensor) -> Any:
        h_pre, h_post, h_res = coeffs(x, phi, b, alpha, alpha, alpha, **options)
        return pre(x, h_pre), post_res(x, f_out, h_post, h_res)

    return call


def _mhc_cost(ops: Any, x: Tensor, f_out: Tensor, phi: Tensor, b: Tensor, alpha: Tensor) -> Any:
    """The three operators one after another."""
    tokens, hc = x.shape[:2]
    gates = x.new_empty((tokens, hc), dtype=torch.float32)
    matrices = x.new_empty((tokens, hc, hc), dtype=torch.float32)
    parts = (
        ops.OP_COEFFS.cost(x, phi, b, alpha, alpha, alpha),
        ops.OP_PRE.cost(x, gates),
        ops.OP_POST_RES.cost(x, f_out, gates, matrices),
    )
    names = ("forward_bytes", "backward_bytes", "saved", "flops")
    return type(parts[0])(*(sum(getattr(p, n) for p in parts) for n in names))


ROWS = [
    Bench(
        "multi_token_attention",
        inputs=_scores,
        grads=("scores", "weight", "bias"),
        shapes={"2x16x2048": (2, 16, 2048), "1x8x4096": (1, 8, 4096)},
        tiny=(1, 2, 64),
        quick=("2x16x2048",),
        eager=lambda ops: _convolved(ops.OP.reference),
        ours={"ours": lambda ops: _convolved(ops.multi_token_attention)},
        cost=lambda ops, **inputs: ops.OP.cost(*inputs.values(), [1, 1]),
    ),
    Bench(
        "fused_neighborhood_attention",
        inputs=_heads,
        grads=("query", "key", "value"),
        shapes={"4x12x4096x64": (4, 12, 4096, 64), "1x16x8192x128": (1, 16, 8192, 128)},
        tiny=(1, 2, 128, 32),
        quick=("4x12x4096x64",),
    ),
    Bench(
        "attn_res",
        inputs=_blocks,
        grads=("V", "w_query", "w_norm"),
        shapes={"8x8192x4096": (8, 8192, 4096), "16x8192x2048": (16, 8192, 2048)},
        tiny=(4, 16, 256),
        quick=("8x8192x4096",),
    ),
    Bench(
        "mhc",
        inputs=_streams,
        grads=("x", "f_out", "phi", "b", "alpha"),
        shapes={"8192x4x4096": (8192, 4, 4096), "8192x4x2048": (8192, 4, 2048)},
        tiny=(16, 4, 64),
        quick=("8192x4x4096",),
        eager=lambda ops: _connection(
            ops.OP_COEFFS.reference, ops.OP_PRE.reference, ops.OP_POST_RES.reference
        ),
        ours={
            "ours": lambda ops: _connection(
                partial(ops.mhc_coeffs, allow_fp32=True), ops.mhc_pre, ops.mhc_post_res
            )
        },
        cost=_mhc_cost,
    ),
]

UPSTREAM = {
    "multi_token_attention": lambda f, scores, weight, bias: f.liger_multi_token_attention(
        scores, weight, bias, padding=1
    ),
    "fused_neighborhood_attention": lambda f, query, key, value: (
        f.liger_fused_neighborhood_attention(query, key, value)
    ),
    "attn_res": lambda f, V, w_query, w_norm: f.liger_attn_res(V, w_query, w_norm),
    "mhc": lambda f, **inputs: _connection(
        f.liger_mhc_coeffs, f.liger_mhc_pre, f.liger_mhc_post_res
    )(**inputs),
}
