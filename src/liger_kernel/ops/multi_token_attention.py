"""Multi-token attention.   out = causal(conv2d(causal(normalise(scores))))

    scores: [B, C, L, L], query by key   weight: [C', C / groups, kh, kw]   bias: [C']   out: [B, C', H, W]

A position whose key lies after its query, column > row, is left out when a row is normalised (by
softmax or sparsemax) and set to 0 in the result of the convolution over queries and keys.

Backward, with p the normalised scores and dp what the convolution passes back:

    softmax     ds = p (dp - sum over the row of p dp)
    sparsemax   ds = dp - mean of dp over the support, on the support p > 0; 0 elsewhere

Casts   normalisation in fp32; p is rounded to the scores' dtype before the convolution, as eager does.
Memory  scores are read once, and only up to the diagonal: no masked copy. p is written (and kept, the
        scores are not), convolved by the library's convolution with repeatable sums, and the upper part
        of the result overwritten in place. Backward reads the lower halves of dout, dp and p.
Paper   Golovneva et al., "Multi-Token Attention", arXiv:2504.00927; Martins and Astudillo, "From Softmax
        to Sparsemax", arXiv:1602.02068; its threshold is found as in `sparsemax.py`
"""
# pyright: reportGeneralTypeIssues=false
# (Triton types a call of one @jit function from another as never returning, so its results cannot be unpacked.)

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv2d

from liger_kernel import _env
from liger_kernel.ops import sparsemax
from liger_kernel.ops._device import exp, row_base
from liger_kernel.ops._op import Cost, Op, compute_dtype, dense, first_order, named, require, rows
from liger_kernel.ops._triton import block_of, cdiv, launch, tl, triton
from liger_kernel.ops.sparsemax import threshold

_MAX_BLOCK = 32768  # columns a program holds in registers

# 1 reference


def reference(
    scores: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
    dilation: Any = 1, groups: int = 1, sparse: bool = False,
) -> Tensor:  # fmt: skip
    """The definition."""
    z = scores.to(compute_dtype(scores)).masked_fill(_future(scores), float("-inf"))
    p = sparsemax.reference(z) if sparse else z.softmax(-1)
    out = conv2d(p.to(scores.dtype), weight, bias, stride, padding, dilation, groups)
    return out.masked_fill(_future(out), 0.0)


def _future(x: Tensor) -> Tensor:
    return torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)


# 2 kernels


