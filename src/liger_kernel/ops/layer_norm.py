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
    backward_plan,
    column_plan,
    forward_plan,
)
from liger_kernel.ops._op import (
    Cost,
    Op,
    compute_dtype,
    dense,
    first_order,
    named,
    rows,
)
from liger_kernel.ops._reduce import sum_two_partials
from liger_kernel.ops._triton import UNFUSED, block_of, cdiv, launch
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
_FORWARD = {
    256: (16, 4), 512: (8, 4), 1024: (2, 2), 2048: (1, 4), 4096: (1, 8),
    8192: (1, 16), 16384: (1, 32), 32768: (1, 32),
}  # fmt: skip
_BACKWARD = {
    256: (16, 4, 4, 2), 512: (8, 4, 3, 2), 1024: (2, 4, 5, 1), 2048: (2, 4, 2, 3), 4096: (2, 8, 1, 3),
    8192: (1, 8, 1, 3), 16384: (1, 32, 1, 1),
}  # fmt: skip


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
    x2 = rows(x)
    n_rows, n_cols = x2.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    mean = torch.empty(n_rows, dtype=torch.float32, device=x.device)
    rstd = torch.empty(n_rows, dtype=torch.float32, device=x.device)
    w, b = (None if t is None else dense(t) for t in (weight, bias))
    args = (y, x2, x2.stride(0), w, b, mean, rstd, n_rows, n_cols, eps)
    block = block_of(n_cols)
    if block > MAX_BLOCK:
        meta = {"BLOCK": WIDE_BLOCK, "num_warps": 16}
        launch(kernels.forward_wide_kernel, (n_rows,), x.device, *args, **meta)
        return y, mean, rstd
    plan = forward_plan(_FORWARD[max(block, 256)], x.device)
    grid = (cdiv(n_rows, plan["ROWS"]),)
    launch(kernels.forward_kernel, grid, x.device, *args, BLOCK=block, **plan)
    return y, mean, rstd


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
    dy2, x2 = rows(dy), rows(x)
    n_rows, n_cols = x2.shape
    dx = torch.empty(x.shape if need_dx else 0, dtype=x.dtype, device=x.device)
    wanted = (
        None if weight is None or not need_dw else weight.dtype,
        None if bias is None or not need_db else bias.dtype,
    )
    if n_rows == 0:
        return dx, *(x.new_zeros(0 if d is None else n_cols, dtype=d) for d in wanted)
    w = None if weight is None else dense(weight)
    operands, statistics = (dy2, dy2.stride(0), x2, x2.stride(0)), (mean, rstd)
    block = block_of(n_cols)
    if block > max(_BACKWARD):
        if need_dx:
            args = (dx, *operands, w, *statistics, n_cols)
            meta = {"BLOCK": WIDE_BLOCK, "num_warps": 16}
            launch(kernels.dx_wide_kernel, (n_rows,), x.device, *args, **meta, **UNFUSED)
        return dx, *_sums_wide(operands, statistics, wanted)
    row_bytes = block * (dy.element_size() + x.element_size())
    entry = _BACKWARD[max(block, 256)]
    programs, share, plan = backward_plan(entry, n_rows, row_bytes, x.device)
    partials, needs = _partials(x2, programs, wanted)
    args = (dx, partials, *operands, w, *statistics, n_rows, n_cols, share)
    meta = {"NEED_DX": need_dx, **needs, "BLOCK": block, **plan}
    launch(kernels.backward_kernel, (programs,), x.device, *args, **meta, **UNFUSED)
    return dx, *sum_two_partials(partials, *wanted)


_Wanted = tuple[torch.dtype | None, torch.dtype | None]  # dtypes of dw and db, None if not needed


def _sums_wide(operands: Any, statistics: Any, wanted: _Wanted) -> tuple[Tensor, Tensor]:
    x = operands[2]
    n_rows, n_cols = x.shape
    columns, parts, share = column_plan(n_rows, n_cols, _SUMS_BLOCK, x.device)
    partials, needs = _partials(x, parts, wanted)
    if partials.shape[0]:
        args = (partials, *operands, *statistics, n_rows, n_cols, share)
        meta = {**needs, "BLOCK": _SUMS_BLOCK}
        launch(kernels.sums_wide_kernel, (columns, parts), x.device, *args, **meta)
    return sum_two_partials(partials, *wanted)


def _partials(x: Tensor, programs: int, wanted: _Wanted) -> tuple[Tensor, dict[str, bool]]:
    """Memory for the partial sums, and the flags that say which are needed."""
    needs = {"NEED_DW": wanted[0] is not None, "NEED_DB": wanted[1] is not None}
    return x.new_empty((sum(needs.values()), programs, x.shape[1]), dtype=torch.float32), needs


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
    return y, X, mean, rstd, block, _FORWARD.get(block, (1, 4))[1]


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
