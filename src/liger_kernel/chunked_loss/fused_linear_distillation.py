"""The base class of distillation losses: bring a formula, get the engine.

    loss = weight_hard * hard / n + weight_soft * soft / n       n: tokens that count, at least 1
    hard = sum of the cross entropies of the student's logits    soft = formula(student logits / T, teacher logits / T)

The formulas of this package (JSD, cosine) have a kernel: `liger_kernel.ops.linear_distillation`. Any other is called on
chunks of real logits within the memory budget and differentiated by autograd there; the student's head and hidden
states still get their gradients from two plain products in the forward pass, and nothing of N x V is kept.
Under torch.compile such a formula breaks the graph.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_kernel.chunked_loss.preference import check_chunk_size
from liger_kernel.ops._op import choice, compute_dtype, first_order, is_dtensor, require
from liger_kernel.ops._scale import scale_
from liger_kernel.ops.head.engine import Wanted, run
from liger_kernel.ops.head.module import takes_module
from liger_kernel.ops.head.pair import Teacher, check_teacher, constant, pair_form
from liger_kernel.ops.head.params import HeadParams, check_head
from liger_kernel.ops.head.plan import resolve_budget

# (student logits, teacher logits, target=, ignore_index=, **loss_kwargs) -> sum over the tokens
Formula = Callable[..., Tensor]


@dataclass(frozen=True)
class DistillationOptions:
    """What the classes of this package take by keyword beyond their contract, as `linear_distillation` has it.

    softcap, pre_scale, post_scale: transforms of the student's logits; teacher_...: of the teacher's.
    reduction: "mean" or "sum". return_count: return also how many tokens count, last.
    accum_dtype, memory_budget, num_valid, impl: as in `fused_linear_cross_entropy`. logits_dtype: None or
        torch.float32, how 16-bit chunks of both logits are kept.
    group: the torch.distributed group over which the vocabulary is split; not for a formula of one's own.
    """

    softcap: float | None = None
    pre_scale: float = 1.0
    post_scale: float = 1.0
    teacher_softcap: float | None = None
    teacher_pre_scale: float = 1.0
    teacher_post_scale: float = 1.0
    reduction: str = "mean"
    return_count: bool = False
    accum_dtype: torch.dtype | None = None
    memory_budget: int | float | str | None = None
    num_valid: int | None = None
    logits_dtype: Any = None
    impl: str | None = None
    group: Any = None

    def __post_init__(self) -> None:
        choice("distillation", "reduction", self.reduction, ("mean", "sum"))

    def of_op(self) -> dict[str, Any]:
        """The keywords of `linear_distillation`."""
        names = [f.name for f in fields(self) if f.name != "return_count"]
        return {name: getattr(self, name) for name in names}


def results(
    loss: Tensor, soft: Tensor, hard: Tensor, count: Tensor, parts: bool, counted: bool
) -> Any:
    """What the classes return: `loss[, soft, hard][, count]`."""
    found = (loss, *((soft, hard) if parts else ()), *((count,) if counted else ()))
    return found if len(found) > 1 else loss


class DistillationLoss(nn.Module):
    """What the distillation losses share as layers.

    Args:
        weight_hard_loss, weight_soft_loss: of the cross entropy and of the loss against the teacher.
        beta: of the loss against the teacher.
        ignore_index: the label of tokens that do not count.
        temperature: divides the logits of both in the loss against the teacher.
        compiled, chunk_size: accepted; chunks follow from memory_budget, and nothing needs compiling.
        return_soft_hard_loss: return (loss, soft, hard); the parts are without their weights and not differentiable.
        options: fields of `DistillationOptions` by keyword (softcap, teacher_softcap, reduction, return_count, ...).
    Raises:
        ValueError: an option out of its range.
    """

    def __init__(
        self, weight_hard_loss: float = 0.5, weight_soft_loss: float = 0.5, beta: float = 0.5,
        ignore_index: int = -100, temperature: float = 1.0, compiled: bool = True, chunk_size: int = 1024,
        return_soft_hard_loss: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        name = type(self).__name__
        check_chunk_size(name, chunk_size)
        require(temperature > 0, f"{name}: temperature must be positive; got {temperature}.")
        self.check(beta)
        DistillationOptions(**options)  # raises now for what would be wrong later
        self.weight_hard_loss = weight_hard_loss
        self.weight_soft_loss = weight_soft_loss
        self.beta = beta
        self.ignore_index = ignore_index
        self.temperature = temperature
        self.compiled = compiled
        self.chunk_size = chunk_size
        self.return_soft_hard_loss = return_soft_hard_loss
        self.options = options

    def check(self, beta: float) -> None:
        """ValueError if beta has no meaning for the loss."""

    def arguments(self) -> tuple[Any, ...]:
        """What follows the tensors in the `apply` of the loss's Function."""
        return (
            self.weight_hard_loss, self.weight_soft_loss, self.beta, self.ignore_index, self.temperature,
            self.compiled, self.chunk_size, self.return_soft_hard_loss,
        )  # fmt: skip


