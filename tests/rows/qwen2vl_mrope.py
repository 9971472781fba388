from liger_kernel.ops import _rope_kernels, qwen2vl_mrope
from liger_kernel.testing.properties import Case

# A shape is (B, Hq, Hkv, S, D).


def _sections(width, kind):
    """Three sizes that add up to half of width."""
    half = width // 2
    third = half // 3
    return {"even": [half - 2 * third, third, third], "no height": [1, 0, half - 1]}[kind]


def _inputs(shape, make, kind):
    b, q_heads, k_heads, s, d = shape
    q, k = make(b, s, q_heads, d).transpose(1, 2), make(b, k_heads, s, d)
    batch, width = (b, d) if kind == "even" else (1, 2 * (d // 4))
    tables = {name: make(3, batch, s, width) for name in ("cos", "sin")}
    return {"q": q, "k": k, **tables}


def _call(function):
    return lambda q, k, cos, sin, kind: function(q, k, cos, sin, _sections(cos.shape[-1], kind))


def _opchecks(tensors):
    q, k, cos, sin = tensors.values()
    how = (1, cos.shape[-1], False, False, False, [1, 2], True)
    return [(_rope_kernels.rope_kernel, (q, k, cos, sin, *how, backward)) for backward in (False, True)]  # fmt: skip


def _bad(*table_shape, sections=(2, 1, 1), q_shape=(2, 3, 4, 8)):
    def call(make):
        table = make(*table_shape)
        return qwen2vl_mrope.qwen2vl_mrope(make(*q_shape), None, table, table, sections)

    return call


_BAD = [
    ("must both be \\[3, 2 or 1, 4, W\\]", _bad(2, 2, 4, 8), ValueError),
    ("cos and sin must both be", _bad(3, 3, 4, 8), ValueError),
    ("cos and sin must both be", _bad(3, 4, 8), ValueError),
    ("add up to 4", _bad(3, 2, 4, 8, sections=(2, 2, 1)), ValueError),
    ("must be three sizes", _bad(3, 2, 4, 8, sections=(2, 2)), ValueError),
    ("at most the head dimension 8; got 10", _bad(3, 1, 4, 10), ValueError),
    ("q must have 4 dimensions", _bad(3, 1, 4, 8, q_shape=(3, 4, 8)), ValueError),
]

ROWS = [
    Case(
        qwen2vl_mrope.OP,
        _call(qwen2vl_mrope.qwen2vl_mrope),
        _inputs,
        shapes=[(2, 4, 2, 3, 8), (1, 3, 1, 5, 22), (1, 2, 2, 0, 8), (1, 5, 1, 2, 80)],
        options={"kind": ["even", "no height"]},
        grads=("q", "k"),
        reference=_call(qwen2vl_mrope.reference),
        opchecks=_opchecks,
        bad=_BAD,
    ),
]
