"""Rotary embedding beyond the generic properties: against the models' own functions, table forms, memory layouts."""

import importlib

import pytest
import torch

from liger_kernel import _env
from liger_kernel.ops.rope import LigerRopeFunction, reference, rope, rope_backward, rope_forward
from liger_kernel.testing.properties import Maker
from liger_kernel.testing.tolerance import assert_close_to_truth
from liger_kernel.transformers.rope import (
    liger_rotary_pos_emb,
    liger_rotary_pos_emb_gpt_oss,
    liger_rotary_pos_emb_vision,
)

B, S, D = 2, 5, 16


@pytest.fixture(params=["triton", "torch"])
def path(request, device):
    if request.param == "triton" and not _env.triton_runs_on(device.type):
        pytest.skip("kernels need an accelerator or TRITON_INTERPRET=1")
    with _env.using_impl(request.param):
        yield request.param


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def make(request, device):
    return Maker(request.param, device)


def _heads(make, heads, dim=D):
    """[B, heads, S, dim] as a model makes it: a view of (B, S, heads, dim)."""
    return make(B, S, heads, dim).transpose(1, 2)


def _angles(make, pairs, copies):
    """cos and sin [1, S, W] in the working dtype: one value a pair, halves repeated, or columns repeated."""
    inv_freq = 10000.0 ** -(torch.arange(pairs) / pairs)
    freqs = torch.arange(S)[None, :, None] * inv_freq
    if copies == "halves":
        freqs = torch.cat((freqs, freqs), dim=-1)
    elif copies == "columns":
        freqs = freqs.repeat_interleave(2, dim=-1)
    return tuple(t.to(make.device, make.dtype) for t in (freqs.cos(), freqs.sin()))


