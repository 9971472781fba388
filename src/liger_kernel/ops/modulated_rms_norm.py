"""RMSNorm with adaptive modulation.   y = (1 + scale) * (offset + w) * x / rms(x) + shift

    x, y: [*, D]   w: [D] or None   scale, shift: [*, D] of M rows, shift may be None
    rms(x) = sqrt(mean(x^2, -1) + eps)   rstd = 1 / rms: [R] fp32, R = rows of D values

M divides R, and each row of scale and shift serves R / M adjacent rows of x: `[B, 1, D]` modulates
`[B, T, D]` by sample, `[B, T, D]` by token.

Backward, with n = x * rstd, m = (1 + scale) * (offset + w), g = dy * m, sums over the rows of a block:

    dx = rstd * (g - n * mean(g * n))
    dscale = (offset + w) * sum(dy * n)   dshift = sum(dy)   dw = sum over blocks of (1 + scale) * sum(dy * n)

Casts   "llama" rounds n to x's dtype before anything meets it; all else is fp32 with one rounding at
        the end. "gemma", "none": fp32 throughout.
Memory  forward reads x once and writes y; scale, shift and w are read once a program. It keeps rstd,
        4 bytes a row, beside its inputs. Backward reads dy and x once and writes dx; dscale, dshift
        and dw stay in registers for the rows of a program and leave it once, as fp32 partials where
        several programs share a block, summed in a fixed order. No atomics.
Paper   Peebles and Xie, "Scalable Diffusion Models with Transformers", arXiv:2212.09748 (adaLN)
"""

from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops import _modulated_norm_kernels as kernels
from liger_kernel.ops import rms_norm as _rms_norm
from liger_kernel.ops._norm_plan import backward_plan, loop_table
from liger_kernel.ops._op import Cost, Op, choice, dense, first_order, named, require, rows
from liger_kernel.ops._reduce import sum_partials, sum_two_partials
from liger_kernel.ops._triton import block_of, cdiv, launch

_CASTING_MODES = ("llama", "gemma", "none")

# 1 reference


def reference(
    x: Tensor, weight: Tensor | None, scale: Tensor, shift: Tensor | None = None, eps: float = 1e-6,
    offset: float = 0.0, casting_mode: str = "llama",
) -> Tensor:  # fmt: skip
    """The definition: modulation of `rms_norm.reference`, as adaLN blocks write it."""
    n = _rms_norm.reference(x, weight, eps, offset, casting_mode)
    count, per = _blocks(x, scale)
    y = n.reshape(count, per, x.shape[-1]) * (1 + scale.reshape(count, 1, x.shape[-1]))
    if shift is not None:
        y = y + shift.reshape(count, 1, x.shape[-1])
    return y.reshape(x.shape).to(x.dtype)


def _blocks(x: Tensor, scale: Tensor) -> tuple[int, int]:
    """(rows of scale, rows of x that each of them serves)."""
    count = scale.shape[:-1].numel()
    return count, x.shape[:-1].numel() // max(count, 1)


# 2 launch

# block of columns -> (rows, warps, programs per SM, stages), forward and backward.
# Compiled for sm_90, next to no spills up to 8192 columns; programs per SM are what the registers allow. Not measured.
_FORWARD = loop_table("modulated_rms_norm.forward", {
    256: (16, 4, 5, 2), 512: (8, 4, 4, 2), 1024: (4, 4, 5, 2), 2048: (2, 4, 4, 3), 4096: (2, 8, 2, 3),
    8192: (1, 16, 1, 3), 16384: (1, 32, 1, 2),
})  # fmt: skip
_BACKWARD = loop_table("modulated_rms_norm.backward", {
    256: (8, 4, 4, 3), 512: (4, 4, 4, 3), 1024: (2, 4, 4, 3), 2048: (2, 8, 2, 3), 4096: (1, 16, 1, 3),
    8192: (1, 16, 1, 3), 16384: (1, 32, 1, 1),
})  # fmt: skip
_WIDEST = _FORWARD.widest


