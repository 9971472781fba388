"""Log-probabilities of a linear head's targets, without the logits.

    z = post_scale * softcap(pre_scale * (h W^T + b)) / temperature     h: [N, H]   W: [V, H]   b: [V]
    logp = z_y - lse(z): [N] fp32                                       y: [N] targets

With a low-rank term h W^T + b + d U^T, d: `[N, r]`, U: `[V, r]`: the head of a model under LoRA. A module in the place
of the weight is asked what it is: linear, quantised, with adapters (`ops.head.module`).

and where asked, from the same pass: entropy H(softmax z), argmax of z, log-probabilities of K further ids. All but the
argmax are differentiable, so any loss over a vocabulary is a few lines of torch on `[N]` vectors.

Four matrix products: backward makes the chunks of logits again (a loss that is known in advance needs three:
`ops.head.objective`). Ignored tokens are dropped before the first product.

On Hopper, in bf16 and without the extras, the products' epilogue is the softmax (`ops.head.exponentials`): logits are
never rounded, whatever `logits_dtype`, and forward stores none.

Memory  Between forward and backward: the inputs, a quantised weight as it is. During a pass: one chunk of logits within
        `memory_budget` (as in `fused_linear_cross_entropy`), a quantised weight made dense, in backward also the
        gradients.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops._logp_kernels import LogpStats
from liger_kernel.ops._op import Cost, Op, compute_dtype, first_order, named, require
from liger_kernel.ops.head import exponentials
from liger_kernel.ops.head.destination import check_destination, nothing_like
from liger_kernel.ops.head.engine import Gradients, Wanted, part, placed, run
from liger_kernel.ops.head.logits import form_of
from liger_kernel.ops.head.module import takes_module
from liger_kernel.ops.head.params import HeadParams, check_head
from liger_kernel.ops.head.plan import resolve_budget
from liger_kernel.ops.head.rows import RowMath
from liger_kernel.ops.head.shard import VocabShard, local_head
from liger_kernel.ops.head.valid import positions, valid_tokens, valid_tokens_later


@dataclass
class LogprobOutput:
    """What `linear_logprob` returns; None where not asked for."""

    logp: Tensor
    entropy: Tensor | None = None
    argmax: Tensor | None = None
    selected: Tensor | None = None


# 1 reference


def reference(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None, temperature: float = 1.0,
    softcap: float | None = None, pre_scale: float = 1.0, post_scale: float = 1.0, ignore_index: int = -100,
    return_entropy: bool = False, return_argmax: bool = False, selected_token_ids: Tensor | None = None,
    accum_dtype: torch.dtype | None = None, memory_budget: Any = None, num_valid: int | None = None,
    low_rank: tuple[Tensor, Tensor] | None = None,
) -> LogprobOutput:  # fmt: skip
    """The definition: logits in the inputs' dtype, the rest in fp32."""
    z = torch.nn.functional.linear(
        hidden, weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
    )
    if low_rank is not None:
        down, up = low_rank
        z = z + (down @ up.t()).to(z.dtype)
    x = pre_scale * z.to(compute_dtype(z))
    if softcap is not None:
        x = softcap * torch.tanh(x / softcap)
    log_p = (x * (post_scale / temperature)).log_softmax(-1)
    valid = targets != ignore_index
    logp = log_p.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    p = log_p.exp()
    entropy = -torch.where(p > 0, p * log_p, 0.0).sum(-1)
    return LogprobOutput(
        torch.where(valid, logp, 0.0),
        torch.where(valid, entropy, 0.0) if return_entropy else None,
        torch.where(valid, x.argmax(-1), -1) if return_argmax else None,
        None if selected_token_ids is None else log_p[..., selected_token_ids] * valid[..., None],
    )


# 2 launch


