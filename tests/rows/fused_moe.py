"""Shapes are (tokens, experts a token, experts, H, I)."""

from functools import partial

import torch

from liger_kernel import _env
from liger_kernel.ops import fused_moe
from liger_kernel.testing.properties import Case

# The interpreter truncates to bf16 three times in a row here.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)[:: 2 if _env.interpreting() else 1]
_GPT_OSS = {"activation": "silu", "interleaved": True, "limit": 1.0, "alpha": 1.702, "shift": 1.0}
_VARIANTS = {"gpt_oss": _GPT_OSS, "gelu, nobody": {"activation": "gelu"}}


def _inputs(shape, make, **_):
    tokens, top_k, n_experts, width, inner = shape
    return {
        "x": make(tokens, width),
        "gate_up_proj": make(n_experts, 2 * inner, width, scale=width**-0.5),
        "down_proj": make(n_experts, width, inner, scale=inner**-0.5),
        "top_k_index": make.ids(n_experts, tokens, top_k),
        "top_k_weights": make(tokens, top_k, dtype=torch.float32).sigmoid(),
    }


def _variant_inputs(shape, make, variant):
    """Biases; weights stored as [E, in, out]; some pairs that belong to nobody."""
    tokens, top_k, n_experts, width, inner = shape
    found = _inputs(shape, make)
    if variant == "gpt_oss":
        for name in ("gate_up_proj", "down_proj"):
            found[name] = found[name].transpose(1, 2).contiguous().transpose(1, 2)
    if variant.endswith("nobody"):
        for wrong in (-1, n_experts):
            found["top_k_index"][make.chance(0.3, tokens, top_k)] = wrong
    else:
        found["gate_up_bias"] = make(n_experts, 2 * inner)
        found["down_bias"] = make(n_experts, width)
    return found


def _variant(function, variant, **tensors):
    return function(**tensors, **_VARIANTS[variant])


def _reference(**tensors):
    return fused_moe.reference(**_renamed(tensors))


def _renamed(tensors):
    names = {"top_k_index": "index", "top_k_weights": "weights"}
    return {names.get(k, k): v for k, v in tensors.items()}


def _opchecks(tensors):
    x, gate_up, down, index, weights = tensors.values()
    options = ("silu", False, None, 1.0, 0.0)
    experts = (gate_up, down, index, weights, None, None)
    _, both, *routing = fused_moe.fused_moe_forward_kernel(x, *experts, *options, True)
    needs = [True, False, True, True, False, False]
    return [
        (fused_moe.fused_moe_forward_kernel, (x, *experts, *options, True)),
        (fused_moe.fused_moe_backward_kernel, (x, x, *experts, both, routing, *options, needs)),
    ]


def _bad(message, **changes):
    def call(make):
        tensors = {**_inputs((3, 2, 2, 4, 5), make), **{k: f(make) for k, f in changes.items()}}
        fused_moe.fused_moe(**tensors)

    return message, call, ValueError


ROWS = [
    Case(
        fused_moe.OP,
        fused_moe.fused_moe,
        _inputs,
        shapes=[(4, 2, 1, 8, 8), (1, 1, 1, 1, 1), (0, 2, 2, 4, 4), (37, 2, 3, 70, 34)],
        grads=("x", "gate_up_proj", "down_proj", "top_k_weights"),
        reference=_reference,
        dtypes=_DTYPES,
        opchecks=_opchecks,
        bad=[
            _bad("down_proj must be|down_proj \\[E, H, I\\]", down_proj=lambda make: make(2, 4, 6)),
            _bad(r"must be \[\*, K\]", top_k_weights=lambda make: make(3, 1)),
            _bad("must hold integers", top_k_index=lambda make: make(3, 2)),
            _bad("gate_up_bias must be", gate_up_bias=lambda make: make(2, 5)),
            _bad("activation must be one of", activation=lambda make: "relu"),
        ],
    ),
    Case(
        fused_moe.OP,
        partial(_variant, fused_moe.fused_moe),
        _variant_inputs,
        shapes=[(3, 2, 2, 8, 12)],
        options={"variant": list(_VARIANTS)},
        grads=("x",),
        reference=partial(_variant, _reference),
        dtypes=_DTYPES,
        label="fused_moe variants",
    ),
]