def _half(t):
    return t[..., : t.shape[-1] // 2]


# model, width of the tables, their form, its function's counterpart
STAND_INS = {
    "llama": (D, "halves", liger_rotary_pos_emb),
    "mistral": (D, "halves", liger_rotary_pos_emb),
    "gpt_neox": (4, "halves", liger_rotary_pos_emb),
    "glm4_moe": (8, "halves", liger_rotary_pos_emb),
    "gpt_oss": (D, "pairs", liger_rotary_pos_emb_gpt_oss),
    "cohere": (D, "columns", lambda *a: rope(*a, interleaved=True)),
    "glm": (
        8,
        "halves",
        lambda q, k, c, s: rope(q, k, _half(c), _half(s), rotary_dim=8, interleaved=True),
    ),
    "ernie4_5": (
        D,
        "halves",
        lambda q, k, c, s: rope(q, k, _half(c), _half(s), rotary_dim=D, interleaved=True),
    ),
}


def _judge(ours, theirs, inputs):
    """Values and gradients of `ours` against `theirs` in float64, beside `theirs` in the same dtype."""
    upstream = [torch.linspace(-1, 1, t.numel()).view(t.shape) for t in inputs[:2]]

    def run(function, tensors):
        q, k = (t.detach().requires_grad_() for t in tensors[:2])
        results = function(q, k, *tensors[2:])
        given = [u.to(r.device, r.dtype) for u, r in zip(upstream, results, strict=True)]
        gradients = torch.autograd.grad(results, (q, k), given)
        names = ("q", "k", "dq", "dk")
        return dict(zip(names, (t.detach() for t in (*results, *gradients)), strict=True))

    assert_close_to_truth(
        run(ours, inputs), run(theirs, inputs), run(theirs, [t.double() for t in inputs])
    )


@pytest.mark.parametrize("model", STAND_INS)
def test_stands_in_for_the_models_own(model, make, path):
    module = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
    width, copies, ours = STAND_INS[model]
    tables = _angles(make, width // 2, copies)
    _judge(ours, module.apply_rotary_pos_emb, [_heads(make, 4), _heads(make, 2), *tables])


def test_stands_in_for_gptj(make, path):
    """One tensor, sin before cos, heads behind tokens, one value a pair."""
    gptj = importlib.import_module("transformers.models.gptj.modeling_gptj")
    x = make(B, S, 3, D)
    cos, sin = (t.expand(B, -1, -1) for t in _angles(make, D // 2, "pairs"))
    expected = gptj.apply_rotary_pos_emb(x, sin, cos)
    found, nothing = rope(x, None, cos, sin, unsqueeze_dim=2, rotary_dim=D, interleaved=True)
    assert nothing is None
    tolerance = 4 * torch.finfo(make.dtype).eps
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=4 * tolerance)


def test_stands_in_for_vision_towers(make, path):
    """[S, H, D] in 16 bit with fp32 tables, computed in fp32 and cast back."""
    qwen = importlib.import_module("transformers.models.qwen2_vl.modeling_qwen2_vl")
    cos, sin = (t[0].float() for t in _angles(make, D // 2, "halves"))
    inputs = [make(S, 3, D), make(S, 3, D), cos, sin]
    _judge(liger_rotary_pos_emb_vision, qwen.apply_rotary_pos_emb_vision, inputs)
    batched = [make(B, S, 3, D), make(B, S, 3, D), cos.expand(B, -1, -1), sin.expand(B, -1, -1)]
    _judge(liger_rotary_pos_emb_vision, qwen.apply_rotary_pos_emb_vision, batched)


def test_every_shape_of_table(make, path):
    q, k = _heads(make, 4), _heads(make, 1)
    cos, sin = make(S, D), make(S, D)
    expected = rope(q, k, cos, sin)
    for shape in [(1, S, D), (B, S, D), (1, 1, S, D), (B, 1, S, D)]:
        found = liger_rotary_pos_emb(q, k, cos.expand(shape), sin.expand(shape))
        assert all(map(torch.equal, found, expected)), shape
    by_token = [t.transpose(1, 2) for t in (q, k)]
    wide = [t[None, :, None].expand(B, S, 1, D) for t in (cos, sin)]
    for tables in ((cos, sin), wide):
        found = rope(*by_token, *tables, unsqueeze_dim=2)
        assert all(torch.equal(f.transpose(1, 2), e) for f, e in zip(found, expected, strict=True))
    by_head = rope(q[0], k[0], cos, sin, unsqueeze_dim=0)
    assert all(torch.equal(f, e[0]) for f, e in zip(by_head, expected, strict=True))


def test_both_halves_are_read(make, path):
    q = make(B, 1, S, 2)
    cos = torch.tensor([2.0, 3.0], device=make.device, dtype=make.dtype).expand(S, 2)
    sin = torch.tensor([5.0, 7.0], device=make.device, dtype=make.dtype).expand(S, 2)
    ones = torch.ones_like(q).requires_grad_()
    found, _ = rope(ones, None, cos, sin)
    assert found[0, 0, 0].tolist() == [2 - 5, 3 + 7]
    (grad,) = torch.autograd.grad(found, ones, torch.ones_like(found))
    assert grad[0, 0, 0].tolist() == [2 + 7, 3 - 5]


@pytest.mark.parametrize("by_token", [True, False])
def test_layout_follows_the_input(by_token, device):
    if not _env.triton_runs_on(device.type):
        pytest.skip("a promise of the kernel")
    make = Maker(torch.float32, device)
    q = make(B, S, 4, D).transpose(1, 2) if by_token else make(B, 4, S, D)
    k = make(B, S, 2, D).transpose(1, 2) if by_token else make(B, 2, S, D)
    leaves = q.requires_grad_(), k.requires_grad_()
    results = rope(*leaves, make(S, D), make(S, D), impl="triton")
    upstream = [torch.ones(r.shape, device=device) for r in results]
    for t, like in zip(
        (*results, *torch.autograd.grad(results, leaves, upstream)), (q, k, q, k), strict=True
    ):
        assert t.stride() == like.stride()
    fused = make(B, S, 8 * D).view(B, S, 8, D)
    found, _ = rope(fused[:, :, :4].transpose(1, 2), None, make(S, D), make(S, D), impl="triton")
    assert found.transpose(1, 2).is_contiguous()


def test_contract_names(path, device):
    make = Maker(torch.float32, device)
    q, k, cos, sin = _heads(make, 4).requires_grad_(), _heads(make, 2), make(S, D), make(S, D)
    ids = torch.arange(S, device=device)[None]
    found = LigerRopeFunction.apply(q, k, cos, sin, ids, 1)
    assert all(map(torch.equal, found, liger_rotary_pos_emb(q, k, cos, sin, ids)))
    assert all(map(torch.equal, found, rope_forward(q, k, cos, sin)))
    assert not rope_forward(q, k, cos, sin)[0].requires_grad
    for tables, rotary_dim in (((cos, sin), None), ((_half(cos), _half(sin)), D), ((cos, sin), D)):
        leaves = q.detach().requires_grad_(), k.detach().requires_grad_()
        results = LigerRopeFunction.apply(*leaves, *tables, rotary_dim=rotary_dim)
        upstream = [torch.randn_like(r) for r in results]
        expected = torch.autograd.grad(results, leaves, upstream)
        for e, f in zip(
            expected, rope_backward(*upstream, *tables, rotary_dim=rotary_dim), strict=True
        ):
            torch.testing.assert_close(f, e)


def test_tables_that_learn_get_gradients(path, device):
    make = Maker(torch.float32, device)
    q, cos, sin = _heads(make, 4), make(S, D).requires_grad_(), make(S, D).requires_grad_()
    found, _ = rope(q, None, cos, sin)
    expected, _ = reference(q, None, cos, sin)
    for f, e in zip(
        torch.autograd.grad(found.sum(), (cos, sin)),
        torch.autograd.grad(expected.sum(), (cos, sin)),
        strict=True,
    ):
        torch.testing.assert_close(f, e)
