"""The kernels that SwiGLU, GeGLU and ReGLU share.   y = down * act(scale * gate) * up

    gate, up, y: [*, F], or gate and up as the halves of one packed [*, 2F]

Every activation here is act(g) = g * c(g) with a cumulative distribution c, so act'(g) = c(g) + g * c'(g):

    silu        c = sigmoid(g)                                    c' = c * (1 - c)
    gelu_tanh   c = (1 + tanh(u)) / 2 = sigmoid(2u),              c' = c * (1 - c) * (2u)'
                2u = 2 sqrt(2 / pi) * (g + 0.044715 g^3)
    gelu        c = (1 + erf(g / sqrt 2)) / 2                     c' = exp(-g^2 / 2) / sqrt(2 pi)
    relu        c = [g > 0]                                       c' = 0

Backward, with g = scale * gate:   dgate = dy * up * down * scale * act'(g),   dup = dy * down * act(g)

Casts   as eager PyTorch: scale * gate and act(g) are computed in fp32 and rounded to gate's dtype before they meet up;
        y has the promoted dtype of gate and up. The product with `down` is rounded once, and so is each gradient.
Memory  forward reads gate and up, writes y, keeps its inputs only; backward reads dy, gate and up once and writes both
        gradients in the same pass, over gate and up where autograd alone still holds those (`_reuse`). Operands with
        adjacent columns are never copied, whatever their row stride.
"""
# pyright: reportGeneralTypeIssues=false
# (Triton types a call of one @jit function from another as never returning, so its results cannot be unpacked.)

from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops._device import INV_SQRT_2PI, SQRT_HALF, exp, logistic
from liger_kernel.ops._elementwise import at, tile, tile_table, tiled
from liger_kernel.ops._op import Cost, like, named, place, rows
from liger_kernel.ops._triton import tl, triton

_CUBIC: tl.constexpr = tl.constexpr(0.044715)
_THRICE_CUBIC: tl.constexpr = tl.constexpr(3 * 0.044715)
_TWICE_SQRT_2_OVER_PI: tl.constexpr = tl.constexpr(1.5957691216057308)

# 1 kernels


@triton.jit
def _activation(g, ACT: tl.constexpr):
    """act(g) and act'(g); a caller that drops the second does not pay for it.

    The logistic form of the tanh GELU is exact where 1 + tanh(u) would cancel, and needs one exponential.
    """
    if ACT == "relu":
        value, slope = tl.where(g <= 0.0, 0.0, g), tl.where(g <= 0.0, 0.0, 1.0)  # NaN stays NaN
    else:
        if ACT == "silu":
            c, dc = logistic(g)
        elif ACT == "gelu_tanh":
            inner = (g * g * _CUBIC + 1.0) * _TWICE_SQRT_2_OVER_PI
            c, dc = logistic(g * inner)
            dc *= (g * g * _THRICE_CUBIC + 1.0) * _TWICE_SQRT_2_OVER_PI
        else:
            tl.static_assert(ACT == "gelu")
            c = 0.5 + 0.5 * tl.erf(g * SQRT_HALF)
            dc = exp(g * g * -0.5) * INV_SQRT_2PI
        value, slope = g * c, c + g * dc
    return value, slope