@triton.jit
def _reach(query, cols, length):
    """What is up to the diagonal, and what to load for it: whole groups of 16 columns, because a mask
    that cuts through a 16-byte access splits it."""
    past = cols[None, :] <= query[:, None]
    groups = (cols // 16)[None, :] <= (query // 16)[:, None]
    return past, groups & (cols < length)[None, :]


@triton.jit
def _normalise_kernel(
    P, S, sS_row, n_rows, length, SPARSE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    m_row = row < n_rows
    past, m_load = _reach(row % length, cols, length)
    at = row_base(row, sS_row)[:, None] + cols[None, :]
    s = tl.load(S + at, mask=m_row[:, None] & m_load, other=0.0).to(tl.float32)
    z = tl.where(past, s, float("-inf"))
    z = z - tl.max(z, axis=1)[:, None]
    if SPARSE:
        tau, _ = threshold(z, length)
        p = tl.maximum(z - tau[:, None], 0.0)
    else:
        e = exp(z)
        p = e / tl.sum(e, axis=1)[:, None]
    mask = m_row[:, None] & (cols < length)[None, :]
    to = row_base(row, length)[:, None] + cols[None, :]
    tl.store(P + to, p.to(P.dtype.element_ty), mask=mask)


@triton.jit
def _normalise_backward_kernel(
    DS, DP, P, n_rows, length, SPARSE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """p is 0 beyond the diagonal, so dp needs no mask there."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    m_row = row < n_rows
    _, m_load = _reach(row % length, cols, length)
    m_load = m_row[:, None] & m_load
    at = row_base(row, length)[:, None] + cols[None, :]
    p = tl.load(P + at, mask=m_load, other=0.0).to(tl.float32)
    dp = tl.load(DP + at, mask=m_load, other=0.0).to(tl.float32)
    if SPARSE:
        inside = p > 0.0
        size = tl.maximum(tl.sum(inside.to(tl.float32), axis=1), 1.0)
        mean = tl.sum(tl.where(inside, dp, 0.0), axis=1) / size
        ds = tl.where(inside, dp - mean[:, None], 0.0)
    else:
        ds = p * (dp - tl.sum(p * dp, axis=1)[:, None])
    mask = m_row[:, None] & (cols < length)[None, :]
    tl.store(DS + at, ds.to(DS.dtype.element_ty), mask=mask)


@triton.jit
def _causal_kernel(
    Y, X, sX_row, height, width, IN_PLACE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """y = x up to the diagonal and 0 beyond. In place, only groups of columns that reach beyond it are
    written, and only the one on it is read."""
    query = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    row = row_base(tl.program_id(0), height) + query
    m_store = (query < height)[:, None] & (cols < width)[None, :]
    past, m_load = _reach(query, cols, width)
    m_load = m_load & (query < height)[:, None]
    if IN_PLACE:
        m_store = m_store & ((cols // 16)[None, :] >= (query // 16)[:, None])
        m_load = m_load & m_store
    x = tl.load(X + row[:, None] * sX_row + cols[None, :], mask=m_load, other=0.0)
    y = tl.where(past, x, 0.0).to(Y.dtype.element_ty)
    tl.store(Y + row[:, None] * width + cols[None, :], y, mask=m_store)


# 3 launch

# block of columns -> rows, warps
_TABLE = {
    256: (8, 4), 512: (4, 4), 1024: (2, 4), 2048: (1, 4), 4096: (1, 8),
    8192: (1, 16), 16384: (1, 32), 32768: (1, 32),
}  # fmt: skip
_CAUSAL = {"ROWS": 4, "BLOCK": 512, "num_warps": 4}


@contextlib.contextmanager
def _repeatable() -> Iterator[None]:
    """Within the block convolutions add in a fixed order."""
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic
    cudnn.deterministic = True
    try:
        yield
    finally:
        cudnn.deterministic = before


def _by_rows(kernel: Any, length: int, *args: Any, sparse: bool) -> None:
    out: Tensor = args[0]
    block = block_of(length)
    n, warps = _TABLE[max(block, 256)]
    n_rows = out.numel() // max(length, 1)
    meta = {"SPARSE": sparse, "ROWS": n, "BLOCK": block}
    warps = min(warps, _env.device_info(out.device).max_warps)
    grid = (cdiv(n_rows, n),)
    launch(kernel, grid, out.device, *args, n_rows, length, **meta, num_warps=warps)


def _causal(x: Tensor, in_place: bool) -> Tensor:
    """x up to the diagonal, in x itself or in new contiguous memory."""
    height, width = x.shape[-2:]
    x2 = x.view(-1, width) if in_place else rows(x)
    y = x if in_place else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grid = (
        x.shape[0] * x.shape[1],
        cdiv(height, _CAUSAL["ROWS"]),
        cdiv(width, _CAUSAL["BLOCK"]),
    )
    args = (y, x2, x2.stride(0), height, width)
    launch(_causal_kernel, grid, x.device, *args, IN_PLACE=in_place, **_CAUSAL)
    return y


def _fake_forward(scores, weight, bias, stride, padding, dilation, groups, sparse):
    sizes = [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, p, d, k, s in zip(
            scores.shape[2:], padding, dilation, weight.shape[2:], stride, strict=True
        )
    ]
    out = scores.new_empty((scores.shape[0], weight.shape[0], *sizes))
    return out, scores.new_empty(scores.shape)


@named(
    "(Tensor scores, Tensor weight, Tensor? bias, int[] stride, int[] padding, int[] dilation, int groups,"
    " bool sparse) -> (Tensor, Tensor)",
    _fake_forward,
)
def multi_token_forward(
    scores: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int],
    dilation: list[int], groups: int, sparse: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """-> out, p like scores; both contiguous."""
    p = torch.empty(scores.shape, dtype=scores.dtype, device=scores.device)
    s = rows(scores)
    _by_rows(_normalise_kernel, s.shape[1], p, s, s.stride(0), sparse=sparse)
    with _repeatable():
        out = conv2d(p, dense(weight), bias, stride, padding, dilation, groups)
    return _causal(out.contiguous(), in_place=True), p


def _fake_backward(
    dout, p, weight, stride, padding, dilation, groups, sparse, need_ds, need_dw, need_db
):
    return (
        p.new_empty(p.shape if need_ds else 0),
        weight.new_empty(weight.shape if need_dw else 0),
        weight.new_empty(weight.shape[0] if need_db else 0),
    )


@named(
    "(Tensor dout, Tensor p, Tensor weight, int[] stride, int[] padding, int[] dilation, int groups, bool sparse,"
    " bool need_ds, bool need_dw, bool need_db) -> (Tensor, Tensor, Tensor)",
    _fake_backward,
)
def multi_token_backward(
    dout: Tensor, p: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int],
    groups: int, sparse: bool, need_ds: bool, need_dw: bool, need_db: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """-> dscores like p, dweight, dbias; one that is not needed is empty."""
    needs = [need_ds, need_dw, need_db]
    with _repeatable():
        found = torch.ops.aten.convolution_backward(
            _causal(dout, in_place=False), p, dense(weight), [weight.shape[0]], stride, padding, dilation,
            False, [0, 0], groups, needs,
        )  # fmt: skip
    dp, dw, db = (g if need else p.new_empty(0) for g, need in zip(found, needs, strict=True))
    if not need_ds:
        return dp, dw, db
    ds = torch.empty(p.shape, dtype=p.dtype, device=p.device)
    _by_rows(_normalise_backward_kernel, p.shape[-1], ds, dense(dp), p, sparse=sparse)
    return ds, dw, db


# 4 op


class _MultiTokenAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int],
        dilation: list[int], groups: int, sparse: bool,
    ) -> Tensor:  # fmt: skip
        ctx.options = stride, padding, dilation, groups, sparse
        out, p = multi_token_forward(scores, weight, bias, *ctx.options)
        ctx.save_for_backward(p, weight)
        return out

    @staticmethod
    @first_order("multi_token_attention")
    def backward(ctx: Any, dout: Tensor) -> Any:
        need = ctx.needs_input_grad[:3]
        found = multi_token_backward(dout, *ctx.saved_tensors, *ctx.options, *need)
        return *(g if n else None for g, n in zip(found, need, strict=True)), *(None,) * 5


def supports(scores: Tensor, weight: Tensor, bias: Tensor | None = None, *_: Any) -> str | None:
    """Rows of 1 to 32768 scores, one dtype."""
    if not 0 < scores.shape[-1] <= _MAX_BLOCK:
        return f"kernels take rows of 1 to {_MAX_BLOCK} scores, not {scores.shape[-1]}"
    if weight.dtype != scores.dtype or (bias is not None and bias.dtype != scores.dtype):
        return f"scores are {scores.dtype}, the weight {weight.dtype}"
    return None


def cost(scores: Tensor, weight: Tensor, bias: Any, stride: Any, *_: Any) -> Cost:
    """Half of the scores in, the result out; then half of dout and of p in, dscores out."""
    n = scores.numel() * scores.element_size()
    out = n * weight.shape[0] // (scores.shape[1] * stride[0] * stride[1])
    flops = 2 * out // scores.element_size() * weight[0].numel()
    return Cost(n // 2 + out, n // 2 + out // 2 + n, saved=n, flops=flops)


OP = Op("multi_token_attention", reference, reference, _MultiTokenAttention.apply, supports, cost)

# 5 public


def multi_token_attention(
    scores: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] = 0,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
    sparse: bool = False,
    impl: str | None = None,
) -> Tensor:
    """Causal attention weights mixed over neighbouring queries and keys (and over heads).

    Args:
        scores: `[B, C, L, L]` before any mask, any strides; fp16, bf16, fp32 (fp64 on the torch path).
            Kernels take L up to 32,768.
        weight: `[C', C / groups, kh, kw]`; bias: `[C']` or None; both in scores' dtype.
        stride, padding, dilation, groups: as in `torch.nn.functional.conv2d`, padding as numbers.
        sparse: sparsemax instead of softmax.
        impl: "triton" or "torch" for this call, None for the default choice.
    Returns:
        `[B, C', H, W]` in scores' dtype, 0 where column > row.
    Memory:
        Keeps the normalised scores and the weight for backward.
    Raises:
        ValueError: scores are not square matrices of weight's channels.
    """
    require(
        scores.dim() == 4 and scores.shape[-1] == scores.shape[-2],
        f"multi_token_attention: scores must be [B, C, L, L]; got {list(scores.shape)}.",
    )
    require(
        weight.dim() == 4 and weight.shape[1] * groups == scores.shape[1],
        f"multi_token_attention: weight must be [C', {scores.shape[1]} / {groups}, kh, kw] for scores "
        f"{list(scores.shape)} in {groups} groups; got {list(weight.shape)}.",
    )
    pairs = ([v, v] if isinstance(v, int) else list(v) for v in (stride, padding, dilation))
    return OP(scores, weight, bias, *pairs, groups, sparse, impl=impl)


class LigerMultiTokenAttentionFunction:
    """`multi_token_attention` with positional arguments."""

    @staticmethod
    def apply(
        scores: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
        dilation: Any = 1, groups: int = 1, sparse: bool = False,
    ) -> Tensor:  # fmt: skip
        return multi_token_attention(
            scores, weight, bias, stride, padding, dilation, groups, sparse
        )