def _pass(
    hidden: Tensor, head: HeadParams, labels: Tensor, ids: Tensor | None, upstream: tuple[Tensor | None, ...] | None,
    ignore_index: int, want_entropy: bool, want_argmax: bool, accum_dtype: torch.dtype | None, budget: int,
    num_valid: int | None, kernels: bool, wanted: Wanted, into: Tensor | None = None,
) -> tuple[list[Any], Gradients, Tensor | None]:  # fmt: skip
    """Statistics of every kept token, or the gradients under `upstream` (of logp, entropy, selected)."""
    call: dict[str, Any] = {
        "budget": budget, "accum_dtype": accum_dtype, "targets": labels, "into": into,
    }  # fmt: skip
    more = want_entropy or want_argmax or ids is not None or (upstream and upstream[1] is not None)
    if not more and exponentials.apply_to(hidden, head, kernels):
        tokens = valid_tokens_later(labels, ignore_index, num_valid)

        def per_token(known: exponentials.Targets, *place: Any) -> tuple[Any, Tensor | None]:
            logp = known.logp
            if upstream is None:
                return (_stats_of(logp), None), None
            a = upstream[0]
            return None, logp.new_zeros(logp.shape) if a is None else part(a, *place)

        found, grads = exponentials.run(
            hidden, head, per_token, wanted, ignore_index=ignore_index, keep=tokens, **call
        )
        return found, grads, positions(tokens)
    keep = valid_tokens(labels, ignore_index, num_valid)
    math = RowMath.of(head, ignore_index, kernels)

    def per_row(
        logits: Tensor, start: int, stop: int, index: Tensor | None, out: Tensor | None, shift: Tensor | None = None
    ) -> Any:  # fmt: skip
        place = start, stop, index
        y = part(labels, *place)
        entropy = want_entropy if upstream is None else upstream[1] is not None
        stats = math.stats(logits, y, shift, entropy=entropy, argmax=want_argmax)
        columns = None if ids is None else math.columns(logits, ids, shift)
        if upstream is None:
            return stats, None if columns is None else columns[0] - stats.lse[:, None]
        assert out is not None
        a, b, s = (None if g is None else part(g, *place) for g in upstream)
        a = stats.logp.new_zeros(y.shape) if a is None else a
        if ids is None or columns is None or s is None:
            math.gradient(out, logits, y, stats, a, a, b, None, shift)
            return None
        s = torch.where((y == ignore_index)[:, None], 0.0, s.to(a.dtype))
        math.gradient(out, logits, y, stats, a, a + s.sum(-1), b, None, shift)
        math.add_columns(out, ids, s * columns[1])
        return None

    return *run(hidden, head, per_row, wanted, keep=keep, **call), keep


def _fake_forward(hidden, weight, target, bias, down, up, ids, *rest):
    shape, (want_entropy, want_argmax) = target.shape, rest[8:10]
    many = (*shape, 0 if ids is None else ids.shape[0])
    return (
        hidden.new_empty(shape, dtype=torch.float32),
        hidden.new_empty(shape if want_entropy else 0, dtype=torch.float32),
        hidden.new_empty(shape if want_argmax else 0, dtype=torch.int64),
        hidden.new_empty(many if ids is not None else 0, dtype=torch.float32),
    )


@named(
    "(Tensor hidden, Tensor weight, Tensor target, Tensor? bias, Tensor? down, Tensor? up, Tensor? ids,"
    " int ignore_index, float pre_scale, float? softcap, float post_scale, str? group, int start, int total,"
    " str logits, bool want_entropy, bool want_argmax, int budget, int? num_valid, bool kernels)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _fake_forward,
)
def linear_logprob_forward(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, down: Tensor | None, up: Tensor | None,
    ids: Tensor | None, ignore_index: int, pre_scale: float, softcap: float | None, post_scale: float,
    group: str | None, start: int, total: int, logits: str, want_entropy: bool, want_argmax: bool, budget: int,
    num_valid: int | None, kernels: bool,
) -> Any:  # fmt: skip
    """-> logp, entropy, argmax, selected (empty where not asked for)."""
    transform = (pre_scale, softcap, post_scale)
    head = _head(weight, bias, down, up, transform, group, start, total, logits)
    labels = target.reshape(-1)
    found, _, keep = _pass(
        hidden, head, labels, ids, None, ignore_index, want_entropy, want_argmax, None, budget, num_valid, kernels,
        Wanted(),
    )  # fmt: skip

    def gathered(parts: list[Tensor], absent: float = 0) -> Tensor:
        return placed(torch.cat(parts), keep, labels.shape[0], absent)

    stats = [s for s, _ in found] or [_stats_of(hidden.new_empty(0, dtype=compute_dtype(hidden)))]
    logp = gathered([s.logp for s in stats]).view(target.shape)
    entropy = (
        gathered([s.entropy for s in stats]).view(target.shape)
        if want_entropy
        else logp.new_empty(0)
    )
    argmax = (
        gathered([s.argmax for s in stats], -1).view(target.shape)
        if want_argmax
        else labels.new_empty(0)
    )
    if ids is None:
        return logp, entropy, argmax, logp.new_empty(0)
    selected = gathered([s for _, s in found] or [logp.new_empty(0, ids.shape[0])])
    selected = torch.where((labels == ignore_index)[:, None], 0.0, selected)
    return logp, entropy, argmax, selected.view(*target.shape, ids.shape[0])


def _head(
    weight: Tensor, bias: Tensor | None, down: Tensor | None, up: Tensor | None,
    transform: tuple[float, float | None, float], group: str | None, start: int, total: int, logits: str,
) -> HeadParams:  # fmt: skip
    shard = None if group is None else VocabShard(group, start, total)
    pair = None if down is None or up is None else (down, up)
    return HeadParams(weight, bias, *transform, shard=shard, logits=logits, low_rank=pair)


