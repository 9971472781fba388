"""A whole gated MLP.   y = (down_multiplier * silu(gate_multiplier * x Wg^T) * (x Wu^T)) Wd^T

    x: [*, H]   Wg, Wu: [F, H]   Wd: [H', F]   y: [*, H']       inside: g = x Wg^T, u = x Wu^T, a = the activation

Backward, with da = dy Wd and (dg, du) as in `_gated.py`:

    dx = dg Wg + du Wu     (dWg, dWu) = (dg, du)^T x, one product     dWd = dy^T a

The point is what is kept: g and u, packed in one buffer [N, 2F], but not a. The linear layer behind the activation
would keep it; here the kernel that makes dg and du has every operand of a in its registers and writes it over da.

Casts   as the separate layers: g, u, silu(g) and a are rounded to the common dtype; the products' sums are the matrix
        library's. dx gathers its second product onto the first, rounded.
Memory  keeps x and 2F values a token (the separate layers: 3F). Forward moves 3NF values in one elementwise kernel,
        backward 6NF. Backward has F values a token above what is kept, and 2F more if what is kept, over which it
        writes the gradients of g and u, is wanted again (`retain_graph`).
Paper   Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202
"""

from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops import swiglu
from liger_kernel.ops._gated import gated_forward, gradients, halves
from liger_kernel.ops._op import Cost, Op, autocast_dtype, first_order, named, place, require, rows
from liger_kernel.ops._reuse import saved

# 1 reference


def reference(
    x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor,
    gate_multiplier: float = 1.0, down_multiplier: float = 1.0,
) -> Tensor:  # fmt: skip
    """The definition, three linear layers and the activation."""
    linear = torch.nn.functional.linear
    gate, up = linear(x, gate_weight), linear(x, up_weight)
    return linear(swiglu.reference(gate, up, gate_multiplier, down_multiplier), down_weight)


# 2 launch


def _fake_forward(
    x: Tensor, wg: Tensor, wu: Tensor, wd: Tensor, scale: float, down: float
) -> tuple[Tensor, Tensor]:
    y = x.new_empty((*x.shape[:-1], wd.shape[0]))
    return y, x.new_empty((x.shape[:-1].numel(), 2 * wg.shape[0]))


@named(
    "(Tensor x, Tensor wg, Tensor wu, Tensor wd, float scale, float down) -> (Tensor, Tensor)",
    _fake_forward,
)
def mlp_forward_kernel(
    x: Tensor, wg: Tensor, wu: Tensor, wd: Tensor, scale: float, down: float
) -> tuple[Tensor, Tensor]:
    """-> y, gate and up packed [N, 2F]."""
    x2 = rows(x)
    gate_up = x2.new_empty((x2.shape[0], 2 * wg.shape[0]))
    gate, up = halves(gate_up)
    torch.mm(x2, wg.t(), out=gate)
    torch.mm(x2, wu.t(), out=up)
    y = torch.mm(gated_forward(gate, up, "silu", scale, down), wd.t())
    return y.view(*x.shape[:-1], wd.shape[0]), gate_up


