import torch

from liger_kernel.ops import modulated_rms_norm
from liger_kernel.testing.properties import Case


def _inputs(shape, make, blocks=None, **_):
    x = make(*shape)
    rows = x.shape[:-1].numel() if blocks is None else blocks
    return {
        "x": x,
        "weight": 1 + 0.2 * make(shape[-1]),
        "scale": 0.5 * make(rows, shape[-1]),
        "shift": make(rows, shape[-1]),
    }


def _by_sample(shape, make, **_):
    b, _, d = shape
    return {
        "x": make(*shape),
        "weight": make(d, dtype=torch.float32),
        "scale": make(b, 1, d, dtype=torch.float32),
        "shift": make(b, 1, d, dtype=torch.float32),
    }


def _function(x, weight, scale, shift, blocks=None, **options):
    return modulated_rms_norm.modulated_rms_norm(x, weight, scale, shift, **options)


def _reference(x, weight, scale, shift, blocks=None, **options):
    return modulated_rms_norm.reference(x, weight, scale, shift, **options)


def _opchecks(tensors, **_):
    x, w, scale, shift = tensors.values()
    _, rstd = modulated_rms_norm.modulated_rms_norm_forward_kernel(
        x, w, scale, shift, 1e-6, 1.0, "llama"
    )
    backward = modulated_rms_norm.modulated_rms_norm_backward_kernel
    how = (rstd, 1.0, "llama")
    return [
        (
            modulated_rms_norm.modulated_rms_norm_forward_kernel,
            (x, w, scale, shift, 1e-6, 1.0, "llama"),
        ),
        (backward, (x, x, w, scale, *how, True, True, True, torch.float32)),
        (backward, (x, x, None, scale, *how, True, False, False, None)),
    ]


def _call(*shapes, **options):
    return lambda make: modulated_rms_norm.modulated_rms_norm(
        *(make(*s) for s in shapes), **options
    )


ROWS = [
    Case(
        modulated_rms_norm.OP,
        _function,
        _inputs,
        shapes=[(2, 3, 8), (0, 5), (3, 257)],
        options={
            "blocks": [1, 3, None],  # None: every row has its own
            "casting_mode": ["llama", "gemma"],
            "offset": [1.0, 0.0],
        },
        grads=("x", "weight", "scale", "shift"),
        reference=_reference,
        opchecks=_opchecks,
        bad=[
            ("weight must have shape", _call((2, 4), (3,), (2, 4)), ValueError),
            ("scale must have rows of 4", _call((2, 4), (4,), (2, 3)), ValueError),
            ("divides the 4 rows", _call((4, 4), (4,), (3, 4)), ValueError),
            ("shift must have the rows of scale", _call((2, 4), (4,), (2, 4), (1, 4)), ValueError),
            (
                "casting_mode must be",
                _call((2, 4), (4,), (2, 4), casting_mode="t5"),
                ValueError,
            ),
        ],
    ),
    Case(
        modulated_rms_norm.OP,
        modulated_rms_norm.modulated_rms_norm,
        _by_sample,
        shapes=[(2, 20, 9)],  # more rows than one program takes
        grads=("scale", "shift"),
        dtypes=(torch.bfloat16, torch.float16),
        label="modulated_rms_norm by sample, mixed dtypes",
    ),
    Case(
        modulated_rms_norm.OP,
        lambda x, scale: modulated_rms_norm.modulated_rms_norm(x, None, scale),
        lambda shape, make: {"x": make(*shape), "scale": make(*shape)},
        shapes=[(7,), (1, 1)],
        grads=("x", "scale"),
        reference=lambda x, scale: modulated_rms_norm.reference(x, None, scale),
        label="modulated_rms_norm without weight or shift",
    ),
]
