"""RMSNorm with a gate, over groups of columns.

    gate after    y = norm(x) * w * act(z)      (Qwen3-Next, OLMo Hybrid, Kimi Linear, ...)
    gate before   y = norm(x * act(z)) * w      (Mamba 2, Bamba, Nemotron-H, Zamba 2, ...)

    x, z, y: [*, D]   w: [D]   act: silu or sigmoid
    norm(h) = h / sqrt(mean(h^2) + eps), the mean over each of D / S groups of S adjacent columns;
    rstd = 1 / sqrt(...): [groups, R] fp32, R = rows of D values

Backward, with a = act(z), n = norm(h), and g = dy * w * a (gate after) or dy * w (gate before):

    dh = rstd * (g - n * mean(g * n))
    gate after    dx = dh       dz = dy * n * w * act'(z)    dw = sum over rows of dy * a * n
    gate before   dx = dh * a   dz = dh * x * act'(z)        dw = sum over rows of dy * n

Casts   "llama": n is rounded to x's dtype before the weight, and n * w to the promoted dtype of x
        and w before a gate that comes after. "gemma": fp32 throughout, one rounding at the end
        (Falcon-H1, Kimi Linear, ...). The gate is applied in fp32 in both.
Memory  forward reads x and z once and writes y; it keeps rstd, 4 bytes a row and group, beside its
        inputs. Backward reads dy, x and z once and writes dx and dz; dw passes through fp32 partials
        of one row per program, summed in a fixed order. No copy of x * act(z) is made or kept.
Papers  Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467
        Dao and Gu, "Transformers are SSMs", arXiv:2405.21060, section 7 (the gate)
"""

from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops import _gated_norm_kernels as kernels
from liger_kernel.ops._norm_plan import backward_plan, forward_plan, forward_table, loop_table
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
from liger_kernel.ops._triton import block_of, cdiv, launch
from liger_kernel.ops.rms_norm import check_weight

_ACTIVATIONS = {"silu": torch.nn.functional.silu, "sigmoid": torch.sigmoid}
_CASTING_MODES = ("llama", "gemma")
_MAX_GROUPS = 65535  # a grid's second dimension

# 1 reference


def reference(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float = 1e-6, norm_before_gate: bool = True,
    group_size: int | None = None, activation: str = "silu", casting_mode: str = "llama",
) -> Tensor:  # fmt: skip
    """The definition, with the roundings of Hugging Face's modules."""
    wide = compute_dtype(x)
    a = _ACTIVATIONS[activation](gate.to(wide))
    h = x.to(wide) if norm_before_gate else x.to(wide) * a
    groups = h.unflatten(-1, (-1, group_size or x.shape[-1]))
    n = groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + eps)
    n = n.flatten(-2)
    u = weight * n.to(x.dtype) if casting_mode == "llama" else weight.to(wide) * n
    return (u * a if norm_before_gate else u).to(x.dtype)


# 2 launch

# block of columns -> (rows, warps) forward; (rows, warps, programs per SM, stages) backward.
# Compiled for sm_90, next to no spills up to 8192 columns; programs per SM are what the registers allow. 128 columns
# are measured on an H200, see NOTES.md.
_FORWARD = forward_table("gated_rms_norm.forward", {
    128: (4, 1), 256: (8, 4), 512: (4, 4), 1024: (2, 4), 2048: (1, 4), 4096: (1, 8),
    8192: (1, 16), 16384: (1, 32),
})  # fmt: skip
_BACKWARD = loop_table("gated_rms_norm.backward", {
    128: (8, 4, 4, 3), 256: (8, 4, 4, 2), 512: (4, 4, 4, 2), 1024: (1, 4, 5, 3), 2048: (1, 8, 3, 3),
    4096: (1, 16, 1, 3), 8192: (1, 32, 1, 3), 16384: (1, 32, 1, 1),
})  # fmt: skip
_WIDEST = _FORWARD.widest


def _fake_forward(x, gate, weight, eps, norm_before_gate, group_size, activation, casting_mode):
    groups = x.shape[-1] // group_size * x.shape[:-1].numel()
    return x.new_empty(x.shape), x.new_empty(groups, dtype=torch.float32)


