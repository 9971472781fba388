"""Matrix products inside kernels: which operands meet the tensor cores in which form.

A product of two 16-bit values of one dtype is exact in fp32, and so is one of bf16 and fp16 through
TF32, which holds both. fp32 operands are multiplied as they are, without tensor cores. Triton's
interpreter cannot multiply bf16: there everything is fp32.
"""

import torch

from liger_kernel import _env
from liger_kernel.ops._triton import tl, triton


def precision(*dtypes: torch.dtype, computed: bool = False) -> str:
    """The `PRECISION` of a product whose stored operands have these dtypes. `computed`: one more
    operand comes from arithmetic and shall keep its fp32 digits, which three TF32 products hold."""
    if _env.interpreting() or any(dtype.itemsize > 2 for dtype in dtypes):
        return "ieee"
    if len({*dtypes}) == 1 and not computed:
        return "native"
    if _env.is_hip():
        return "ieee"
    return "tf32x3" if computed else "tf32"


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """a b with fp32 sums. "native": b's 16-bit dtype, to which a computed a is rounded."""
    if PRECISION == "native":
        product = tl.dot(a.to(b.dtype), b)
    else:
        product = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision=PRECISION)
    return product


@triton.jit
def grouped(t, n_rows, n_columns, GROUP: tl.constexpr):
    """Row and column tile of the t-th of n_rows x n_columns tiles of a result. The row tiles of a group vary fastest:
    they share columns of the other operand while these are in L2.
    """
    first = t // (GROUP * n_columns) * GROUP
    size = tl.minimum(n_rows - first, GROUP)
    rest = t % (GROUP * n_columns)
    return first + rest % size, rest // size


@triton.jit
def halves(x, ROWS: tl.constexpr, HALF: tl.constexpr):
    """The left and the right columns of [ROWS, 2 HALF]."""
    return tl.split(tl.permute(tl.reshape(x, (ROWS, 2, HALF)), (0, 2, 1)))
