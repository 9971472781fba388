"""The second half of a gated MLP.   y = (act(gate_multiplier * gate) * up) W^T + b

    gate, up: [*, F], or gate and up as the halves of one packed [*, 2F]   W: [H, F]   b: [H] or None   y: [*, H]

Backward, with p = act(gate) * up, dp = dy W and (dgate, dup) as in `_gated.py`:

    dW = dy^T p     db = sum over rows of dy

A linear layer keeps its input p for dW. Here the kernel that makes dgate and dup has every operand of p in its
registers and writes it over dp, so p is never kept; dgate and dup are written over gate and up where autograd alone
still holds those (`_reuse`). The same products as those of the separate layers, and the same bits.

A checkpoint ends its second forward where the last tensor has been saved. So y gets its node, which saves, before it
gets its values: in a layer that ends here they are not computed again, and neither is p.

Casts   as the separate layers: p is rounded to the common dtype, sums within products are the matrix library's.
Memory  keeps gate and up (the separate layers: 3F values a token). Backward has F values a token above them, dp, and 2F
        more where gate or up cannot be written over. It moves 6NF values in one kernel, forward 3NF.
Paper   Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from liger_kernel import _env
from liger_kernel.ops import _gated
from liger_kernel.ops._op import (
    Cost,
    Op,
    autocast_dtype,
    choice,
    compute_dtype,
    direct,
    first_order,
    named,
    observed,
    place,
    require,
    rows,
)
from liger_kernel.ops._reuse import saved

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")

# 1 reference


def reference(
    gate: Tensor, up: Tensor | None, weight: Tensor, bias: Tensor | None = None, activation: str = "silu",
    gate_multiplier: float = 1.0,
) -> Tensor:  # fmt: skip
    """The definition: the activation, the product, the linear layer. up None: gate is packed."""
    if up is None:
        gate, up = _gated.halves(gate)
    g = gate if gate_multiplier == 1.0 else gate * gate_multiplier
    if activation.startswith("gelu"):
        a = torch.nn.functional.gelu(g, approximate="tanh" if activation == "gelu_tanh" else "none")
    else:
        a = getattr(torch.nn.functional, activation)(g)
    return torch.nn.functional.linear(a * up, weight, bias)


# 2 launch


def _fake_forward(
    gate: Tensor, up: Tensor | None, weight: Tensor, bias: Tensor | None, act: str, scale: float
) -> Tensor:
    return gate.new_empty((*gate.shape[:-1], weight.shape[0]))


@named(
    "(Tensor gate, Tensor? up, Tensor weight, Tensor? bias, str act, float scale) -> Tensor",
    _fake_forward,
)
def gated_linear_forward_kernel(
    gate: Tensor, up: Tensor | None, weight: Tensor, bias: Tensor | None, act: str, scale: float
) -> Tensor:
    """-> y, contiguous."""
    y = gate.new_empty((*gate.shape[:-1], weight.shape[0]))
    with torch.no_grad():  # an exported graph runs this under whatever mode is on
        _fill(y, gate, up, weight, bias, act, scale)
    return y


def _pair(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """gate and up, or the halves of a packed gate, as `[R, F]`."""
    return _gated.halves(rows(gate)) if up is None else (rows(gate), rows(up))


def _fill(
    y: Tensor,
    gate: Tensor,
    up: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    act: str,
    scale: float,
) -> None:
    p, out = _gated.gated_forward(*_pair(gate, up), act, scale, 1.0), rows(y)
    if bias is None:
        torch.mm(p, weight.t(), out=out)
    else:
        torch.addmm(bias, p, weight.t(), out=out)


def _fake_backward(
    dy: Tensor, gate: Tensor, up: Tensor | None, weight: Tensor, act: str, scale: float, need_operands: bool,
    need_dw: bool, dgate: Tensor | None = None, dup: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return (
        place(dgate, gate) if need_operands else gate.new_empty(0),
        gate.new_empty(0) if up is None or not need_operands else place(dup, up),
        weight.new_empty(weight.shape if need_dw else 0),
    )


@named(
    "(Tensor dy, Tensor gate, Tensor? up, Tensor weight, str act, float scale, bool need_operands, bool need_dw,"
    " Tensor? dgate=None, Tensor? dup=None) -> (Tensor, Tensor, Tensor)",
    _fake_backward,
)
def gated_linear_backward_kernel(
    dy: Tensor, gate: Tensor, up: Tensor | None, weight: Tensor, act: str, scale: float, need_operands: bool,
    need_dw: bool, dgate: Tensor | None = None, dup: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """-> dgate, dup, dW, contiguous; what is not needed is empty, and dup of packed operands. dgate and dup: memory for
    them, gate's and up's own as a rule."""
    flat, nothing = rows(dy), [gate.new_empty(0) for _ in range(3)]
    if not need_operands:
        p = _gated.gated_forward(*_pair(gate, up), act, scale, 1.0)
        return nothing[0], nothing[1], torch.mm(flat.t(), p)
    dgate, dup = place(dgate, gate), None if up is None else place(dup, up)
    dp = torch.mm(flat, weight)
    outputs = (*_pair(dgate, dup), dp if need_dw else None)
    _gated.gradients(dp, *_pair(gate, up), act, scale, 1.0, *outputs)
    dup = nothing[1] if dup is None else dup
    return dgate, dup, torch.mm(flat.t(), dp) if need_dw else nothing[2]


# 3 op


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, later: bool, gate: Tensor, up: Tensor | None, weight: Tensor, bias: Tensor | None, act: str,
        scale: float,
    ) -> Tensor:  # fmt: skip
        """later: y is memory that somebody fills afterwards."""
        ctx.save_for_backward(gate, up, weight)
        ctx.recipe = act, scale
        if later:
            return gate.new_empty((*gate.shape[:-1], weight.shape[0]))
        return gated_linear_forward_kernel(gate, up, weight, bias, act, scale)

    @staticmethod
    @first_order("gated_linear")
    def backward(ctx: Any, dy: Tensor) -> Any:
        (gate, up, weight), rooms = saved(ctx)
        need_gate, need_up, need_w, need_b = ctx.needs_input_grad[1:5]
        dgate = dup = dw = None
        if need_gate or need_up or need_w:
            dgate, dup, dw = gated_linear_backward_kernel(
                dy, gate, up, weight, *ctx.recipe, need_gate or need_up, need_w, *rooms[:2]
            )
        db = rows(dy).sum(0, dtype=compute_dtype(dy)).to(dy.dtype) if need_b else None
        return (
            None, dgate if need_gate else None, dup if need_up else None, dw if need_w else None, db, None, None,
        )  # fmt: skip


_apply = direct(_GatedLinear.apply)


def _kernels(*args: Any) -> Tensor:
    if observed() or torch._C._are_functorch_transforms_active():
        return _apply(False, *args)
    y = _apply(True, *args)
    with torch.no_grad():
        _fill(y.detach(), *args)
    return y


def supports(
    gate: Tensor, up: Tensor | None, weight: Tensor, bias: Tensor | None, *_: Any
) -> str | None:
    """Every shape and layout, on one device."""
    for name, tensor in (("up", up), ("the weight", weight), ("the bias", bias)):
        if tensor is not None and tensor.device != gate.device:
            return f"gate is on {gate.device}, {name} on {tensor.device}"
    return None


def cost(gate: Tensor, up: Tensor | None, weight: Tensor, *_: Any) -> Cost:
    """Three products (one forward) of N x F x H; gate, up and the weight in, y or their gradients out."""
    size, (h, f) = gate.element_size(), weight.shape
    n = gate.shape[:-1].numel()
    operands, y, w = 2 * n * f * size, n * h * size, weight.numel() * size
    forward = operands + w + y
    return Cost(forward, 2 * (operands + w) + y, saved=0, flops=6 * n * h * f)


OP = Op("gated_linear", reference, reference, _kernels, supports, cost)

# 4 public


def gated_linear(
    gate: Tensor, up: Tensor | None, weight: Tensor, bias: Tensor | None = None, activation: str = "silu",
    gate_multiplier: float = 1.0, impl: str | None = None,
) -> Tensor:  # fmt: skip
    """(act(gate_multiplier * gate) * up) W^T + b: activation, product and output layer of a gated MLP.

    Args:
        gate, up: `[*, F]` of one shape, any rank and strides; or gate `[*, 2F]` packed (gate in the first half of the
            last dimension, up in the second) and up None.
        weight: `[H, F]`; bias: `[H]` or None. One dtype with gate and up: fp16, bf16, fp32 (fp64 on the torch path);
            under autocast all are cast to its dtype, the weight anew in each call.
        activation: "silu", "gelu" (exact), "gelu_tanh" or "relu".
        gate_multiplier: scales gate before the activation (Falcon-H1).
        impl: "triton" or "torch" for this call, None for the default choice.
    Returns:
        `[*, H]`, contiguous.
    Memory:
        Keeps gate, up and the weight for backward, which writes the gradients of gate and up over them if nobody else
        holds them.
    Raises:
        ValueError: an unknown activation, shapes that do not fit each other.
        TypeError: dtypes that differ.
    """
    choice("gated_linear", "activation", activation, ACTIVATIONS)
    if up is None:
        _gated.check_packed("gated_linear", gate)
    else:
        _gated.check_pair("gated_linear", gate, up)
    width = gate.shape[-1] // 2 if up is None else gate.shape[-1]
    require(
        weight.dim() == 2 and weight.shape[1] == width and (bias is None or bias.shape == weight.shape[:1]),
        f"gated_linear: for gate and up of {width} features the weight must be [H, {width}] and the bias [H]; got"
        f" {list(weight.shape)} and {None if bias is None else list(bias.shape)}.",
    )  # fmt: skip
    tensors = [gate, up, weight, bias]
    dtype = autocast_dtype(gate.device.type)
    if dtype is not None and gate.dtype != torch.float64:
        tensors = [None if t is None else t.to(dtype) for t in tensors]
    dtypes = [t.dtype for t in tensors if t is not None]
    require(
        len(set(dtypes)) == 1,
        f"gated_linear: gate, up, weight and bias must have one dtype; got {', '.join(map(str, dtypes))}.",
        TypeError,
    )
    return OP(*tensors, activation, gate_multiplier, impl=impl)


# Output layers that are modules

_LINEAR = nn.Linear.forward
_LINEAR_IS_TORCHS = _LINEAR.__code__.co_filename == nn.modules.linear.__file__
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PRODUCTS = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu", "relu": "reglu"}


def through(
    layer: nn.Module, gate: Tensor, up: Tensor | None, activation: str, product: Callable[[], Tensor],
    gate_multiplier: float = 1.0, impl: str | None = None,
) -> Tensor:  # fmt: skip
    """layer(product()), where product() is act(gate_multiplier * gate) * up by an op of its own; as `gated_linear` if
    that is the same: the layer is plain and fits in dtype, both ops take the kernels. Nothing else decides: a
    checkpoint must see the same tensors saved when it runs this again, outside of the modes of the first time.
    """
    if torch.compiler.is_compiling() or not (is_plain(layer) and _fits(layer, gate, up)):
        return layer(product())  # a compiler decides by itself what it keeps
    args: Any = (gate, up, layer.weight, layer.bias, activation, gate_multiplier)
    alike = _env.impl(_PRODUCTS[activation]) == _env.impl(OP.name)
    # Not on the torch path, which would keep the product and know no recipe for it.
    fused = alike and OP.uses_kernels(args, impl)
    return gated_linear(*args, impl=impl) if fused else layer(product())


def is_plain(layer: nn.Module) -> bool:
    """Whether a call of `layer` is `torch.nn.functional.linear` of its weight and bias and nothing else: no adapter, no
    hook of its own, no parallel or quantised weight.
    """
    if type(layer) is not nn.Linear or nn.Linear.forward is not _LINEAR or not _LINEAR_IS_TORCHS:
        return False
    own = vars(layer)
    if "forward" in own or (any(own[name] for name in _HOOKS) and not _env.planned_memory):
        return False  # an estimate's own hooks do not count
    tensors = (layer.weight,) if layer.bias is None else (layer.weight, layer.bias)
    return all(type(t) in (Tensor, nn.Parameter) for t in tensors)


def _fits(layer: Any, gate: Tensor, up: Tensor | None) -> bool:
    operands = (gate,) if up is None else (gate, up)
    dtype = autocast_dtype(gate.device.type) or layer.weight.dtype
    return all(type(t) is Tensor and t.dtype == dtype for t in operands)