@named(
    "(Tensor x, Tensor gate, Tensor weight, float eps, bool norm_before_gate, int group_size,"
    " str activation, str casting_mode) -> (Tensor, Tensor)",
    _fake_forward,
)
def gated_rms_norm_forward_kernel(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, norm_before_gate: bool, group_size: int,
    activation: str, casting_mode: str,
) -> Any:  # fmt: skip
    """-> y like x (contiguous), rstd [groups * R] fp32."""
    x2, z2 = rows(x), rows(gate)
    n_rows, n_cols = x2.shape
    groups, block = n_cols // group_size, block_of(group_size)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty(groups * n_rows, dtype=torch.float32, device=x.device)
    operands = (x2, x2.stride(0), z2, z2.stride(0), dense(weight), rstd)
    plan = forward_plan(_FORWARD.entry(block, x), x.device)
    launch(
        kernels.forward_kernel, (cdiv(n_rows, plan["ROWS"]), groups), x.device, y, *operands, n_rows, n_cols,
        group_size, eps, **_flags(x, weight, norm_before_gate, activation, casting_mode), BLOCK=block, **plan,
    )  # fmt: skip
    return y, rstd


def _fake_backward(
    dy, x, gate, weight, rstd, norm_before_gate, group_size, activation, casting_mode, need_dx, need_dz, need_dw
):  # fmt: skip
    needs = ((x, need_dx), (gate, need_dz), (weight, need_dw))
    return tuple(t.new_empty(t.shape if need else 0) for t, need in needs)


@named(
    "(Tensor dy, Tensor x, Tensor gate, Tensor weight, Tensor rstd, bool norm_before_gate, int group_size,"
    " str activation, str casting_mode, bool need_dx, bool need_dz, bool need_dw) -> (Tensor, Tensor, Tensor)",
    _fake_backward,
)
def gated_rms_norm_backward_kernel(
    dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor, rstd: Tensor, norm_before_gate: bool, group_size: int,
    activation: str, casting_mode: str, need_dx: bool, need_dz: bool, need_dw: bool,
) -> Any:  # fmt: skip
    """-> dx like x, dz like gate, dw like weight; an output that is not needed is empty."""
    dy2, x2, z2 = rows(dy), rows(x), rows(gate)
    n_rows, n_cols = x2.shape
    groups, block = n_cols // group_size, block_of(group_size)
    dx = torch.empty(x.shape if need_dx else 0, dtype=x.dtype, device=x.device)
    dz = torch.empty(gate.shape if need_dz else 0, dtype=gate.dtype, device=x.device)
    if n_rows == 0:
        return dx, dz, torch.zeros_like(weight) if need_dw else weight.new_empty(0)
    operands = (dy2, dy2.stride(0), x2, x2.stride(0), z2, z2.stride(0), dense(weight), rstd)
    row_bytes = block * (dy.element_size() + x.element_size() + gate.element_size())
    entry = _BACKWARD.entry(block, x)
    programs, share, plan = backward_plan(entry, n_rows, row_bytes, x.device, groups)
    partials = x.new_empty((programs, n_cols) if need_dw else 0, dtype=torch.float32)
    needs = {"NEED_DX": need_dx, "NEED_DZ": need_dz, "NEED_DW": need_dw}
    launch(
        kernels.backward_kernel, (programs, groups), x.device, dx, dz, partials, *operands, n_rows, n_cols,
        group_size, share, **_flags(x, weight, norm_before_gate, activation, casting_mode), **needs,
        BLOCK=block, **plan,
    )  # fmt: skip
    dw = sum_partials(partials, weight.dtype) if need_dw else weight.new_empty(0)
    return dx, dz, dw


def _flags(
    x: Tensor, weight: Tensor, norm_before_gate: bool, activation: str, casting_mode: str
) -> dict[str, Any]:
    llama = casting_mode == "llama"
    # x's dtype and a narrower weight's promote to x's; a wider one's to fp32: nothing to round.
    rounds = llama and torch.promote_types(x.dtype, weight.dtype) == x.dtype
    return {
        "ACT": activation,
        "GATE_FIRST": not norm_before_gate,
        "LLAMA": llama,
        "ROUND_U": rounds,
    }


