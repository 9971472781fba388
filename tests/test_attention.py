"""Attention-like operators, their layers and hyper-connections: what the properties of a row cannot say."""

import importlib.util
from pathlib import Path

import pytest
import torch
from liger_kernel.transformers.fused_neighborhood_attention import (
    LigerFusedNeighborhoodAttention,
    LigerFusedNeighborhoodAttentionConfig,
    LigerFusedNeighborhoodAttentionLayer,
)
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from liger_kernel import _env
from liger_kernel.bench.memory import PeakMemory
from liger_kernel.ops import attn_res, fused_neighborhood_attention, mhc, multi_token_attention
from liger_kernel.testing.properties import Maker
from liger_kernel.transformers import LigerMHC, LigerMultiTokenAttention


@pytest.fixture
def make(device):
    if not _env.triton_runs_on(device.type):
        pytest.skip("kernels need an accelerator or TRITON_INTERPRET=1")
    return Maker(torch.float32, device)


# Neighborhood attention


def test_window_is_what_a_mask_says(make):
    q, k, v = (make(1, 2, 9, 8) for _ in range(3))
    place = torch.arange(9, device=q.device)
    apart = (place[:, None] - place).abs()
    seen = (apart <= 4) & (apart % 2 == 0)
    expected = scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=0.2)
    found = fused_neighborhood_attention.fused_neighborhood_attention(q, k, v, 5, 2, 0.2)
    torch.testing.assert_close(found, expected)
    same, lse = fused_neighborhood_attention.fused_neighborhood_attention_forward(
        q, k, v, 5, 2, 0.2, return_lse=True
    )
    scores = (q @ k.transpose(-1, -2) * 0.2).masked_fill(~seen, float("-inf"))
    torch.testing.assert_close(same, found)
    torch.testing.assert_close(lse, scores.logsumexp(-1))


def test_neighborhood_keeps_no_square_of_scores():
    """On the torch path; the kernels have no place for one."""
    seq = 2048
    q, k, v = (torch.randn(1, 1, seq, 8, requires_grad=True) for _ in range(3))
    with _env.using_impl("torch"), PeakMemory(q.device) as peak:
        out = fused_neighborhood_attention.fused_neighborhood_attention(q, k, v, 7)
        out.sum().backward()
    assert peak.bytes < 4 * seq * seq


def test_neighborhood_layer(device):
    torch.manual_seed(0)
    config = LigerFusedNeighborhoodAttentionConfig(hidden_size=16, num_heads=2, kernel_size=3)
    layer = LigerFusedNeighborhoodAttentionLayer(**config.to_dict()).to(device)
    with _env.using_impl("torch"):
        x = torch.randn(2, 6, 16, device=device)
        kept = torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6], device=device)
        out = layer(x, kept)
        assert out.shape == x.shape
        short = layer(x[:1, :4])
        torch.testing.assert_close(out[:1, :4], short)
        out.sum().backward()
    assert all(p.grad is not None for p in layer.parameters())
    with pytest.raises(ValueError, match="num_heads must divide"):
        LigerFusedNeighborhoodAttention(10, 3)
    with pytest.raises(ValueError, match="positive odd"):
        LigerFusedNeighborhoodAttention(8, 2, kernel_size=2)
    with pytest.raises(ValueError, match="key_mask must be bool or integer"):
        layer(x, torch.zeros(2, 1, 6, 6, device=device))


def test_heads_are_not_transposed_in_memory(make):
    """The output of projections in, the input of a projection out, and no copy between."""
    q, k, v = (make(2, 5, 3, 8).transpose(1, 2) for _ in range(3))
    out = fused_neighborhood_attention.fused_neighborhood_attention(q, k, v)
    assert out.transpose(1, 2).is_contiguous()


# Multi-token attention


def test_causal_part_of_any_shape(make):
    x = make(1, 2, 5, 1100)
    kept = x.clone()
    expected = x.tril()
    assert torch.equal(multi_token_attention._causal(x, in_place=False), expected)
    assert torch.equal(x, kept)
    assert torch.equal(multi_token_attention._causal(x, in_place=True), expected)
    tall = make(1, 1, 37, 3)
    assert torch.equal(multi_token_attention._causal(tall.clone(), in_place=True), tall.tril())


@pytest.mark.parametrize("sparse", [False, True])
def test_no_future_enters(make, sparse):
    """A later score changes no earlier row, whatever the convolution reaches for."""
    torch.manual_seed(0)
    layer = LigerMultiTokenAttention(2, 2, 3, padding=1, sparse=sparse).to(make.device)
    scores = make(1, 2, 6, 6)
    other = scores + 5 * torch.ones(6, 6, device=make.device).triu(1)
    torch.testing.assert_close(layer(scores), layer(other))
    assert not layer(scores).triu(1).any()


