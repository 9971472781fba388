"""RMSNorm.   y = x / rms(x) * (offset + w),   rms(x) = sqrt(mean(x^2, -1) + eps)

    x, y: [*, D]   w: [D] or None   rstd = 1 / rms: [R] fp32, R = rows of D values

Backward, with n = x * rstd and g = dy * (offset + w):

    dx = rstd * (g - n * mean(g * n))   dw = sum over rows of dy * n

Casts   "llama": n is rounded to x's dtype before it meets the weight (Llama, Qwen, Mistral, ...)
        "gemma", "none": fp32 throughout, one rounding at the end (Gemma, OLMo 2, GPT-OSS, ...)
        "t5": n is rounded to the weight's dtype, which is also y's (T5 and its kin). It differs from
        "llama" only where x and w differ in dtype: with fp16 weights T5 keeps x in fp32.
Memory  forward reads x once and writes y; it keeps rstd, 4 bytes a row, beside its inputs.
        Backward reads dy and x once and writes dx; dw passes through fp32 partials of one row per
        program (SMs x 1..8 programs), summed in a fixed order. Few rows are read twice instead, and
        nothing else is written. Rows that do not fit in registers take two passes over their columns.
Paper   Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467
"""

from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops import _rms_kernels as kernels
from liger_kernel.ops._norm_plan import (
    MAX_BLOCK,
    WIDE_BLOCK,
    backward_phases_plan,
    backward_plan,
    column_plan,
    forward_phases_plan,
    forward_plan,
    forward_table,
    loop_table,
)
from liger_kernel.ops._op import (
    Cost,
    Op,
    choice,
    compute_dtype,
    dense,
    first_order,
    like,
    named,
    spaced,
)
from liger_kernel.ops._reduce import sum_partials
from liger_kernel.ops._row_phases import in_phases, phases_of
from liger_kernel.ops._schedules import Table, card_of
from liger_kernel.ops._triton import Launch, block_of, cdiv, launch, planned

CASTING_MODES = ("llama", "gemma", "none", "t5")
_CASTING_CODES = {-1: "none", 0: "llama", 1: "gemma"}
_DW_BLOCK = 1024

# Backward in one launch, while a program's read of all rows of its columns takes no longer than a second launch: 3.3 us
# at 64 x 1,024 on an H200 (two launches: 3.5), 4.3 at 128 x 1,024 (3.7), 3.4 at 16 x 4,096 (4.8).
_FEW_ROWS, _FEW_COLUMNS, _FEW_VALUES = 64, 8192, 1 << 17  # the first a power of two
_COLUMNS = 64  # of a program's part of dw

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
    dtype = out_dtype(x, weight, casting_mode)
    rounds = casting_mode in ("llama", "t5")
    if rounds or weight is None:
        n = n.to(dtype)
    if weight is None:
        return n
    w = weight if rounds else weight.to(n.dtype)
    return (n * (w if offset == 0.0 else offset + w)).to(dtype)


# 2 launch

# block of columns -> (rows, warps) forward; (rows, warps, programs per SM, stages) backward.
# Measured on H200, see NOTES.md.
_FORWARD = forward_table("rms_norm.forward", {
    256: (16, 4), 512: (8, 4), 1024: (2, 2), 2048: (1, 4), 4096: (1, 8),
    8192: (1, 16), 16384: (1, 32), 32768: (1, 32),
})  # fmt: skip
_BACKWARD = loop_table("rms_norm.backward", {
    256: (16, 4, 8, 2), 512: (8, 4, 8, 2), 1024: (2, 4, 6, 1), 2048: (2, 4, 2, 3), 4096: (2, 8, 1, 3),
    8192: (1, 8, 1, 3), 16384: (1, 32, 2, 1), 32768: (1, 32, 1, 1),
})  # fmt: skip


def out_dtype(x: Tensor, weight: Tensor | None, casting_mode: str) -> torch.dtype:
    """x's dtype; the weight's under "t5"."""
    return x.dtype if weight is None or casting_mode != "t5" else weight.dtype


