import torch

from liger_kernel.ops import rope
from liger_kernel.testing.properties import Case

# A shape is (B, Hq, Hkv, S, D).


def _tables(make, batch, seq_len, width):
    """Values of no special form, so that both halves must be read."""
    return {"cos": make(batch, seq_len, width), "sin": make(batch, seq_len, width)}


def _inputs(shape, make, **_):
    b, q_heads, k_heads, s, d = shape
    q, k = make(b, q_heads, s, d), make(b, k_heads, s, d)
    return {"q": q, "k": k, **_tables(make, b, s, d)}


def _partial(shape, make, rotary_dim, **_):
    """As the models pass them: (B, S, H, D) in memory, one fp32 table for the whole batch."""
    b, q_heads, k_heads, s, d = shape
    q, k = make(b, s, q_heads, d).transpose(1, 2), make(b, s, k_heads, d).transpose(1, 2)
    table = torch.float32
    cos, sin = (make(1, s, rotary_dim // 2, dtype=table) for _ in range(2))
    return {"q": q, "k": k, "cos": cos, "sin": sin}


def _one_tensor(shape, make, **_):
    b, _, heads, s, d = shape
    return {"q": make(b, s, heads, d), **_tables(make, 1, s, d)}


def _images(shape, make, **_):
    s, heads, d = shape
    return {"q": make(s, heads, d), "k": make(s, heads, d), "cos": make(s, d), "sin": make(s, d)}


def _alone(function):
    return lambda q, cos, sin, **options: function(q, None, cos, sin, **options)[0]


def _opchecks(tensors):
    q, k, cos, sin = tensors.values()
    sizes = (1, q.shape[-1])
    halves, pairs = (False, False, False, []), (True, True, True, [])
    return [
        (rope.rope_kernel, (q, k, cos, sin, *sizes, *halves, True, False)),
        (rope.rope_kernel, (q, k, cos, sin, *sizes, *pairs, False, True)),
        (rope.rope_kernel, (q, None, cos, None, *sizes, *pairs, False, True)),
    ]


def _bad(q_shape, k_shape, table_shape, **options):
    def call(make):
        table = make(*table_shape)
        return rope.rope(make(*q_shape), make(*k_shape), table, table, **options)

    return call


_Q = (1, 2, 3, 8)
_BAD = [
    ("3 or 4 dimensions", _bad((3, 8), (3, 8), (3, 8)), ValueError),
    ("names no axis of heads", _bad(_Q, _Q, (3, 8), unsqueeze_dim=3), ValueError),
    ("k must have q's shape", _bad(_Q, (1, 2, 4, 8), (3, 8)), ValueError),
    ("k must have q's shape", _bad(_Q, (2, 3, 8), (3, 8)), ValueError),
    ("cos and sin must both be", _bad(_Q, _Q, (4, 8)), ValueError),
    ("cos and sin must both be", _bad(_Q, _Q, (2, 3, 8)), ValueError),
    ("cos and sin must both be", _bad(_Q, _Q, (1, 2, 3, 8)), ValueError),
    ("the width of cos must be even", _bad(_Q, _Q, (3, 5)), ValueError),
    ("at most the head dimension 8; got 10", _bad(_Q, _Q, (3, 10)), ValueError),
    ("rotary_dim must be even", _bad(_Q, _Q, (3, 3), rotary_dim=3), ValueError),
    ("rotary_dim must be even", _bad(_Q, _Q, (3, 5), rotary_dim=10), ValueError),
    ("needs cos and sin of width 2", _bad(_Q, _Q, (3, 8), rotary_dim=4), ValueError),
    ("say both", _bad(_Q, _Q, (3, 8), to_halves=True), ValueError),
]

ROWS = [
    Case(
        rope.OP,
        rope.rope,
        _inputs,
        shapes=[
            (2, 4, 2, 3, 8),
            (1, 3, 1, 5, 6),
            (1, 1, 1, 1, 2),
            (2, 2, 2, 0, 4),
            (1, 5, 1, 2, 80),
            (1, 9, 3, 17, 16),
        ],
        options={"interleaved": [False, True]},
        grads=("q", "k"),
        opchecks=_opchecks,
        bad=_BAD,
    ),
    Case(
        rope.OP,
        rope.rope,
        _partial,
        shapes=[(2, 4, 2, 3, 8), (1, 3, 1, 5, 22), (2, 1, 1, 1, 96)],
        options={"rotary_dim": [2, 6, 8], "interleaved": [False, True]},
        grads=("q", "k"),
        label="rope partial",
    ),
    Case(
        rope.OP,
        rope.rope,
        _partial,
        shapes=[(1, 3, 1, 2, 10)],
        options={
            "rotary_dim": [8, 4],
            "interleaved": [True],
            "to_halves": [True, False],
            "trailing": [False, True],
        },
        grads=("q", "k"),
        label="rope orders",
    ),
    Case(
        rope.OP,
        _alone(rope.rope),
        _one_tensor,
        shapes=[(2, 1, 3, 2, 8), (1, 1, 5, 7, 10)],
        options={"unsqueeze_dim": [2], "interleaved": [False, True]},
        grads=("q",),
        reference=_alone(rope.reference),
        label="rope one tensor",
    ),
    Case(
        rope.OP,
        rope.rope,
        _images,
        shapes=[(3, 2, 8), (1, 1, 6), (10, 3, 20)],
        grads=("q", "k"),
        label="rope images",
    ),
]