def _fake_backward(
    dy: Tensor, x: Tensor, wg: Tensor, wu: Tensor, wd: Tensor, gate_up: Tensor, scale: float, down: float,
    need_dx: bool, need_dgate_up: bool, need_ddown: bool, dgate_up: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return (
        x.new_empty(x.shape if need_dx else 0),
        wg.new_empty((2 * wg.shape[0], wg.shape[1]) if need_dgate_up else 0),
        wd.new_empty(wd.shape if need_ddown else 0),
    )


@named(
    "(Tensor dy, Tensor x, Tensor wg, Tensor wu, Tensor wd, Tensor gate_up, float scale, float down,"
    " bool need_dx, bool need_dgate_up, bool need_ddown, Tensor? dgate_up=None) -> (Tensor, Tensor, Tensor)",
    _fake_backward,
)
def mlp_backward_kernel(
    dy: Tensor, x: Tensor, wg: Tensor, wu: Tensor, wd: Tensor, gate_up: Tensor, scale: float, down: float,
    need_dx: bool, need_dgate_up: bool, need_ddown: bool, dgate_up: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """-> dx, dWg above dWu, dWd; one that is not needed is empty. dgate_up: memory for it, gate_up's own as a rule."""
    dy2, x2 = rows(dy), rows(x)
    empty = [x.new_empty(0) for _ in range(3)]
    da = torch.mm(dy2, wd)
    dgate_up = place(dgate_up, gate_up)
    dgate, dup = halves(dgate_up)
    gradients(da, *halves(gate_up), "silu", scale, down, dgate, dup, da if need_ddown else None)
    a = da
    ddown = torch.mm(dy2.t(), a) if need_ddown else empty[2]
    del a, da  # before there is more
    dx = torch.mm(dgate, wg).addmm_(dup, wu).view(x.shape) if need_dx else empty[0]
    dw = torch.mm(dgate_up.t(), x2) if need_dgate_up else empty[1]
    return dx, dw, ddown


# 3 op


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, wg: Tensor, wu: Tensor, wd: Tensor, scale: float, down: float
    ) -> Tensor:
        y, gate_up = mlp_forward_kernel(x, wg, wu, wd, scale, down)
        ctx.save_for_backward(x, wg, wu, wd, gate_up)
        ctx.multipliers = scale, down
        return y

    @staticmethod
    @first_order("mlp")
    def backward(ctx: Any, dy: Tensor) -> Any:
        (x, wg, wu, wd, gate_up), rooms = saved(ctx)
        need_x, need_gate, need_up, need_down = ctx.needs_input_grad[:4]
        dx, dw, dwd = mlp_backward_kernel(
            dy,
            x,
            wg,
            wu,
            wd,
            gate_up,
            *ctx.multipliers,
            need_x,
            need_gate or need_up,
            need_down,
            rooms[-1],
        )
        dwg, dwu = dw.chunk(2) if need_gate or need_up else (None, None)
        return (
            dx if need_x else None, dwg if need_gate else None, dwu if need_up else None,
            dwd if need_down else None, None, None,
        )  # fmt: skip


def supports(x: Tensor, *weights: Any) -> str | None:
    """Every shape and layout, on one device."""
    for w in weights:
        if isinstance(w, Tensor) and w.device != x.device:
            return f"x is on {x.device}, a weight on {w.device}"
    return None


def cost(x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor, *_: Any) -> Cost:
    """Nine products (three forward) of N x H x F; x and the weights in, y or their gradients out; gate and up kept."""
    size, n = x.element_size(), x.numel() // max(x.shape[-1], 1)
    weights = sum(w.numel() for w in (gate_weight, up_weight, down_weight)) * size
    y = n * down_weight.shape[0] * size
    tokens = x.numel() * size
    return Cost(
        forward_bytes=tokens + weights + y,
        backward_bytes=2 * (tokens + weights) + y,
        saved=2 * n * gate_weight.shape[0] * size,
        flops=6 * n * (weights // size),
    )


OP = Op("mlp", reference, reference, _MLP.apply, supports, cost)

# 4 public


def mlp(
    x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor,
    gate_multiplier: float = 1.0, down_multiplier: float = 1.0, impl: str | None = None,
) -> Tensor:  # fmt: skip
    """A SwiGLU MLP without biases from its three weights.

    Args:
        x: `[*, H]` of any rank and strides.
        gate_weight, up_weight: `[F, H]`; down_weight: `[H', F]`. One dtype with x: fp16, bf16, fp32
            (fp64 on the torch path); under autocast all are cast to its dtype.
        gate_multiplier, down_multiplier: scale gate before silu and the product before the last
            layer (Falcon-H1).
        impl: "triton" or "torch" for this call, None for the default choice.
    Returns:
        `[*, H']`, contiguous.
    Memory:
        Keeps x, the weights and `[N, 2F]`; backward writes over the last.
    Raises:
        ValueError: shapes that do not fit each other.
        TypeError: dtypes that differ.
    """
    dtype = autocast_dtype(x.device.type)
    if dtype is not None and x.dtype != torch.float64:
        x, gate_weight, up_weight, down_weight = (
            t.to(dtype) for t in (x, gate_weight, up_weight, down_weight)
        )
    weights = (gate_weight, up_weight, down_weight)
    shapes = [list(w.shape) for w in weights]
    require(
        all(w.dim() == 2 for w in weights) and gate_weight.shape == up_weight.shape
        and x.dim() > 0 and gate_weight.shape == (down_weight.shape[1], x.shape[-1]),
        f"mlp: for x {list(x.shape)} the weights must be [F, H], [F, H] and [H', F] with H its last dimension; got"
        f" {shapes[0]}, {shapes[1]} and {shapes[2]}.",
    )  # fmt: skip
    dtypes = [x.dtype, *(w.dtype for w in weights)]
    require(
        len(set(dtypes)) == 1,
        f"mlp: x and the weights must have one dtype; got {', '.join(map(str, dtypes))}.",
        TypeError,
    )
    return OP(x, *weights, gate_multiplier, down_multiplier, impl=impl)


class LigerMLPFunction:
    """`mlp` by positional arguments."""

    @staticmethod
    def apply(
        input: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor,
        gate_multiplier: float = 1.0, down_multiplier: float = 1.0,
    ) -> Tensor:  # fmt: skip
        return mlp(input, gate_weight, up_weight, down_weight, gate_multiplier, down_multiplier)