def _plan(table: Any, x: Tensor, scale: Tensor, loaded: int) -> tuple[tuple[int, ...], int, Any]:
    """((n_cols, n_blocks, per, blocks, parts, share), programs, constants), `loaded` bytes a column.

    A block of rows longer than a program's share is cut into parts, else a program takes whole blocks.
    """
    n_rows, n_cols = x.shape
    each = _each(x, scale)
    count = 1 if each else scale.shape[0]
    per = n_rows // count
    block = block_of(n_cols)
    _, share, plan = backward_plan(table.entry(block, x), n_rows, block * loaded, x.device)
    parts, blocks = cdiv(per, share), max(share // per, 1)
    sizes = (n_cols, count, per, blocks, parts, min(share, per))
    return sizes, cdiv(count, blocks) * parts, {"EACH": each, "BLOCK": block, **plan}


def _each(x: Tensor, scale: Tensor) -> bool:
    """Whether every row of x, of several, has its own scale."""
    n_rows = x.shape[:-1].numel()
    return n_rows > 1 and scale.shape[:-1].numel() == n_rows


def _weight_flags(x: Tensor, weight: Tensor | None, offset: float, casting_mode: str) -> Any:
    llama = casting_mode == "llama"
    flags = {"LLAMA": llama, "HAS_W": weight is not None, "ROUND_W": llama and offset != 0.0}
    return (x if weight is None else dense(weight)), flags


def _fake_forward(x, weight, scale, shift, eps, offset, casting_mode):
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1].numel(), dtype=torch.float32)


@named(
    "(Tensor x, Tensor? weight, Tensor scale, Tensor? shift, float eps, float offset, str casting_mode)"
    " -> (Tensor, Tensor)",
    _fake_forward,
)
def modulated_rms_norm_forward_kernel(
    x: Tensor, weight: Tensor | None, scale: Tensor, shift: Tensor | None, eps: float, offset: float,
    casting_mode: str,
) -> Any:  # fmt: skip
    """-> y like x (contiguous), rstd [R] fp32."""
    x2, scale2 = rows(x), rows(scale)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty(x2.shape[0], dtype=torch.float32, device=x.device)
    if x2.shape[0] == 0:
        return y, rstd
    w, flags = _weight_flags(x2, weight, offset, casting_mode)
    shift2 = None if shift is None else rows(shift)
    shifted = (shift2, None if shift2 is None else shift2.stride(0))
    loaded = x.element_size()
    if _each(x2, scale2):
        loaded += scale.element_size() + (0 if shift is None else shift.element_size())
    sizes, programs, plan = _plan(_FORWARD, x2, scale2, loaded)
    operands = (x2, x2.stride(0), scale2, scale2.stride(0), *shifted, w, rstd)
    args = (y, *operands, *sizes, eps, offset)
    launch(kernels.forward_kernel, (programs,), x.device, *args, **flags, **plan)
    return y, rstd


def _fake_backward(
    dy, x, weight, scale, rstd, offset, casting_mode, need_dx, need_dw, need_dscale, dshift_dtype
):
    dw = x.new_empty(0) if weight is None or not need_dw else weight.new_empty(weight.shape)
    dscale = scale.new_empty(scale.shape if need_dscale else 0)
    dshift = scale.new_empty(0 if dshift_dtype is None else scale.shape, dtype=dshift_dtype)
    return x.new_empty(x.shape if need_dx else 0), dw, dscale, dshift


