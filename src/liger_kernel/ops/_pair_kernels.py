"""A loss between two rows of V numbers and its gradient in the first of them: one read of both, one write.

x belongs to the student and gets the gradient, y to the teacher. Per element, with P = e^y and Q = e^x:

    form         loss                                     dloss/dx                x, y
    kl           y (log max(y, eps) - x)                  -y                      log-probability, probability
    kl_log       P (y - x)                                -P                      log-probabilities
    reverse_kl   Q (x - y)                                Q (x - y) + Q           log-probabilities
    jsd          beta P (y - m) + (1 - beta) Q (x - m)    (1 - beta) Q (x - m)    log-probabilities
                 m = log(beta P + (1 - beta) Q)
    tvd          |x - y| / 2                              sign(x - y) / 2         probabilities

A factor of 0 wins over everything it meets: probability 0, given as 0 or as -inf, adds 0 and has
gradient 0 on its own side, and two entries of -inf are equal. Where only the student's is 0 the KL
forms are infinite, as they are by definition. NaN stays NaN. fp32 inside; the gradient is rounded
once.

JSD is computed from d = y - x: with L the larger of P and Q, a = |d|, t = e^-a and c the weight of
the smaller,

    s = 1 - c + c t    m = log L + log s    loss = -L (s log s + c t a)

so that nothing is logged that could be 0 and an offset common to x and y costs no digits: the error
is relative to L, where m formed from x and y would have one relative to L |m|.

Each program takes one piece of one row, the last one also the few columns that no piece holds
(`_columns`). The sums of the pieces are added up in a fixed order. Rows whose label is ignore_index
are not read and get loss and gradient 0.
"""
# pyright: reportGeneralTypeIssues=false

import torch
from torch import Tensor

from liger_kernel.ops._columns import EDGES, column_flags, edges, first_column, whole_and_behind
from liger_kernel.ops._device import LN2, exp, row_base
from liger_kernel.ops._op import named
from liger_kernel.ops._triton import block_of, cdiv, launch, tl, triton

_BLOCK = 4096  # columns of a program: 16 fp32 a thread of either operand, four 16-byte accesses
_TINY = tl.constexpr(1.1754944e-38)  # the smallest normal fp32
_LOWEST = tl.constexpr(-1e30)  # stands for -inf

# 1 kernels


@triton.jit
def _relative_entropy(x, y, p):
    """p (y - x) for p = e^y, 0 where p is 0."""
    return p * tl.where(p == 0.0, 0.0, y - x)


@triton.jit
def _jsd(x, y, beta, rest):
    """Loss and slope; rest = 1 - beta, rounded on its own."""
    x = tl.maximum(x, _LOWEST, propagate_nan=tl.PropagateNan.ALL)  # finite, so that 0 * a is 0
    y = tl.maximum(y, _LOWEST, propagate_nan=tl.PropagateNan.ALL)
    below = y < x  # the teacher's is the smaller one
    c, large = tl.where(below, beta, rest), tl.where(below, rest, beta)
    a = tl.abs(y - x)
    t = exp(-a)
    ta = t * a
    s = tl.maximum(large + c * t, _TINY)
    log_s = tl.log2(s) * LN2
    top = exp(tl.where(below, x, y))
    return -top * (s * log_s + c * ta), -rest * top * tl.where(below, log_s, t * log_s + ta)


@triton.jit
def _element(x, y, parameter, rest, FORM: tl.constexpr):
    """Loss and slope of one element (table above); parameter is eps or beta."""
    if FORM == "kl":
        log_y = tl.log2(tl.maximum(y, parameter)) * LN2
        loss, slope = y * tl.where(y == 0.0, 0.0, log_y - x), -y
    elif FORM == "kl_log":
        p = exp(y)
        loss, slope = _relative_entropy(x, y, p), -p
    elif FORM == "reverse_kl":
        q = exp(x)
        loss = _relative_entropy(y, x, q)
        slope = loss + q
    elif FORM == "jsd":
        loss, slope = _jsd(x, y, parameter, rest)
    else:
        tl.static_assert(FORM == "tvd")
        loss = 0.5 * tl.abs(x - y)
        slope = tl.where(x > y, 0.5, tl.where(x < y, -0.5, 0.0))
    return loss, slope


