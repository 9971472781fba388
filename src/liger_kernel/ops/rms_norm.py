"""RMSNorm.   y = x / rms(x) * (offset + w),   rms(x) = sqrt(mean(x^2, -1) + eps)

    x, y: [*, D]   w: [D] or None   rstd = 1 / rms: [R] fp32, R = rows of D values

Backward, with n = x * rstd and g = dy * (offset + w):   dx = rstd * (g - n * mean(g * n)),   dw = sum over rows of dy * n

Casts   "llama": n is rounded to x's dtype before it meets the weight (Llama, Qwen, Mistral, ...)
        "gemma", "none": fp32 throughout, one rounding at the end (Gemma, OLMo 2, GPT-OSS, ...)
Memory  forward reads x once and writes y; it keeps rstd, 4 bytes a row, beside its inputs. Backward reads dy and x once and
        writes dx; dw passes through fp32 partials of one row per program (SMs x 1..8 programs), summed in a fixed order.
        Rows that do not fit in registers take two passes over their columns.
Paper   Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467
"""

from typing import Any

import torch
from torch import Tensor

from liger_kernel import _env
from liger_kernel.ops._device import row_base
from liger_kernel.ops._op import (
    Cost,
    Op,
    choice,
    compute_dtype,
    dense,
    first_order,
    named,
    require,
    rows,
)
from liger_kernel.ops._reduce import sum_partials
from liger_kernel.ops._triton import block_of, cdiv, launch, tl, triton

CASTING_MODES = ("llama", "gemma", "none")
_CASTING_CODES = {-1: "none", 0: "llama", 1: "gemma"}
_MAX_BLOCK = 32768  # columns a program holds in registers
_WIDE_BLOCK = 8192  # columns a program visits at a time beyond that

# 1 reference


def reference(
    x: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str = "llama",
) -> Tensor:
    """The definition, with the roundings of Hugging Face's modules."""
    wide = x.to(compute_dtype(x))
    n = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if casting_mode == "llama":
        n = n.to(x.dtype)
    if weight is None:
        return n.to(x.dtype)
    w = weight if casting_mode == "llama" else weight.to(n.dtype)
    return (n * (w if offset == 0.0 else offset + w)).to(x.dtype)


# 2 kernels


@triton.jit
def _scale(W, cols, mask, offset, ROUND: tl.constexpr):
    """offset + w in fp32, rounded to w's dtype under "llama" as eager does."""
    w = tl.load(W + cols, mask=mask, other=0.0)
    scale = w.to(tl.float32) + offset
    if ROUND:
        scale = scale.to(w.dtype).to(tl.float32)
    return scale


@triton.jit
def _forward_kernel(
    Y, sY_row, X, sX_row, W, RSTD, n_rows, n_cols, eps, offset,
    LLAMA: tl.constexpr, HAS_W: tl.constexpr, ROUND_W: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    m_row = row < n_rows
    m_col = cols < n_cols
    mask = m_row[:, None] & m_col[None, :]
    x = tl.load(X + row_base(row, sX_row)[:, None] + cols[None, :], mask=mask, other=0.0).to(
        tl.float32
    )
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / n_cols + eps)
    tl.store(RSTD + row, rstd, mask=m_row)
    n = x * rstd[:, None]
    if LLAMA:
        n = n.to(Y.dtype.element_ty).to(tl.float32)
    if HAS_W:
        n = n * _scale(W, cols, m_col, offset, ROUND_W)[None, :]
    tl.store(
        Y + row_base(row, sY_row)[:, None] + cols[None, :], n.to(Y.dtype.element_ty), mask=mask
    )


