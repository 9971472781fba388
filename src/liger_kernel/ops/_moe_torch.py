"""`fused_moe` in plain torch: the same sort by expert, and products of experts' rows that can be traced and
differentiated any number of times. torch's grouped products where they can be had, else one for each expert."""

from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops._op import compute_dtype, named


def gated(
    both: Tensor, activation: str, interleaved: bool, limit: float | None, alpha: float, shift: float
) -> Tensor:  # fmt: skip
    """`[*, 2I]` gate and up -> `[*, I]`, with the roundings of Hugging Face's modules."""
    gate, up = (both[..., ::2], both[..., 1::2]) if interleaved else both.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if activation == "silu":
        value = torch.nn.functional.silu(gate) if alpha == 1.0 else gate * (gate * alpha).sigmoid()
    else:
        approximate = "tanh" if activation == "gelu_tanh" else "none"
        value = torch.nn.functional.gelu(gate * alpha, approximate=approximate) / alpha
    return value * (up if shift == 0.0 else up + shift)


def fallback(
    x: Tensor, gate_up_proj: Tensor, down_proj: Tensor, index: Tensor, weights: Tensor,
    gate_up_bias: Tensor | None, down_bias: Tensor | None,
    activation: str, interleaved: bool, limit: float | None, alpha: float, shift: float,
) -> Tensor:  # fmt: skip
    """As `fused_moe.reference`. Pairs that belong to nobody are sorted to the end, where products are zero."""
    n_experts, (tokens, top_k) = gate_up_proj.shape[0], index.shape
    flat = index.reshape(-1).long()
    key, pair = torch.where((flat >= 0) & (flat < n_experts), flat, n_experts).sort(stable=True)
    ends = torch.searchsorted(key, torch.arange(n_experts, device=x.device), right=True)
    expert = key.clamp(max=n_experts - 1)
    both = _Product.apply(x[pair // top_k], gate_up_proj, ends)
    both = both if gate_up_bias is None else both + gate_up_bias[expert]
    wide = compute_dtype(
        x
    )  # one rounding each for the activation and for the sum, as the kernels have
    y = gated(both.to(wide), activation, interleaved, limit, alpha, shift).to(x.dtype)
    y = _Product.apply(y, down_proj, ends)
    y = y if down_bias is None else y + down_bias[expert]
    weights = torch.where(key < n_experts, weights.reshape(-1)[pair], 0.0)
    y = (y.to(wide) * weights.to(wide)[:, None])[pair.argsort()]
    return y.view(tokens, top_k, x.shape[1]).sum(1).to(x.dtype)


class _Product(torch.autograd.Function):
    """Sorted rows `[S, K]` times the weights `[E, N, K]` of their experts, which end at `ends` [E] -> `[S, N]`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight, ends)
        return moe_product(rows, weight, ends)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        rows, weight, ends = ctx.saved_tensors
        need_rows, need_weight = ctx.needs_input_grad[:2]
        drows = _Product.apply(dy, weight.transpose(1, 2), ends) if need_rows else None
        return drows, _Outer.apply(dy, rows, ends) if need_weight else None, None


class _Outer(torch.autograd.Function):
    """Sums over an expert's rows of a[row] b[row]^T: `[S, N]`, `[S, K]` -> `[E, N, K]`."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(a, b, ends)
        return moe_outer(a, b, ends)

    @staticmethod
    def backward(ctx: Any, dw: Tensor) -> Any:
        a, b, ends = ctx.saved_tensors
        need_a, need_b = ctx.needs_input_grad[:2]
        da = _Product.apply(b, dw, ends) if need_a else None
        return da, _Product.apply(a, dw.transpose(1, 2), ends) if need_b else None, None


def _fake_product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[1])


@named("(Tensor rows, Tensor weight, Tensor ends) -> Tensor", _fake_product)
def moe_product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows from `ends[-1]` on are zero."""
    if _groupable(rows, weight):
        y = torch.nn.functional.grouped_mm(rows, weight.transpose(1, 2), offs=ends.int())
        known = torch.arange(rows.shape[0], device=rows.device) < ends[-1]
        return torch.where(
            known[:, None], y, 0.0
        )  # torch leaves those that belong to nobody as they were
    y = rows.new_zeros(rows.shape[0], weight.shape[1])
    for first, end, w in _spans(ends, weight):
        torch.mm(rows[first:end], w.t(), out=y[first:end])
    return y


def _fake_outer(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    return a.new_empty(ends.shape[0], a.shape[1], b.shape[1])


@named("(Tensor a, Tensor b, Tensor ends) -> Tensor", _fake_outer)
def moe_outer(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """An expert without rows has zeros."""
    dw = a.new_zeros(ends.shape[0], a.shape[1], b.shape[1])
    for first, end, out in _spans(ends, dw):
        torch.mm(a[first:end].t(), b[first:end], out=out)
    return dw


def _spans(ends: Tensor, weight: Tensor) -> Any:
    """(first row, end of rows, its part of `weight`) of the experts that have rows."""
    bounds = [0, *ends.tolist()]
    spans = zip(bounds[:-1], bounds[1:], weight, strict=True)
    return [span for span in spans if span[0] < span[1]]


def _groupable(rows: Tensor, weight: Tensor) -> bool:
    """What torch's grouped product asks for: rows, bf16, one adjacent dimension, strides of 16 bytes."""
    if not hasattr(torch.nn.functional, "grouped_mm") or rows.shape[0] == 0:
        return False
    if rows.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16 or not rows.is_contiguous():
        return False
    wide = [s for s in weight.stride() if s != 1]
    return len(wide) == 2 and all(s % 8 == 0 for s in (*wide, rows.shape[1], weight.shape[1]))