@named(
    "(Tensor dy, Tensor x, Tensor? weight, Tensor scale, Tensor rstd, float offset, str casting_mode,"
    " bool need_dx, bool need_dw, bool need_dscale, ScalarType? dshift_dtype)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _fake_backward,
)
def modulated_rms_norm_backward_kernel(
    dy: Tensor, x: Tensor, weight: Tensor | None, scale: Tensor, rstd: Tensor, offset: float, casting_mode: str,
    need_dx: bool, need_dw: bool, need_dscale: bool, dshift_dtype: torch.dtype | None,
) -> Any:  # fmt: skip
    """-> dx, dw, dscale like x, weight, scale, and dshift like scale in its own dtype; an output that is not needed
    (dtype None) is empty. Where every row has its own scale, dshift is dy and not made here."""
    dy2, x2, scale2 = rows(dy), rows(x), rows(scale)
    dx = torch.empty(x.shape if need_dx else 0, dtype=x.dtype, device=x.device)
    wanted = (scale.dtype if need_dscale else None, dshift_dtype)
    dw_dtype = None if weight is None or not need_dw else weight.dtype
    if x2.shape[0] == 0:
        dw = x.new_zeros(0 if dw_dtype is None else x.shape[-1], dtype=dw_dtype)
        return dx, dw, *(x.new_zeros(0 if d is None else scale.shape, dtype=d) for d in wanted)
    w, flags = _weight_flags(x2, weight, offset, casting_mode)
    loaded = dy.element_size() + x.element_size() + scale.element_size()
    sizes, programs, plan = _plan(_BACKWARD, x2, scale2, loaded)
    n_cols, parts = x2.shape[1], 1 if plan["EACH"] else sizes[4]
    sums = x.new_empty(0 if dw_dtype is None else (programs, n_cols), dtype=torch.float32)
    # A block that one program sees whole gets its gradients there and then, others as partial sums.
    made = [x.new_empty(0 if d is None else scale.shape, dtype=d) for d in wanted]
    partials = x.new_empty(0, dtype=torch.float32)
    outputs = made
    if parts > 1 and any(wanted):
        many = 2 - wanted.count(None)
        partials = x.new_empty((many, parts, scale.numel()), dtype=torch.float32)
        outputs = [partials[0], partials[many - 1]]
    needs = {
        "NEED_DX": need_dx,
        "NEED_DSCALE": need_dscale,
        "NEED_DSHIFT": dshift_dtype is not None,
        "NEED_DW": dw_dtype is not None,
    }
    operands = (dy2, dy2.stride(0), x2, x2.stride(0), scale2, scale2.stride(0), w, rstd)
    args = (dx, *outputs, sums, *operands, *sizes, offset)
    launch(kernels.backward_kernel, (programs,), x.device, *args, **flags, **needs, **plan)
    dw = x.new_empty(0) if dw_dtype is None else sum_partials(sums, dw_dtype)
    if parts > 1:
        found = sum_two_partials(partials, *wanted)
        made = [t if d is None else t.view(scale.shape) for t, d in zip(found, wanted, strict=True)]
    return dx, dw, *made


# 3 op


class _ModulatedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, scale: Tensor, shift: Tensor | None, eps: float, offset: float,
        casting_mode: str,
    ) -> Tensor:  # fmt: skip
        y, rstd = modulated_rms_norm_forward_kernel(
            x, weight, scale, shift, eps, offset, casting_mode
        )
        ctx.save_for_backward(x, weight, scale, rstd)
        ctx.options = offset, casting_mode
        ctx.shift = (None, None) if shift is None else (shift.shape, shift.dtype)
        return y

    @staticmethod
    @first_order("modulated_rms_norm")
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, scale, rstd = ctx.saved_tensors
        need_dx, need_dw, need_dscale, need_dshift = ctx.needs_input_grad[:4]
        shape, dtype = ctx.shift
        each = _each(x, scale)
        needs = (need_dx, need_dw, need_dscale, None if each or not need_dshift else dtype)
        dx, dw, dscale, dshift = modulated_rms_norm_backward_kernel(
            dy, x, weight, scale, rstd, *ctx.options, *needs
        )
        if need_dshift:
            dshift = (dy.to(dtype) if each else dshift).reshape(shape)
        grads = zip((dx, dw, dscale, dshift), ctx.needs_input_grad, strict=False)
        return *(g if need else None for g, need in grads), None, None, None


def supports(x: Tensor, weight: Tensor | None, scale: Tensor, *_: Any) -> str | None:
    """Every layout; rows of up to 16,384 columns."""
    width = x.shape[-1]
    if width == 0:
        return "rows have no columns"
    return (
        f"rows have {width} columns, more than a program holds ({_WIDEST})"
        if width > _WIDEST
        else None
    )


