import torch

from liger_kernel.ops import attn_res
from liger_kernel.testing.properties import Case


def _inputs(shape, make, **_):
    width = shape[-1]
    return {"V": make(*shape), "w_query": make(width), "w_norm": 1 + 0.2 * make(width)}


def _listed(shape, make, **_):
    """Blocks as separate tensors, weights in fp32."""
    weights = {n: make(shape[-1], dtype=torch.float32) for n in ("w_query", "w_norm")}
    return {"a": make(*shape), "b": make(*shape), **weights}


def _of_list(function):
    return lambda a, b, w_query, w_norm, **options: function([a, b], w_query, w_norm, **options)


def _opchecks(tensors, eps=1e-6):
    operands = tensors["V"], tensors["w_query"], tensors["w_norm"]
    h, *kept = attn_res.attn_res_forward_kernel(*operands, eps)
    return [
        (attn_res.attn_res_forward_kernel, (*operands, eps)),
        (attn_res.attn_res_backward_kernel, (h, *operands, *kept, True, True)),
        (attn_res.attn_res_backward_kernel, (h, *operands, *kept, False, True)),
    ]


def _call(blocks, query=4, norm=4):
    return lambda make: attn_res.attn_res(
        [make(*s) for s in blocks] if isinstance(blocks, list) else make(*blocks),
        make(query),
        make(norm),
    )


ROWS = [
    Case(
        attn_res.OP,
        attn_res.attn_res,
        _inputs,
        shapes=[(3, 2, 8), (1, 1), (2, 0, 5), (2, 1, 2, 8), (5, 3, 33), (2, 300)],
        options={"eps": [1e-6, 1e-2]},
        grads=("V", "w_query", "w_norm"),
        opchecks=_opchecks,
        bad=[
            ("at least one block", _call((0, 2, 4)), ValueError),
            ("at least one block", _call([]), ValueError),
            ("must have one shape", _call([(2, 4), (3, 4)]), ValueError),
            ("w_query must have shape", _call((2, 2, 4), query=3), ValueError),
            ("w_norm must have shape", _call((2, 2, 4), norm=5), ValueError),
        ],
    ),
    Case(
        attn_res.OP,
        _of_list(attn_res.attn_res),
        _listed,
        shapes=[(2, 8)],
        grads=("a", "w_query"),
        reference=_of_list(attn_res.reference),
        label="attn_res of a list",
    ),
]