class LigerFusedLinearDistillationBase:
    """A distillation loss. Subclass it, define `distillation_loss_fn`, call `apply`.

        class MSE(LigerFusedLinearDistillationBase):
            @staticmethod
            def distillation_loss_fn(student_logits, teacher_logits, target=None, ignore_index=None, beta=0.5):
                return (student_logits - teacher_logits).square().mean(-1).sum()

        loss = MSE.apply(hidden, weight, teacher_hidden, teacher_weight, labels)

    Autograd is the engine's: there is no backward to write. A subclass may give `apply` other arguments by overriding
    `forward` as a classmethod `forward(cls, ctx, ...)` that ends in `super().forward(cls=cls, ctx=ctx, ...)`.
    """

    @staticmethod
    def distillation_loss_fn(*args: Any, **kwargs: Any) -> Tensor:
        """(student_logits, teacher_logits, target=..., ignore_index=..., beta=..., **loss_kwargs) -> the sum.

        Gets a chunk of the tokens that count, ignored ones are dropped before: fp32 logits `[C, W]`, transformed and
        divided by the temperature, the student's filled up with 0 to the teacher's classes; target `[C]`. It must be a
        sum over tokens.
        """
        raise NotImplementedError("A distillation loss must define distillation_loss_fn.")

    @staticmethod
    def forward(
        cls: Any,  # pyright: ignore[reportSelfClsParameterName]
        ctx: Any, student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor,
        target: Tensor, student_bias: Tensor | None = None, teacher_bias: Tensor | None = None,
        chunk_size: int = 1024, ignore_index: int = -100, weight_hard_loss: float = 0.5,
        weight_soft_loss: float = 0.5, beta: float = 0.5, compute_ce_loss: bool = True, temperature: float = 1.0,
        compiled: bool = True, return_soft_hard_loss: bool = False, head: DistillationOptions | None = None,
        **loss_kwargs: Any,
    ) -> Any:  # fmt: skip
        """The loss of `[*, H]` hidden states.

        Args:
            cls: the class whose `distillation_loss_fn` is the formula. ctx: unused.
            student_input: `[*, H]`. student_weight: `[V, H]`. teacher_input: `[*, H']`.
            teacher_weight: `[W, H']`, W >= V. Either head may be a module. target: `[*]` class indices.
            student_bias: `[V]`, teacher_bias: `[W]`, or None.
            chunk_size, compiled: accepted; chunks follow from head.memory_budget, and nothing needs compiling.
            compute_ce_loss: without it the hard loss is 0.
            return_soft_hard_loss: return also the two parts, without their weights; they are not differentiable.
            head: transforms of the logits, reduction, memory budget.
            beta, loss_kwargs: handed to `distillation_loss_fn`.
        Returns:
            loss or (loss, soft, hard), and the number of tokens last if head asks for it. fp32; the loss is
            differentiable in student_input, student_weight and student_bias.
        Raises:
            ValueError: shapes that do not fit, options out of range.
        """
        name, o = cls.__name__, head or DistillationOptions()
        check_chunk_size(name, chunk_size)
        hard = weight_hard_loss if compute_ce_loss else 0.0
        want_hard = compute_ce_loss and (hard != 0.0 or return_soft_hard_loss)
        formula = partial(
            cls.distillation_loss_fn, ignore_index=ignore_index, beta=beta, **loss_kwargs
        )
        weights = _Weights(weight_soft_loss, hard, want_hard)
        loss, parts, count = _of_formula(
            name, formula, student_input, student_weight, student_bias, teacher_input, teacher_weight, teacher_bias,
            target, ignore_index, temperature, weights, o,
        )  # fmt: skip
        return results(loss, parts[0], parts[1], count, return_soft_hard_loss, o.return_count)

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        """`forward` without cls and ctx, by position or keyword."""
        if cls.forward is LigerFusedLinearDistillationBase.forward:
            return cls.forward(cls, None, *args, **kwargs)
        return cls.forward(None, *args, **kwargs)