@triton.jit
def _forward_wide_kernel(
    Y, sY_row, X, sX_row, W, RSTD, n_cols, eps, offset,
    LLAMA: tl.constexpr, HAS_W: tl.constexpr, ROUND_W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    X += row_base(row, sX_row)
    Y += row_base(row, sY_row)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(X + cols, mask=cols < n_cols, other=0.0, eviction_policy="evict_last").to(
            tl.float32
        )
        squares += x * x
    rstd = tl.rsqrt(tl.sum(squares, axis=0) / n_cols + eps)
    tl.store(RSTD + row, rstd)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        m_col = cols < n_cols
        n = tl.load(X + cols, mask=m_col, other=0.0).to(tl.float32) * rstd
        if LLAMA:
            n = n.to(Y.dtype.element_ty).to(tl.float32)
        if HAS_W:
            n = n * _scale(W, cols, m_col, offset, ROUND_W)
        tl.store(Y + cols, n.to(Y.dtype.element_ty), mask=m_col)


@triton.jit
def _backward_kernel(
    DX, DWP, DY, sDY_row, X, sX_row, W, RSTD, n_rows, n_cols, rows_per_program, offset,
    LLAMA: tl.constexpr, HAS_W: tl.constexpr, ROUND_W: tl.constexpr, NEED_DX: tl.constexpr, NEED_DW: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    m_col = cols < n_cols
    dw = tl.zeros((BLOCK,), tl.float32)
    first = pid * rows_per_program
    last = tl.minimum(first + rows_per_program, n_rows)
    for start in tl.range(first, last, ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        m_row = row < last
        mask = m_row[:, None] & m_col[None, :]
        dy = tl.load(DY + row_base(row, sDY_row)[:, None] + cols[None, :], mask=mask, other=0.0).to(
            tl.float32
        )
        x = tl.load(X + row_base(row, sX_row)[:, None] + cols[None, :], mask=mask, other=0.0).to(
            tl.float32
        )
        rstd = tl.load(RSTD + row, mask=m_row, other=0.0)
        n = x * rstd[:, None]
        if NEED_DW:
            rounded = n.to(X.dtype.element_ty).to(tl.float32) if LLAMA else n
            dw += tl.sum(dy * rounded, axis=0)
        if NEED_DX:
            g = dy
            if HAS_W:
                g = dy * _scale(W, cols, m_col, offset, ROUND_W)[None, :]
            mean = tl.sum(g * n, axis=1) / n_cols
            dx = rstd[:, None] * (g - n * mean[:, None])
            tl.store(
                DX + row_base(row, n_cols)[:, None] + cols[None, :],
                dx.to(DX.dtype.element_ty),
                mask=mask,
            )
    if NEED_DW:
        tl.store(DWP + pid * n_cols + cols, dw, mask=m_col)


@triton.jit
def _dx_wide_kernel(
    DX, DY, sDY_row, X, sX_row, W, RSTD, n_cols, offset,
    HAS_W: tl.constexpr, ROUND_W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    DX += row_base(row, n_cols)
    DY += row_base(row, sDY_row)
    X += row_base(row, sX_row)
    rstd = tl.load(RSTD + row)
    dot = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        m_col = cols < n_cols
        g = tl.load(DY + cols, mask=m_col, other=0.0, eviction_policy="evict_last").to(tl.float32)
        x = tl.load(X + cols, mask=m_col, other=0.0, eviction_policy="evict_last").to(tl.float32)
        if HAS_W:
            g = g * _scale(W, cols, m_col, offset, ROUND_W)
        dot += g * x * rstd
    mean = tl.sum(dot, axis=0) / n_cols
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        m_col = cols < n_cols
        g = tl.load(DY + cols, mask=m_col, other=0.0).to(tl.float32)
        x = tl.load(X + cols, mask=m_col, other=0.0).to(tl.float32)
        if HAS_W:
            g = g * _scale(W, cols, m_col, offset, ROUND_W)
        tl.store(DX + cols, (rstd * (g - x * rstd * mean)).to(DX.dtype.element_ty), mask=m_col)


@triton.jit
def _dw_wide_kernel(
    DWP, DY, sDY_row, X, sX_row, RSTD, n_rows, n_cols, rows_per_program,
    LLAMA: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(1)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_col = cols < n_cols
    dw = tl.zeros((BLOCK,), tl.float32)
    first = part * rows_per_program
    for row in range(first, tl.minimum(first + rows_per_program, n_rows)):
        dy = tl.load(DY + row_base(row, sDY_row) + cols, mask=m_col, other=0.0).to(tl.float32)
        n = tl.load(X + row_base(row, sX_row) + cols, mask=m_col, other=0.0).to(
            tl.float32
        ) * tl.load(RSTD + row)
        if LLAMA:
            n = n.to(X.dtype.element_ty).to(tl.float32)
        dw += dy * n
    tl.store(DWP + row_base(part, n_cols) + cols, dw, mask=m_col)


# 3 launch

# block of columns -> (rows, warps) forward; (rows, warps, programs per SM, stages) backward. Measured on H200, see NOTES.md.
_FORWARD = {
    256: (16, 4),
    512: (8, 4),
    1024: (4, 4),
    2048: (2, 4),
    4096: (1, 4),
    8192: (1, 8),
    16384: (1, 16),
    32768: (1, 32),
}
_BACKWARD = {
    256: (16, 4, 8, 2), 512: (8, 4, 8, 2), 1024: (4, 4, 6, 2), 2048: (2, 8, 4, 2), 4096: (1, 8, 3, 2),
    8192: (1, 16, 2, 2), 16384: (1, 32, 1, 2), 32768: (1, 32, 1, 1),
}  # fmt: skip


def _fake_forward(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, casting_mode: str
) -> Any:
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1].numel(), dtype=torch.float32)


@named(
    "(Tensor x, Tensor? weight, float eps, float offset, str casting_mode) -> (Tensor, Tensor)",
    _fake_forward,
)
def rms_norm_forward_kernel(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, casting_mode: str
) -> Any:
    """-> y like x (contiguous), rstd [R] fp32."""
    x2 = rows(x)
    n_rows, n_cols = x2.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty(n_rows, dtype=torch.float32, device=x.device)
    llama, has_w = casting_mode == "llama", weight is not None
    flags = {"LLAMA": llama, "HAS_W": has_w, "ROUND_W": llama and offset != 0.0}
    w = dense(weight) if weight is not None else x2
    args = (y, n_cols, x2, x2.stride(0), w, rstd)
    block = block_of(n_cols)
    if block > _MAX_BLOCK:
        meta = {"BLOCK": _WIDE_BLOCK, "num_warps": 16}
        launch(
            _forward_wide_kernel, (n_rows,), x.device, *args, n_cols, eps, offset, **flags, **meta
        )
        return y, rstd
    n, warps = _FORWARD[max(block, 256)]
    meta = {
        "ROWS": n,
        "BLOCK": block,
        "num_warps": min(warps, _env.device_info(x.device).max_warps),
    }
    launch(
        _forward_kernel,
        (cdiv(n_rows, n),),
        x.device,
        *args,
        n_rows,
        n_cols,
        eps,
        offset,
        **flags,
        **meta,
    )
    return y, rstd


def _fake_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    casting_mode: str,
    need_dx: bool,
    need_dw: bool,
) -> Any:
    dw = weight.new_empty(weight.shape) if weight is not None and need_dw else x.new_empty(0)
    return x.new_empty(x.shape if need_dx else 0), dw


@named(
    "(Tensor dy, Tensor x, Tensor? weight, Tensor rstd, float offset, str casting_mode, bool need_dx, bool need_dw)"
    " -> (Tensor, Tensor)",
    _fake_backward,
)
def rms_norm_backward_kernel(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    casting_mode: str,
    need_dx: bool,
    need_dw: bool,
) -> Any:
    """-> dx like x, dw like weight; an output that is not needed is empty."""
    dy2, x2 = rows(dy), rows(x)
    n_rows, n_cols = x2.shape
    device, empty = x.device, x.new_empty(0)
    dx = torch.empty(x.shape, dtype=x.dtype, device=device) if need_dx else empty
    need_dw = need_dw and weight is not None
    if n_rows == 0:
        return dx, torch.zeros_like(weight) if need_dw and weight is not None else empty
    llama, has_w = casting_mode == "llama", weight is not None
    flags = {"HAS_W": has_w, "ROUND_W": llama and offset != 0.0}
    w = dense(weight) if weight is not None else x2
    block = block_of(n_cols)
    if block > _MAX_BLOCK:
        return _backward_wide(dx, dy2, x2, w, rstd, offset, llama, need_dx, need_dw, flags)
    n, warps, per_sm, stages = _BACKWARD[max(block, 256)]
    info = _env.device_info(device)
    programs = min(cdiv(n_rows, n), info.sm_count * per_sm)
    share = cdiv(cdiv(n_rows, programs), n) * n
    programs = cdiv(n_rows, share)
    partials = torch.empty((programs, n_cols) if need_dw else 0, dtype=torch.float32, device=device)
    launch(
        _backward_kernel, (programs,), device, dx, partials, dy2, dy2.stride(0), x2, x2.stride(0), w, rstd,
        n_rows, n_cols, share, offset, LLAMA=llama, **flags, NEED_DX=need_dx, NEED_DW=need_dw,
        ROWS=n, BLOCK=block, STAGES=stages, num_warps=min(warps, info.max_warps),
    )  # fmt: skip
    return dx, sum_partials(partials, w.dtype) if need_dw else empty


def _backward_wide(
    dx: Tensor, dy: Tensor, x: Tensor, w: Tensor, rstd: Tensor, offset: float, llama: bool, need_dx: bool, need_dw: bool,
    flags: dict[str, bool],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    n_rows, n_cols = x.shape
    shared = (dy, dy.stride(0), x, x.stride(0))
    if need_dx:
        meta = {"BLOCK": _WIDE_BLOCK, "num_warps": 16}
        launch(
            _dx_wide_kernel,
            (n_rows,),
            x.device,
            dx,
            *shared,
            w,
            rstd,
            n_cols,
            offset,
            **flags,
            **meta,
        )
    if not need_dw:
        return dx, x.new_empty(0)
    columns = cdiv(n_cols, 1024)
    parts = min(n_rows, max(1, 4 * _env.device_info(x.device).sm_count // columns))
    share = cdiv(n_rows, parts)
    partials = torch.empty(cdiv(n_rows, share), n_cols, dtype=torch.float32, device=x.device)
    grid = (columns, partials.shape[0])
    launch(
        _dw_wide_kernel,
        grid,
        x.device,
        partials,
        *shared,
        rstd,
        n_rows,
        n_cols,
        share,
        LLAMA=llama,
        BLOCK=1024,
    )
    return dx, sum_partials(partials, w.dtype)


# 4 op


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, eps: float, offset: float, casting_mode: str
    ) -> Tensor:
        y, rstd = rms_norm_forward_kernel(x, weight, eps, offset, casting_mode)
        ctx.save_for_backward(x, weight, rstd)
        ctx.offset, ctx.casting_mode = offset, casting_mode
        return y

    @staticmethod
    @first_order("rms_norm")
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, rstd = ctx.saved_tensors
        need_dx, need_dw = ctx.needs_input_grad[:2]
        dx, dw = rms_norm_backward_kernel(
            dy, x, weight, rstd, ctx.offset, ctx.casting_mode, need_dx, need_dw
        )
        return dx if need_dx else None, dw if need_dw else None, None, None, None


def supports(x: Tensor, weight: Tensor | None, *_: Any) -> str | None:
    """Every width and layout; an empty row has no mean."""
    return "rows have no columns" if x.shape[-1] == 0 else None


def cost(x: Tensor, weight: Tensor | None, *_: Any) -> Cost:
    """x in, y out, w in; then dy and x in, dx and dw out."""
    n, w = (
        x.numel() * x.element_size(),
        0 if weight is None else weight.numel() * weight.element_size(),
    )
    return Cost(
        forward_bytes=2 * n + w, backward_bytes=3 * n + 2 * w, saved=4 * (x.numel() // x.shape[-1])
    )


OP = Op("rms_norm", reference, reference, _RMSNorm.apply, supports, cost)

# 5 public


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str | int = "llama",
    impl: str | None = None,
) -> Tensor:
    """Root-mean-square layer normalisation over the last dimension.

    Args:
        x: `[*, D]` of any rank, width and strides; fp16, bf16, fp32 (fp64 on the torch path).
        weight: `[D]`, or None for no scale. Its dtype may differ from x's.
        eps: added to the mean square.
        offset: added to the weight (1.0 where the weight is stored as a difference from one, as in Gemma).
        casting_mode: "llama" rounds the normalised x to x's dtype before the weight; "gemma" and "none" stay in fp32.
        impl: "triton" or "torch" for this call, None for the default choice.
    Returns:
        `[*, D]` in x's dtype, contiguous.
    Memory:
        Keeps x, weight and 4 bytes a row for backward.
    Raises:
        ValueError: unknown casting mode, or a weight whose shape is not `[D]`.
    """
    mode = _CASTING_CODES.get(casting_mode, casting_mode)  # type: ignore[call-overload]
    choice("rms_norm", "casting_mode", mode, CASTING_MODES)
    if weight is not None:
        require(
            weight.shape == x.shape[-1:],
            f"rms_norm: weight must have shape [{x.shape[-1]}], the last dimension of x {list(x.shape)}; "
            f"got {list(weight.shape)}.",
        )
    return OP(x, weight, eps, offset, mode, impl=impl)
