"""Linear layer and cross entropy without the logits.

    z = post_scale * softcap(pre_scale * (h W^T + b)) / temperature     loss = cross_entropy(z, target)
    h: [N, H]   W: [V, H]   b: [V]   target: [N]                        every option of `cross_entropy`

Three matrix products: for "mean" and "sum" the gradients dh and dW are made in the forward pass, chunk by chunk
(`ops.head.engine`), and handed over in backward. "none" recomputes the chunks in backward with the real per-token
upstream gradient: four products. So does fp16, whose range needs the upstream loss scale before rounding.

On Hopper bf16 losses without smoothing, z-loss and predicted tokens take products whose epilogue is the softmax
(`ops.head.exponentials`): logits are never rounded, and a loss alone stores none. Those of a hundred tokens, or quickly
made ones, are kept in fp32 instead, which takes fewer launches (`form_for`). Of many chunks the first lies in dW's
memory.

Memory  Between forward and backward: dh, dW, db and the inputs. During a pass: one chunk of logits within
        `memory_budget`, by default 0.5 % of device memory within 128..640 MiB (64 MiB on a CPU).
        accum_dtype=None accumulates dW in the weight's dtype, one rounding a chunk; up to 8 chunks that stays below the
        rounding of 16-bit logits. torch.float32 rounds once and takes 4 V H bytes more while it runs.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_kernel.ops import cross_entropy as ce
from liger_kernel.ops._ce_batch import denominators, factors
from liger_kernel.ops._op import (
    Cost,
    Op,
    compute_dtype,
    dense,
    direct,
    first_order,
    is_dtensor,
    named,
    once,
    require,
)
from liger_kernel.ops._scale import scale_all_
from liger_kernel.ops.cross_entropy import CrossEntropyOutput
from liger_kernel.ops.head import exponentials
from liger_kernel.ops.head.cross_entropy import (
    loss_of_logits,
    loss_of_logp,
    objective_cross_entropy,
)
from liger_kernel.ops.head.engine import Wanted, form_for, placed, run
from liger_kernel.ops.head.module import Packed, takes_module
from liger_kernel.ops.head.params import HeadParams, check_head
from liger_kernel.ops.head.plan import resolve_budget
from liger_kernel.ops.head.valid import positions, valid_tokens, valid_tokens_later, without_ignored

# 1 reference


def reference(
    input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, ce_weight: Tensor | None = None, *,
    pre_scale: float = 1.0, softcap: float | None = None, post_scale: float = 1.0, temperature: float = 1.0,
    accum_dtype: torch.dtype | None = None, memory_budget: Any = None, num_valid: int | None = None, **options: Any,
) -> CrossEntropyOutput:  # fmt: skip
    """The definition: logits in the inputs' dtype, then their transforms and the loss in fp32."""
    z = torch.nn.functional.linear(
        input, weight.to(input.dtype), None if bias is None else bias.to(input.dtype)
    )
    x = pre_scale * z.to(compute_dtype(z))
    if softcap is not None:
        x = softcap * torch.tanh(x / softcap)
    return ce.reference(x * (post_scale / temperature), target, ce_weight, **options)


# 2 launch


class _Options(NamedTuple):
    """What a pass is asked for, in the operator's order."""

    ignore_index: int
    label_smoothing: float
    lse_square_scale: float
    reduction: str
    pre_scale: float
    softcap: float | None
    post_scale: float
    accum_dtype: torch.dtype | None
    token_scaling: bool
    want_z: bool
    want_accuracy: bool
    want_prediction: bool
    budget: int
    num_valid: int | None


def _fake_forward(hidden, weight, target, bias, ce_weight, upstream, *rest):
    options, needed, tokens = _Options(*rest[:14]), rest[15:], target.shape
    each = tokens if options.reduction == "none" else ()
    asked = (True, options.want_z, options.want_accuracy)
    wide = compute_dtype(hidden)
    found = [hidden.new_empty(each, dtype=wide) for wanted in asked if wanted]
    if options.want_prediction:
        found.append(hidden.new_empty(tokens, dtype=torch.int64))
    sources = zip((hidden, weight, bias), needed, strict=True)
    return found + [source.new_empty(source.shape) for source, wanted in sources if wanted]