def _stats_of(logp: Tensor) -> LogpStats:
    """Log-probabilities and nothing else."""
    none = logp.new_empty(0)
    return LogpStats(logp, none, none, none, logp.new_empty(0, dtype=torch.int64), none)


def _fake_backward(hidden, weight, target, bias, down, up, *rest):
    own = weight if rest[4] is None else None
    wants = zip((hidden, own, bias, down, up), rest[-5:], strict=True)
    return tuple(
        hidden.new_empty(0) if t is None or not n else t.new_empty(t.shape) for t, n in wants
    )


@named(
    "(Tensor hidden, Tensor weight, Tensor target, Tensor? bias, Tensor? down, Tensor? up, Tensor? ids,"
    " Tensor? dlogp, Tensor? dentropy, Tensor? dselected, Tensor(a!)? into, int ignore_index, float pre_scale,"
    " float? softcap, float post_scale, str? group, int start, int total, str logits, ScalarType? accum_dtype,"
    " int budget, int? num_valid, bool kernels, bool need_dh, bool need_dw, bool need_db, bool need_dd, bool need_du)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_backward,
)
def linear_logprob_backward(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, down: Tensor | None, up: Tensor | None,
    ids: Tensor | None, dlogp: Tensor | None, dentropy: Tensor | None, dselected: Tensor | None, into: Tensor | None,
    ignore_index: int, pre_scale: float, softcap: float | None, post_scale: float, group: str | None, start: int,
    total: int, logits: str, accum_dtype: torch.dtype | None, budget: int, num_valid: int | None, kernels: bool,
    need_dh: bool, need_dw: bool, need_db: bool, need_dd: bool, need_du: bool,
) -> Any:  # fmt: skip
    """-> dh, dw, db, dd, du (empty where not needed). into: dw is added to it, and comes out empty."""
    transform = (pre_scale, softcap, post_scale)
    head = _head(weight, bias, down, up, transform, group, start, total, logits)
    flat = [
        None if g is None else g.reshape(target.numel(), *g.shape[target.dim() :])
        for g in (dlogp, dentropy, dselected)
    ]
    _, grads, _ = _pass(
        hidden, head, target.reshape(-1), ids, tuple(flat), ignore_index, False, False, accum_dtype, budget, num_valid,
        kernels, Wanted(need_dh, need_dw, need_db, need_dd, need_du), into,
    )  # fmt: skip
    return tuple(hidden.new_empty(0) if g is None else g for g in grads.all())


# 3 op


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Any, target: Tensor, bias: Tensor | None, down: Tensor | None,
        up: Tensor | None, ids: Tensor | None, options: tuple[Any, ...], kernels: bool,
    ) -> Any:  # fmt: skip
        transform, accum_dtype, (want_entropy, want_argmax), place, ctx.into = options
        ctx.packed = None if isinstance(weight, Tensor) else weight
        kept = None if ctx.packed is not None else weight
        ctx.save_for_backward(hidden, kept, target, bias, down, up, ids)
        ctx.call = transform, accum_dtype, place, kernels
        ctx.set_materialize_grads(False)
        logp, entropy, argmax, selected = linear_logprob_forward(
            hidden, weight, target, bias, down, up, ids, *transform, want_entropy, want_argmax, *place, kernels
        )  # fmt: skip
        ctx.mark_non_differentiable(argmax)
        return logp, entropy, argmax, selected

    @staticmethod
    @first_order("linear_logprob")
    def backward(
        ctx: Any, dlogp: Tensor | None, dentropy: Tensor | None, _: Any, dselected: Tensor | None
    ) -> Any:
        hidden, weight, target, bias, down, up, ids = ctx.saved_tensors
        needed = [ctx.needs_input_grad[i] for i in (0, 1, 3, 4, 5)]
        transform, accum_dtype, place, kernels = ctx.call
        dentropy = dentropy if dentropy is not None and dentropy.numel() == target.numel() else None
        dselected = dselected if ids is not None else None
        grads = linear_logprob_backward(
            hidden, weight if ctx.packed is None else ctx.packed, target, bias, down, up, ids, dlogp, dentropy,
            dselected, ctx.into, *transform, accum_dtype, *place, kernels, *needed,
        )  # fmt: skip
        dh, dw, db, dd, du = (g if n else None for g, n in zip(grads, needed, strict=True))
        if dw is not None and ctx.into is not None:
            dw = nothing_like(weight)
        return dh, dw, None, db, dd, du, None, None, None


def supports(*_: Any) -> str | None:
    """Every size; dtypes and devices are judged by `Op`."""
    return None


def cost(hidden: Tensor, weight: Tensor, *_: Any) -> Cost:
    """One product forward, three backward."""
    n, v, h = hidden.numel() // hidden.shape[-1], *weight.shape
    size = hidden.numel() * hidden.element_size() + weight.numel() * weight.element_size()
    return Cost(size, 2 * size, saved=0, flops=8 * n * v * h)


