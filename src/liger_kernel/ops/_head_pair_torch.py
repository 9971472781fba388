"""`pair_rows` and `top_k_rows` in plain PyTorch: the same arguments, results and rules; fp64 stays fp64.

Rows are taken a few at a time, so that copies in wide precision stay small however many there are.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_kernel.ops._head_pair import PairLoss
from liger_kernel.ops._logp_torch import wide
from liger_kernel.ops._op import compute_dtype

_ELEMENTS = 1 << 20  # logits in wide precision at a time
COSINE_EPS = 1e-8
_NONE = float("-inf")


def pair_rows_torch(
    loss: PairLoss, logits: Tensor, teacher: Tensor, index: Tensor | None, target: Tensor | None,
    scale: Tensor | None, out: Tensor | None, *, V: int, saved: tuple[Tensor, Tensor, Tensor] | None = None,
    stage: str = "whole", slice_: bool = False,
) -> Tensor:  # fmt: skip
    """See `_head_pair.pair_rows`, for the head's own buffers; the stages only of a slice.

    Memory:
        About eight copies of 2^20 logits in wide precision, or of one row if that is longer.
    """

    def soft(x: Tensor, some: slice) -> tuple[Tensor, Tensor]:
        y = teacher[some] if index is None else teacher[index[some]]
        if saved is None:
            return _soft(loss, F.pad(x, (0, y.shape[1] - V)), y)
        return _of_slice(loss, x, y, saved, some, stage)

    log_h = None if saved is None else (loss.temperature * saved[0][0], saved[0][2])
    return _by_rows(loss, soft, logits, target, scale, out, V, teacher.shape[1], V + slice_, log_h)


def top_k_rows_torch(
    loss: PairLoss, logits: Tensor, ids: Tensor, log_probs: Tensor, index: Tensor | None, target: Tensor | None,
    scale: Tensor | None, out: Tensor | None, *, V: int,
) -> Tensor:  # fmt: skip
    """See `_head_top_k.top_k_rows`; memory as `pair_rows_torch`."""

    def soft(x: Tensor, some: slice) -> tuple[Tensor, Tensor]:
        at = some if index is None else index[some]
        return _top_k(loss, x, ids[at].long(), log_probs[at].to(x.dtype))

    return _by_rows(loss, soft, logits, target, scale, out, V, V, V)


def _by_rows(loss, soft, logits, target, scale, out, V, width, classes, log_h=None):  # type: ignore[no-untyped-def]
    """Both losses of all rows, a few at a time; soft(x, rows) -> the soft loss and its derivative by x. Labels lie
    below `classes`. log_h: base and log-sum-exp over it of the logits of the hard loss, if not of these columns.
    """
    n, dtype = logits.shape[0], compute_dtype(logits)
    stats = torch.zeros(2, n, dtype=dtype, device=logits.device)
    pre, cap, post = loss.student_transform
    step = max(_ELEMENTS // max(width, 1), 1)
    for start in range(0, n, step):
        some = slice(start, start + step)
        x, slope = wide(logits[some, :V], pre, cap, post / loss.temperature)
        blank = _blank(loss, None if target is None else target[some], classes, dtype)
        stats[0, some], d = soft(x, some)
        d = loss.soft * d[:, :V]
        if loss.want_hard and target is not None:
            y = target[some].long()
            c, here = y.clamp(0, V - 1)[:, None], (y < V).to(x.dtype)
            z = x * loss.temperature
            known = None if log_h is None else [part[some, None] for part in log_h]
            log_p = z.log_softmax(-1) if known is None else z - known[0] - known[1]
            stats[1, some] = -log_p.gather(-1, c)[:, 0]
            h = log_p.exp()
            h.scatter_add_(-1, c, -here[:, None])
            d = d + (loss.hard * loss.temperature) * h
        d = d * slope if scale is None else d * slope * scale
        if blank is not None:
            stats[:, some] = torch.where(blank == 1, stats[:, some], blank)
            d = torch.where((blank == 1)[:, None], d, blank[:, None])
        if out is not None:
            out[some, :V] = d.to(out.dtype)
    return stats


def _blank(loss: PairLoss, target: Tensor | None, V: int, dtype: torch.dtype) -> Tensor | None:
    """Per row 1, or what stands in its place: 0 on ignored rows, NaN where a label is none."""
    if target is None:
        return None
    bad = ((target < 0) | (target >= V)) & loss.want_hard
    kept = torch.where(bad, float("nan"), torch.ones((), dtype=dtype, device=target.device))
    return torch.where(target == loss.ignore_index, 0.0, kept)


def _soft(loss: PairLoss, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    y = y.to(x.dtype)
    if loss.teacher == "logits":
        pre, cap, post = loss.teacher_transform
        y, _ = wide(y, pre, cap, post / loss.temperature)
    if loss.form == "cosine":
        return _cosine(x, y, loss.parameter)
    if loss.teacher == "probs":
        p, log_p = y, y.clamp(min=loss.parameter).log()
    else:
        log_p = y.log_softmax(-1) if loss.teacher == "logits" else y
        p = log_p.exp()
    log_q = x.log_softmax(-1)
    value, g = elements(log_q, log_p, p, loss.form, loss.parameter)
    return value.sum(-1), g - log_q.exp() * g.sum(-1, keepdim=True)


def _of_slice(
    loss: PairLoss, x: Tensor, y: Tensor, saved: tuple[Tensor, Tensor, Tensor], some: slice, stage: str
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The part of some columns, by the statistics of all; at stage "sums" G is left in `saved`."""
    (top, log_total, _), (y_top, y_total), sum_g = saved
    y = y.to(x.dtype)
    if loss.teacher == "logits":
        pre, cap, post = loss.teacher_transform
        y, _ = wide(y, pre, cap, post / loss.temperature)
    log_q = x - top[some, None] - log_total[some, None]
    if loss.teacher == "probs":
        p, log_p = y, y.clamp(min=loss.parameter).log()
    else:
        log_p = y - y_top[some, None] - y_total[some, None]
        p = log_p.exp()
    value, g = elements(log_q, log_p, p, loss.form, loss.parameter)
    if stage == "sums":
        sum_g[some] = g.sum(-1)
    return value.sum(-1), g - log_q.exp() * sum_g[some, None]


