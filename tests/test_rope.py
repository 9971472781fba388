"""Rotary embedding beyond the generic properties: against the models' own functions, table forms, memory layouts."""

import importlib

import pytest
import torch

from liger_kernel import _env
from liger_kernel.ops.llama4_rope import (
    LigerLlama4RopeFunction,
    llama4_rope,
    llama4_rope_forward,
)
from liger_kernel.ops.qwen2vl_mrope import (
    LigerQwen2VLMRopeFunction,
    qwen2vl_mrope_backward,
    qwen2vl_mrope_forward,
)
from liger_kernel.ops.rope import LigerRopeFunction, reference, rope, rope_backward, rope_forward
from liger_kernel.testing.properties import Maker
from liger_kernel.testing.tolerance import assert_close_to_truth
from liger_kernel.transformers.functional import liger_qwen2vl_mrope
from liger_kernel.transformers.rope import (
    apply_liger_llama4_rope_full,
    liger_llama4_text_rotary_pos_emb,
    liger_llama4_vision_rotary_pos_emb,
    liger_multimodal_rotary_pos_emb,
    liger_rotary_pos_emb,
    liger_rotary_pos_emb_gpt_oss,
    liger_rotary_pos_emb_vision,
)

B, S, D = 2, 5, 16


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


def test_stands_in_for_latent_attention(make, path):
    """DeepSeek-V3: interleaved pairs in, halves out; q a slice of wider heads, one head of k."""
    deepseek = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    q, k = _heads(make, 4, 24)[..., 8:], make(B, 1, S, D)
    tables = _angles(make, D // 2, "halves")

    def ours(q, k, cos, sin):
        return rope(q, k, _half(cos), _half(sin), rotary_dim=D, interleaved=True, to_halves=True)

    _judge(ours, deepseek.apply_rotary_pos_emb_interleave, [q, k, *tables])


def _complex_angles(make, *shape):
    cos, sin = _angles(make, D // 2, "pairs")
    return torch.complex(cos.float(), sin.float())[0].expand(*shape, S, D // 2)


def test_stands_in_for_llama4(make, path):
    llama4 = pytest.importorskip("transformers.models.llama4.modeling_llama4")
    freqs = _complex_angles(make, B)
    inputs = [make(B, S, 4, D), make(B, S, 2, D)]
    _judge_complex(liger_llama4_text_rotary_pos_emb, llama4.apply_rotary_emb, inputs, freqs)
    inputs = [make(B, S, 3, D), make(B, S, 3, D)]
    freqs = _complex_angles(make)[:, None]
    _judge_complex(
        liger_llama4_vision_rotary_pos_emb, llama4.vision_apply_rotary_emb, inputs, freqs
    )


def test_stands_in_for_deepseek_v2(make, path):
    deepseek = pytest.importorskip("transformers.models.deepseek_v2.modeling_deepseek_v2")
    inputs, freqs = [_heads(make, 4), make(B, 1, S, D)], _complex_angles(make, 1)
    _judge_complex(
        lambda q, k, f: llama4_rope(q, k, f, 1), deepseek.apply_rotary_emb, inputs, freqs
    )


def _judge_complex(ours, theirs, inputs, freqs):
    """`_judge`; their functions compute in fp32 whatever they get, so float64 is that of the definition."""

    def exact(q, k, cos, sin):
        axis = 1 if q.shape[1] != S else 2
        return reference(q, k, cos, sin, axis, rotary_dim=D, interleaved=True)

    wide = freqs.reshape(-1, S, D // 2) if freqs.dim() == 3 and freqs.shape[1] == 1 else freqs
    tables = [wide.real.contiguous(), wide.imag.contiguous()]

    def with_freqs(function):
        return lambda q, k, *tables: (
            exact(q, k, *tables) if q.dtype == torch.float64 else function(q, k, freqs)
        )

    _judge(with_freqs(ours), with_freqs(theirs), [*inputs, *tables])


def test_llama4_tables_of_every_shape(make, path):
    q, k, freqs = make(B, S, 4, D), make(B, S, 1, D), _complex_angles(make)
    expected = llama4_rope(q, k, freqs)
    longer = torch.cat((freqs, freqs))
    for table in (
        freqs[None],
        freqs.expand(B, -1, -1),
        freqs[:, None],
        freqs[None, :, None],
        longer,
    ):
        found = liger_llama4_vision_rotary_pos_emb(q, k, table)
        assert all(map(torch.equal, found, expected)), table.shape
    for found, x in zip(
        liger_llama4_vision_rotary_pos_emb(q, k, q.new_full((S, D // 2), 2.0, dtype=torch.float32)),
        (q, k),
        strict=True,
    ):
        assert torch.equal(found, 2 * x)
    for table in (freqs, freqs[:, None]):
        assert torch.equal(llama4_rope(q[0], None, table, 1)[0], expected[0][0])
    each = freqs[:B, None]  # one token: a number for each batch, not for each token
    found = llama4_rope(q[:, :1], None, each)[0]
    assert torch.equal(found[1], llama4_rope(q[1:, :1], None, freqs[1:2])[0][0])


def test_llama4_contract_names(path, device):
    make = Maker(torch.float32, device)
    q, k = make(B, S, 4, D).requires_grad_(), make(B, S, 2, D).requires_grad_()
    freqs = torch.complex(make(B, S, D // 2), make(B, S, D // 2))
    found = LigerLlama4RopeFunction.apply(q, k, freqs, 128)
    assert all(map(torch.equal, found, llama4_rope_forward(q, k, freqs)))
    upstream = [torch.randn_like(f) for f in found]
    back = llama4_rope_forward(*upstream, freqs, imag_sign=-1.0)
    for f, e in zip(back, torch.autograd.grad(found, (q, k), upstream), strict=True):
        torch.testing.assert_close(f, e)
    learned = freqs.clone().requires_grad_()
    (grad,) = torch.autograd.grad(llama4_rope(q, None, learned)[0].sum(), learned)
    assert grad.abs().sum() > 0
    module = type("modeling", (), {})
    apply_liger_llama4_rope_full(module)
    assert module.apply_rotary_emb is liger_llama4_text_rotary_pos_emb
    assert module.vision_apply_rotary_emb is liger_llama4_vision_rotary_pos_emb


def test_each_section_reads_its_own_table(path, device):
    """Temporal, height and width positions: with tables of one number each, every pair shows whose it read."""
    make = Maker(torch.float32, device)
    cos = torch.tensor([2.0, 3.0, 5.0], device=device).view(3, 1, 1, 1).expand(3, B, S, D)
    q = torch.ones(B, 1, S, D, device=device)
    found, _ = liger_multimodal_rotary_pos_emb(q, q, cos, 0 * cos, [3, 4, 1])
    assert found[0, 0, 0].tolist() == 2 * ([2.0] * 3 + [3.0] * 4 + [5.0])
    q, k = _heads(make, 4).requires_grad_(), _heads(make, 2).requires_grad_()
    cos, sin, sections = make(3, B, S, D), make(3, B, S, D), [2, 3, 3]
    found = LigerQwen2VLMRopeFunction.apply(q, k, cos, sin, sections)
    for same in (
        liger_qwen2vl_mrope(q, k, cos, sin, sections),
        qwen2vl_mrope_forward(q, k, cos, sin, sections),
    ):
        assert all(map(torch.equal, found, same))
    upstream = [torch.randn_like(f) for f in found]
    back = qwen2vl_mrope_backward(*upstream, cos, sin, sections)
    for f, e in zip(back, torch.autograd.grad(found, (q, k), upstream), strict=True):
        torch.testing.assert_close(f, e)


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