OP = Op(
    "linear_logprob",
    reference,
    fallback=lambda *args: _LinearLogprob.apply(*args, False),
    function=lambda *args: _LinearLogprob.apply(*args, True),
    supports=supports,
    cost=cost,
)

# 4 public


@takes_module("hidden")
def linear_logprob(
    hidden: Tensor, weight: Any, targets: Tensor, *, bias: Tensor | None = None, temperature: float = 1.0,
    softcap: float | None = None, pre_scale: float = 1.0, post_scale: float = 1.0, ignore_index: int = -100,
    return_entropy: bool = False, return_argmax: bool = False, selected_token_ids: Tensor | None = None,
    accum_dtype: torch.dtype | None = None, memory_budget: int | float | str | None = None,
    num_valid: int | None = None, group: Any = None, logits_dtype: Any = None, impl: str | None = None,
    low_rank: tuple[Tensor, Tensor] | None = None, accumulate_into: Tensor | None = None,
) -> LogprobOutput:  # fmt: skip
    """Per-token log-probabilities of `targets` under a linear head, differentiable, without the logits.

    Args:
        hidden: `[*, H]` of any strides; fp16, bf16, fp32 (fp64 on the torch path).
        weight: `[V, H]`; tied, frozen, or of another dtype. A DTensor split along its rows, or with `group` this rank's
            slice: then every rank gives the same hidden states and targets (of the whole vocabulary), gets the same
            results, and dh is the sum over the group. Or the head as a module, see `ops.head.module`.
        targets: `[*]` class indices; `ignore_index` where there is none: 0 in every output, -1 in argmax, no gradient.
        bias: `[V]` or None.
        temperature, softcap, pre_scale, post_scale: the transforms between product and logits, see the module.
        return_entropy: also the entropy of each token's distribution, in nats.
        return_argmax: also the most likely id, the lowest on ties.
        selected_token_ids: `[K]` int64; also the log-probabilities of these ids, `[*, K]`, order and duplicates kept.
        accum_dtype, memory_budget, num_valid, impl: as in `fused_linear_cross_entropy`.
        group: the torch.distributed group over which the vocabulary is split, see `ops.head.shard.local_head`.
        logits_dtype: how 16-bit chunks of logits are kept: None, torch.float32 or "offset", see `ops.head.logits`.
        low_rank: d `[*, r]` and U `[V, r]` of a low-rank term, differentiable; dU is summed in fp32. U is split as W.
        accumulate_into: `[V, H]` (this rank's rows of it), such as an fp32 sum over micro-batches: backward adds dW to
            it, in the products that make dW and with no other `[V, H]`, and gives the weight an empty sparse gradient,
            so that its hooks run. Not under torch.compile.
    Returns:
        LogprobOutput: logp `[*]` fp32; entropy fp32, argmax int64, selected fp32 where asked.
    Memory:
        Keeps its inputs. See the module.
    Raises:
        ValueError: shapes that do not fit, an empty or flat (sharded) weight, transforms out of range, bad ids, a
            module that is more than such a product (DoRA, a layer with a forward of its own).
        IndexError: on a CPU, a target out of range; elsewhere that row becomes NaN.
    """
    name = OP.name
    check_destination(name, accumulate_into, weight)
    tokens = hidden.shape[:-1].numel()
    weight, bias, shard = local_head(name, weight, bias, group, tokens)
    head = HeadParams(
        weight, bias, pre_scale, softcap, post_scale, temperature, shard, low_rank=low_rank
    )
    hidden = check_head(name, hidden, targets, head, ignore_index)
    if selected_token_ids is not None:
        require(
            selected_token_ids.dim() == 1 and selected_token_ids.dtype == torch.int64,
            f"{name}: selected_token_ids must be [K] int64; got {list(selected_token_ids.shape)} of "
            f"{selected_token_ids.dtype}.",
        )
    where = (None, 0, 0) if shard is None else (shard.group, shard.start, shard.total)
    form = form_of(name, logits_dtype, hidden.dtype)
    require(
        form != "offset" or shard is None,
        f'{name}: logits_dtype="offset" does not exist for a sharded head; use torch.float32.',
    )
    transform = (ignore_index, pre_scale, softcap, post_scale / temperature, *where, form)
    place = (resolve_budget(memory_budget, hidden.device), num_valid)
    options = (transform, accum_dtype, (return_entropy, return_argmax), place, accumulate_into)
    logp, entropy, argmax, selected = OP(
        hidden,
        weight,
        targets,
        bias,
        *(low_rank or (None, None)),
        selected_token_ids,
        options,
        impl=impl,
    )
    return LogprobOutput(
        logp,
        entropy if return_entropy else None,
        argmax if return_argmax else None,
        None if selected_token_ids is None else selected,
    )
