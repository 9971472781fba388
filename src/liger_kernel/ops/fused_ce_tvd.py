"""Cross entropy and total variation distance of given logits, each row's apart, in one kernel.

    p = softmax(x)     q = softmax(y)     ce = -log p_target     tvd = sum_v |p - q| / 2
    x, y: post_scale * softcap(pre_scale * logits) of the student and of the teacher, both [*, V]; target: [*]
    ce, tvd: [*] fp32

Rows         whose target is ignore_index: 0 in both, no gradient.
Gradient     ce: p - [target]    tvd: p (s - sum p s) / 2,  s = sign(p - q)    to student_logits, in new memory.
             Made in backward from the gradients of either vector: any weighting of the two stays open.
Memory       Forward reads both twice, the second time backwards, mostly from L2; keeps five numbers a row. Backward
             reads both once and writes the gradient. Entries of -inf are classes without probability.
Kernel       `_head_pair_kernels`, without Triton the reference.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_kernel.ops._head_pair import PairLoss, Transform, pair_rows
from liger_kernel.ops._labels import check_labels
from liger_kernel.ops._op import Cost, Op, compute_dtype, dense, first_order, named, require, rows

Vectors = tuple[Tensor, Tensor]

# 1 reference


def reference(
    student_logits: Tensor, teacher_logits: Tensor, target: Tensor, ignore_index: int = -100,
    transforms: tuple[Transform, Transform] = ((1.0, None, 1.0), (1.0, None, 1.0)),
) -> Vectors:  # fmt: skip
    """The definition."""
    log_p = _transformed(student_logits, transforms[0]).log_softmax(-1)
    q = _transformed(teacher_logits.detach(), transforms[1]).softmax(-1)
    tvd = 0.5 * (log_p.exp() - q).abs().sum(-1)
    flat = F.nll_loss(
        log_p.reshape(-1, log_p.shape[-1]), target.reshape(-1).long(), ignore_index=ignore_index, reduction="none"
    )  # fmt: skip
    return flat.view(tvd.shape), tvd.where((target != ignore_index).view(tvd.shape), 0.0)


def _transformed(z: Tensor, of: Transform) -> Tensor:
    pre, cap, post = of
    x = pre * z.to(compute_dtype(z))
    return post * (cap * torch.tanh(x / cap) if cap else x)


# 2 launch


def _loss(ignore_index: int, transforms: list[float]) -> PairLoss:
    (pre, cap, post), (t_pre, t_cap, t_post) = transforms[:3], transforms[3:]
    student, teacher = (pre, cap or None, post), (t_pre, t_cap or None, t_post)
    return PairLoss("tvd", "logits", 0.0, 1.0, 1.0, 1.0, True, ignore_index, student, teacher)


def _fake_forward(student, teacher, target, *_):
    n, new = student.shape[0], student.new_empty
    return tuple(new(shape, dtype=torch.float32) for shape in (n, n, (2, n), (2, n), n))


@named(
    "(Tensor student, Tensor teacher, Tensor target, int ignore_index, float[] transforms)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_forward,
)
def ce_tvd_forward(
    student: Tensor, teacher: Tensor, target: Tensor, ignore_index: int, transforms: list[float]
) -> tuple[Tensor, ...]:
    """-> ce, tvd, and for backward: maximum and log-sum-exp over it of either row, `[2, R]`, and sum p s / 2, `[R]`."""
    n, new = student.shape[0], student.new_empty
    x, y = (new(2, n, dtype=torch.float32) for _ in range(2))
    saved = (x, y, new(n, dtype=torch.float32))
    loss = _loss(ignore_index, transforms)
    tvd, ce = pair_rows(
        loss, student, teacher, None, target, None, None, V=student.shape[1], own=False, saved=saved
    )  # fmt: skip
    return ce.clone(), tvd.clone(), *saved


def _fake_backward(grad_ce, grad_tvd, student, *_):
    return student.new_empty(student.shape)


@named(
    "(Tensor grad_ce, Tensor grad_tvd, Tensor student, Tensor teacher, Tensor target, Tensor student_lse,"
    " Tensor teacher_lse, Tensor sigma, int ignore_index, float[] transforms) -> Tensor",
    _fake_backward,
)
def ce_tvd_backward(
    grad_ce: Tensor, grad_tvd: Tensor, student: Tensor, teacher: Tensor, target: Tensor, student_lse: Tensor,
    teacher_lse: Tensor, sigma: Tensor, ignore_index: int, transforms: list[float],
) -> Tensor:  # fmt: skip
    """-> the gradient of the student's logits, contiguous."""
    out = torch.empty(student.shape, dtype=student.dtype, device=student.device)
    pair_rows(
        _loss(ignore_index, transforms), student, teacher, None, target, None, out, V=student.shape[1], own=False,
        upstream=(grad_tvd, grad_ce), saved=(student_lse, teacher_lse, sigma), stage="gradient",
    )  # fmt: skip
    return out


