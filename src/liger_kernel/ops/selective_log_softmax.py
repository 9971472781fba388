"""Log-probabilities of chosen ids under given logits.

    logp = z_y - lse(z),   z = logits / temperature        logits: [*, V]   y: [*] ids   logp: [*] fp32
    dlogits = dlogp (onehot(y) - softmax(z)) / temperature

Forward reads the logits once, backward reads and writes them once. The rows are those of `linear_logprob`, for models
whose logits exist anyway. Log-softmax is computed in fp32 and never stored.

Memory  saves the logits and 12 bytes a row; backward writes a gradient of the logits' size, or
        does so in their own memory under inplace=True. The torch path holds a few fp32 copies of them for a moment.
"""

from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops._labels import check_labels
from liger_kernel.ops._logp_kernels import LogpStats
from liger_kernel.ops._op import (
    Cost,
    Op,
    compute_dtype,
    first_order,
    named,
    observed,
    require,
    rows,
)
from liger_kernel.ops.head.rows import RowMath

# 1 reference


def reference(
    logits: Tensor, ids: Tensor, *, temperature: float = 1.0, ignore_index: int = -100
) -> Tensor:
    """The definition, in fp32 (fp64 for fp64)."""
    log_p = (logits.to(compute_dtype(logits)) / temperature).log_softmax(-1)
    valid = ids != ignore_index
    return torch.where(valid, log_p.gather(-1, torch.where(valid, ids, 0)[..., None])[..., 0], 0.0)


# 2 launch


def _fake_forward(logits, ids, *rest):
    return logits.new_empty((3, *ids.shape), dtype=compute_dtype(logits))


@named(
    "(Tensor logits, Tensor ids, float scale, int ignore_index, bool kernels) -> Tensor",
    _fake_forward,
)
def selective_log_softmax_forward(
    logits: Tensor, ids: Tensor, scale: float, ignore_index: int, kernels: bool
) -> Tensor:
    """Logits `[R, V]`, ids `[R]` -> `[3, R]`: logp, largest logit, log of the sum of exponentials."""
    found = RowMath(logits.shape[1], ignore_index, kernels, post_scale=scale).stats(logits, ids)
    return torch.stack((found.logp, found.top, found.log_total))


def _gradient(
    out: Tensor, logits: Tensor, ids: Tensor, stats: Tensor, dlogp: Tensor, scale: float, ignore_index: int,
    kernels: bool,
) -> None:  # fmt: skip
    none = ids.new_empty(0)
    known = LogpStats(stats[0], stats[1], stats[2], none, none, none)
    math = RowMath(logits.shape[1], ignore_index, kernels, post_scale=scale)
    math.gradient(out, logits, ids, known, dlogp, dlogp)


def _fake_backward(logits, *rest):
    return torch.empty_like(logits)


@named(
    "(Tensor logits, Tensor ids, Tensor stats, Tensor dlogp, float scale, int ignore_index, bool kernels) -> Tensor",
    _fake_backward,
)
def selective_log_softmax_backward(
    logits: Tensor, ids: Tensor, stats: Tensor, dlogp: Tensor, scale: float, ignore_index: int, kernels: bool
) -> Tensor:  # fmt: skip
    """-> dlogits, in memory of its own."""
    dlogits = torch.empty_like(logits)
    _gradient(dlogits, logits, ids, stats, dlogp, scale, ignore_index, kernels)
    return dlogits


# 3 op


class _SelectiveLogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, ids: Tensor, scale: float, ignore_index: int, inplace: bool, kernels: bool
    ) -> Tensor:  # fmt: skip
        stats = selective_log_softmax_forward(logits, ids, scale, ignore_index, kernels)
        ctx.save_for_backward(logits, ids, stats)
        ctx.call = scale, ignore_index, kernels
        ctx.inplace = inplace
        return stats[0].clone()  # the caller may write on it

    @staticmethod
    @first_order("selective_log_softmax")
    def backward(ctx: Any, dlogp: Tensor) -> Any:
        logits, ids, stats = ctx.saved_tensors
        if not ctx.inplace or observed():
            dlogits = selective_log_softmax_backward(logits, ids, stats, dlogp, *ctx.call)
        else:
            dlogits = logits.detach()
            _gradient(dlogits, dlogits, ids, stats, dlogp, *ctx.call)
            torch.autograd.graph.increment_version(logits)  # a second backward must not pass
        return dlogits, None, None, None, None, None