def _fake_forward(x, weight, eps, offset, casting_mode):
    y = x.new_empty(x.shape, dtype=out_dtype(x, weight, casting_mode))
    return y, x.new_empty(x.shape[:-1].numel(), dtype=torch.float32)


@named(
    "(Tensor x, Tensor? weight, float eps, float offset, str casting_mode) -> (Tensor, Tensor)",
    _fake_forward,
)
def rms_norm_forward_kernel(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, casting_mode: str
) -> Any:
    """-> y like x (contiguous), rstd [R] fp32."""
    y = like(x, out_dtype(x, weight, casting_mode))
    rstd = x.new_empty(x.shape[:-1].numel(), dtype=torch.float32)
    run_forward(y, rstd, x, weight, eps, offset, casting_mode, _FORWARD)
    return y, rstd


def run_forward(
    y: Tensor, rstd: Tensor, x: Tensor, weight: Tensor | None, eps: float, offset: float, casting_mode: str,
    table: Table, residual: Tensor | None = None, s: Tensor | None = None,
) -> None:  # fmt: skip
    """y = norm(x), or s = x + residual and y = norm(s). Operands of any layout."""
    n_rows, n_cols, device = rstd.shape[0], x.shape[-1], x.device
    x, x_step = spaced(x)
    residual, r_step = (None, None) if residual is None else spaced(residual)
    sizes = (x.element_size(), n_rows, n_cols, x_step, r_step)
    run = _forward(device, table, *sizes, eps, offset, casting_mode)
    run(y, x, s, residual, weight if weight is None else dense(weight), rstd)


@planned
def _forward(
    device: torch.device, table: Table, itemsize: int, n_rows: int, n_cols: int, x_step: int, r_step: int | None,
    eps: float, offset: float, casting_mode: str,
) -> Launch:  # fmt: skip
    block, numbers = block_of(n_cols), (x_step, r_step, n_rows, n_cols, eps, offset)
    flags = _roundings(offset, casting_mode)
    if block > MAX_BLOCK:
        meta = {**flags, "BLOCK": WIDE_BLOCK, "num_warps": 16}
        return Launch(kernels.forward_wide_kernel, (n_rows,), device, *numbers, **meta)
    entry = table.choose(block, itemsize, card_of(device))
    meta = {**flags, "BLOCK": block, **forward_plan(entry, device)}
    if in_phases(itemsize, n_cols, x_step, r_step):
        grid, plan = forward_phases_plan(entry, n_rows, block, phases_of(n_cols), device)
        return Launch(kernels.forward_phases_kernel, grid, device, *numbers, **{**meta, **plan})
    grid = (cdiv(n_rows, meta["ROWS"]),)
    return Launch(kernels.forward_kernel, grid, device, *numbers, **meta)


def _roundings(offset: float, casting_mode: str) -> dict[str, bool]:
    llama = casting_mode in ("llama", "t5")
    return {"LLAMA": llama, "ROUND_W": llama and offset != 0.0}


def _fake_backward(dy, x, weight, rstd, offset, casting_mode, need_dx, need_dw):
    dw = weight.new_empty(weight.shape) if weight is not None and need_dw else x.new_empty(0)
    return x.new_empty(x.shape if need_dx else 0), dw


@named(
    "(Tensor dy, Tensor x, Tensor? weight, Tensor rstd, float offset, str casting_mode,"
    " bool need_dx, bool need_dw) -> (Tensor, Tensor)",
    _fake_backward,
)
def rms_norm_backward_kernel(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, offset: float, casting_mode: str,
    need_dx: bool, need_dw: bool,
) -> Any:  # fmt: skip
    """-> dx like x, dw like weight; an output that is not needed is empty."""
    return run_backward(
        dy, None, x, weight, rstd, offset, casting_mode, need_dx, need_dw, _BACKWARD
    )


