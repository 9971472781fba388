"""Dynamic tanh, a normalisation without statistics.   y = gamma * tanh(alpha * x) + beta

    x, y: [*, D]   alpha: one value   gamma: [D]   beta: [D] or None

Backward, with t = tanh(alpha * x) and s = 1 - t^2:

    dx = dy * gamma * s * alpha     dalpha = sum over all of dy * gamma * s * x
    dgamma = sum over rows of dy * t     dbeta = sum over rows of dy

Casts   fp32 throughout, one rounding at the end. s keeps its digits where tanh saturates.
Memory  forward reads x and writes y; only the inputs are kept. Backward reads dy and x once and writes dx; a program
        takes a block of columns over a run of rows, so that nothing is summed across threads before its end, and its
        part of dgamma, dbeta and dalpha passes through fp32 partials, summed in a fixed order.
Paper   Zhu et al., "Transformers without Normalization", arXiv:2503.10622
"""
# pyright: reportGeneralTypeIssues=false

from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops._device import row_base, tanh, tanh_and_slope
from liger_kernel.ops._norm_plan import column_plan
from liger_kernel.ops._op import Cost, Op, compute_dtype, dense, first_order, named, require, rows
from liger_kernel.ops._reduce import sum_partials, sum_two_partials
from liger_kernel.ops._triton import block_of, cdiv, launch, tl, triton

_TILE = 2048  # elements a program of forward handles, and of each step of backward
_BLOCK = 1024  # columns of a program at most
_WARPS = 4
_STAGES = 3

# 1 reference


def reference(x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor | None) -> Tensor:
    """The definition."""
    wide = compute_dtype(x)
    y = gamma.to(wide) * torch.tanh(alpha.to(wide) * x.to(wide))
    return (y if beta is None else y + beta.to(wide)).to(x.dtype)


# 2 kernels