@named(
    "(Tensor hidden, Tensor weight, Tensor target, Tensor? bias, Tensor? ce_weight, Tensor? upstream, int ignore_index,"
    " float label_smoothing, float lse_square_scale, str reduction, float pre_scale, float? softcap, float post_scale,"
    " ScalarType? accum_dtype, bool token_scaling, bool want_z, bool want_accuracy, bool want_prediction, int budget,"
    " int? num_valid, bool kernels, bool need_dh, bool need_dw, bool need_db) -> Tensor[]",
    _fake_forward,
)
def head_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, ce_weight: Tensor | None,
    upstream: Tensor | None, ignore_index: int, label_smoothing: float, lse_square_scale: float, reduction: str,
    pre_scale: float, softcap: float | None, post_scale: float, accum_dtype: torch.dtype | None,
    token_scaling: bool, want_z: bool, want_accuracy: bool, want_prediction: bool, budget: int,
    num_valid: int | None, kernels: bool, need_dh: bool, need_dw: bool, need_db: bool,
) -> list[Tensor]:  # fmt: skip
    """-> loss, and as far as they are wanted z, accuracy, predictions, dh, dw, db.

    upstream: gradient of the loss as given, scalar or `[N]`; None for 1.
    """
    labels, vocab = dense(target if target.dim() == 1 else target.reshape(-1)), weight.shape[0]
    n = labels.shape[0]
    form = form_for(hidden, vocab, budget)
    head = HeadParams(weight, bias, pre_scale, softcap, post_scale, logits=form)
    wide, wanted = compute_dtype(hidden), Wanted(need_dh, need_dw, need_db)
    plain = form == "same" and not (label_smoothing or lse_square_scale or want_prediction)
    without_logits = plain and exponentials.apply_to(hidden, head, kernels)
    tokens = means = None
    if form == "same":
        find = valid_tokens_later if without_logits else valid_tokens
        tokens = find(labels, ignore_index, num_valid)
    elif need_dw:  # quickly computed for nothing, rather than counted; dW is a sum over all rows
        means = labels.new_empty(2, dtype=wide) if kernels and reduction == "mean" else None
        hidden = without_ignored(hidden, labels, ignore_index, means, ce_weight, vocab)
    counts = labels, ce_weight, ignore_index, reduction, vocab, wide
    scales = once(lambda: factors(kernels, *counts) if means is None else means)
    each = None if upstream is None else upstream.reshape(-1).expand(n)
    call: dict[str, Any] = {"keep": tokens, "budget": budget, "accum_dtype": accum_dtype}
    if without_logits:
        per_token = loss_of_logp(labels, ce_weight, scales, each, token_scaling, ignore_index)
        call |= {"targets": labels, "ignore_index": ignore_index, "hits": want_accuracy}
        found, grads = exponentials.run(hidden, head, per_token, wanted, **call)
    else:
        options = {
            "V": vocab, "ignore_index": ignore_index, "label_smoothing": label_smoothing,
            "lse_square_scale": lse_square_scale, "pre_scale": pre_scale, "softcap": softcap, "post_scale": post_scale,
            "token_scaling": token_scaling, "want_argmax": want_accuracy or want_prediction,
            "weight_sum": ce_weight.sum(dtype=wide) if ce_weight is not None and label_smoothing else None,
        }  # fmt: skip
        per_row = loss_of_logits(labels, ce_weight, scales, each, kernels, options)
        found, grads = run(hidden, head, per_row, wanted, **call)
    keep = positions(tokens)

    def gathered(name: str, dtype: torch.dtype = wide, absent: float = 0) -> Tensor:
        parts = [getattr(stats, name) for stats in found]
        if len(parts) != 1 or reduction == "none":  # else its sum is returned, and nothing aliases
            parts = [torch.cat(parts) if parts else hidden.new_empty(0, dtype=dtype)]
        return placed(parts[0], keep, n, absent)

    def reduced(each: Tensor) -> Tensor:
        return each.view(target.shape) if reduction == "none" else each.sum()

    results = [reduced(gathered("loss"))]
    if want_z:
        results.append(reduced(gathered("z")))
    if want_accuracy:
        correct = gathered("correct")
        if reduction != "none":
            correct = correct * denominators(labels, None, ignore_index, "mean", vocab, wide)[0]
        results.append(reduced(correct))
    if want_prediction:
        results.append(gathered("predicted", torch.int64, -1).view(target.shape))
    return results + [g for g in (grads.hidden, grads.weight, grads.bias) if g is not None]