def run_backward(
    dy: Tensor, ds: Tensor | None, x: Tensor, weight: Tensor | None, rstd: Tensor, offset: float,
    casting_mode: str, need_dx: bool, need_dw: bool, table: Table,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """-> dx (+ ds), dw; an output that is not needed is empty. Operands of any layout."""
    n_rows, n_cols, device = rstd.shape[0], x.shape[-1], x.device
    dx, need_dw = like(x) if need_dx else x.new_empty(0), need_dw and weight is not None
    dw_dtype = x.dtype if weight is None else weight.dtype
    if n_rows == 0:
        return dx, x.new_zeros(n_cols if need_dw else 0, dtype=dw_dtype)
    loaded = dy.element_size() + x.element_size() + (0 if ds is None else ds.element_size())
    dy, dy_step = spaced(dy)
    x, x_step = spaced(x)
    ds, ds_step = (None, None) if ds is None else spaced(ds)
    weight = weight if weight is None else dense(weight)
    tensors, steps = (ds, dy, x, weight, rstd), (ds_step, dy_step, x_step)
    if n_cols > MAX_BLOCK:
        flags = _roundings(offset, casting_mode)
        if need_dx:
            meta = {"ROUND_W": flags["ROUND_W"], "BLOCK": WIDE_BLOCK, "num_warps": 16}
            args = (dx, *tensors, *steps, n_cols, offset)
            launch(kernels.dx_wide_kernel, (n_rows,), device, *args, **meta)
        return dx, _dw_wide(tensors, steps, flags["LLAMA"]) if need_dw else x.new_empty(0)
    parts, run = _backward(
        device, table, x.element_size(), loaded, n_rows, n_cols, steps, offset, casting_mode, need_dx, need_dw
    )  # fmt: skip
    if parts:
        partials = x.new_empty((parts, n_cols), dtype=torch.float32)
        run(dx, partials, *tensors)
        return dx, sum_partials(partials, dw_dtype)
    dw = x.new_empty(n_cols, dtype=dw_dtype) if need_dw else x.new_empty(0)
    run(dx, dw, *tensors)
    return dx, dw


@planned
def _backward(
    device: torch.device, table: Table, itemsize: int, loaded: int, n_rows: int, n_cols: int,
    steps: tuple[int | None, ...], offset: float, casting_mode: str, need_dx: bool, need_dw: bool,
) -> tuple[int, Launch]:  # fmt: skip
    """-> how many partial sums of dw the launch writes, 0 if it writes dw itself or none is needed; the launch.

    loaded: bytes of an element of all operands together.
    """
    block = block_of(n_cols)
    entry = table.choose(block, itemsize, card_of(device))
    needs = {"NEED_DX": need_dx, "NEED_DW": need_dw, "BLOCK": block}
    meta = {**_roundings(offset, casting_mode), **needs}
    # whether dw is needed or not: dx has the same bits
    if n_rows <= _FEW_ROWS and n_cols <= _FEW_COLUMNS and n_rows * n_cols <= _FEW_VALUES:
        meta |= {**forward_plan(entry[:2], device), "DEPTH": _FEW_ROWS, "COLUMNS": _COLUMNS}
        tiles, columns = cdiv(n_rows, meta["ROWS"]), cdiv(n_cols, _COLUMNS)
        grid = (max(need_dx * tiles, need_dw * columns),)
        numbers = (*steps, n_rows, n_cols, offset)
        return 0, Launch(kernels.backward_few_kernel, grid, device, *numbers, **meta)
    kernel, sizes = kernels.backward_kernel, (block * loaded, device)
    if in_phases(itemsize, n_cols, *steps):
        kernel = kernels.backward_phases_kernel
        programs, share, plan = backward_phases_plan(
            entry, n_rows, block, phases_of(n_cols), *sizes
        )
    else:
        programs, share, plan = backward_plan(entry, n_rows, *sizes)
    numbers = (*steps, n_rows, n_cols, share, offset)
    run = Launch(kernel, (programs,), device, *numbers, **meta, **plan)
    return need_dw * programs, run


def _dw_wide(tensors: tuple[Any, ...], steps: tuple[Any, ...], llama: bool) -> Tensor:
    _, dy, x, weight, rstd = tensors
    n_rows, n_cols = rstd.shape[0], x.shape[-1]
    columns, parts, share = column_plan(n_rows, n_cols, _DW_BLOCK, x.device)
    partials = x.new_empty((parts, n_cols), dtype=torch.float32)
    args = (partials, dy, x, rstd, *steps[1:], n_rows, n_cols, share)
    meta = {"LLAMA": llama, "BLOCK": _DW_BLOCK}
    launch(kernels.dw_wide_kernel, (columns, parts), x.device, *args, **meta)
    return sum_partials(partials, weight.dtype)


# 3 op


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


OP = Op("rms_norm", reference, reference, _RMSNorm.apply, supports, cost, rows=1)

# 4 public


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
        offset: added to the weight (1.0 where the weight is stored as a difference from one, as in
        Gemma).
        casting_mode: "llama" rounds the normalised x to x's dtype before the weight; "gemma" and "none" stay in fp32;
            "t5" rounds to the weight's dtype.
        impl: "triton" or "torch" for this call, None for the default choice.
    Returns:
        `[*, D]` in x's dtype (the weight's under "t5"), contiguous.
    Memory:
        Keeps x, weight and 4 bytes a row for backward.
    Raises:
        ValueError: unknown casting mode, or a weight whose shape is not `[D]`.
    """
    mode = casting_name(casting_mode)
    choice("rms_norm", "casting_mode", mode, CASTING_MODES)
    check_weight("rms_norm", x, weight)
    return OP(x, weight, eps, offset, mode, impl=impl)


def casting_name(casting_mode: str | int) -> Any:
    """The name of a casting mode given by name or by the contract's number."""
    return _CASTING_CODES.get(casting_mode, casting_mode)  # type: ignore[call-overload]


