from liger_kernel.ops import fused_neighborhood_attention as fna
from liger_kernel.testing.properties import Case


def _inputs(shape, make, **_):
    return {"query": make(*shape), "key": make(*shape), "value": make(*shape)}


def _padded(shape, make, **_):
    """One row with some padding, one that is nothing else."""
    batch, _, seq, _ = shape
    kept = make.chance(0.6, batch, seq)
    kept[-1] = False
    return {**_inputs(shape, make), "key_mask": kept}


def _opchecks(tensors, kernel_size=7, dilation=1, scale=0.3):
    qkv = tensors["query"], tensors["key"], tensors["value"]
    window = (kernel_size, dilation, 0.3)
    o, lse = fna.neighborhood_forward(*qkv, *window, None)
    return [
        (fna.neighborhood_forward, (*qkv, *window, None)),
        (fna.neighborhood_backward, (o, *qkv, o, lse, *window, None, True, True)),
        (fna.neighborhood_backward, (o, *qkv, o, lse, *window, None, True, False)),
    ]


def _bad(**options):
    def call(make):
        return fna.fused_neighborhood_attention(*(make(1, 2, 4, 8) for _ in range(3)), **options)

    return call


def _other_shape(make):
    return fna.fused_neighborhood_attention(make(1, 2, 4, 8), make(1, 1, 4, 8), make(1, 2, 4, 8))


ROWS = [
    Case(
        fna.OP,
        fna.fused_neighborhood_attention,
        _inputs,
        shapes=[(1, 2, 5, 8), (1, 1, 1, 1), (2, 1, 0, 8), (1, 1, 70, 20), (1, 1, 9, 130)],
        options={"kernel_size": [3, 7], "dilation": [1, 2], "scale": [None, 0.3]},
        grads=("query", "key", "value"),
        opchecks=_opchecks,
        bad=[
            ("must have one shape", _other_shape, ValueError),
            ("positive odd number", _bad(kernel_size=4), ValueError),
            ("positive odd number", _bad(kernel_size=-1), ValueError),
            ("dilation must be at least 1", _bad(dilation=0), ValueError),
            (
                "key_mask must be bool or integer",
                lambda make: _bad(key_mask=make(1, 4))(make),
                ValueError,
            ),
        ],
    ),
    Case(
        fna.OP,
        fna.fused_neighborhood_attention,
        _padded,
        shapes=[(2, 1, 4, 8)],
        options={"kernel_size": [71], "dilation": [2]},
        grads=("query", "key", "value"),
        label="fused_neighborhood_attention padded",
    ),
]