# 3 op


class _CETVD(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, student: Tensor, teacher: Tensor, target: Tensor, ignore_index: int, transforms: list[float]
    ) -> Vectors:  # fmt: skip
        ce, tvd, *saved = ce_tvd_forward(student, teacher, target, ignore_index, transforms)
        ctx.save_for_backward(student, teacher, target, *saved)
        ctx.call = ignore_index, transforms
        return ce, tvd

    @staticmethod
    @first_order("fused_ce_tvd")
    def backward(ctx: Any, grad_ce: Tensor, grad_tvd: Tensor) -> Any:
        grad = ce_tvd_backward(grad_ce, grad_tvd, *ctx.saved_tensors, *ctx.call)
        return grad, None, None, None, None


def _function(
    student: Tensor, teacher: Tensor, target: Tensor, ignore_index: int, transforms: tuple[Transform, Transform]
) -> Vectors:  # fmt: skip
    flat = [number or 0.0 for of in transforms for number in of]
    shape, labels = student.shape[:-1], dense(target.reshape(-1))
    ce, tvd = _CETVD.apply(rows(student), rows(teacher.detach()), labels, ignore_index, flat)
    return ce.view(shape), tvd.view(shape)


def supports(student: Tensor, *_: Any) -> str | None:
    """Every layout and every width that 32 bits can count; dtypes and devices are judged by `Op`."""
    return "more than 2^30 columns" if student.shape[-1] > 1 << 30 else None


def cost(student: Tensor, teacher: Tensor, *_: Any) -> Cost:
    """Both in; both in and the gradient out. A second read of forward is L2's."""
    both = sum(t.numel() * t.element_size() for t in (student, teacher))
    n = student.numel() // max(student.shape[-1], 1)
    return Cost(both, both + student.numel() * student.element_size(), saved=20 * n)


OP = Op("fused_ce_tvd", reference, reference, _function, supports, cost)

# 4 public


