import torch

from liger_kernel.ops import fused_add_rms_norm
from liger_kernel.testing.properties import Case


def _inputs(shape, make, **_):
    return {"x": make(*shape), "residual": make(*shape), "weight": 1 + 0.2 * make(shape[-1])}


def _mixed(shape, make, **_):
    return {
        "x": make(*shape),
        "residual": make(*shape, dtype=torch.float32),
        "weight": make(shape[-1], dtype=torch.float32),
    }


def _opchecks(tensors, eps=1e-6, offset=0.0, casting_mode="llama"):
    x, r, w = tensors.values()
    options = (offset, casting_mode)
    _, s, rstd = fused_add_rms_norm.fused_add_rms_norm_forward_kernel(x, r, w, eps, *options)
    backward = fused_add_rms_norm.fused_add_rms_norm_backward_kernel
    return [
        (fused_add_rms_norm.fused_add_rms_norm_forward_kernel, (x, r, w, eps, *options)),
        (backward, (x, r, s, w, rstd, *options, True, True)),
        (backward, (x, None, s, w, rstd, *options, True, False)),
    ]


def _call(*shapes, **options):
    return lambda make: fused_add_rms_norm.fused_add_rms_norm(
        *(make(*shape) for shape in shapes), **options
    )


ROWS = [
    Case(
        fused_add_rms_norm.OP,
        fused_add_rms_norm.fused_add_rms_norm,
        _inputs,
        shapes=[(2, 3, 8), (1, 1), (7,), (0, 5), (3, 257)],
        options={"casting_mode": ["llama", "gemma"], "offset": [0.0, 1.0]},
        grads=("x", "residual", "weight"),
        opchecks=_opchecks,
        bad=[
            ("weight must have shape", _call((2, 4), (2, 4), (3,)), ValueError),
            ("residual must have the shape of x", _call((2, 4), (1, 4), (4,)), ValueError),
            (
                "casting_mode must be one of",
                _call((2, 4), (2, 4), (4,), casting_mode="lama"),
                ValueError,
            ),
        ],
    ),
    Case(
        fused_add_rms_norm.OP,
        fused_add_rms_norm.fused_add_rms_norm,
        _mixed,
        shapes=[(5, 33), (1, 33000)],
        options={"casting_mode": ["llama"]},
        grads=("x", "residual", "weight"),
        dtypes=(torch.bfloat16, torch.float16),
        label="fused_add_rms_norm mixed dtypes",
    ),
    Case(
        fused_add_rms_norm.OP,
        lambda x, residual: fused_add_rms_norm.fused_add_rms_norm(x, residual, None)[0],
        lambda shape, make: {"x": make(*shape), "residual": make(*shape)},
        shapes=[(4, 129)],
        grads=("x", "residual"),
        reference=lambda x, residual: fused_add_rms_norm.reference(x, residual, None)[0],
        label="fused_add_rms_norm without weight, y alone",
    ),
]
