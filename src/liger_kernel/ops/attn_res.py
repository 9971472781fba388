"""Attention residuals.   h = sum over n of alpha_n v_n,   alpha = softmax_n <w_query, w_norm * v_n / rms(v_n)>

    v: [N, *, D], the outputs of N earlier blocks; each token mixes its own N rows
    w_query, w_norm: [D]   h: [*, D]   alpha, rstd: [R, N] fp32, R = tokens, rstd = 1 / rms

Backward, with w = w_query * w_norm, l_n = rstd_n <w, v_n> and g_n = alpha_n (<dh, v_n> - sum_m alpha_m <dh, v_m>):

    dv_n = alpha_n dh + g_n rstd_n (w - v_n rstd_n l_n / D)
    dw = sum over tokens and n of g_n rstd_n v_n,   dw_query = dw * w_norm,   dw_norm = dw * w_query

Casts   fp32 throughout, one rounding of h and of each gradient.
Memory  forward reads v once: it keeps a running maximum, sum and mixture, as fused attention does.
        It keeps 8 bytes a row of v beside its inputs. Backward visits a token's N rows twice, the
        second time from the cache, reads dh and writes dv; dw passes through fp32 partials of one row
        per program, summed in a fixed order. A list of blocks is stacked first, which moves v twice
        more: who mixes the same blocks again and again should keep them in one buffer.
Paper   Kimi Team, "Attention Residuals", arXiv:2603.15031
"""
# pyright: reportGeneralTypeIssues=false
# (Triton types a call of one @jit function from another as never returning, so its results cannot be unpacked.)

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops._device import exp, row_base
from liger_kernel.ops._norm_plan import backward_plan, forward_plan, loop_table, pipeline
from liger_kernel.ops._op import Cost, Op, compute_dtype, dense, first_order, named, require, rows
from liger_kernel.ops._reduce import sum_partials
from liger_kernel.ops._schedules import TILE, Table, fits_tile
from liger_kernel.ops._triton import UNFUSED, block_of, cdiv, launch, tl, triton

_MAX_BLOCK = 32768  # columns a program holds in registers

# 1 reference


def reference(
    V: Tensor | Sequence[Tensor], w_query: Tensor, w_norm: Tensor, eps: float = 1e-6
) -> Tensor:
    """The definition, with a norm that rounds as Llama's does."""
    v = V if isinstance(V, Tensor) else torch.stack(list(V))
    wide = v.to(compute_dtype(v))
    keys = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(v.dtype) * w_norm
    alpha = (keys * w_query).sum(-1).softmax(0)
    return (alpha[..., None] * v).sum(0).to(v.dtype)


# 2 kernels


@triton.jit
def _weight(WQ, WN, cols, mask):
    wq = tl.load(WQ + cols, mask=mask, other=0.0).to(tl.float32)
    wn = tl.load(WN + cols, mask=mask, other=0.0).to(tl.float32)
    return wq, wn


