"""Pieces shared by kernels. Everything here is `@triton.jit` and works on fp32 values.

Only functions that Triton's interpreter has too: exp2, log2, rsqrt, erf; tanh is built from exp2.
"""

from liger_kernel.ops._triton import tl, triton

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
SQRT_HALF: tl.constexpr = tl.constexpr(0.7071067811865476)
INV_SQRT_2PI: tl.constexpr = tl.constexpr(0.3989422804014327)


@triton.jit
def row_base(row, stride):
    """Element offset of a row (or of a vector of rows), in 64 bits: row * stride passes 2^31 in
    real batches.
    """
    return tl.cast(row, tl.int64) * stride


@triton.jit
def rounded(x, LIKE, ROUND: tl.constexpr):
    """x in fp32, rounded to the dtype of what LIKE points at, if ROUND."""
    if ROUND:
        x = x.to(LIKE.dtype.element_ty).to(tl.float32)
    return x


@triton.jit
def exp(x):
    return tl.exp2(x * LOG2E)


@triton.jit
def log_of_normal(x, PTX: tl.constexpr):
    """log x for a normal x. Triton's log2 takes 20 instructions on NVIDIA cards for its last bits; theirs takes one,
    with an absolute error below 2^-22 between 1/2 and 2 and a relative one elsewhere.
    """
    if PTX:
        log2 = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        log2 = tl.log2(x)
    return log2 * LN2


@triton.jit
def logistic(x):
    """sigmoid(x) and its derivative. Nothing overflows and nothing cancels: both tails keep full precision."""
    e = exp(-tl.abs(x))
    upper = 1.0 / (1.0 + e)
    lower = e * upper
    return tl.where(x >= 0, upper, lower), upper * lower


@triton.jit
def tanh(x):
    """1 - 2 / (1 + e^2x): saturates to +-1 on both sides. Below 0.04 the odd series, where the
    form above cancels.
    """
    far = 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2E)))
    near = x * (1.0 - x * x * (0.3333333333333333 - x * x * 0.13333333333333333))
    return tl.where(tl.abs(x) < 0.04, near, far)


@triton.jit
def tanh_and_slope(x):
    """tanh(x) and its derivative 1 - tanh(x)^2 = 4q / (1 + q)^2, q = e^-2|x|, which keeps its digits
    where tanh saturates.
    """
    q = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    scale = 1.0 / (1.0 + q)
    far = tl.where(x < 0.0, (q - 1.0) * scale, (1.0 - q) * scale)
    near = x * (1.0 - x * x * (0.3333333333333333 - x * x * 0.13333333333333333))
    return tl.where(tl.abs(x) < 0.04, near, far), 4.0 * q * scale * scale