def check_weight(op: str, x: Tensor, weight: Tensor | None, name: str = "weight") -> None:
    """ValueError unless `weight` is None or has one entry a column."""
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(
            f"{op}: {name} must have shape [{x.shape[-1]}], the last dimension of x {list(x.shape)}; "
            f"got {list(weight.shape)}.",
        )


class LigerRMSNormFunction:
    """`rms_norm` with positional arguments; `in_place` and `row_mode` are accepted and change
    nothing.
    """

    @staticmethod
    def apply(
        X: Tensor, W: Tensor | None, eps: float, offset: float = 0.0, casting_mode: str | int = "llama",
        in_place: bool = True, row_mode: bool | None = None,
    ) -> Tensor:  # fmt: skip
        return rms_norm(X, W, eps, offset, casting_mode)


def rms_norm_forward(
    X: Tensor,
    W: Tensor | None,
    eps: float,
    offset: float,
    casting_mode: str | int,
    row_mode: bool | None,
) -> tuple[Tensor, Tensor, Tensor, int, int, str]:
    """-> Y, X, RSTD, block, warps, casting mode, by the kernel and outside autograd; `row_mode`
    changes nothing.
    """
    mode = casting_name(casting_mode)
    y, rstd = rms_norm_forward_kernel(X, W, eps, offset, mode)
    block = block_of(X.shape[-1])
    return y, X, rstd, block, _FORWARD.entry(block, X)[1], mode


def rms_norm_backward(
    dY: Tensor, X: Tensor, W: Tensor | None, RSTD: Tensor, offset: float, casting_mode: str | int, BLOCK_SIZE: int,
    num_warps: int, in_place: bool, row_mode: bool | None, needs_dw: bool | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """-> dX, dW in new tensors, by the kernel and outside autograd; block, warps, `in_place`,
    `row_mode` change nothing.
    """
    mode = casting_name(casting_mode)
    need_dw = W is not None and needs_dw is not False
    dx, dw = rms_norm_backward_kernel(dY, X, W, RSTD, offset, mode, True, need_dw)
    return dx, dw if need_dw else None
