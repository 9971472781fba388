"""Distillation on a linear head: a divergence from a teacher and cross entropy, without the logits.

    z = post_scale * softcap(pre_scale * (h W^T + b))        the student's logits; h: [N, H]   W: [V, H]   b: [V]
    Q = softmax(z / temperature)     P = softmax(w / temperature)    w: a teacher's, with its own head and transforms

    loss = weight_soft * soft + weight_hard * hard           hard = cross entropy of z and the targets
    soft = kl          sum_v P (log P - log Q)
           reverse_kl  sum_v Q (log Q - log P)
           jsd         beta KL(P || M) + (1 - beta) KL(Q || M),    M = beta P + (1 - beta) Q
           tvd         sum_v |P - Q| / 2
           cosine      beta (1 - cos(z, w))                  both of them means over the tokens that count, or sums

Teacher   A head (hidden states, weight, bias, transforms), run chunk by chunk beside the student's; or stored
          log-probabilities `[N, V]`; or the K most likely of them `[N, K]` with their ids, all other classes then being
          one, whose mass is what is left (offline distillation). What is stored is taken as it is: at this temperature.
          A teacher with more classes than the student meets student logits of 0 there, in the soft loss alone.
          No gradient flows to a teacher.
Zeros     Probability 0 on either or both sides, entries of -inf and any gap stay numbers. kl and reverse_kl are
          infinite where the distribution they are measured against has probability 0, as by definition; reverse_kl
          then has the gradient of its other terms.
Memory    Between forward and backward: dh, dW, db and the inputs. During a pass: a chunk of logits of either head
          within `memory_budget` together (`ops.head.pair`). Four products, three for a stored teacher; the kernel reads
          both rows twice (jsd, reverse_kl and tvd three times, mostly from L2) and writes one.
Papers    Hinton et al., arXiv 1503.02531; Agarwal et al., arXiv 2306.13649 (jsd, reverse_kl).
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_kernel.ops._head_pair import FORMS, PairLoss
from liger_kernel.ops._op import choice, compute_dtype, require
from liger_kernel.ops.head.module import takes_module
from liger_kernel.ops.head.pair import (
    PairOptions,
    check_teacher,
    pair_form,
    pair_loss,
    pair_op,
    teacher_here,
)
from liger_kernel.ops.head.params import HeadParams, check_head
from liger_kernel.ops.head.plan import resolve_budget
from liger_kernel.ops.head.shard import local_head
from liger_kernel.ops.jsd import _elements as jsd_elements

_NONE = float("-inf")


@dataclass
class DistillationOutput:
    """What `linear_distillation` returns; only loss is differentiable.

    loss          0-dim
    soft, hard    0-dim, the two parts without their weights; hard is 0 where it was not computed
    count         0-dim, how many tokens count
    """

    loss: Tensor
    soft: Tensor
    hard: Tensor
    count: Tensor


# 1 reference


def logits_of(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, pre_scale: float = 1.0, softcap: float | None = None,
    post_scale: float = 1.0,
) -> Tensor:  # fmt: skip
    """The definition: the product in the inputs' dtype, its transforms in fp32."""
    z = F.linear(hidden, weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype))
    x = pre_scale * z.to(compute_dtype(z))
    return post_scale * (x if softcap is None else softcap * torch.tanh(x / softcap))


def divergence(log_q: Tensor, log_p: Tensor, kind: str, beta: float) -> Tensor:
    """Of given log-probabilities `[*, V]`: `[*]`. An infinite value has the gradient of the finite terms."""
    if kind == "tvd":
        return 0.5 * (log_q.exp() - log_p.exp()).abs().sum(-1)
    if kind != "reverse_kl":
        return jsd_elements(log_q, log_p, 0.0 if kind == "kl" else beta).sum(-1)
    absent = log_p == _NONE
    infinite = (absent & (log_q.exp() > 0)).any(-1)
    finite = jsd_elements(log_q.masked_fill(absent, _NONE), log_p, 1.0).sum(-1)
    return finite + torch.where(infinite, float("inf"), 0.0)


def cosine(x: Tensor, y: Tensor, beta: float) -> Tensor:
    """Of logits `[*, V]`, entries of -inf left out: `[*]`."""
    some = (x != _NONE) & (y != _NONE)
    return beta * (1.0 - F.cosine_similarity(x.where(some, 0.0), y.where(some, 0.0), dim=-1))


