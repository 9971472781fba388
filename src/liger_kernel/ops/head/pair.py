"""Two heads, one loss: a chunk of a student's logits against the same tokens of a teacher.

    z = h W^T + b                                    the student's product, in a reused buffer
    w = h' W'^T + b'                                 the teacher's, in another; or what is stored of it
    losses, dz in place over z                       one kernel (`_head_pair`, `_head_top_k`)
    dh = dz W        dW += dz^T h        db          two products

Four products for a teacher with a head, three for a stored one; nothing of N x V is kept. Both buffers count against
the memory budget. Ignored tokens are dropped before the products, and their rows of a stored teacher are never read.
The gradients are made in forward, except for fp16, whose range needs the upstream loss scale before rounding.

Either head may have a low-rank term or be quantised (`head.module`). Where the rows of both lie with several ranks
(`head.shard`) a chunk's statistics are combined in one all-gather for each side and one all-reduce: `pair_shard`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops._head_pair import PairLoss, Transform, pair_rows
from liger_kernel.ops._head_pair_torch import pair_rows_torch, top_k_rows_torch
from liger_kernel.ops._head_top_k import top_k_rows
from liger_kernel.ops._op import Cost, Op, compute_dtype, first_order, named, require, rows
from liger_kernel.ops._scale import scale_
from liger_kernel.ops.head.engine import Wanted, alignment, part, run
from liger_kernel.ops.head.logits import Logits, form_of
from liger_kernel.ops.head.module import Packed
from liger_kernel.ops.head.pair_shard import shard_rows
from liger_kernel.ops.head.params import HeadParams, autocast
from liger_kernel.ops.head.plan import padded
from liger_kernel.ops.head.shard import VocabShard, local_head
from liger_kernel.ops.head.valid import valid_tokens


@dataclass(frozen=True)
class PairOptions:
    """Everything of a call that is no tensor.

    loss        what is computed
    width       what the losses are divided by, times the number of tokens that count; 0: not divided
    budget      bytes of the chunks of logits
    num_valid   the tokens that count, if known
    logits      how chunks of both logits are kept, "same" or "float32": see `head.logits`
    shard       where these rows of both heads belong if other processes have more of them
    """

    loss: PairLoss
    width: int
    accum_dtype: torch.dtype | None
    budget: int
    num_valid: int | None
    logits: str
    shard: VocabShard | None = None


# 1 launch


def _fake(hidden, weight, bias, down, up, *rest):
    wants = zip((hidden, weight, bias, down, up), rest[-5:], strict=True)
    wide = compute_dtype(hidden)
    return (
        hidden.new_empty((), dtype=wide), hidden.new_empty(2, dtype=wide), hidden.new_empty((), dtype=wide),
        *(hidden.new_empty(0) if t is None or not n else t.new_empty(t.shape) for t, n in wants),
    )  # fmt: skip


@named(
    "(Tensor hidden, Tensor weight, Tensor? bias, Tensor? down, Tensor? up, Tensor? target, Tensor? t_hidden,"
    " Tensor? t_weight, Tensor? t_bias, Tensor? t_down, Tensor? t_up, Tensor? t_rows, Tensor? t_ids, Tensor? upstream,"
    " str form, str teacher, float parameter, float temperature, float soft, float hard, bool want_hard,"
    " int ignore_index, float[] student, float[] t_transform, str kept, int width, ScalarType? accum_dtype, int budget,"
    " int? num_valid, str? group, int start, int total, bool kernels, bool need_dh, bool need_dw, bool need_db,"
    " bool need_dd, bool need_du) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake,
)
def head_pair(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor | None, up: Tensor | None,
    target: Tensor | None, t_hidden: Tensor | None, t_weight: Tensor | None, t_bias: Tensor | None,
    t_down: Tensor | None, t_up: Tensor | None, t_rows: Tensor | None, t_ids: Tensor | None,
    upstream: Tensor | None, form: str, teacher: str, parameter: float, temperature: float, soft: float, hard: float,
    want_hard: bool, ignore_index: int, student: list[float], t_transform: list[float], kept: str,
    width: int, accum_dtype: torch.dtype | None, budget: int, num_valid: int | None, group: str | None, start: int,
    total: int, kernels: bool, *needed: bool,
) -> Any:  # fmt: skip
    """-> loss, `[2]` soft and hard, number of tokens, dh, dw, db, dd, du (empty where not needed).

    student, t_transform: pre_scale, softcap (0: none), post_scale. kept: `PairOptions.logits`. upstream: the gradient
    of the loss, or None for 1. group, start, total: `VocabShard`, or None. needed: which of the five gradients.
    """
    labels = None if target is None else target.reshape(-1)
    n, vocab, wide = (
        hidden.numel() // max(hidden.shape[-1], 1),
        weight.shape[0],
        compute_dtype(hidden),
    )
    loss = PairLoss(
        form, teacher, parameter, temperature, soft, hard, want_hard, ignore_index, _transform(student),
        _transform(t_transform),
    )  # fmt: skip
    keep = None if labels is None else valid_tokens(labels, ignore_index, num_valid)
    count = _count(labels, ignore_index, n, wide, hidden.device)
    share = 1.0 / (count.clamp(min=1) * width) if width else torch.ones_like(count)
    scale = share if upstream is None else share * upstream
    shard = None if group is None else VocabShard(group, start, total)
    t_head = (
        None if t_weight is None else HeadParams(t_weight, t_bias, low_rank=pair_of(t_down, t_up))
    )
    source = Teacher(t_hidden, t_head, t_rows, t_ids, kept, kernels, shard)

    def per_row(
        logits: Tensor, start: int, stop: int, index: Tensor | None, out: Tensor | None
    ) -> Tensor:
        y = None if labels is None else part(labels, start, stop, index)
        return source.losses(loss, logits, y, scale, out, start, stop, index)

    head = HeadParams(weight, bias, shard=shard, logits=kept, low_rank=pair_of(down, up))
    found, grads = run(
        hidden, head, per_row, Wanted(*needed), keep=keep,
        budget=source.students_share(budget, vocab, hidden.element_size()), accum_dtype=accum_dtype,
    )  # fmt: skip
    parts = (
        torch.cat(found, 1).sum(1) if found else torch.zeros(2, dtype=wide, device=hidden.device)
    )
    parts = parts * share
    # A loss of weight 0 stays out: it may be infinite.
    terms = [w * part for w, part in zip((soft, hard), parts, strict=True) if w]
    both = sum(terms[1:], terms[0]) if terms else parts.new_zeros(())
    return both, parts, count, *(hidden.new_empty(0) if g is None else g for g in grads.all())


def pair_of(down: Tensor | None, up: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Two arguments of an operator as `HeadParams.low_rank`."""
    return None if down is None or up is None else (down, up)