# 3 op


class _FusedLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, ce_weight: Tensor | None,
        options: _Options, train: bool, kernels: bool,
    ) -> Any:  # fmt: skip
        ctx.save_for_backward(hidden, weight, target, bias, ce_weight)
        ctx.call = options, kernels
        needs = ctx.needs_input_grad
        ctx.needed = needs[0], needs[1], needs[3]
        late = options.reduction == "none" or hidden.dtype == torch.float16
        early = ctx.needed if train and not late else (False, False, False)
        found = _pass(hidden, weight, target, bias, ce_weight, None, options, kernels, early)
        ctx.ready = found[4:] if True in early else None
        ctx.mark_non_differentiable(*[t for t in found[1:4] if t is not None])
        return found[:4]

    @staticmethod
    @first_order("fused_linear_cross_entropy")
    def backward(ctx: Any, dloss: Tensor, *_: Any) -> Any:
        # The first backward hands the buffers over, so that nobody else holds them; a second one makes them anew.
        ready, ctx.ready = ctx.ready, None
        if ready is None:
            call: Any = (*ctx.saved_tensors, dloss, *ctx.call, ctx.needed)
            dh, dw, db = _pass(*call)[4:]
        else:
            dh, dw, db = scale_all_(ready, dloss)
        return dh, dw, None, db, None, None, None, None