def fused_ce_tvd(
    student_logits: Tensor, teacher_logits: Tensor, target: Tensor, ignore_index: int = -100, *,
    softcap: float | None = None, pre_scale: float = 1.0, post_scale: float = 1.0,
    teacher_softcap: float | None = None, teacher_pre_scale: float = 1.0, teacher_post_scale: float = 1.0,
    impl: str | None = None,
) -> Vectors:  # fmt: skip
    """Cross entropy and total variation distance, row by row (formulas: top of this file).

    Args:
        student_logits: `[*, V]`, any strides; fp16, bf16, fp32 (fp64 on the torch path). teacher_logits: `[*, V]`.
        target: `[*]` class indices, int64 or int32; `ignore_index` where there is none.
        softcap, pre_scale, post_scale, teacher_softcap, teacher_pre_scale, teacher_post_scale: transforms of raw
            logits.
        impl: "triton" or "torch" for this call, None for the default choice.
    Returns:
        ce, tvd: `[*]` fp32, differentiable in student_logits. For a loss that makes its logits itself see
        `linear_distillation`.
    Memory:
        Five numbers a row until backward, beside the inputs. Nothing is overwritten.
    Raises:
        ValueError: shapes that differ, operands that are not floats, targets that do not fit, transforms out of range.
        IndexError: on a CPU, a target that is neither a class nor `ignore_index`; elsewhere that row becomes NaN.
    """
    name, shape = OP.name, list(student_logits.shape)
    require(
        student_logits.shape == teacher_logits.shape and student_logits.dim() >= 1 and shape[-1] > 0,
        f"{name}: student_logits and teacher_logits must have the same shape [*, V]; got {shape} and "
        f"{list(teacher_logits.shape)}.",
    )  # fmt: skip
    require(
        student_logits.is_floating_point() and teacher_logits.is_floating_point(),
        f"{name}: logits must be floating-point; got {student_logits.dtype} and {teacher_logits.dtype}.",
    )
    require(
        target.numel() == student_logits.shape[:-1].numel(),
        f"{name}: target must hold one label for each row of logits {shape}; got {list(target.shape)}.",
    )
    check_labels(name, target, shape[-1], ignore_index)
    given = (
        (pre_scale, softcap, post_scale),
        (teacher_pre_scale, teacher_softcap, teacher_post_scale),
    )
    for pre, cap, post in given:
        require(
            math.isfinite(pre) and math.isfinite(post) and (cap is None or cap > 0),
            f"{name}: scales must be finite and a softcap positive or None; got {pre}, {cap}, {post}.",
        )
    return OP(student_logits, teacher_logits, target, ignore_index, given, impl=impl)


class LigerFusedCETVDFunction:
    """The op under the name and argument order of the contract."""

    @staticmethod
    def apply(
        student_logits: Tensor, teacher_logits: Tensor, target: Tensor, ignore_index: int = -100
    ) -> Vectors:
        """-> ce, tvd."""
        return fused_ce_tvd(student_logits, teacher_logits, target, ignore_index)


_PLAIN = [1.0, 0.0, 1.0] * 2


def fused_ce_tvd_forward(
    student_logits: Tensor, teacher_logits: Tensor, target: Tensor, ignore_index: int
) -> tuple[Tensor, ...]:
    """-> ce, tvd, student_lse, teacher_lse, sigma of `[R, V]` logits, without autograd; the last three are for
    `fused_ce_tvd_backward`: maximum and log-sum-exp over it `[2, R]`, so that large logits keep their digits, and
    sum p s / 2.
    """
    student, teacher = rows(student_logits.detach()), rows(teacher_logits.detach())
    if OP.why_not(student, teacher, target) is None:
        return ce_tvd_forward(student, teacher, target, ignore_index, _PLAIN)
    ce, tvd = reference(student, teacher, target, ignore_index)
    (x, lse), (y, t_lse) = _lse(student), _lse(teacher)
    p, q = ((z - e[0][:, None] - e[1][:, None]).exp() for z, e in ((x, lse), (y, t_lse)))
    return ce, tvd, lse, t_lse, 0.5 * (p * (p - q).sign()).sum(-1)


def _lse(z: Tensor) -> tuple[Tensor, Tensor]:
    x = z.to(compute_dtype(z))
    top = x.amax(-1)
    return x, torch.stack([top, (x - top[:, None]).logsumexp(-1)])


def fused_ce_tvd_backward(
    grad_ce: Tensor, grad_tvd: Tensor, student_logits: Tensor, teacher_logits: Tensor, target: Tensor,
    student_lse: Tensor, teacher_lse: Tensor, sigma: Tensor, ignore_index: int,
) -> Tensor:  # fmt: skip
    """-> the gradient of student_logits from what `fused_ce_tvd_forward` returned."""
    student, teacher = rows(student_logits.detach()), rows(teacher_logits.detach())
    saved = (student_lse, teacher_lse, sigma)
    if OP.why_not(student, teacher, target) is None:
        return ce_tvd_backward(
            grad_ce, grad_tvd, student, teacher, target, *saved, ignore_index, _PLAIN
        )
    leaf = student.requires_grad_()
    with torch.enable_grad():
        both = reference(leaf, teacher, target, ignore_index)
    return torch.autograd.grad(both, leaf, (grad_ce, grad_tvd))[0]