@triton.jit
def _take(
    LOSS, DX, X, Y, SCALE, UP, sUP_col, row, n_cols, cols, mask, kept, parameter, rest,
    FORM: tl.constexpr, ELEMENTS: tl.constexpr, SHIFTED: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Some columns of a row -> the sum of their losses, unless these are stored."""
    counted = mask & kept
    x = tl.load(X + cols, mask=counted, other=0.0).to(tl.float32)
    y = tl.load(Y + cols, mask=counted, other=0.0).to(tl.float32)
    loss, slope = _element(x, y, parameter, rest, FORM)
    loss = tl.where(counted, loss, 0.0)
    total = 0.0
    if ELEMENTS:
        at, _ = first_column(row, n_cols, EACH, SHIFTED)
        tl.store(LOSS + at + cols, loss, mask=mask)
    else:
        total = tl.sum(loss, axis=0)
    if DX is not None:
        if SCALE is not None:
            slope *= tl.load(SCALE)
        if UP is not None:
            up = tl.load(UP + row_base(cols, sUP_col), mask=counted, other=0.0)
            slope *= up.to(tl.float32)
        slope = tl.where(counted, slope, 0.0)
        at, _ = first_column(row, n_cols, EACH, SHIFTED)  # sooner, it would take registers
        tl.store(DX + at + cols, slope.to(DX.dtype.element_ty), mask=mask)
    return total


@triton.jit(do_not_specialize=["ignore_index"])
def _pair_kernel(
    LOSS, DX, X, sX, Y, sY, T, SCALE, UP, sUP_row, sUP_col, n_cols, pieces, ignore_index,
    parameter, rest, FORM: tl.constexpr, ELEMENTS: tl.constexpr, RAGGED: tl.constexpr,
    SHIFTED: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    row, piece = pid // pieces, pid % pieces
    at_x, before = first_column(row, sX, EACH, SHIFTED)
    at_y, _ = first_column(row, sY, EACH, SHIFTED)
    whole, behind = n_cols, 0
    if RAGGED:
        whole, behind = whole_and_behind(n_cols, before)
    X += at_x
    Y += at_y
    if UP is not None:
        at_up = row_base(row, sUP_row) + row_base(before, sUP_col)
        if sUP_col == 1:  # the same, as a multiple that the compiler sees
            at_up, _ = first_column(row, sUP_row, EACH, SHIFTED)
        UP += at_up
    kept = True
    if T is not None:
        kept = tl.load(T + row).to(tl.int64) != ignore_index
    cols = piece * BLOCK + tl.arange(0, BLOCK)
    total = _take(
        LOSS, DX, X, Y, SCALE, UP, sUP_col, row, n_cols, cols, cols < whole, kept, parameter, rest,
        FORM, ELEMENTS, SHIFTED, EACH,
    )  # fmt: skip
    if RAGGED:
        few, there = edges(tl.arange(0, EDGES), before, whole, behind)
        if piece == pieces - 1:  # which is seldom full
            total += _take(
                LOSS, DX, X, Y, SCALE, UP, sUP_col, row, n_cols, few, there, kept, parameter, rest,
                FORM, ELEMENTS, SHIFTED, EACH,
            )  # fmt: skip
    if LOSS is not None and not ELEMENTS:
        tl.store(LOSS + pid, total)


# 2 launch


def _run(
    loss: Tensor | None, dx: Tensor | None, x: Tensor, y: Tensor, labels: Tensor | None,
    scale: Tensor | None, upstream: Tensor | None, ignore_index: int, form: str, parameter: float,
    elements: bool,
) -> None:  # fmt: skip
    n_rows, n_cols = x.shape
    block = min(block_of(n_cols), _BLOCK)
    pieces = cdiv(n_cols, block)
    strides = (0, 0) if upstream is None else upstream.stride()
    # Columns 16 bytes apart in the narrowest operand are multiples of 16 bytes apart in the others.
    size = min(x.element_size(), y.element_size())
    steps = [x.stride(0), y.stride(0), n_cols]
    if upstream is not None and strides[1] == 1:
        size, steps = min(size, upstream.element_size()), [*steps, strides[0]]
    meta = {"FORM": form, "ELEMENTS": elements, **column_flags(n_cols, size, *steps)}
    launch(
        _pair_kernel, (n_rows * pieces,), x.device, loss, dx, x, x.stride(0), y, y.stride(0),
        labels, scale, upstream, *strides, n_cols, pieces, ignore_index, parameter,
        1.0 - parameter, **meta, BLOCK=block, num_warps=8 if block > 2048 else 4,
    )  # fmt: skip


def _fake_forward(
    x: Tensor, y: Tensor, labels: Tensor | None, scale: Tensor | None, ignore_index: int,
    form: str, parameter: float, gradient: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    loss = x.new_empty(x.shape if scale is None else (), dtype=torch.float32)
    return loss, x.new_empty(x.shape if gradient else 0)


@named(
    "(Tensor x, Tensor y, Tensor? labels, Tensor? scale, int ignore_index, str form,"
    " float parameter, bool gradient) -> (Tensor, Tensor)",
    _fake_forward,
)
def pair_forward(
    x: Tensor, y: Tensor, labels: Tensor | None, scale: Tensor | None, ignore_index: int,
    form: str, parameter: float, gradient: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """-> loss fp32, summed and times `scale`, or `[R, V]` without one; its gradient in x's dtype, empty unless wanted.

    x, y: `[R, V]` with adjacent columns; labels: `[R]` contiguous; scale: 0-dim fp32.
    """
    n_rows, n_cols = x.shape
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if gradient else None
    options = (ignore_index, form, parameter)
    if scale is None:
        loss = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        _run(loss, dx, x, y, labels, None, None, *options, True)
    else:
        pieces = cdiv(n_cols, min(block_of(n_cols), _BLOCK))
        partial = torch.empty(n_rows * pieces, dtype=torch.float32, device=x.device)
        _run(partial, dx, x, y, labels, scale, None, *options, False)
        loss = partial.sum() * scale
    return loss, x.new_empty(0) if dx is None else dx


def _fake_backward(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape)


@named(
    "(Tensor x, Tensor y, Tensor? labels, Tensor? scale, Tensor? upstream, int ignore_index,"
    " str form, float parameter) -> Tensor",
    _fake_backward,
)
def pair_backward(
    x: Tensor, y: Tensor, labels: Tensor | None, scale: Tensor | None, upstream: Tensor | None,
    ignore_index: int, form: str, parameter: float,
) -> Tensor:  # fmt: skip
    """-> dx, contiguous: the slopes times `scale` and `upstream` (`[R, V]`, any strides), where given."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _run(None, dx, x, y, labels, scale, upstream, ignore_index, form, parameter, False)
    return dx
