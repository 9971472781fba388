import torch

from liger_kernel.ops import fused_linear_cross_entropy as flce
from liger_kernel.testing.properties import Case

IGNORE = -100


def _inputs(shape, make, masked=0.4, bias=False, class_weights=False, **_):
    *tokens, width, vocab = shape
    target = make.ids(vocab, *tokens)
    target[make.chance(masked, *tokens)] = IGNORE
    tensors = {
        "input": make(*tokens, width),
        "weight": make(vocab, width, scale=width**-0.5),
        "target": target,
    }
    if bias:
        tensors["bias"] = make(vocab)
    if class_weights:
        tensors["ce_weight"] = make(vocab).abs() + 0.1
    return tensors


def _function(masked=0.4, bias=None, class_weights=False, **kwargs):
    bias = None if isinstance(bias, bool) else bias
    return flce.fused_linear_cross_entropy(bias=bias, **kwargs)


def _reference(masked=0.4, bias=None, class_weights=False, **kwargs):
    bias = None if isinstance(bias, bool) else bias
    return flce.reference(bias=bias, **kwargs)


def _one_chunk(vocab, rows):
    return 4 * rows * max(vocab, 64)


_SHAPES = [(6, 5, 7), (1, 1, 2), (2, 9, 16, 33), (0, 4, 5), (40, 24, 130), (3, 8, 40001)]
_BAD = [
    (
        "width",
        lambda make: flce.fused_linear_cross_entropy(make(2, 4), make(5, 3), make.ids(5, 2)),
        ValueError,
    ),
    (
        "shard",
        lambda make: flce.fused_linear_cross_entropy(make(2, 4), make(20), make.ids(5, 2)),
        ValueError,
    ),
    (
        "one label for each row",
        lambda make: flce.fused_linear_cross_entropy(make(2, 4), make(5, 4), make.ids(5, 3)),
        ValueError,
    ),
    (
        "memory_budget",
        lambda make: flce.fused_linear_cross_entropy(
            make(2, 4), make(5, 4), make.ids(5, 2), memory_budget=-1
        ),
        ValueError,
    ),
]

ROWS = [
    Case(
        flce.OP,
        _function,
        _inputs,
        shapes=_SHAPES,
        options={
            "reduction": ["mean", "sum", "none"],
            "masked": [0.4, 0.0, 1.0, 0.9],
            "label_smoothing": [0.0, 0.1],
            "softcap": [None, 5.0],
            "lse_square_scale": [0.0, 1e-3],
            "pre_scale": [1.0, 0.5],
            "post_scale": [1.0, 2.0],
            "temperature": [1.0, 1.0, 0.7],
            "memory_budget": [None, 4096],
            "return_z_loss": [True, False],
        },
        grads=("input", "weight"),
        reference=_reference,
        bad=_BAD,
    ),
    Case(
        flce.OP,
        _function,
        lambda shape, make, **options: _inputs(
            shape, make, bias=True, class_weights=True, **options
        ),
        shapes=_SHAPES[:3],
        options={
            "reduction": ["mean", "none", "sum"],
            "label_smoothing": [0.0, 0.1],
            "accum_dtype": [None, torch.float32],
            "memory_budget": [4096, None],
        },
        grads=("input", "weight", "bias"),
        reference=_reference,
        label="fused_linear_cross_entropy with bias and class weights",
    ),
    Case(
        flce.OP,
        _function,
        _inputs,
        shapes=[*_SHAPES[:2], _SHAPES[4]],
        options={
            "reduction": ["mean", "none"],
            "use_token_scaling": [True],
            "return_token_accuracy": [False, True],
            "softcap": [None, 5.0],
        },
        grads=("input", "weight"),
        reference=_reference,
        differentiable=False,  # the factor p_y is held constant: the gradient is not the loss's derivative
        label="fused_linear_cross_entropy with token scaling",
    ),
]