def test_multi_token_layer():
    layer = LigerMultiTokenAttention(4, 6, 3, groups=2, bias=False)
    assert layer.weight.shape == (6, 2, 3, 3)
    assert layer.bias is None
    with pytest.raises(ValueError, match="groups must divide"):
        LigerMultiTokenAttention(4, 6, 3, groups=4)


# Attention residuals


def test_attn_res_entry_points(make):
    v, wq, wn = make(3, 2, 4, 8), make(8), make(8)
    leaves = [t.clone().requires_grad_() for t in (v, wq, wn)]
    h = attn_res.LigerAttnResFunction.apply(*leaves, 1e-6)
    dh = make(2, 4, 8)
    h.backward(dh)
    found, v3, alpha, rstd = attn_res.attn_res_forward(list(v), wq, wn)
    assert torch.equal(found, h)
    torch.testing.assert_close(alpha.sum(-1), torch.ones(8, device=h.device))
    gradients = attn_res.attn_res_backward(dh, v3, wq, wn, alpha, rstd)
    for gradient, leaf in zip(gradients, leaves, strict=True):
        assert torch.equal(gradient.view(leaf.shape), leaf.grad)


# Hyper-connections


def _parameters(make, hc, width):
    out = hc * hc + 2 * hc
    phi = make(hc * width, out, scale=(hc * width) ** -0.5)
    return phi, make(out), *(make(1).abs() for _ in range(3))


@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize("hc", [1, 3, 4])
def test_h_res_is_doubly_stochastic(make, hc, impl):
    x = make(5, hc, 6)
    h_pre, h_post, h_res = mhc.mhc_coeffs(x, *_parameters(make, hc, 6), allow_fp32=True, impl=impl)
    one = torch.ones(5, hc, device=x.device)
    torch.testing.assert_close(h_res.sum(-1), one, rtol=0, atol=1e-3)
    torch.testing.assert_close(h_res.sum(-2), one, rtol=0, atol=1e-3)
    assert (h_res >= 0).all()
    assert ((h_pre > 0) & (h_pre < 1) & (h_post > 0) & (h_post < 2)).all()


def test_many_streams_take_the_torch_path(make):
    x = make(2, 11, 3)
    parameters = _parameters(make, 11, 3)
    assert "that is 10 streams" in mhc.OP_COEFFS.why_not(x, *parameters)
    h_res = mhc.mhc_coeffs(x, *parameters, allow_fp32=True)[2]
    assert h_res.shape == (2, 11, 11)


def test_connection_of_a_layer(make):
    """What comes back beside the streams, and that an unused part costs nothing."""
    x, parameters = make(3, 2, 4), _parameters(make, 2, 4)
    layer = nn.Linear(4, 4, device=x.device)
    leaves = [p.clone().requires_grad_() for p in parameters]
    streams, coeffs = mhc.mhc_forward(x, layer, *leaves, allow_fp32=True, return_coeffs=True)
    f_out = layer(mhc.mhc_pre(x, coeffs[0]))
    again, x_in = mhc.mhc_apply(x, f_out, *coeffs, return_x_in=True)
    assert torch.equal(streams, again)
    assert torch.equal(mhc.mhc_apply(x, f_out, *coeffs), streams)
    torch.testing.assert_close(x_in, (coeffs[0][..., None] * x).sum(-2))
    coeffs[1].sum().backward()
    assert leaves[2].grad is not None
    assert not leaves[2].grad.any()  # h_post does not depend on alpha_pre
    assert leaves[3].grad.any()


def test_mhc_layer(device):
    torch.manual_seed(0)
    layer = LigerMHC(nn.Linear(6, 6), hc=3, c=6).to(device)
    assert layer.phi.dtype == torch.float16
    assert {p.dtype for p in (layer.b, layer.alpha_pre, layer.alpha_res)} == {torch.float32}
    layer.layer.bfloat16()
    x = torch.randn(2, 4, 3, 6, device=device, dtype=torch.bfloat16)
    with _env.using_impl("torch"):
        out = layer(x)
        out.float().square().sum().backward()
    assert out.shape == x.shape
    assert out.dtype == x.dtype
    assert all(p.grad is not None for p in layer.parameters())
    with pytest.raises(ValueError, match=r"must be \[3, 6\]"):
        layer(x[..., :5])
    with pytest.raises(AssertionError, match="unless allow_fp32"):
        layer(x.float())


def test_example():
    path = Path(__file__).parents[1] / "examples" / "mhc.py"
    spec = importlib.util.spec_from_file_location("example_mhc", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    with _env.using_impl("torch"):
        losses = example.train(streams=2, steps=6, size=2, length=16)
    assert losses[-1] < losses[0]