@triton.jit
def _forward_kernel(
    Y, X, sX_row, A, G, B, n_rows, n_cols, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    blocks = tl.cdiv(n_cols, BLOCK)
    row = (tl.program_id(0) // blocks) * ROWS + tl.arange(0, ROWS)
    cols = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    m_col = cols < n_cols
    mask = (row < n_rows)[:, None] & m_col[None, :]
    x = tl.load(X + row_base(row, sX_row)[:, None] + cols[None, :], mask=mask, other=0.0)
    alpha = tl.load(A).to(tl.float32)
    gamma = tl.load(G + cols, mask=m_col, other=0.0).to(tl.float32)
    y = tanh(x.to(tl.float32) * alpha) * gamma[None, :]
    if B is not None:
        y += tl.load(B + cols, mask=m_col, other=0.0).to(tl.float32)[None, :]
    tl.store(
        Y + row_base(row, n_cols)[:, None] + cols[None, :], y.to(Y.dtype.element_ty), mask=mask
    )


@triton.jit
def _backward_kernel(
    DX, PA, PG, DY, sDY_row, X, sX_row, A, G, n_rows, n_cols, rows_per_program,
    NEED_DX: tl.constexpr, NEED_P: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    part, parts = tl.program_id(1), tl.num_programs(1)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_col = cols < n_cols
    alpha = tl.load(A).to(tl.float32)
    gamma = tl.load(G + cols, mask=m_col, other=0.0).to(tl.float32)
    dalpha = tl.zeros((ROWS, BLOCK), tl.float32)
    dgamma = tl.zeros((ROWS, BLOCK), tl.float32)
    dbeta = tl.zeros((ROWS, BLOCK), tl.float32)
    first = part * rows_per_program
    last = tl.minimum(first + rows_per_program, n_rows)
    for start in tl.range(first, last, ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        mask = (row < last)[:, None] & m_col[None, :]
        at_dy = DY + row_base(row, sDY_row)[:, None] + cols[None, :]
        at_x = X + row_base(row, sX_row)[:, None] + cols[None, :]
        dy = tl.load(at_dy, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(at_x, mask=mask, other=0.0).to(tl.float32)
        t, slope = tanh_and_slope(x * alpha)
        slope *= dy
        if NEED_P:
            dalpha += slope * x  # times gamma, once, below
            dgamma += dy * t
            dbeta += dy
        if NEED_DX:
            dx = slope * (gamma * alpha)[None, :]
            at_dx = DX + row_base(row, n_cols)[:, None] + cols[None, :]
            tl.store(at_dx, dx.to(DX.dtype.element_ty), mask=mask)
    if NEED_P:
        total = tl.sum(tl.sum(dalpha, axis=0) * gamma, axis=0)
        tl.store(PA + part * tl.num_programs(0) + tl.program_id(0), total)
        tl.store(PG + row_base(part, n_cols) + cols, tl.sum(dgamma, axis=0), mask=m_col)
        tl.store(PG + row_base(parts + part, n_cols) + cols, tl.sum(dbeta, axis=0), mask=m_col)


# 3 launch


def _fake_forward(x, alpha, gamma, beta):
    return x.new_empty(x.shape)


@named("(Tensor x, Tensor alpha, Tensor gamma, Tensor? beta) -> Tensor", _fake_forward)
def dyt_forward_kernel(x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor | None) -> Tensor:
    """-> y like x, contiguous."""
    x2 = rows(x)
    n_rows, n_cols = x2.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = min(block_of(n_cols), _BLOCK)
    n = _TILE // block
    grid = (cdiv(n_rows, n) * cdiv(n_cols, block),)
    params = (alpha, dense(gamma), None if beta is None else dense(beta))
    meta = {"ROWS": n, "BLOCK": block, "num_warps": _WARPS}
    args = (y, x2, x2.stride(0), *params, n_rows, n_cols)
    launch(_forward_kernel, grid, x.device, *args, **meta)
    return y


def _fake_backward(dy, x, alpha, gamma, beta_like, need_dx, need_params):
    params = (alpha, gamma, beta_like) if need_params else ()
    shapes = [p.new_empty(p.shape) for p in params] or [x.new_empty(0) for _ in range(3)]
    return x.new_empty(x.shape if need_dx else 0), *shapes


@named(
    "(Tensor dy, Tensor x, Tensor alpha, Tensor gamma, Tensor beta_like, bool need_dx, bool need_params)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _fake_backward,
)
def dyt_backward_kernel(
    dy: Tensor, x: Tensor, alpha: Tensor, gamma: Tensor, beta_like: Tensor, need_dx: bool, need_params: bool
) -> Any:  # fmt: skip
    """-> dx, dalpha, dgamma, dbeta (in beta_like's dtype); what is not needed is empty."""
    dy2, x2 = rows(dy), rows(x)
    n_rows, n_cols = x2.shape
    dx = torch.empty(x.shape if need_dx else 0, dtype=x.dtype, device=x.device)
    if x2.numel() == 0:
        empty = (p.new_zeros(p.shape if need_params else 0) for p in (alpha, gamma, beta_like))
        return dx, *empty
    block = min(block_of(n_cols), _BLOCK)
    n = _TILE // block
    columns, _, share = column_plan(n_rows, n_cols, block, x.device)
    share = cdiv(share, n) * n
    parts = cdiv(n_rows, share)
    scalars = x.new_empty((parts * columns, 1) if need_params else 0, dtype=torch.float32)
    vectors = x.new_empty((2, parts, n_cols) if need_params else 0, dtype=torch.float32)
    launch(
        _backward_kernel, (columns, parts), x.device, dx, scalars, vectors, dy2, dy2.stride(0), x2, x2.stride(0),
        alpha, dense(gamma), n_rows, n_cols, share, NEED_DX=need_dx, NEED_P=need_params, ROWS=n, BLOCK=block,
        STAGES=_STAGES, num_warps=_WARPS,
    )  # fmt: skip
    if not need_params:
        return dx, x.new_empty(0), x.new_empty(0), x.new_empty(0)
    dalpha = sum_partials(scalars, alpha.dtype).view(alpha.shape)
    return dx, dalpha, *sum_two_partials(vectors, gamma.dtype, beta_like.dtype)


# 4 op


class _DyT(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, alpha, gamma, beta)
        return dyt_forward_kernel(x, alpha, gamma, beta)

    @staticmethod
    @first_order("dyt")
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, alpha, gamma, beta = ctx.saved_tensors
        need_dx, *need = ctx.needs_input_grad
        beta_like = gamma if beta is None else beta
        dx, *params = dyt_backward_kernel(dy, x, alpha, gamma, beta_like, need_dx, any(need))
        return dx if need_dx else None, *(
            p if n else None for p, n in zip(params, need, strict=True)
        )


def supports(x: Tensor, *_: Any) -> str | None:
    """Every width and layout."""
    return None if x.is_floating_point() else f"{x.dtype} is not a floating-point dtype"


def cost(x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor | None) -> Cost:
    """x and the parameters in, y out; then dy and x in, dx and their gradients out."""
    n = x.numel() * x.element_size()
    p = gamma.numel() * gamma.element_size() * (1 if beta is None else 2)
    return Cost(forward_bytes=2 * n + p, backward_bytes=3 * n + 2 * p, saved=0)


OP = Op("dyt", reference, reference, _DyT.apply, supports, cost, rows=1)

# 5 public


def dyt(
    x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor | None = None, impl: str | None = None
) -> Tensor:
    """gamma * tanh(alpha * x) + beta over the last dimension.

    Args:
        x: `[*, D]` of any rank, width and strides; fp16, bf16, fp32 (fp64 on the torch path).
        alpha: one value, of any shape that holds one; its dtype, like those of gamma and beta, may differ from x's.
        gamma: `[D]`.
        beta: `[D]`, or None for no shift.
        impl: "triton" or "torch" for this call, None for the default choice.
    Returns:
        `[*, D]` in x's dtype, contiguous.
    Memory:
        Keeps x and the parameters for backward.
    Raises:
        ValueError: alpha holds more than one value, or gamma or beta is not `[D]`.
    """
    require(alpha.numel() == 1, f"dyt: alpha must hold one value; got shape {list(alpha.shape)}.")
    for name, p in (("gamma", gamma), ("beta", beta)):
        require(
            p is None or p.shape == x.shape[-1:],
            f"dyt: {name} must have the shape of the last dimension of x {list(x.shape)}; "
            f"got {None if p is None else list(p.shape)}.",
        )
    return OP(x, alpha, gamma, beta, impl=impl)


# The names other libraries call


class LigerDyTFunction:
    """`apply(x, alpha, gamma, beta)` is `dyt`."""

    @staticmethod
    def apply(x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor | None) -> Tensor:
        return dyt(x, alpha, gamma, beta)


def liger_dyt_fwd(x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor | None) -> Tensor:
    """-> y, by the kernel and outside autograd."""
    return dyt_forward_kernel(x, alpha, gamma, beta)


def liger_dyt_bwd(
    dy: Tensor, x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """-> dx, dalpha, dgamma, dbeta (None without beta), by the kernel and outside autograd."""
    like = gamma if beta is None else beta
    dx, dalpha, dgamma, dbeta = dyt_backward_kernel(dy, x, alpha, gamma, like, True, True)
    return dx, dalpha, dgamma, None if beta is None else dbeta
