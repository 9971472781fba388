"""`logp_rows` and `logp_gradient` in plain PyTorch: the same arguments, results and rules; fp64 stays fp64."""

import torch
from torch import Tensor

from liger_kernel.ops._logp_kernels import LogpStats
from liger_kernel.ops._op import compute_dtype


def wide(
    z: Tensor,
    pre_scale: float,
    softcap: float | None,
    post_scale: float,
    shift: Tensor | None = None,
) -> tuple[Tensor, Tensor | float]:
    """Transformed logits and their slope; shift `[C]` is added to the rows first."""
    z = z.to(compute_dtype(z))
    x = (z if shift is None else z + shift[:, None]) * pre_scale
    if softcap is None:
        return x * post_scale, pre_scale * post_scale
    t = torch.tanh(x / softcap)
    return t * (softcap * post_scale), (1 - t * t) * (pre_scale * post_scale)


def logp_rows_torch(
    logits: Tensor, target: Tensor, *, V: int, ignore_index: int = -100, pre_scale: float = 1.0,
    softcap: float | None = None, post_scale: float = 1.0, want_entropy: bool = False, want_argmax: bool = False,
    want_gaps: bool = False, sharded: bool = False, shift: Tensor | None = None,
) -> LogpStats:  # fmt: skip
    """`logp_rows` in plain PyTorch; fp64 stays fp64."""
    x, _ = wide(logits[:, :V], pre_scale, softcap, post_scale, shift)
    y, known, absent = _labels(target, V, ignore_index, x.dtype)
    top = x.amax(-1)
    top = torch.where(top == float("-inf"), 0.0, top)
    x = x - top[:, None]
    log_total = x.logsumexp(-1)
    logp = torch.where(known, x.gather(-1, y[:, None])[:, 0] - log_total, absent)
    if sharded:
        logp = logp.where(target != V, float("-inf"))
        known = known | (target == V)
    entropy, argmax, gaps = x.new_empty(0), y.new_empty(0), x.new_empty(0)
    if want_entropy:
        log_p = x - log_total[:, None]
        p = log_p.exp()
        entropy = torch.where(known, -torch.where(p > 0, p * log_p, 0.0).sum(-1), absent)
    if want_argmax:
        argmax = torch.where(known, x.argmax(-1), -1)
    if want_gaps:
        gaps = torch.where(known, x.sum(-1), absent)
    return LogpStats(logp, top, log_total, entropy, argmax, gaps)


def logp_gradient_torch(
    out: Tensor, logits: Tensor, target: Tensor, stats: LogpStats, a: Tensor, c: Tensor, b: Tensor | None = None,
    d: Tensor | None = None, *, V: int, ignore_index: int = -100, pre_scale: float = 1.0,
    softcap: float | None = None, post_scale: float = 1.0, sharded: bool = False, shift: Tensor | None = None,
) -> None:  # fmt: skip
    """`logp_gradient` in plain PyTorch."""
    x, slope = wide(logits[:, :V], pre_scale, softcap, post_scale, shift)
    y, known, absent = _labels(target, V, ignore_index, x.dtype)
    log_p = x - stats.top[:, None] - stats.log_total[:, None]
    p = log_p.exp()
    if sharded:
        absent = absent.where(target != V, 0.0)
    a = torch.where(known, a.to(x.dtype), absent)
    g = (0.0 * a)[:, None] - c.to(x.dtype)[:, None] * p  # 0 * a: NaN for a target that is nowhere
    g.scatter_add_(-1, y[:, None], a[:, None])
    if b is not None:
        b = b.to(x.dtype)[:, None]
        g -= torch.where(p > 0, b * p * (log_p + stats.entropy[:, None]), 0.0)
    if d is not None:
        g += d.to(x.dtype)[:, None]
    out[:, :V] = torch.where((target == ignore_index)[:, None], 0.0, g * slope)


def _labels(
    target: Tensor, V: int, ignore_index: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    known = (target >= 0) & (target < V) & (target != ignore_index)
    absent = torch.where(target == ignore_index, 0.0, float("nan")).to(dtype)
    return torch.where(known, target, 0).long(), known, absent