@triton.jit
def _forward_kernel(
    Y, G, U, sY_row, sG_row, sU_row, n_rows, n_cols, scale, down,
    ACT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, start, cols, mask = tile(n_rows, n_cols, ROWS, BLOCK)
    stored = G.dtype.element_ty
    g = tl.load(at(G, row, sG_row, start, cols), mask=mask, other=0.0).to(tl.float32)
    u = tl.load(at(U, row, sU_row, start, cols), mask=mask, other=0.0).to(tl.float32)
    a, _ = _activation((g * scale).to(stored).to(tl.float32), ACT)
    y = a.to(stored).to(tl.float32) * u * down
    tl.store(at(Y, row, sY_row, start, cols), y.to(Y.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    DG, DU, Y, DY, G, U, sDG_row, sDU_row, sY_row, sDY_row, sG_row, sU_row, n_rows, n_cols, scale, down,
    ACT: tl.constexpr, NEED_DG: tl.constexpr, NEED_DU: tl.constexpr, NEED_Y: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """An output may lie over an operand of its dtype, DG over G, DU over U, Y over DY: a thread has read what it
    writes over."""
    row, start, cols, mask = tile(n_rows, n_cols, ROWS, BLOCK)
    stored = G.dtype.element_ty
    dy = tl.load(at(DY, row, sDY_row, start, cols), mask=mask, other=0.0).to(tl.float32) * down
    g = tl.load(at(G, row, sG_row, start, cols), mask=mask, other=0.0).to(tl.float32)
    a, slope = _activation((g * scale).to(stored).to(tl.float32), ACT)
    a = a.to(stored).to(tl.float32)
    u = dy
    if NEED_DG or NEED_Y:
        u = tl.load(at(U, row, sU_row, start, cols), mask=mask, other=0.0).to(tl.float32)
    if NEED_DG:
        dg = dy * u * slope * scale
        tl.store(at(DG, row, sDG_row, start, cols), dg.to(DG.dtype.element_ty), mask=mask)
    if NEED_DU:
        tl.store(at(DU, row, sDU_row, start, cols), (dy * a).to(DU.dtype.element_ty), mask=mask)
    if NEED_Y:
        y = a * u * down
        tl.store(at(Y, row, sY_row, start, cols), y.to(Y.dtype.element_ty), mask=mask)


# 2 launch

_forward = tiled(_forward_kernel, tile_table("gated.forward"), ("ACT",))
_NEEDS = ("NEED_DG", "NEED_DU", "NEED_Y")
_backward = tiled(_backward_kernel, tile_table("gated.backward"), ("ACT", *_NEEDS))


def halves(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """gate and up, views of the first and the second half of the last dimension."""
    width = gate_up.shape[-1] // 2
    return gate_up[..., :width], gate_up[..., width:]


def _fake_forward(gate: Tensor, up: Tensor, act: str, scale: float, down: float) -> Tensor:
    return gate.new_empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype))


@named("(Tensor gate, Tensor up, str act, float scale, float down) -> Tensor", _fake_forward)
def gated_forward(gate: Tensor, up: Tensor, act: str, scale: float, down: float) -> Tensor:
    """-> y, contiguous, in the promoted dtype."""
    y = like(gate, torch.promote_types(gate.dtype, up.dtype))
    _forward((y, gate, up), (scale, down), (act,))
    return y


def gradients(
    dy: Tensor, gate: Tensor, up: Tensor, act: str, scale: float, down: float, dgate: Tensor | None, dup: Tensor | None,
    y: Tensor | None = None,
) -> None:  # fmt: skip
    """Writes dgate, dup and y = the product itself, those that are given: over gate, up and dy, or elsewhere."""
    # What is not needed has no memory: an operand stands in, and the flag keeps the kernel from writing it.
    outputs = gate if dgate is None else dgate, up if dup is None else dup, dy if y is None else y
    needs = dgate is not None, dup is not None, y is not None
    _backward((*outputs, dy, gate, up), (scale, down), (act, *needs))


def _fake_backward(
    dy: Tensor, gate: Tensor, up: Tensor, act: str, scale: float, down: float, need_dgate: bool, need_dup: bool,
    dgate: Tensor | None = None, dup: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return (
        place(dgate, gate) if need_dgate else gate.new_empty(0),
        place(dup, up) if need_dup else up.new_empty(0),
    )


@named(
    "(Tensor dy, Tensor gate, Tensor up, str act, float scale, float down, bool need_dgate, bool need_dup,"
    " Tensor? dgate=None, Tensor? dup=None) -> (Tensor, Tensor)",
    _fake_backward,
)
def gated_backward(
    dy: Tensor, gate: Tensor, up: Tensor, act: str, scale: float, down: float, need_dgate: bool, need_dup: bool,
    dgate: Tensor | None = None, dup: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """-> dgate, dup, contiguous; one that is not needed is empty. In the memory of dgate and dup where that is given,
    gate's and up's own as a rule (`_reuse`)."""
    dgate = place(dgate, gate) if need_dgate else None
    dup = place(dup, up) if need_dup else None
    gradients(dy, gate, up, act, scale, down, dgate, dup)
    return (
        gate.new_empty(0) if dgate is None else dgate,
        up.new_empty(0) if dup is None else dup,
    )


def _fake_packed_backward(
    dy: Tensor, gate_up: Tensor, act: str, scale: float, down: float, dgate_up: Tensor | None = None
) -> Tensor:
    return place(dgate_up, gate_up)


@named(
    "(Tensor dy, Tensor gate_up, str act, float scale, float down, Tensor? dgate_up=None) -> Tensor",
    _fake_packed_backward,
)
def gated_packed_backward(
    dy: Tensor, gate_up: Tensor, act: str, scale: float, down: float, dgate_up: Tensor | None = None
) -> Tensor:
    """-> dgate_up `[*, 2F]`, contiguous: one buffer, ready for the single product of a packed projection. In dgate_up
    if that is given, as in `gated_backward`."""
    dgate_up = place(dgate_up, gate_up)
    places = halves(rows(dgate_up))
    gradients(rows(dy), *halves(rows(gate_up)), act, scale, down, *places)
    return dgate_up


# 3 what these ops say about their arguments


def check_pair(op: str, gate: Tensor, up: Tensor) -> None:
    """ValueError unless gate and up have one shape."""
    if gate.shape != up.shape:
        raise ValueError(
            f"{op}: gate and up must have the same shape; got {list(gate.shape)} and {list(up.shape)}."
        )


def check_packed(op: str, gate_up: Tensor) -> None:
    """ValueError unless the last dimension has two halves."""
    if gate_up.dim() == 0 or gate_up.shape[-1] % 2:
        raise ValueError(
            f"{op}: the last dimension must be even, gate in its first half and up in its second; got shape "
            f"{list(gate_up.shape)}."
        )


def supports(gate: Tensor, up: Tensor, *_: Any) -> str | None:
    """Every shape and layout, on one device."""
    if gate.device != up.device:
        return f"gate is on {gate.device}, up on {up.device}"
    return supports_packed(gate) or supports_packed(up)


def supports_packed(gate_up: Tensor, *_: Any) -> str | None:
    """Every shape and layout."""
    return None if gate_up.is_floating_point() else f"{gate_up.dtype} is not a floating-point dtype"


def cost(gate: Tensor, up: Tensor, *_: Any) -> Cost:
    """gate and up in, y out; then dy, gate and up in, dgate and dup out."""
    width = torch.promote_types(gate.dtype, up.dtype).itemsize
    operands, y = gate.element_size() + up.element_size(), width
    n = gate.numel()
    return Cost(forward_bytes=n * (operands + y), backward_bytes=n * (2 * operands + y), saved=0)


def cost_packed(gate_up: Tensor, *_: Any) -> Cost:
    """As `cost` of the two halves."""
    return cost(*halves(gate_up))
