"""LayerNorm.   y = (x - mean(x)) / std(x) * w + b,   std(x) = sqrt(mean((x - mean(x))^2) + eps)

    x, y: [*, D]   w, b: [D] or None   mean, rstd = 1 / std: [R] fp32, R = rows of D values

Backward, with n = (x - mean) * rstd and g = dy * w:

    dx = rstd * (g - mean(g) - n * mean(g * n))   dw = sum over rows of dy * n   db = sum over rows of dy

Casts   fp32 throughout, one rounding at the end.
Memory  forward reads x once and writes y; it keeps mean and rstd, 8 bytes a row, beside its inputs.
        Backward reads dy and x once and writes dx; dw and db pass through fp32 partials of one row
        per program, summed in a fixed order in one further launch. Rows of more than 32,768 columns
        (16,384 backward) take two passes.
Digits  the variance is that of the deviations, never E[x^2] - E[x]^2, and the rounding of the mean
        is taken out of them: a row far from zero is as exact as one around it.
Paper   Ba, Kiros and Hinton, "Layer Normalization", arXiv:1607.06450
"""

from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops import _layer_norm_kernels as kernels
from liger_kernel.ops._norm_plan import (
    MAX_BLOCK,
    WIDE_BLOCK,
    backward_phases_plan,
    backward_plan,
    column_plan,
    forward_phases_plan,
    forward_plan,
    forward_table,
    loop_table,
)
from liger_kernel.ops._op import (
    Cost,
    Op,
    compute_dtype,
    dense,
    first_order,
    like,
    named,
    spaced,
)
from liger_kernel.ops._reduce import sum_two_partials
from liger_kernel.ops._row_phases import in_phases, phases_of
from liger_kernel.ops._schedules import card_of
from liger_kernel.ops._triton import UNFUSED, Launch, block_of, cdiv, planned
from liger_kernel.ops.rms_norm import check_weight

_SUMS_BLOCK = 1024

# 1 reference


def reference(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-6) -> Tensor:
    """torch's own; operands of several dtypes meet in fp32."""
    operands = [t for t in (x, weight, bias) if t is not None]
    if all(t.dtype == x.dtype for t in operands):
        return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
    wide = compute_dtype(x)
    w, b = (None if t is None else t.to(wide) for t in (weight, bias))
    return torch.nn.functional.layer_norm(x.to(wide), x.shape[-1:], w, b, eps).to(x.dtype)


# 2 launch

# block of columns -> (rows, warps) forward; (rows, warps, programs per SM, stages) backward.
# Compiled for sm_90, next to no spills up to 8192 columns; programs per SM are what the registers allow. Not measured.
_FORWARD = forward_table("layer_norm.forward", {
    256: (16, 4), 512: (8, 4), 1024: (2, 2), 2048: (1, 4), 4096: (2, 8),
    8192: (1, 8), 16384: (1, 32), 32768: (1, 32),
})  # fmt: skip
# Columns up to which dx may be a difference of equal products: of one it is always 0.
_CANCELLING = 64
_BACKWARD = loop_table("layer_norm.backward", {
    256: (16, 4, 4, 2), 512: (8, 4, 3, 2), 1024: (2, 4, 5, 1), 2048: (2, 4, 2, 3), 4096: (2, 8, 1, 3),
    8192: (1, 8, 1, 3), 16384: (1, 32, 1, 1),
})  # fmt: skip


def _fake_forward(x, weight, bias, eps):
    statistic = (x.shape[:-1].numel(),)
    mean, rstd = (x.new_empty(statistic, dtype=torch.float32) for _ in range(2))
    return x.new_empty(x.shape), mean, rstd