# 3 op


class _GatedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float, norm_before_gate: bool, group_size: int,
        activation: str, casting_mode: str,
    ) -> Tensor:  # fmt: skip
        ctx.options = norm_before_gate, group_size, activation, casting_mode
        y, rstd = gated_rms_norm_forward_kernel(x, gate, weight, eps, *ctx.options)
        ctx.save_for_backward(x, gate, weight, rstd)
        return y

    @staticmethod
    @first_order("gated_rms_norm")
    def backward(ctx: Any, dy: Tensor) -> Any:
        needs = ctx.needs_input_grad[:3]
        found = gated_rms_norm_backward_kernel(dy, *ctx.saved_tensors, *ctx.options, *needs)
        grads = (g if need else None for g, need in zip(found, needs, strict=True))
        return *grads, None, None, None, None, None


def supports(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, norm_before_gate: bool, group_size: int, *_: Any
) -> str | None:  # fmt: skip
    """Every layout; groups of up to 16,384 columns, 65,535 of them."""
    if group_size == 0:
        return "rows have no columns"
    if group_size > _WIDEST:
        return f"a group has {group_size} columns, more than a program holds ({_WIDEST})"
    groups = x.shape[-1] // group_size
    return f"{groups} groups, more than {_MAX_GROUPS}" if groups > _MAX_GROUPS else None


def cost(x: Tensor, gate: Tensor, weight: Tensor, *options: Any) -> Cost:
    """x, gate and w in, y out; then dy, x, gate and w in, dx, dgate and dw out."""
    n, z, w = (t.numel() * t.element_size() for t in (x, gate, weight))
    groups = x.shape[-1] // (options[2] if len(options) > 2 else x.shape[-1])
    rstd = 4 * groups * (x.numel() // x.shape[-1])
    return Cost(2 * n + z + w, 3 * n + 2 * z + 2 * w, rstd)


OP = Op("gated_rms_norm", reference, reference, _GatedRMSNorm.apply, supports, cost, rows=2)

# 4 public


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    norm_before_gate: bool = True,
    group_size: int | None = None,
    activation: str = "silu",
    casting_mode: str = "llama",
    impl: str | None = None,
) -> Tensor:
    """RMSNorm over the last dimension or groups of it, with a gate before or after it.

    Args:
        x: `[*, D]` of any rank and strides; fp16, bf16, fp32 (fp64 on the torch path).
        gate: like x; its dtype may differ. Halves of a wider projection are read where they lie.
        weight: `[D]`. Its dtype may differ from x's.
        eps: added to the mean square.
        norm_before_gate: True: norm(x) * weight * act(gate). False: norm(x * act(gate)) * weight.
        group_size: adjacent columns that share a norm, a divisor of D; None for all D.
        activation: "silu" or "sigmoid", of the gate.
        casting_mode: "llama" rounds the normalised values to x's dtype before the weight; "gemma" stays in fp32.
        impl: "triton" or "torch" for this call, None for the default choice. Groups of more than
            16,384 columns take the torch path.
    Returns:
        `[*, D]` in x's dtype, contiguous.
    Memory:
        Keeps x, gate, weight and 4 bytes a row and group for backward.
    Raises:
        ValueError: an unknown activation or casting mode, a gate of another shape, a weight whose
            shape is not `[D]`, a group size that does not divide D.
    """
    choice("gated_rms_norm", "activation", activation, tuple(_ACTIVATIONS))
    choice("gated_rms_norm", "casting_mode", casting_mode, _CASTING_MODES)
    require(
        gate.shape == x.shape,
        f"gated_rms_norm: the gate must have the shape of x {list(x.shape)}; got {list(gate.shape)}.",
    )
    check_weight("gated_rms_norm", x, weight)
    width = x.shape[-1]
    size = width if group_size is None else group_size
    require(
        size > 0 and width % size == 0 if width else True,
        f"gated_rms_norm: group_size must divide the last dimension of x, {width}; got {size}.",
    )
    options = (eps, norm_before_gate, size, activation, casting_mode)
    return OP(x, gate, weight, *options, impl=impl)