@dataclass(frozen=True)
class _Weights:
    """Of both losses, and whether the hard one is computed at all."""

    soft: float
    hard: float
    want_hard: bool


@takes_module("student_input", "student_weight", "student_bias", "student_low_rank")
@takes_module("teacher_input", "teacher_weight", "teacher_bias", "teacher_low_rank", constant=True)
def _of_formula(
    op: str, formula: Formula, student_input: Tensor, student_weight: Any, student_bias: Tensor | None,
    teacher_input: Tensor, teacher_weight: Any, teacher_bias: Tensor | None, target: Tensor, ignore_index: int,
    temperature: float, weights: _Weights, o: DistillationOptions,
    student_low_rank: tuple[Tensor, Tensor] | None = None, teacher_low_rank: tuple[Tensor, Tensor] | None = None,
) -> Any:  # fmt: skip
    """-> loss, `[2]` soft and hard, number of tokens."""
    split = o.group is not None or any(is_dtensor(w) for w in (student_weight, teacher_weight))
    require(
        not split,
        f"{op}: a formula on logits needs whole heads, not slices of a vocabulary.",
        NotImplementedError,
    )
    student = HeadParams(
        student_weight, student_bias, o.pre_scale, o.softcap, o.post_scale, temperature, low_rank=student_low_rank
    )  # fmt: skip
    hidden = check_head(op, student_input, target, student, ignore_index)
    student = replace(student, logits=pair_form(op, o.logits_dtype, hidden.dtype))
    teacher = HeadParams(
        teacher_weight, teacher_bias, o.teacher_pre_scale, o.teacher_softcap, o.teacher_post_scale,
        low_rank=teacher_low_rank,
    )  # fmt: skip
    t_hidden = check_teacher(op, teacher_input, hidden, teacher)
    require(
        teacher_weight.shape[0] >= student_weight.shape[0],
        f"{op}: the teacher has {teacher_weight.shape[0]} classes, fewer than the student's "
        f"{student_weight.shape[0]}.",
    )
    low_rank = None if teacher_low_rank is None else tuple(map(constant, teacher_low_rank))
    teacher = replace(
        teacher, weight=constant(teacher_weight), bias=constant(teacher_bias), low_rank=low_rank
    )
    call = _Call(
        formula, student, teacher, constant(t_hidden), target.reshape(-1), ignore_index, weights, o
    )
    leaves = (hidden, student_weight, student_bias, *(student_low_rank or (None, None)))
    return _Distillation.apply(*leaves, call, torch.is_grad_enabled())