@named(
    "(Tensor x, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)", _fake_forward
)
def layer_norm_forward_kernel(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Any:
    """-> y like x (contiguous), mean and rstd [R] fp32."""
    n_rows, n_cols, y = x.shape[:-1].numel(), x.shape[-1], like(x)
    mean = x.new_empty(n_rows, dtype=torch.float32)
    rstd = x.new_empty(n_rows, dtype=torch.float32)
    w, b = _dense(weight), _dense(bias)
    x, step = spaced(x)
    run = _forward(x.device, x.element_size(), n_rows, n_cols, step, eps)
    run(y, x, w, b, mean, rstd)
    return y, mean, rstd


def _dense(vector: Tensor | None) -> Tensor | None:
    return None if vector is None else dense(vector)


@planned
def _forward(
    device: torch.device, itemsize: int, n_rows: int, n_cols: int, step: int, eps: float
) -> Launch:
    block, numbers = block_of(n_cols), (step, n_rows, n_cols, eps)
    if block > MAX_BLOCK:
        meta = {"BLOCK": WIDE_BLOCK, "num_warps": 16}
        return Launch(kernels.forward_wide_kernel, (n_rows,), device, *numbers, **meta)
    entry = _FORWARD.choose(block, itemsize, card_of(device))
    meta = {"BLOCK": block, **forward_plan(entry, device)}
    if in_phases(itemsize, n_cols, step):
        grid, plan = forward_phases_plan(entry, n_rows, block, phases_of(n_cols), device)
        return Launch(kernels.forward_phases_kernel, grid, device, *numbers, **{**meta, **plan})
    return Launch(kernels.forward_kernel, (cdiv(n_rows, meta["ROWS"]),), device, *numbers, **meta)


def _fake_backward(dy, x, weight, bias, mean, rstd, need_dx, need_dw, need_db):
    dw = x.new_empty(0) if weight is None or not need_dw else weight.new_empty(weight.shape)
    db = x.new_empty(0) if bias is None or not need_db else bias.new_empty(bias.shape)
    return x.new_empty(x.shape if need_dx else 0), dw, db


@named(
    "(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor mean, Tensor rstd,"
    " bool need_dx, bool need_dw, bool need_db) -> (Tensor, Tensor, Tensor)",
    _fake_backward,
)
def layer_norm_backward_kernel(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor,
    need_dx: bool, need_dw: bool, need_db: bool,
) -> Any:  # fmt: skip
    """-> dx like x, dw like weight, db like bias; an output that is not needed is empty."""
    n_rows, n_cols, device = mean.shape[0], x.shape[-1], x.device
    dx = like(x) if need_dx else x.new_empty(0)
    wanted = (
        None if weight is None or not need_dw else weight.dtype,
        None if bias is None or not need_db else bias.dtype,
    )
    if n_rows == 0:
        return dx, *(x.new_zeros(0 if d is None else n_cols, dtype=d) for d in wanted)
    sizes = (x.element_size(), dy.element_size(), n_rows, n_cols)
    dy, dy_step = spaced(dy)
    x, x_step = spaced(x)
    steps, needs = (dy_step, x_step), (wanted[0] is not None, wanted[1] is not None)
    programs, run, run_sums = _backward(device, *sizes, steps, need_dx, *needs)
    partials = x.new_empty((sum(needs), programs, n_cols), dtype=torch.float32)
    if run_sums is None:
        run(dx, partials, dy, x, _dense(weight), mean, rstd)
    else:
        run(dx, dy, x, _dense(weight), mean, rstd)
        run_sums(partials, dy, x, mean, rstd)
    return dx, *sum_two_partials(partials, *wanted)


@planned
def _backward(
    device: torch.device, x_itemsize: int, dy_itemsize: int, n_rows: int, n_cols: int,
    steps: tuple[int, int], need_dx: bool, need_dw: bool, need_db: bool,
) -> tuple[int, Launch, Launch | None]:  # fmt: skip
    """Rows of partial sums and what makes dx and them; where rows are too wide for one kernel, what makes either."""
    block, needs = block_of(n_cols), {"NEED_DW": need_dw, "NEED_DB": need_db}
    if block <= _BACKWARD.widest:
        entry = _BACKWARD.choose(block, x_itemsize, card_of(device))
        kernel, sizes = kernels.backward_kernel, (block * (x_itemsize + dy_itemsize), device)
        meta = {"NEED_DX": need_dx, **needs, "BLOCK": block}
        if in_phases(x_itemsize, n_cols, *steps):
            kernel = kernels.backward_phases_kernel
            programs, share, plan = backward_phases_plan(
                entry, n_rows, block, phases_of(n_cols), *sizes
            )
        else:
            programs, share, plan = backward_plan(entry, n_rows, *sizes)
        meta |= plan if n_cols > _CANCELLING else {**plan, **UNFUSED}
        numbers = (*steps, n_rows, n_cols, share)
        run = Launch(kernel, (programs,), device, *numbers, **meta)
        return programs, run, None
    meta = {"BLOCK": WIDE_BLOCK, "num_warps": 16, **UNFUSED}
    grid = (n_rows if need_dx else 0,)
    run = Launch(kernels.dx_wide_kernel, grid, device, *steps, n_cols, **meta)
    columns, parts, share = column_plan(n_rows, n_cols, _SUMS_BLOCK, device)
    numbers, meta = (*steps, n_rows, n_cols, share), {**needs, "BLOCK": _SUMS_BLOCK}
    grid = (columns, parts if need_dw or need_db else 0)
    return parts, run, Launch(kernels.sums_wide_kernel, grid, device, *numbers, **meta)


# 3 op


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        y, mean, rstd = layer_norm_forward_kernel(x, weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        return y

    @staticmethod
    @first_order("layer_norm")
    def backward(ctx: Any, dy: Tensor) -> Any:
        need_dx, need_dw, need_db = needs = ctx.needs_input_grad[:3]
        dx, dw, db = layer_norm_backward_kernel(dy, *ctx.saved_tensors, *needs)
        return dx if need_dx else None, dw if need_dw else None, db if need_db else None, None


def supports(x: Tensor, *_: Any) -> str | None:
    """Every width and layout; an empty row has no mean."""
    return "rows have no columns" if x.shape[-1] == 0 else None


def cost(x: Tensor, weight: Tensor | None, bias: Tensor | None = None, *_: Any) -> Cost:
    """x in, y out, w and b in; then dy, x and w in, dx, dw and db out."""
    n = x.numel() * x.element_size()
    w, b = (0 if t is None else t.numel() * t.element_size() for t in (weight, bias))
    return Cost(2 * n + w + b, 3 * n + 2 * w + b, 8 * (x.numel() // x.shape[-1]))


OP = Op("layer_norm", reference, reference, _LayerNorm.apply, supports, cost, rows=1)

# 4 public


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    impl: str | None = None,
) -> Tensor:
    """Layer normalisation over the last dimension.

    Args:
        x: `[*, D]` of any rank, width and strides; fp16, bf16, fp32 (fp64 on the torch path).
        weight: `[D]`, or None for no scale. Its dtype may differ from x's.
        bias: `[D]`, or None for no shift. Its dtype may differ from x's.
        eps: added to the variance.
        impl: "triton" or "torch" for this call, None for the default choice.
    Returns:
        `[*, D]` in x's dtype, contiguous.
    Memory:
        Keeps x, weight and 8 bytes a row for backward.
    Raises:
        ValueError: a weight or a bias whose shape is not `[D]`.
    """
    check_weight("layer_norm", x, weight)
    check_weight("layer_norm", x, bias, "bias")
    return OP(x, weight, bias, eps, impl=impl)


class LigerLayerNormFunction:
    """`layer_norm` with positional arguments."""

    @staticmethod
    def apply(X: Tensor, W: Tensor | None, B: Tensor | None, eps: float) -> Tensor:
        return layer_norm(X, W, B, eps)


def layer_norm_forward(
    X: Tensor, W: Tensor | None, B: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int]:
    """-> Y, X, Mean, RSTD, block, warps, by the kernel and outside autograd."""
    y, mean, rstd = layer_norm_forward_kernel(X, W, B, eps)
    block = block_of(X.shape[-1])
    return y, X, mean, rstd, block, _FORWARD.entry(block, X)[1]


def layer_norm_backward(
    dY: Tensor, X: Tensor, W: Tensor | None, B: Tensor | None, Mean: Tensor, RSTD: Tensor,
    needs_dw: bool | None = None, needs_db: bool | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """-> dX, dW, dB in new tensors, by the kernel and outside autograd."""
    need_dw, need_db = (
        W is not None and needs_dw is not False,
        B is not None and needs_db is not False,
    )
    dx, dw, db = layer_norm_backward_kernel(dY, X, W, B, Mean, RSTD, True, need_dw, need_db)
    return dx, dw if need_dw else None, db if need_db else None