def supports(*_: Any) -> str | None:
    """Every size; dtypes and devices are judged by `Op`."""
    return None


def cost(logits: Tensor, ids: Tensor, *_: Any) -> Cost:
    """The logits once; again, and their gradient. Without the gradient in a buffer of its own nothing more is moved."""
    size = logits.numel() * logits.element_size()
    return Cost(size, 2 * size, saved=12 * ids.numel())


OP = Op(
    "selective_log_softmax",
    reference,
    fallback=lambda *args: _SelectiveLogSoftmax.apply(*args, False),
    function=lambda *args: _SelectiveLogSoftmax.apply(*args, True),
    supports=supports,
    cost=cost,
)

# 4 public


def selective_log_softmax(
    logits: Tensor, ids: Tensor, *, temperature: float = 1.0, ignore_index: int = -100, inplace: bool = False,
    impl: str | None = None,
) -> Tensor:  # fmt: skip
    """Log-probabilities of `ids` under softmax(logits / temperature).

    Args:
        logits: `[*, V]`; fp16, bf16, fp32 (fp64 on the torch path).
        ids: `[*]` int64 or int32; `ignore_index` where there is none: 0 there, and no gradient.
        temperature: positive.
        inplace: backward may write the gradient over the logits, which must not be read afterwards.
        impl: "triton" or "torch" for this call, None for the default choice.
    Returns:
        `[*]` fp32, differentiable in logits.
    Memory:
        See the module.
    Raises:
        ValueError: shapes that do not fit, a temperature that is not positive. IndexError: an id out of range (on a
        CPU; elsewhere that row becomes NaN).
    """
    require(
        logits.dim() >= 1 and ids.shape == logits.shape[:-1],
        f"{OP.name}: logits must be [*, V] and ids [*]; got {list(logits.shape)} and {list(ids.shape)}.",
    )
    require(temperature > 0, f"{OP.name}: temperature must be positive; got {temperature}.")
    check_labels(OP.name, ids, logits.shape[-1], ignore_index)
    found = OP(rows(logits), ids.reshape(-1), 1 / temperature, ignore_index, inplace, impl=impl)
    return found.view(ids.shape)


def fused_selective_log_softmax(
    logits: Tensor, input_ids: Tensor, temperature: float = 0.9, mask: Tensor | None = None
) -> Tensor:
    """Log-probs `[B, L]` fp32 of the last L of input_ids `[B, >= L]` under logits `[B, L + 1, V]`; no gradient.

    Logits at place t predict id t, so the last place counts for nothing. 0 where mask `[B, L]` is 0.
    """
    with torch.no_grad():
        return completion_logps(logits, input_ids[:, 1 - logits.shape[1] :], mask, temperature)


def completion_logps(
    logits: Tensor, ids: Tensor, mask: Tensor | None, temperature: float, inplace: bool = False
) -> Tensor:
    """Log-probs `[B, L]` of ids `[B, L]` under logits `[B, L + 1, V]`, whose last place is not used; 0 where masked."""
    batch, length = logits.shape[0], logits.shape[1] - 1
    require(
        logits.dim() == 3 and ids.shape == (batch, length),
        f"{OP.name}: logits must be [B, L + 1, V] for ids [B, L]; got {list(logits.shape)} and {list(ids.shape)}.",
    )
    require(
        mask is None or mask.shape == ids.shape,
        f"{OP.name}: mask must be {list(ids.shape)}; got {None if mask is None else list(mask.shape)}.",
    )
    # The unused place takes part as an ignored row: a slice of logits would be copied.
    targets = ids.new_full((batch, length + 1), -100)
    targets[:, :length] = ids if mask is None else torch.where(mask != 0, ids, -100)
    return selective_log_softmax(logits, targets, temperature=temperature, inplace=inplace)[:, :length]  # fmt: skip