def _top_k(loss: PairLoss, x: Tensor, ids: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
    V = x.shape[1]
    used = (ids >= 0) & (ids < V)
    spare = torch.where(used, ids, V)  # unused slots write to a column that is cut off
    log_p = log_p.where(used, _NONE)
    every = x.log_softmax(-1)
    log_q = F.pad(every, (0, 1), value=_NONE).gather(-1, spare)
    others = F.pad(every, (0, 1)).scatter(-1, spare, _NONE)[:, :V]
    q_rest = others.logsumexp(-1, keepdim=True)
    p_rest = (1.0 - log_p.exp().sum(-1, keepdim=True)).clamp(min=0.0)
    log_q, log_p = torch.cat([log_q, q_rest], -1), torch.cat([log_p, p_rest.log()], -1)
    value, g = elements(log_q, log_p, log_p.exp(), loss.form, loss.parameter)
    value = value.sum(-1) + torch.where((ids >= V).any(-1), float("nan"), 0.0)
    share = torch.where(q_rest == _NONE, 0.0, (others - q_rest).exp())
    d = share * g[:, -1:] - every.exp() * g.sum(-1, keepdim=True)
    return value, F.pad(d, (0, 1)).scatter_add(-1, spare, g[:, :-1])[:, :V]


def elements(x: Tensor, y: Tensor, p: Tensor, form: str, beta: float) -> tuple[Tensor, Tensor]:
    """Loss and derivative by log Q, entry by entry, of log Q, log P and P."""
    q = x.exp()
    if form == "kl":
        return torch.where(p == 0, 0.0, p * (y - x)), -p
    if form == "reverse_kl":
        absent = y == _NONE
        gap = torch.where(absent | (q == 0), 0.0, q * (x - y))
        return torch.where(absent & (q > 0), float("inf"), gap), torch.where(absent, 0.0, gap + q)
    if form == "jsd":
        log_m = torch.logaddexp(y + math.log(beta), x + math.log1p(-beta))
        student = torch.where(q == 0, 0.0, (1.0 - beta) * q * (x - log_m))
        return torch.where(p == 0, 0.0, beta * p * (y - log_m)) + student, student
    gap = q - p
    return 0.5 * gap.abs(), 0.5 * q * gap.sign()


def _cosine(x: Tensor, y: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    some = (x != _NONE) & (y != _NONE)
    x, y = x.where(some, 0.0), y.where(some, 0.0)
    length, other = (v.norm(dim=-1, keepdim=True).clamp(min=COSINE_EPS) for v in (x, y))
    cos = (x * y).sum(-1, keepdim=True) / (length * other)
    own = torch.where(length > COSINE_EPS, cos / length.square(), 0.0)
    return beta * (1.0 - cos[:, 0]), beta * (own * x - y / (length * other))
