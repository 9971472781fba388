"""`ce_rows` in plain PyTorch: the same arguments, results and rules, where Triton cannot run.

Rows are taken a few at a time, so that copies in wide precision stay small however many there are.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from liger_kernel.ops._ce_kernels import RowStats
from liger_kernel.ops._op import compute_dtype

_ELEMENTS = 1 << 20  # logits in wide precision at a time


def ce_rows_torch(
    logits: Tensor, target: Tensor, weight: Tensor | None, scales: Tensor, upstream: Tensor | None,
    out: Tensor | None, *, V: int, ignore_index: int = -100, label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0, pre_scale: float = 1.0, softcap: float | None = None,
    post_scale: float = 1.0, token_scaling: bool = False, weight_sum: Tensor | None = None,
    want_argmax: bool = False,
) -> RowStats:  # fmt: skip
    """See `ce_rows`. fp64 logits are computed in fp64, and then so are the results.

    Memory:
        Up to three fp32 copies of 2^20 logits, or of one row if that is longer.
    """
    n_rows, dtype = logits.shape[0], compute_dtype(logits)
    numbers = torch.empty(3 + want_argmax, n_rows, dtype=dtype, device=logits.device)
    predicted = torch.empty(n_rows if want_argmax else 0, dtype=torch.int64, device=logits.device)
    scale, scale_z = scales.to(dtype).unbind()
    weight = None if weight is None else weight.to(dtype)
    terms = _Terms(
        weight, V if weight is None or weight_sum is None else weight_sum.to(dtype).view(()), scale,
        scale_z, label_smoothing, lse_square_scale, token_scaling,
    )  # fmt: skip
    transform = partial(_transform, pre_scale=pre_scale, softcap=softcap, post_scale=post_scale)
    step = max(_ELEMENTS // V, 1)
    for start in range(0, n_rows, step):
        some = slice(start, start + step)
        y = target[some].long()
        usable = (y >= 0) & (y < V) & (y != ignore_index)
        blank = torch.where(y == ignore_index, 0.0, float("nan")).to(dtype)
        y = y.where(usable, 0)
        x = logits[some, :V].to(dtype, copy=True)
        slope = transform(x)
        if want_argmax:
            best = x.argmax(-1)
            predicted[some] = best.where(usable, -1)
            numbers[3, some] = (best == y).to(dtype).where(usable, blank)
        *found, c_p, g_y, c_w = _rows(x, y, terms)
        for i, values in enumerate(found):
            numbers[i, some] = values.where(usable, blank)
        if out is not None:
            x *= c_p[:, None]
            x.scatter_(-1, y[:, None], g_y[:, None])
            if label_smoothing:
                x -= c_w[:, None] if weight is None else c_w[:, None] * weight
            x *= slope if upstream is None else slope * upstream[some, None].to(dtype)
            out[some, :V] = x.where(usable[:, None], blank[:, None])
    return RowStats(numbers, predicted)


class _Terms(NamedTuple):
    weight: Tensor | None
    weight_sum: Tensor | int
    scale: Tensor
    scale_z: Tensor
    smoothing: float
    lse_square_scale: float
    token_scaling: bool


def _rows(x: Tensor, y: Tensor, terms: _Terms) -> tuple[Tensor, ...]:
    """-> loss, z, lse, c_p / sum of exp, p_y c_p - c_y, c_w; leaves exp(x - max) in x."""
    weight, weight_sum, scale, scale_z, smoothing, lse_square_scale, token_scaling = terms
    top, y = x.amax(-1, keepdim=True), y[:, None]
    x -= top
    x_y = x.gather(-1, y)[:, 0]
    spread = 0.0
    if smoothing:
        spread = x.sum(-1) if weight is None else x @ weight
    e_y = x.exp_().gather(-1, y)[:, 0]
    rest = x.scatter_(-1, y, 0.0).sum(-1)
    total = rest + e_y
    log_total = total.log()
    lse = top[:, 0] + log_total
    ratio = rest / e_y
    nll = torch.where(ratio < 0.5, ratio.log1p(), log_total - x_y)
    scale, scale_z = scale.expand_as(lse), scale_z.expand_as(lse)
    if token_scaling:
        scale, scale_z = scale * (e_y / total), scale_z * (e_y / total)
    c_y = (
        (1.0 - smoothing) * scale if weight is None else (1.0 - smoothing) * weight[y[:, 0]] * scale
    )
    loss = c_y * nll
    c_w = smoothing / x.shape[-1] * scale
    if smoothing:
        loss = loss + c_w * (weight_sum * log_total - spread)
    z = lse_square_scale * lse.square() * scale_z
    more = c_w * weight_sum + 2.0 * lse_square_scale * lse * scale_z
    return loss + z, z, lse, (c_y + more) / total, (more * e_y - c_y * rest) / total, c_w


def _transform(
    z: Tensor, pre_scale: float, softcap: float | None, post_scale: float
) -> Tensor | float:
    """z becomes x in place; -> dx/dz."""
    scale = pre_scale * post_scale
    if softcap is None:
        if scale != 1.0:
            z *= scale
        return scale
    z *= pre_scale / softcap
    z.tanh_()
    slope = z.square().neg_().add_(1.0).mul_(scale)
    z *= softcap * post_scale
    return slope