def cost(
    x: Tensor, weight: Tensor | None, scale: Tensor, shift: Tensor | None = None, *_: Any
) -> Cost:
    """x, w, scale and shift in, y out; then dy, x, w and scale in, the four gradients out."""
    n, w, s, t = (
        0 if p is None else p.numel() * p.element_size() for p in (x, weight, scale, shift)
    )
    return Cost(2 * n + w + s + t, 3 * n + 2 * w + 2 * s + t, 4 * (x.numel() // x.shape[-1]))


OP = Op("modulated_rms_norm", reference, reference, _ModulatedRMSNorm.apply, supports, cost)

# 4 public


def modulated_rms_norm(
    x: Tensor,
    weight: Tensor | None,
    scale: Tensor,
    shift: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str | int = "llama",
    impl: str | None = None,
) -> Tensor:
    """Root-mean-square layer normalisation, then a scale and a shift that depend on the sample or the token.

    Args:
        x: `[*, D]` of any rank and strides; fp16, bf16, fp32 (fp64 on the torch path).
        weight: `[D]`, or None for no weight. Its dtype may differ from x's.
        scale: `[*, D]` whose number of rows divides that of x; a row serves as many adjacent rows of
            x as it goes into. Stored as its difference from one. Its dtype may differ from x's.
        shift: as many rows as scale, or None for no shift.
        eps, offset, casting_mode: as in `liger_kernel.ops.rms_norm.rms_norm`.
        impl: "triton" or "torch" for this call, None for the default choice. Rows of more than
            16,384 columns take the torch path.
    Returns:
        `[*, D]` in x's dtype, contiguous.
    Memory:
        Keeps x, weight, scale and 4 bytes a row for backward.
    Raises:
        ValueError: unknown casting mode, a weight whose shape is not `[D]`, a scale or shift of another
            last dimension or whose rows do not divide those of x or differ in number.
    """
    mode = _rms_norm.casting_name(casting_mode)
    choice("modulated_rms_norm", "casting_mode", mode, _CASTING_MODES)
    _rms_norm.check_weight("modulated_rms_norm", x, weight)
    n_rows, count = x.shape[:-1].numel(), scale.shape[:-1].numel()
    require(
        scale.shape[-1:] == x.shape[-1:] and (n_rows % count == 0 if count else n_rows == 0),
        f"modulated_rms_norm: scale must have rows of {x.shape[-1]}, a number of them that divides the {n_rows} rows "
        f"of x; got {list(scale.shape)} for x {list(x.shape)}.",
    )
    require(
        shift is None or (shift.shape[-1:] == scale.shape[-1:] and shift.numel() == scale.numel()),
        f"modulated_rms_norm: shift must have the rows of scale {list(scale.shape)}; "
        f"got {list(shift.shape) if shift is not None else None}.",
    )
    return OP(x, weight, scale, shift, eps, offset, mode, impl=impl)


class LigerModulatedRMSNormFunction:
    """`modulated_rms_norm` with positional arguments; `in_place` is accepted and changes nothing."""

    @staticmethod
    def apply(
        X: Tensor, W: Tensor | None, scale: Tensor, shift: Tensor | None, eps: float, offset: float = 0.0,
        casting_mode: str | int = "llama", in_place: bool = True,
    ) -> Tensor:  # fmt: skip
        return modulated_rms_norm(X, W, scale, shift, eps, offset, casting_mode)


def modulated_rms_norm_forward(
    X: Tensor, W: Tensor | None, scale: Tensor, shift: Tensor | None, eps: float, offset: float,
    casting_mode: str | int,
) -> tuple[Tensor, Tensor, Tensor, int, int, int, str]:  # fmt: skip
    """-> Y, X, RSTD, block, warps, rows per modulation, casting mode, by the kernel and outside autograd."""
    mode = _rms_norm.casting_name(casting_mode)
    y, rstd = modulated_rms_norm_forward_kernel(X, W, scale, shift, eps, offset, mode)
    block = block_of(X.shape[-1])
    return y, X, rstd, block, _FORWARD.entry(block, X)[1], _blocks(X, scale)[1], mode


def modulated_rms_norm_backward(
    dY: Tensor, X: Tensor, W: Tensor | None, scale: Tensor, shift: Tensor | None, RSTD: Tensor, offset: float,
    casting_mode: str | int, BLOCK_SIZE: int, num_warps: int, rows_per_modulation: int, in_place: bool,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:  # fmt: skip
    """-> dX, dW, dscale, dshift in new tensors, by the kernel and outside autograd; block, warps, rows per
    modulation and `in_place` change nothing."""
    mode = _rms_norm.casting_name(casting_mode)
    each = _each(X, scale)
    dtype = None if shift is None or each else shift.dtype
    needs: Any = (True, W is not None, True, dtype)
    dx, dw, dscale, dshift = modulated_rms_norm_backward_kernel(
        dY, X, W, scale, RSTD, offset, mode, *needs
    )
    if shift is not None:
        dshift = (dY.to(shift.dtype, copy=True) if each else dshift).reshape(shift.shape)
    return dx, None if W is None else dw, dscale, None if shift is None else dshift