def _transform(of: list[float]) -> Transform:
    pre, cap, post = of
    return pre, cap or None, post


def _count(
    labels: Tensor | None, ignore_index: int, n: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    if labels is None:
        return torch.full((), n, dtype=dtype, device=device)
    return (labels != ignore_index).sum().to(dtype)


class Teacher:
    """Where the teacher's rows come from: a product with its head, or what is stored of them."""

    def __init__(
        self, hidden: Tensor | None, head: HeadParams | None, given: Tensor | None, ids: Tensor | None, kept: str,
        kernels: bool, shard: VocabShard | None = None,
    ) -> None:  # fmt: skip
        self.given = None if given is None else rows(given)
        self.ids = None if ids is None else rows(ids)
        self.kept, self.kernels, self.shard = kept, kernels, shard
        self.logits: Logits | None = None
        if hidden is not None and head is not None:
            self.hidden = rows(hidden)
            self.head = head.to(hidden.dtype)

    def students_share(self, budget: int, vocab: int, itemsize: int) -> int:
        """What is left of the budget for the student's logits of `vocab` classes: both buffers have the same number of
        rows.
        """
        if self.given is not None:
            return budget
        wide = self.kept == "float32"
        student_row = vocab * (itemsize + 4 * wide)
        weight = self.head.weight
        teacher_row = weight.shape[0] * (4 if wide else weight.element_size())
        return max(budget * student_row // max(student_row + teacher_row, 1), 1)

    def losses(
        self, loss: PairLoss, logits: Tensor, target: Tensor | None, scale: Tensor, out: Tensor | None,
        start: int, stop: int, index: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Soft and hard loss of a chunk, `[2, C]`, and the gradient into `out`."""
        V, given = logits.shape[1], self.given
        if given is None:
            given, index = self.product(start, stop, index), None
        elif index is None:
            given = given[start:stop]
        if self.shard is not None:
            return shard_rows(
                loss,
                self.shard,
                logits,
                given,
                index,
                target,
                scale,
                out,
                V=V,
                kernels=self.kernels,
            )
        place = (index, target, scale, out)
        if self.ids is None:
            function = pair_rows if self.kernels else pair_rows_torch
            return function(loss, logits, given, *place, V=V)
        ids = self.ids if index is not None else self.ids[start:stop]
        function = top_k_rows if self.kernels else top_k_rows_torch
        return function(loss, logits, ids, given, *place, V=V)

    def product(self, start: int, stop: int, index: Tensor | None) -> Tensor:
        """The teacher's logits of a chunk, in a buffer padded like the student's."""
        head = self.head
        down, up = head.low_rank or (None, None)
        if self.logits is None:  # the first chunk is the longest
            stride = padded(head.weight.shape[0], alignment(head.weight.device))
            self.logits = Logits(
                head.weight, head.bias, self.kept, stop - start, stride, gradient=False, up=up
            )
        x, d = (None if t is None else part(t, start, stop, index) for t in (self.hidden, down))
        assert x is not None
        return self.logits(x, None, d)[0]


# 2 autograd

_LEAVES = 5  # hidden, weight, bias, down, up: what a gradient may flow to
_WEIGHT, _TEACHER = 1, 7  # places of the two heads


class _Pair(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        *tensors, options, kernels, train = args
        # quantised weights are no tensors and no part of a graph
        ctx.packed = {i: t for i, t in enumerate(tensors) if isinstance(t, Packed)}
        ctx.save_for_backward(*(None if i in ctx.packed else t for i, t in enumerate(tensors)))
        ctx.options, ctx.kernels = options, kernels
        ctx.needed = ctx.needs_input_grad[:_LEAVES]
        late = tensors[0].dtype == torch.float16
        early = tuple(needed and train and not late for needed in ctx.needed)
        loss, parts, count, *grads = _pass(*tensors, None, options, kernels, early)
        ctx.ready = grads if any(early) else None
        ctx.mark_non_differentiable(parts, count)
        return loss, parts, count

    @staticmethod
    @first_order("linear_distillation")
    def backward(ctx: Any, dloss: Tensor, *_: Any) -> Any:
        # The first backward hands the buffers over, so that nobody else holds them; a second one makes them anew.
        ready, ctx.ready = ctx.ready, None
        if ready is None:
            tensors = [ctx.packed.get(i, t) for i, t in enumerate(ctx.saved_tensors)]
            _still_there(tensors[_WEIGHT], tensors[_TEACHER])
            found = _pass(*tensors, dloss, ctx.options, ctx.kernels, ctx.needed)[3:]
        else:
            found = [g if g.numel() == 0 else scale_(g, dloss.to(g.dtype)) for g in ready]
        grads = (g if needed else None for g, needed in zip(found, ctx.needed, strict=True))
        return *grads, *(None,) * (len(ctx.needs_input_grad) - _LEAVES)


def _still_there(*weights: Any) -> None:
    """RuntimeError for a head whose owner has let go of it since forward."""
    if torch.compiler.is_compiling():
        return
    freed = [w for w in weights if isinstance(w, Tensor) and not w.untyped_storage().size()]
    require(
        not freed,
        "linear_distillation: fp16, or a second backward, needs both heads again, and one of them is sharded and was "
        "freed after forward. Keep the teacher gathered until then, or train in bf16.",
        RuntimeError,
    )


def constant(t: Any) -> Any:
    """t, cut off its graph. A frozen parameter stays itself, so that its owner can free it although autograd has it."""
    return t.detach() if isinstance(t, Tensor) and t.requires_grad else t


def _pass(*args: Any) -> Any:
    *tensors, options, kernels, needed = args
    o: PairOptions = options
    loss, shard = o.loss, o.shard
    where = (None, 0, 0) if shard is None else (shard.group, shard.start, shard.total)

    def flat(of: Transform) -> list[float]:
        return [of[0], of[1] or 0.0, of[2]]

    return head_pair(
        *tensors, loss.form, loss.teacher, loss.parameter, loss.temperature, loss.soft, loss.hard, loss.want_hard,
        loss.ignore_index, flat(loss.student_transform), flat(loss.teacher_transform), o.logits, o.width,
        o.accum_dtype, o.budget, o.num_valid, *where, kernels, *needed,
    )  # fmt: skip


def pair_op(name: str, reference: Callable[..., Any]) -> Op:
    """The op `name`: (hidden, weight, bias, down, up, target, teacher's hidden, weight, bias, down, up, stored rows,
    stored ids, options, train) -> loss, soft and hard, number of tokens.
    """
    return Op(
        name,
        reference,
        fallback=lambda *args: _Pair.apply(*args[:-1], False, args[-1]),
        function=lambda *args: _Pair.apply(*args[:-1], True, args[-1]),
        supports=lambda *args: None,
        cost=_cost,
    )


def pair_loss(
    op: Op, hidden: Tensor, head: HeadParams, targets: Tensor | None, teacher: Tensor | None,
    t_head: HeadParams | None, stored: tuple[Tensor | None, Tensor | None], options: PairOptions, impl: str | None,
) -> Any:  # fmt: skip
    """-> loss, `[2]` soft and hard, number of tokens, of checked arguments; nothing of a teacher is differentiated."""
    none = (None, None)
    theirs = (
        (*none, *none)
        if t_head is None
        else (t_head.weight, t_head.bias, *(t_head.low_rank or none))
    )
    given = (constant(t) for t in (teacher, *theirs, *stored))
    own = (hidden, head.weight, head.bias, *(head.low_rank or none), targets)
    return op(*own, *given, options, torch.is_grad_enabled(), impl=impl)


def _cost(hidden: Tensor, weight: Tensor, *rest: Any) -> Cost:
    """Three products of the student, one of a teacher with a head; the chunks are the plan's, not in `saved`."""
    t_hidden, t_weight, t_rows = rest[4], rest[5], rest[9]
    given = [t for t in (hidden, weight, t_hidden, t_weight, t_rows) if t is not None]
    n, v, h = hidden.numel() // hidden.shape[-1], *weight.shape
    flops = 6 * n * v * h + (0 if t_weight is None else 2 * n * t_weight.numel())
    own = sum(t.numel() * t.element_size() for t in (hidden, weight))
    return Cost(sum(t.numel() * t.element_size() for t in given), own, saved=own, flops=flops)


# 3 checks


def pair_form(op: str, logits_dtype: Any, dtype: torch.dtype) -> str:
    """`PairOptions.logits`; ValueError for what only a loss of one class a row can use."""
    require(
        not isinstance(logits_dtype, str),
        f"{op}: a loss of two distributions has no target to measure logits from; logits_dtype must be None or "
        f"torch.float32, got {logits_dtype!r}.",
    )
    return form_of(op, logits_dtype, dtype)


def teacher_here(
    op: str, weight: Any, bias: Any, shard: VocabShard | None, own: int
) -> tuple[Any, Any]:
    """A teacher's head, or the rows of it that belong beside the `own` rows of a student's slice: a DTensor split
    alike, this rank's slice, or a whole weight, which is cut.

    Raises:
        ValueError: a teacher split in another way.
    """
    weight, bias, theirs = local_head(f"{op}, teacher", weight, bias, None)
    if shard is None:
        require(
            theirs is None,
            f"{op}: the teacher's head is split and the student's is not; split both alike.",
        )
        return weight, bias
    if theirs is None and own != shard.total and weight.shape[0] == shard.total:
        require(
            isinstance(weight, Tensor),
            f"{op}: a quantised teacher cannot be cut; give this rank's slice.",
        )
        weight, bias = (
            None if t is None else t.narrow(0, shard.start, own) for t in (weight, bias)
        )
    require(
        theirs in (None, shard) and weight.shape[0] == own,
        f"{op}: the teacher's classes must be split over the ranks as the student's, {own} of {shard.total} from "
        f"{shard.start} here; got {weight.shape[0]}.",
    )
    return weight, bias


def check_teacher(op: str, hidden: Tensor, student: Tensor, head: HeadParams) -> Tensor:
    """ValueError unless this is a teacher of the same tokens; -> its hidden states, as `check_head`."""
    head.check(hidden, f"{op}, teacher")
    require(
        hidden.shape[:-1].numel() == student.shape[:-1].numel(),
        f"{op}: the teacher's hidden states {list(hidden.shape)} must be of the same tokens as the student's "
        f"{list(student.shape)}.",
    )
    return autocast(hidden)