@triton.jit
def _forward_kernel(
    H, ALPHA, RSTD, V, sV_block, sV_row, WQ, WN, n_blocks, n_rows, n_cols, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    m_row = row < n_rows
    m_col = cols < n_cols
    mask = m_row[:, None] & m_col[None, :]
    wq, wn = _weight(WQ, WN, cols, m_col)
    w = (wq * wn)[None, :]
    at = row_base(row, sV_row)[:, None] + cols[None, :]
    each = tl.arange(0, BLOCKS)[None, :]
    logits = tl.full((ROWS, BLOCKS), float("-inf"), tl.float32)
    rstds = tl.zeros((ROWS, BLOCKS), tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    h = tl.zeros((ROWS, BLOCK), tl.float32)
    for n in tl.range(0, n_blocks, num_stages=STAGES):
        v = tl.load(V + row_base(n, sV_block) + at, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(v * v, axis=1) / n_cols + eps)
        logit = tl.sum(v * w, axis=1) * rstd
        higher = tl.maximum(top, logit)
        fade, p = exp(top - higher), exp(logit - higher)
        h = h * fade[:, None] + p[:, None] * v
        total = total * fade + p
        top = higher
        logits = tl.where(each == n, logit[:, None], logits)
        rstds = tl.where(each == n, rstd[:, None], rstds)
    h = h / total[:, None]
    tl.store(
        H + row_base(row, n_cols)[:, None] + cols[None, :], h.to(H.dtype.element_ty), mask=mask
    )
    at = row_base(row, n_blocks)[:, None] + each
    mask = m_row[:, None] & (each < n_blocks)
    tl.store(ALPHA + at, exp(logits - top[:, None]) / total[:, None], mask=mask)
    tl.store(RSTD + at, rstds, mask=mask)


@triton.jit
def _take(values, each, n):
    """Column n of a `[ROWS, BLOCKS]` tensor that lives in registers, as `[ROWS, 1]`."""
    return tl.sum(tl.where(each == n, values, 0.0), axis=1)[:, None]


@triton.jit
def _backward_kernel(
    DV, DWQ, DWN, DH, sDH_row, V, sV_block, sV_row, WQ, WN, ALPHA, RSTD, n_blocks, n_rows, n_cols, rows_per_program,
    NEED_DV: tl.constexpr, NEED_DW: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Two visits of a token's rows: the first takes every <dh, v_n> and <w, v_n>, and with all of
    them known the second, which finds v in the cache, is plain arithmetic. (One visit with <dh, h>
    from the stored h would carry h's rounding into g, and from there into dw.)"""
    pid = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    m_col = cols < n_cols
    wq, wn = _weight(WQ, WN, cols, m_col)
    w = (wq * wn)[None, :]
    each = tl.arange(0, BLOCKS)[None, :]
    dw = tl.zeros((BLOCK,), tl.float32)
    first = pid * rows_per_program
    last = tl.minimum(first + rows_per_program, n_rows)
    for start in range(first, last, ROWS):
        row = start + tl.arange(0, ROWS)
        m_row = row < last
        mask = m_row[:, None] & m_col[None, :]
        dh = tl.load(DH + row_base(row, sDH_row)[:, None] + cols[None, :], mask=mask, other=0.0).to(
            tl.float32
        )
        at = row_base(row, sV_row)[:, None] + cols[None, :]
        with_dh = tl.zeros((ROWS, BLOCKS), tl.float32)
        with_w = tl.zeros((ROWS, BLOCKS), tl.float32)
        for n in tl.range(0, n_blocks, num_stages=STAGES):
            v = tl.load(
                V + row_base(n, sV_block) + at, mask=mask, other=0.0, eviction_policy="evict_last"
            ).to(tl.float32)
            with_dh = tl.where(each == n, tl.sum(dh * v, axis=1)[:, None], with_dh)
            with_w = tl.where(each == n, tl.sum(w * v, axis=1)[:, None], with_w)
        kept = row_base(row, n_blocks)[:, None] + each
        m_kept = m_row[:, None] & (each < n_blocks)
        alpha = tl.load(ALPHA + kept, mask=m_kept, other=0.0)
        rstd = tl.load(RSTD + kept, mask=m_kept, other=0.0)
        toward_w = alpha * (with_dh - tl.sum(alpha * with_dh, axis=1)[:, None]) * rstd
        against_v = toward_w * rstd * rstd * with_w / n_cols
        for n in tl.range(0, n_blocks, num_stages=STAGES):
            v = tl.load(
                V + row_base(n, sV_block) + at, mask=mask, other=0.0, eviction_policy="evict_first"
            ).to(tl.float32)
            scaled = _take(toward_w, each, n)
            if NEED_DV:
                dv = _take(alpha, each, n) * dh + scaled * w - _take(against_v, each, n) * v
                to = row_base(n, n_rows) * n_cols + row_base(row, n_cols)[:, None] + cols[None, :]
                tl.store(DV + to, dv.to(DV.dtype.element_ty), mask=mask)
            if NEED_DW:
                dw += tl.sum(scaled * v, axis=0)
    if NEED_DW:
        wq, wn = _weight(WQ, WN, cols, m_col)
        tl.store(DWQ + pid * n_cols + cols, dw * wn, mask=m_col)
        tl.store(DWN + pid * n_cols + cols, dw * wq, mask=m_col)


# 3 launch

# block of columns -> (tokens, warps, stages) forward; (tokens, warps, programs per SM, stages) backward
_FORWARD = Table("attn_res.forward", {**TILE, "stages": (1, 2, 3)}, {
    256: (4, 4, 3), 512: (2, 4, 3), 1024: (1, 4, 3), 2048: (1, 4, 3), 4096: (1, 8, 3),
    8192: (1, 16, 3), 16384: (1, 32, 2), 32768: (1, 32, 1),
}, lambda block, rows, warps, stages: fits_tile(block, rows, warps))  # fmt: skip
_BACKWARD = loop_table("attn_res.backward", {
    256: (4, 4, 6, 3), 512: (2, 4, 6, 3), 1024: (1, 4, 6, 3), 2048: (1, 4, 4, 3), 4096: (1, 8, 2, 3),
    8192: (1, 16, 1, 3), 16384: (1, 32, 1, 2), 32768: (1, 32, 1, 1),
})  # fmt: skip


def _stacked_rows(v: Tensor) -> Tensor:
    """v as `[N, R, D]` with adjacent columns: a view where the layout allows one."""
    flat = v.reshape(v.shape[0], math.prod(v.shape[1:-1]), v.shape[-1])
    return flat if flat.stride(2) == 1 or flat.shape[2] == 1 else flat.contiguous()


def _fake_forward(v, w_query, w_norm, eps):
    kept = (math.prod(v.shape[1:-1]), v.shape[0])
    alpha, rstd = (v.new_empty(kept, dtype=torch.float32) for _ in range(2))
    return v.new_empty(v.shape[1:]), alpha, rstd


@named(
    "(Tensor v, Tensor w_query, Tensor w_norm, float eps) -> (Tensor, Tensor, Tensor)",
    _fake_forward,
)
def attn_res_forward_kernel(
    v: Tensor, w_query: Tensor, w_norm: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """-> h, contiguous, alpha and rstd [R, N] fp32."""
    v3 = _stacked_rows(v)
    n_blocks, n_rows, n_cols = v3.shape
    h = torch.empty(v.shape[1:], dtype=v.dtype, device=v.device)
    alpha, rstd = (
        torch.empty((n_rows, n_blocks), dtype=torch.float32, device=v.device) for _ in range(2)
    )
    block = block_of(n_cols)
    *tile, stages = _FORWARD.entry(block, v)
    plan = forward_plan(tile, v.device)
    stages = pipeline(stages, plan["ROWS"] * block * v.element_size(), v.device)
    args = (h, alpha, rstd, v3, v3.stride(0), v3.stride(1), dense(w_query), dense(w_norm))
    launch(
        _forward_kernel, (cdiv(n_rows, plan["ROWS"]),), v.device, *args, n_blocks, n_rows, n_cols, eps,
        BLOCK=block, BLOCKS=block_of(n_blocks), STAGES=stages, **plan, **UNFUSED,
    )  # fmt: skip
    return h, alpha, rstd


def _fake_backward(dh, v, w_query, w_norm, alpha, rstd, need_dv, need_dw):
    dv = v.new_empty(v.shape if need_dv else 0)
    return dv, *(w.new_empty(w.shape if need_dw else 0) for w in (w_query, w_norm))


@named(
    "(Tensor dh, Tensor v, Tensor w_query, Tensor w_norm, Tensor alpha, Tensor rstd,"
    " bool need_dv, bool need_dw) -> (Tensor, Tensor, Tensor)",
    _fake_backward,
)
def attn_res_backward_kernel(
    dh: Tensor, v: Tensor, w_query: Tensor, w_norm: Tensor, alpha: Tensor, rstd: Tensor, need_dv: bool,
    need_dw: bool,
) -> Any:  # fmt: skip
    """-> dv like v, contiguous, dw_query, dw_norm; what is not needed is empty."""
    v3, dh2 = _stacked_rows(v), rows(dh)
    n_blocks, n_rows, n_cols = v3.shape
    dv = torch.empty(v.shape if need_dv else 0, dtype=v.dtype, device=v.device)
    if n_rows == 0:
        return dv, *(torch.zeros_like(w) if need_dw else w.new_empty(0) for w in (w_query, w_norm))
    block = block_of(n_cols)
    entry = _BACKWARD.entry(block, v)
    programs, share, plan = backward_plan(entry, n_rows, block * v.element_size(), v.device)
    dwq, dwn = (
        v.new_empty((programs, n_cols) if need_dw else 0, dtype=torch.float32) for _ in range(2)
    )
    operands = (dh2, dh2.stride(0), v3, v3.stride(0), v3.stride(1))
    launch(
        _backward_kernel, (programs,), v.device, dv, dwq, dwn, *operands, dense(w_query), dense(w_norm),
        alpha, rstd, n_blocks, n_rows, n_cols, share,
        NEED_DV=need_dv, NEED_DW=need_dw, BLOCK=block, BLOCKS=block_of(n_blocks), **plan, **UNFUSED,
    )  # fmt: skip
    if not need_dw:
        return dv, w_query.new_empty(0), w_norm.new_empty(0)
    return dv, sum_partials(dwq, w_query.dtype), sum_partials(dwn, w_norm.dtype)


# 4 op


class _AttnRes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, v: Tensor, w_query: Tensor, w_norm: Tensor, eps: float) -> Tensor:
        h, alpha, rstd = attn_res_forward_kernel(v, w_query, w_norm, eps)
        ctx.save_for_backward(v, w_query, w_norm, alpha, rstd)
        return h

    @staticmethod
    @first_order("attn_res")
    def backward(ctx: Any, dh: Tensor) -> Any:
        need_dv, need_dwq, need_dwn = ctx.needs_input_grad[:3]
        dv, dwq, dwn = attn_res_backward_kernel(
            dh, *ctx.saved_tensors, need_dv, need_dwq or need_dwn
        )
        return (
            dv if need_dv else None,
            dwq if need_dwq else None,
            dwn if need_dwn else None,
            None,
        )


def supports(v: Tensor, *_: Any) -> str | None:
    """Rows of 1 to 32768 columns: a program holds a row of the mixture."""
    width = v.shape[-1]
    return (
        None if 0 < width <= _MAX_BLOCK else f"kernels take 1 to {_MAX_BLOCK} columns, not {width}"
    )


def cost(v: Tensor, w_query: Tensor, *_: Any) -> Cost:
    """v in, h out; then v, dh in, dv out. The vectors count once each way."""
    n, w = v.numel() * v.element_size(), 2 * w_query.numel() * w_query.element_size()
    row, kept = n // v.shape[0], 8 * (v.numel() // v.shape[-1])
    return Cost(n + row + w + kept, 2 * n + row + 2 * w + kept, saved=kept)


OP = Op("attn_res", reference, reference, _AttnRes.apply, supports, cost)

# 5 public


def attn_res(
    V: Tensor | Sequence[Tensor],
    w_query: Tensor,
    w_norm: Tensor,
    eps: float = 1e-6,
    impl: str | None = None,
) -> Tensor:
    """Mixture of the outputs of earlier blocks, weighted per token by a learned query.

    Args:
        V: `[N, *, D]`, N at least 1, any strides, or a sequence of N tensors `[*, D]`, which is
            stacked; fp16, bf16, fp32 (fp64 on the torch path). Kernels take up to 32,768 columns.
        w_query: `[D]`, the query that scores the normalised rows.
        w_norm: `[D]`, the weight of the RMS norm before scoring.
        eps: added to the mean square.
        impl: "triton" or "torch" for this call, None for the default choice.
    Returns:
        `[*, D]` in V's dtype, contiguous.
    Memory:
        Keeps V and 8 bytes a row of V for backward.
    Raises:
        ValueError: no blocks, blocks of different shapes, or vectors whose shape is not `[D]`.
    """
    v = V if isinstance(V, Tensor) else _stack(V)
    require(
        v.dim() >= 2 and v.shape[0] > 0,
        f"attn_res: V must be [N, *, D] with at least one block; got {list(v.shape)}.",
    )
    for name, w in (("w_query", w_query), ("w_norm", w_norm)):
        require(
            w.shape == v.shape[-1:],
            f"attn_res: {name} must have shape [{v.shape[-1]}], the last dimension of V {list(v.shape)}; "
            f"got {list(w.shape)}.",
        )
    return OP(v, w_query, w_norm, eps, impl=impl)


def _stack(blocks: Sequence[Tensor]) -> Tensor:
    shapes = [list(block.shape) for block in blocks]
    require(len(shapes) > 0, "attn_res: V must hold at least one block; got an empty sequence.")
    require(
        all(shape == shapes[0] for shape in shapes),
        f"attn_res: the blocks of V must have one shape; got {shapes}.",
    )
    return torch.stack(list(blocks))


class LigerAttnResFunction:
    """`attn_res` with positional arguments; `V_stacked` may be a list."""

    @staticmethod
    def apply(
        V_stacked: Tensor | Sequence[Tensor], w_query: Tensor, w_norm: Tensor, eps: float
    ) -> Tensor:
        return attn_res(V_stacked, w_query, w_norm, eps)


def attn_res_forward(
    blocks: Tensor | Sequence[Tensor], w_query: Tensor, w_norm: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> h, V as [N, R, D], alpha and rstd [R, N], by the kernel and outside autograd."""
    v = blocks if isinstance(blocks, Tensor) else _stack(blocks)
    h, alpha, rstd = attn_res_forward_kernel(v, w_query, w_norm, eps)
    return h, _stacked_rows(v), alpha, rstd


def attn_res_backward(
    dh: Tensor, V_3d: Tensor, w_query: Tensor, w_norm: Tensor, Alpha: Tensor, RSTD: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """-> dV [N, R, D], dw_query, dw_norm, by the kernel and outside autograd; `eps` is in RSTD already."""
    return attn_res_backward_kernel(rows(dh), V_3d, w_query, w_norm, Alpha, RSTD, True, True)