def _pass(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, ce_weight: Tensor | None,
    upstream: Tensor | None, options: _Options, kernels: bool, needed: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """-> loss, z, accuracy, predictions, dh, dw, db; None for what is not wanted."""
    tensors = hidden, weight, target, bias, ce_weight, upstream
    made = head_cross_entropy(*tensors, *options, kernels, *needed)
    found: list[Tensor | None] = []
    next_one = 0
    for wanted in (True, options.want_z, options.want_accuracy, options.want_prediction, *needed):
        found.append(made[next_one] if wanted else None)
        next_one += wanted
    return tuple(found)


def fused_linear_cross_entropy_forward(
    _input: Tensor, weight: Tensor, target: Tensor, ce_weight: Tensor | None = None, bias: Tensor | None = None,
    ignore_index: int = -100, lse_square_scale: float = 0.0, label_smoothing: float = 0.0, reduction: str = "mean",
    softcap: float | None = None, return_z_loss: bool = False, accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False, return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
    ce_impl: str | None = None, ce_mode: str | None = None, token_grad_output: Tensor | None = None,
    compute_gradients: bool | None = None, weight_requires_grad: bool | None = None, chunk_mem_const: int = 1, *,
    pre_scale: float = 1.0, post_scale: float = 1.0, memory_budget: int | float | str | None = None,
    num_valid: int | None = None, kernels: bool | None = None, needed: tuple[bool, ...] | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """One pass without autograd: -> loss, z_loss, token_accuracy, predicted_tokens, grad_input, grad_weight, grad_bias.

    needed says which gradients to make; by default those of tensors that require one, all or none of them under
    compute_gradients, the weight's under weight_requires_grad. token_grad_output is the upstream gradient, scalar or
    one a token. kernels chooses the path, by default as the op would. ce_impl, ce_mode and chunk_mem_const have no
    meaning here.
    """
    if needed is None:
        wants = [t is not None and t.requires_grad for t in (_input, weight, bias)]
        wants = wants if compute_gradients is None else [compute_gradients] * 3
        wants[1] = wants[1] if weight_requires_grad is None else weight_requires_grad
        needed = tuple(wants)
    if kernels is None:
        kernels = OP.why_not(_input, weight, target, bias, ce_weight) is None
    options = _Options(
        ignore_index, label_smoothing, lse_square_scale, reduction, pre_scale, softcap, post_scale, accum_dtype,
        use_token_scaling, return_z_loss, return_token_accuracy, return_predicted_tokens,
        resolve_budget(memory_budget, _input.device), num_valid,
    )  # fmt: skip
    tensors = _input, weight, target, bias, ce_weight, token_grad_output
    with torch.no_grad():
        return _pass(*tensors, options, kernels, (*needed[:2], needed[2] and bias is not None))


def fused_linear_cross_entropy_backward(
    grad_output: Tensor,
    grad_input: Tensor | None,
    grad_weight: Tensor | None,
    grad_bias: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """The gradients of a pass times the loss's own, in their buffers: -> grad_input, grad_weight, grad_bias."""
    return scale_all_((grad_input, grad_weight, grad_bias), grad_output)


def supports(*_: Any) -> str | None:
    """Every size; dtypes and devices are judged by `Op`."""
    return None


def cost(hidden: Tensor, weight: Tensor, *_: Any) -> Cost:
    """Three products of N x H x V; the transient chunk of logits is the plan's, not counted in `saved`."""
    n, v, h = hidden.numel() // hidden.shape[-1], *weight.shape
    size = hidden.numel() * hidden.element_size() + weight.numel() * weight.element_size()
    return Cost(size, size, saved=size, flops=6 * n * v * h)


_apply = direct(_FusedLinearCrossEntropy.apply)
OP = Op(
    "fused_linear_cross_entropy",
    reference,
    fallback=lambda *args: _apply(*args, False),
    function=lambda *args: _apply(*args, True),
    supports=supports,
    cost=cost,
)

# 4 public


@takes_module("input")
def fused_linear_cross_entropy(
    input: Tensor, weight: Any, target: Tensor, bias: Tensor | None = None, ce_weight: Tensor | None = None, *,
    ignore_index: int = -100, label_smoothing: float = 0.0, lse_square_scale: float = 0.0, reduction: str = "mean",
    softcap: float | None = None, pre_scale: float = 1.0, post_scale: float = 1.0, temperature: float = 1.0,
    return_z_loss: bool = False, accum_dtype: torch.dtype | None = None, use_token_scaling: bool = False,
    return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
    memory_budget: int | float | str | None = None, num_valid: int | None = None, group: Any = None,
    logits_dtype: Any = None, impl: str | None = None, low_rank: tuple[Tensor, Tensor] | None = None,
    accumulate_into: Tensor | None = None,
) -> CrossEntropyOutput:  # fmt: skip
    """Cross entropy of a linear head's logits, which never exist as a whole.

    Args:
        input: hidden states `[N, H]` or `[*, H]`, any strides; fp16, bf16, fp32 (fp64 on the torch path).
        weight: `[V, H]`; tied, frozen, or of another dtype (it is then cast to the input's for the products, and its
            gradient accumulates in its own dtype). A DTensor split along its rows, or with `group` this rank's slice:
            as in `linear_logprob`, without class weights. Or the head as a module, see `ops.head.module`; a quantised
            one or one with adapters likewise.
        target: `[N]` or `[*]` class indices; `ignore_index` where there is none.
        bias: `[V]` or None.
        ce_weight: `[V]` class weights of the loss, or None.
        ignore_index, label_smoothing, lse_square_scale, reduction: as in `cross_entropy`.
        softcap, pre_scale, post_scale, temperature: the transforms between product and logits, see the module.
        accum_dtype: where dW is summed over chunks; None for the weight's dtype, torch.float32 for a single rounding.
        use_token_scaling: multiply each token's loss by the probability of its target, held constant.
        memory_budget: bytes for the chunk of logits, "256M", or a share of device memory in (0, 1).
        num_valid: exact number of targets that are not ignored, if known: saves the one synchronisation.
        group: the torch.distributed group over which the vocabulary is split.
        logits_dtype: how 16-bit chunks of logits are kept: None, torch.float32 or "offset", see `ops.head.logits`;
            without class weights.
        low_rank: d `[*, r]` and U `[V, r]`, as in `linear_logprob`; without class weights.
        impl: "triton" or "torch" for this call, None for the default choice.
        accumulate_into: `[V, H]`, where backward adds dW, as in `linear_logprob`; with reduction "none" alone, because
            a mean's or sum's dW is made in forward, when the factor that the loss will get is not known yet. Without
            class weights, label smoothing, z-loss and token scaling.
    Returns:
        CrossEntropyOutput: loss fp32 (scalar, or `[*]` for "none"), and where asked z_loss, token_accuracy (fp32) and
        predicted_tokens (int64, -1 on ignored). No valid token: 0, with zero gradients. Only loss is differentiable,
        in input, weight, bias and low_rank.
    Memory:
        See the module. Under autocast the products run in its dtype.
    Raises:
        ValueError: shapes that do not fit, an empty or flat (sharded) weight, options out of range.
        IndexError: on a CPU, a target that is neither a class nor `ignore_index`; elsewhere that row becomes NaN
            (LIGER_KERNEL_VALIDATE=1 raises there too).
    """
    name = OP.name
    if accumulate_into is not None and reduction != "none":
        raise ValueError(
            f'{name}: accumulate_into needs reduction="none"; got {reduction!r}. Reduce the result.'
        )
    plain = group is None and logits_dtype is None and low_rank is None and accumulate_into is None
    if not plain or isinstance(weight, Packed) or is_dtensor(weight):
        require(
            ce_weight is None,
            f"{name}: a sharded, quantised or LoRA head, logits_dtype and accumulate_into take no class weights.",
        )
        ce.check_options(name, weight.shape[0], None, label_smoothing, reduction, softcap)
        into = {} if accumulate_into is None else {"accumulate_into": accumulate_into}
        return objective_cross_entropy(
            input, weight, target, bias, group, ignore_index=ignore_index, label_smoothing=label_smoothing,
            lse_square_scale=lse_square_scale, reduction=reduction, pre_scale=pre_scale, softcap=softcap,
            accum_dtype=accum_dtype, use_token_scaling=use_token_scaling, return_z_loss=return_z_loss,
            return_token_accuracy=return_token_accuracy, return_predicted_tokens=return_predicted_tokens,
            post_scale=post_scale, temperature=temperature, memory_budget=memory_budget, logits_dtype=logits_dtype,
            low_rank=low_rank, impl=impl, **into,
        )  # fmt: skip
    head = HeadParams(weight, bias, pre_scale, softcap, post_scale, temperature)
    input = check_head(name, input, target, head, ignore_index)
    ce.check_options(name, weight.shape[0], ce_weight, label_smoothing, reduction, softcap)
    options = _Options(
        ignore_index, label_smoothing, lse_square_scale, reduction, pre_scale, softcap, post_scale / temperature,
        accum_dtype, use_token_scaling, return_z_loss, return_token_accuracy, return_predicted_tokens,
        resolve_budget(memory_budget, input.device), num_valid,
    )  # fmt: skip
    train = torch.is_grad_enabled()
    return CrossEntropyOutput(
        *OP(input, weight, target, bias, ce_weight, options, train, impl=impl)
    )


class LigerFusedLinearCrossEntropyFunction:
    """The op under the name and argument order of the contract."""

    supports_inner_impl_dispatch = True

    @staticmethod
    def apply(
        _input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, ce_weight: Tensor | None = None,
        ignore_index: int = -100, lse_square_scale: float = 0.0, label_smoothing: float = 0.0,
        reduction: str = "mean", softcap: float | None = None, return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None, use_token_scaling: bool = False, return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False, ce_impl: str | None = None, ce_mode: str | None = None,
        chunk_mem_const: int = 1,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """-> loss, z_loss, token_accuracy, predicted_tokens; None where not asked for."""
        found = fused_linear_cross_entropy(
            _input, weight, target, bias, ce_weight, ignore_index=ignore_index, label_smoothing=label_smoothing,
            lse_square_scale=lse_square_scale, reduction=reduction, softcap=softcap, return_z_loss=return_z_loss,
            accum_dtype=accum_dtype, use_token_scaling=use_token_scaling,
            return_token_accuracy=return_token_accuracy, return_predicted_tokens=return_predicted_tokens, impl=ce_impl,
        )  # fmt: skip
        return found.loss, found.z_loss, found.token_accuracy, found.predicted_tokens
