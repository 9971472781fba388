import torch

from liger_kernel.ops import _rope_kernels, llama4_rope
from liger_kernel.testing.properties import Case

# A shape is (B, S, Hq, Hkv, D).


def _freqs(make, *shape):
    """Complex numbers of any modulus, in fp32 as the models have them."""
    return torch.complex(*(make(*shape, dtype=torch.float32) for _ in range(2)))


def _inputs(shape, make, unsqueeze_dim):
    b, s, q_heads, k_heads, d = shape
    q, k = make(b, s, q_heads, d), make(b, s, k_heads, d)
    if unsqueeze_dim == 1:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    batch = b if unsqueeze_dim == 2 else 1
    return {"q": q, "k": k, "freqs_cis": _freqs(make, batch, s, d // 2)}


def _opchecks(tensors):
    q, k, freqs = tensors.values()
    how = (2, q.shape[-1], True, False, False, [], True)
    table = torch.view_as_real(freqs).flatten(-2)
    return [(_rope_kernels.rope_kernel, (q, k, table, None, *how, False))]


def _bad(q_shape, k_shape, *freqs_shape, real=False, **options):
    def call(make):
        freqs = make(*freqs_shape) if real else _freqs(make, *freqs_shape)
        return llama4_rope.llama4_rope(make(*q_shape), make(*k_shape), freqs, **options)

    return call


_Q = (2, 3, 4, 8)
_BAD = [
    ("must be complex", _bad(_Q, _Q, 3, 4, real=True), ValueError),
    ("S at least 3; got", _bad(_Q, _Q, 2, 4), ValueError),
    ("freqs_cis must be", _bad(_Q, _Q, 3, 3, 4), ValueError),
    ("freqs_cis must be", _bad(_Q, _Q, 3, 8), ValueError),
    ("k must have q's shape", _bad(_Q, (2, 4, 4, 8), 3, 4), ValueError),
    ("names no axis", _bad(_Q, _Q, 3, 4, unsqueeze_dim=3), ValueError),
]

ROWS = [
    Case(
        llama4_rope.OP,
        llama4_rope.llama4_rope,
        _inputs,
        shapes=[(2, 3, 4, 2, 8), (1, 5, 3, 1, 6), (2, 0, 2, 2, 4), (1, 2, 5, 1, 80)],
        options={"unsqueeze_dim": [2, 1]},
        grads=("q", "k"),
        reference=llama4_rope.reference,
        opchecks=_opchecks,
        bad=_BAD,
    ),
]