@dataclass(frozen=True)
class _Call:
    """A call of a formula that has no kernel."""

    formula: Formula
    student: HeadParams
    teacher: HeadParams
    teacher_hidden: Tensor
    labels: Tensor
    ignore_index: int
    weights: _Weights
    options: DistillationOptions

    def losses(self, z: Tensor, teacher: Tensor, index: Tensor) -> Tensor:
        """Soft and hard sums of a chunk of both's raw logits, `[2]`, part of the student's graph."""
        s, t, labels = self.student, self.teacher, self.labels.index_select(0, index).long()
        x, y = _transformed(z, s), _transformed(teacher, t)
        padded = F.pad(x / s.temperature, (0, y.shape[-1] - x.shape[-1]))
        soft = self.formula(padded, y / s.temperature, target=labels)
        want_hard = self.weights.want_hard
        hard = F.cross_entropy(x, labels, reduction="sum") if want_hard else x.new_zeros(())
        return torch.stack([soft, hard])

    def run(self, hidden: Tensor, upstream: Tensor | None, wanted: Wanted) -> Any:
        """-> loss, `[2]` parts, count, gradients."""
        keep = (self.labels != self.ignore_index).nonzero().view(-1)
        count = torch.full((), keep.numel(), dtype=torch.float32, device=hidden.device)
        share = 1.0 / max(keep.numel(), 1) if self.options.reduction == "mean" else 1.0
        factors = (self.weights.soft, self.weights.hard)
        weights = torch.tensor(factors, device=hidden.device) * share
        o, s = self.options, self.student
        source = Teacher(self.teacher_hidden, self.teacher, None, None, s.logits, False)

        def per_row(
            logits: Tensor, start: int, stop: int, index: Tensor | None, out: Tensor | None
        ) -> Tensor:
            assert index is not None
            z = logits.detach().requires_grad_(out is not None)
            with torch.set_grad_enabled(out is not None):
                parts = self.losses(z, source.product(start, stop, index), index)
                if out is not None:
                    by = weights if upstream is None else weights * upstream
                    out.copy_(torch.autograd.grad(parts, z, by.to(parts.dtype))[0])
            return parts.detach()

        budget = resolve_budget(o.memory_budget, hidden.device)
        plain = HeadParams(s.weight, s.bias, logits=s.logits, low_rank=s.low_rank)
        found, grads = run(
            hidden, plain, per_row, wanted, keep=keep,
            accum_dtype=o.accum_dtype, budget=source.students_share(budget, s.weight.shape[0], hidden.element_size()),
        )  # fmt: skip
        parts = torch.stack(found).sum(0) if found else torch.zeros_like(weights)
        terms = [w * p for w, p in zip(factors, parts * share, strict=True) if w]
        loss = sum(terms[1:], terms[0]) if terms else parts.new_zeros(())
        return loss, parts * share, count, grads.all()


def _transformed(z: Tensor, head: HeadParams) -> Tensor:
    x = head.pre_scale * z.to(compute_dtype(z))
    return head.post_scale * (
        x if head.softcap is None else head.softcap * torch.tanh(x / head.softcap)
    )


class _Distillation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Any, bias: Tensor | None, down: Tensor | None, up: Tensor | None,
        call: _Call, train: bool,
    ) -> Any:  # fmt: skip
        ctx.save_for_backward(hidden)
        ctx.call, ctx.needed = call, ctx.needs_input_grad[:5]
        late = (
            hidden.dtype == torch.float16
        )  # needs the upstream loss scale before its gradient is rounded
        early = Wanted(*(needed and train and not late for needed in ctx.needed))
        loss, parts, count, ctx.ready = call.run(hidden, None, early)
        if not early.any:
            ctx.ready = None
        ctx.mark_non_differentiable(parts, count)
        return loss, parts, count

    @staticmethod
    @first_order("fused_linear_distillation")
    def backward(ctx: Any, dloss: Tensor, *_: Any) -> Any:
        ready, ctx.ready = ctx.ready, None
        if ready is None:
            (hidden,) = ctx.saved_tensors
            grads = ctx.call.run(hidden, dloss, Wanted(*ctx.needed))[3]
        else:
            grads = tuple(None if g is None else scale_(g, dloss.to(g.dtype)) for g in ready)
        return *grads, None, None