def with_rest(log_p: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities `[*, V]` as those of the ids `[*, K]` and of all others as one class: `[*, K + 1]`, and the
    mask of the slots in use.
    """
    used = ids >= 0
    at = torch.where(used, ids, log_p.shape[-1])
    some = F.pad(log_p, (0, 1), value=_NONE).gather(-1, at)
    others = F.pad(log_p, (0, 1)).scatter(-1, at, _NONE)[..., :-1]
    return torch.cat([some, others.logsumexp(-1, keepdim=True)], -1), used


def reference(
    hidden: Tensor, weight: Tensor, targets: Tensor | None = None, *, teacher_hidden: Tensor | None = None,
    teacher_weight: Tensor | None = None, teacher_bias: Tensor | None = None, teacher_log_probs: Tensor | None = None,
    teacher_ids: Tensor | None = None, kind: str = "kl", beta: float | None = None, weight_soft: float = 1.0,
    weight_hard: float = 0.0, temperature: float = 1.0, bias: Tensor | None = None, softcap: float | None = None,
    pre_scale: float = 1.0, post_scale: float = 1.0, teacher_softcap: float | None = None,
    teacher_pre_scale: float = 1.0, teacher_post_scale: float = 1.0, ignore_index: int = -100,
    reduction: str = "mean", **_: Any,
) -> DistillationOutput:  # fmt: skip
    """The definition."""
    beta = 0.5 if beta is None else beta
    x = logits_of(hidden, weight, bias, pre_scale, softcap, post_scale)
    soft_x = x / temperature
    if teacher_hidden is not None and teacher_weight is not None:
        y = logits_of(
            teacher_hidden, teacher_weight, teacher_bias, teacher_pre_scale, teacher_softcap, teacher_post_scale
        ).detach()  # fmt: skip
        soft_x, y = F.pad(soft_x, (0, y.shape[-1] - x.shape[-1])), y / temperature
        log_p = y.log_softmax(-1)
    else:
        assert teacher_log_probs is not None
        y = log_p = teacher_log_probs.detach().to(x.dtype)
    if kind == "cosine":
        soft = cosine(soft_x, y, beta)
    elif teacher_ids is None:
        soft = divergence(soft_x.log_softmax(-1), log_p, kind, beta)
    else:
        log_q, used = with_rest(soft_x.log_softmax(-1), teacher_ids)
        log_p = log_p.where(used, _NONE)
        rest = (1.0 - log_p.exp().sum(-1, keepdim=True)).clamp(min=0.0).log()
        soft = divergence(log_q, torch.cat([log_p, rest], -1), kind, beta)
    hard = torch.zeros_like(soft)
    counted = torch.ones_like(soft, dtype=torch.bool)
    if targets is not None:
        counted = targets != ignore_index
        if weight_hard:
            classes = targets.long().where(counted, 0)[..., None]
            hard = -x.log_softmax(-1).gather(-1, classes)[..., 0].where(counted, 0.0)
    count = counted.sum().to(x.dtype)
    scale = 1.0 / count.clamp(min=1) if reduction == "mean" else 1.0
    soft, hard = soft.where(counted, 0.0).sum() * scale, hard.sum() * scale
    loss = x.new_zeros(())
    if weight_soft:
        loss = loss + weight_soft * soft
    if weight_hard:
        loss = loss + weight_hard * hard
    return DistillationOutput(loss, soft.detach(), hard.detach(), count)


# 2 op (launch: `ops.head.pair`)

OP = pair_op("linear_distillation", reference)

# 3 public


@takes_module("hidden")
@takes_module("teacher_hidden", "teacher_weight", "teacher_bias", "teacher_low_rank", constant=True)
def linear_distillation(
    hidden: Tensor, weight: Any, targets: Tensor | None = None, *, teacher_hidden: Tensor | None = None,
    teacher_weight: Any = None, teacher_bias: Tensor | None = None, teacher_log_probs: Tensor | None = None,
    teacher_ids: Tensor | None = None, kind: str = "kl", beta: float | None = None, weight_soft: float = 1.0,
    weight_hard: float = 0.0, temperature: float = 1.0, bias: Tensor | None = None, softcap: float | None = None,
    pre_scale: float = 1.0, post_scale: float = 1.0, teacher_softcap: float | None = None,
    teacher_pre_scale: float = 1.0, teacher_post_scale: float = 1.0, ignore_index: int = -100,
    reduction: str = "mean", return_hard: bool = False, accum_dtype: torch.dtype | None = None,
    memory_budget: int | float | str | None = None, num_valid: int | None = None, group: Any = None,
    logits_dtype: Any = None, impl: str | None = None, low_rank: tuple[Tensor, Tensor] | None = None,
    teacher_low_rank: tuple[Tensor, Tensor] | None = None,
) -> DistillationOutput:  # fmt: skip
    """Divergence from a teacher plus cross entropy, of a linear head's logits, which never exist as a whole.

    Args:
        hidden: the student's hidden states `[*, H]` of any strides; fp16, bf16, fp32 (fp64 on the torch path).
        weight: the student's head `[V, H]`, of any dtype, or as a module (LoRA and quantised layers too), see
            `ops.head.module`. A DTensor split along its rows, or with `group` this rank's slice, as in
            `linear_logprob`: hidden states, targets and stored log-probabilities are then whole, and the same on every
            rank. bias: `[V]` or None.
        targets: `[*]` class indices, `ignore_index` on tokens that do not count; None: every token counts. Without
            hard loss only the comparison with `ignore_index` matters.
        teacher_hidden, teacher_weight, teacher_bias: `[*, H']`, `[W, H']` with W >= V, `[W]`, or the head as a module;
            beside a slice of a student a slice, or whole. Or instead
        teacher_log_probs: `[*, V]`, or `[*, K]` with teacher_ids `[*, K]` int64 or int32, different in each row,
            negative in unused slots. Any float dtype.
        kind: "kl" (of the student from the teacher), "reverse_kl", "jsd", "tvd", "cosine" (needs the teacher's head).
        beta: jsd: the weight of the teacher, in [0, 1]; cosine: a factor; 0.5 by default; not for the others.
        weight_soft, weight_hard: of the divergence and of the cross entropy. There is no factor temperature^2.
        temperature: divides the logits of both in the divergence, not in the cross entropy.
        softcap, pre_scale, post_scale: transforms of the student's logits; teacher_softcap, teacher_pre_scale,
            teacher_post_scale: of those of the teacher's head.
        reduction: "mean" over the tokens that count, or "sum" (divide by a count of your own; `count` is this batch's).
        return_hard: compute the hard part even with weight 0.
        accum_dtype, memory_budget, num_valid, impl: as in `fused_linear_cross_entropy`.
        group: the torch.distributed group over which the vocabulary is split. Not with "cosine", teacher_ids, or a
            teacher of more classes.
        low_rank, teacher_low_rank: as in `linear_logprob`; the teacher's is constant.
        logits_dtype: how 16-bit chunks of logits are kept, of both heads: None or torch.float32, see
            `ops.head.logits`.
    Returns:
        DistillationOutput: loss, soft, hard, count, fp32. No token that counts: 0, with zero gradients. loss is
        differentiable in hidden, weight, bias and low_rank.
    Memory:
        See the module. Under autocast the products run in its dtype.
    Raises:
        ValueError: shapes that do not fit, an empty or flat (sharded) weight, no teacher or two, options out of range
            or without meaning for this kind or teacher.
        NotImplementedError: a sharded head with "cosine" or teacher_ids.
        IndexError: on a CPU, a class out of range; elsewhere that token becomes NaN.
    """
    name = OP.name
    kind, beta = _kind(name, kind, beta)
    choice(name, "reduction", reduction, ("mean", "sum"))
    require(
        targets is not None or not (weight_hard or return_hard),
        f"{name}: the hard loss needs targets; got weight_hard={weight_hard} and none.",
    )
    want_hard = bool(weight_hard) or return_hard
    weight, bias, shard = local_head(name, weight, bias, group, hidden.shape[:-1].numel())
    head = HeadParams(
        weight, bias, pre_scale, softcap, post_scale, temperature, shard, low_rank=low_rank
    )
    hidden = check_head(name, hidden, targets, head, ignore_index, want_hard)
    t_head = None
    if teacher_weight is not None:
        t_head = HeadParams(
            *teacher_here(name, teacher_weight, teacher_bias, shard, weight.shape[0]), teacher_pre_scale,
            teacher_softcap, teacher_post_scale, low_rank=teacher_low_rank,
        )  # fmt: skip
    plain = (
        teacher_bias is teacher_softcap is None and teacher_pre_scale == teacher_post_scale == 1.0
    )
    require(
        t_head is not None or plain,
        f"{name}: teacher_bias, teacher_softcap, teacher_pre_scale and teacher_post_scale belong to a teacher's head; "
        "stored log-probabilities are taken as they are.",
    )
    teacher = _check_teacher(
        name, hidden, head, teacher_hidden, t_head, (teacher_log_probs, teacher_ids), kind
    )
    stored = (None if teacher_log_probs is None else head.here(teacher_log_probs), teacher_ids)
    loss = PairLoss(
        kind, "log_probs" if t_head is None else "logits", beta, temperature, weight_soft, weight_hard, want_hard,
        ignore_index, (pre_scale, softcap, post_scale), (teacher_pre_scale, teacher_softcap, teacher_post_scale),
    )  # fmt: skip
    options = PairOptions(
        loss, int(reduction == "mean"), accum_dtype, resolve_budget(memory_budget, hidden.device), num_valid,
        pair_form(name, logits_dtype, hidden.dtype), shard,
    )  # fmt: skip
    total, parts, count = pair_loss(
        OP, hidden, head, targets, teacher, t_head, stored, options, impl
    )
    return DistillationOutput(total, parts[0], parts[1], count)


def _kind(op: str, kind: str, beta: float | None) -> tuple[str, float]:
    """The form that is computed and its parameter; ValueError for what has no meaning."""
    choice(op, "kind", kind, FORMS)
    require(
        beta is None or kind in ("jsd", "cosine"),
        f"{op}: beta belongs to kind 'jsd' and 'cosine'; got beta={beta} with {kind!r}.",
    )
    beta = 0.5 if beta is None else float(beta)
    if kind == "jsd":
        require(0.0 <= beta <= 1.0, f"{op}: beta must lie in [0, 1]; got {beta}.")
        kind = {0.0: "kl", 1.0: "reverse_kl"}.get(beta, kind)
    return kind, beta


def _check_teacher(
    op: str, hidden: Tensor, student: HeadParams, teacher_hidden: Tensor | None, head: HeadParams | None,
    stored: tuple[Tensor | None, Tensor | None], kind: str,
) -> Tensor | None:  # fmt: skip
    """ValueError unless there is exactly one whole teacher; -> its hidden states in autocast's dtype."""
    log_probs, ids = stored
    vocab = student.weight.shape[0]
    require(
        student.shard is None or (kind != "cosine" and ids is None),
        f"{op}: a sharded head takes neither 'cosine' nor teacher_ids; give whole heads.",
        NotImplementedError,
    )
    online = teacher_hidden is not None and head is not None
    require(
        online != (log_probs is not None) and (teacher_hidden is None) == (head is None),
        f"{op}: the teacher is either teacher_hidden with teacher_weight or teacher_log_probs (with teacher_ids for "
        "the most likely classes alone); give one of them.",
    )
    require(
        ids is None or not online,
        f"{op}: teacher_ids belong to teacher_log_probs; the teacher has a head.",
    )
    if teacher_hidden is not None and head is not None:
        teacher = check_teacher(op, teacher_hidden, hidden, head)
        width = head.weight.shape[0]
        require(
            width >= vocab,
            f"{op}: the teacher has {width} classes, fewer than the student's {vocab}: pad its head (a bias of -inf in "
            "the new classes), or cut the student's.",
        )
        return teacher
    assert log_probs is not None
    require(kind != "cosine", f"{op}: 'cosine' compares logits; it needs the teacher's head.")
    want, vocab = hidden.shape[:-1].numel(), student.vocab
    shape = list(log_probs.shape)
    require(
        log_probs.is_floating_point() and log_probs.dim() >= 2 and log_probs.shape[:-1].numel() == want
        and (log_probs.shape[-1] == vocab if ids is None else log_probs.shape == ids.shape and shape[-1] > 0),
        f"{op}: teacher_log_probs must hold {want} rows of {vocab} classes, or of K with teacher_ids of the same "
        f"shape; got {shape} and ids {None if ids is None else list(ids.shape)}.",
    )  # fmt: skip
    require(
        ids is None or ids.dtype in (torch.int64, torch.int32),
        f"{op}: teacher_ids must be int64 or int32; got {None if ids is None else ids.dtype}.",
    )
    return None
