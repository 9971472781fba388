"""Mixture of experts, tokens routed uniformly at random."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from liger_kernel import _env
from liger_kernel.bench.row import Bench
from liger_kernel.bench.work import BACKWARD, BOTH, FORWARD, Inputs, Make


def _moe(make: Make, tokens: int, hidden: int, inner: int, experts: int, top_k: int) -> Inputs:
    scores = make(tokens, experts).float()
    weights, index = scores.softmax(-1).topk(top_k)
    return {
        "x": make(tokens, hidden),
        "gate_up_proj": make(experts, 2 * inner, hidden).mul_(hidden**-0.5),
        "down_proj": make(experts, hidden, inner).mul_(inner**-0.5),
        "top_k_index": index,
        "top_k_weights": (weights / weights.sum(-1, keepdim=True)).to(make(1).dtype),
    }


def _grouped(
    x: Tensor, gate_up_proj: Tensor, down_proj: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """torch's grouped products around a sort, the fastest plain torch there is."""
    n_experts, (tokens, top_k) = gate_up_proj.shape[0], top_k_index.shape
    key, pair = top_k_index.flatten().sort(stable=True)
    ends = torch.searchsorted(key, torch.arange(n_experts, device=x.device), right=True).int()
    product = torch.nn.functional.grouped_mm
    both = product(x[pair // top_k], gate_up_proj.transpose(1, 2), offs=ends)
    gate, up = both.chunk(2, -1)
    y = product(torch.nn.functional.silu(gate) * up, down_proj.transpose(1, 2), offs=ends)
    y = (y * top_k_weights.flatten()[pair, None])[pair.argsort()]
    return y.view(tokens, top_k, -1).sum(1).to(x.dtype)


def _ours(ops: Any) -> Any:
    """Triton's interpreter truncates bf16 at every store, more often here than the gate allows."""
    return partial(ops.fused_moe, impl="torch" if _env.interpreting() else None)


def _established(functional: Any, **inputs: Tensor) -> Tensor:
    from liger_kernel.ops import LigerFusedMoEFunction  # in the other library's own process

    return LigerFusedMoEFunction.apply(*inputs.values())


ROWS = [
    Bench(
        "fused_moe",
        inputs=_moe,
        grads=("x", "gate_up_proj", "down_proj", "top_k_weights"),
        shapes={
            "8192x2048x768, 8 of 128": (8192, 2048, 768, 128, 8),
            "8192x2048x1024, 8 of 64": (8192, 2048, 1024, 64, 8),
            "8192x4096x14336, 2 of 8": (8192, 4096, 14336, 8, 2),
        },
        tiny=(64, 64, 32, 8, 2),
        quick=("8192x2048x768, 8 of 128",),
        modes=(FORWARD, BACKWARD, BOTH),
        eager=lambda ops: _grouped,
        ours={"ours": _ours},
    ),
]

UPSTREAM = {"fused_moe": _established}
