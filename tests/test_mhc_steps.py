"""The steps of hyper-connections that other libraries call one by one, against float64 and autograd."""

import pytest
import torch

from liger_kernel import _env
from liger_kernel.ops import _mhc_streams, mhc
from liger_kernel.testing.properties import Maker

CLOSE = {"rtol": 2e-5, "atol": 2e-6, "check_dtype": False}


@pytest.fixture
def make(device):
    if not _env.triton_runs_on(device.type):
        pytest.skip("kernels need an accelerator or TRITON_INTERPRET=1")
    return Maker(torch.float32, device)


def _leaves(*tensors):
    return [t.double().requires_grad_() for t in tensors]


@pytest.mark.parametrize("tokens", [5, 0])
def test_product_and_norm(make, tokens):
    x, phi, dmix = make(tokens, 3, 24), make(72, 15, scale=0.1), make(tokens, 15)
    x64, phi64 = _leaves(x, phi)
    flat = x64.flatten(1)
    invr64 = torch.rsqrt(flat.pow(2).mean(1) + 1e-6)
    mix64 = flat @ phi64 * invr64[:, None]
    mix64.backward(dmix.double())
    out = torch.empty(tokens, device=x.device)
    mix, invr = mhc.mhc_mm_norm_fwd(x, phi, 1e-6, out_invr=out)
    assert invr is out
    torch.testing.assert_close(mix, mix64.detach(), **CLOSE)
    torch.testing.assert_close(invr, invr64.detach(), **CLOSE)
    assert torch.equal(mhc.mhc_mm_norm_fwd(x.flatten(1), phi, 1e-6)[0], mix)
    into = torch.empty_like(phi)
    dx, dphi = mhc.mhc_mm_norm_bwd(x, phi, mix, invr, dmix, out_grad_phi=into)
    assert dphi is into
    assert dx.shape == x.shape
    torch.testing.assert_close(dx, x64.grad, **CLOSE)
    torch.testing.assert_close(dphi, phi64.grad, **CLOSE)


@pytest.mark.parametrize("hc", [1, 3])
@pytest.mark.parametrize("tmax", [1, 4])
def test_split_and_sinkhorn(make, hc, tmax):
    mix, b, dres = make(5, hc * (hc + 2)), make(hc * (hc + 2)), make(5, hc, hc)
    alphas = [make(1).abs() for _ in range(3)]
    options = {"tmax": tmax, "sinkhorn_eps": 1e-6}
    found = mhc.mhc_split_sinkhorn_fwd(
        mix, b, *alphas, pre_eps=0.1, post_mult=1.5, return_hist=True, **options
    )
    pre, post, res = (
        a.double() * m.double() + c.double()
        for a, m, c in zip(
            alphas, mix.split((hc, hc, hc * hc), 1), b.split((hc, hc, hc * hc)), strict=True
        )
    )
    (logits,) = _leaves(res.unflatten(1, (hc, hc)))
    p = logits.softmax(-1) + 1e-6
    for i in range(tmax):
        p = p if i == 0 else p / (p.sum(-1, keepdim=True) + 1e-6)
        p = p / (p.sum(-2, keepdim=True) + 1e-6)
    p.backward(dres.double())
    for ours, wanted in zip(found, (pre.sigmoid() + 0.1, post.sigmoid() * 1.5, p), strict=False):
        torch.testing.assert_close(ours, wanted.detach(), **CLOSE)
    assert found[3].shape == (2 * tmax - 1, 5, hc)
    assert (
        len(mhc.mhc_split_sinkhorn_fwd(mix, b, *alphas, pre_eps=0.1, post_mult=1.5, **options)) == 3
    )
    grad = mhc.mhc_sinkhorn_bwd(mix, b, alphas[2], dres, hist=found[3], **options)
    torch.testing.assert_close(grad, logits.grad, **CLOSE)


def test_steps_make_the_coefficients(make):
    """One after the other they are `mhc_coeffs`."""
    x, phi, b = make(4, 2, 6), make(12, 8), make(8)
    alphas = [make(1).abs() for _ in range(3)]
    mix, _ = mhc.mhc_mm_norm_fwd(x, phi, 1e-6)
    options = {"tmax": 20, "pre_eps": 0.0, "sinkhorn_eps": 1e-6, "post_mult": 2.0}
    found = mhc.mhc_split_sinkhorn_fwd(mix, b, *alphas, **options)
    wanted = mhc.mhc_coeffs(x, phi, b, *alphas, allow_fp32=True)
    torch.testing.assert_close(found, wanted)


def test_streams(make):
    x, f_out, h_pre, h_post, h_res = (
        make(4, 3, 8),
        make(4, 8),
        make(4, 3),
        make(4, 3),
        make(4, 3, 3),
    )
    out, dy, dstreams = torch.empty_like(f_out), make(4, 8), make(4, 3, 8)
    assert mhc.mhc_pre_fwd(x, h_pre, out=out) is out
    assert torch.equal(out, mhc.mhc_pre(x, h_pre))
    assert torch.equal(
        mhc.mhc_post_res_fwd(x, f_out, h_post, h_res), mhc.mhc_post_res(x, f_out, h_post, h_res)
    )
    leaves = _leaves(x, h_pre)
    _mhc_streams.reference_pre(*leaves).backward(dy.double())
    for ours, leaf in zip(mhc.mhc_pre_bwd(x, h_pre, dy), leaves, strict=True):
        torch.testing.assert_close(ours, leaf.grad, **CLOSE)
    leaves = _leaves(x, f_out, h_post, h_res)
    _mhc_streams.reference_post_res(*leaves).backward(dstreams.double())
    found = mhc.mhc_post_res_bwd(x, f_out, h_post, h_res, dstreams)
    for ours, leaf in zip(found, leaves, strict=True):
        torch.testing.assert_close(ours, leaf.grad, **CLOSE)


def test_shapes_are_checked(make):
    with pytest.raises(ValueError, match=r"K = HC \* C = 12"):
        mhc.mhc_mm_norm_fwd(make(4, 2, 5), make(12, 8), 1e-6)
    one = make(1)
    with pytest.raises(ValueError, match=r"mix must be \[N, 2 HC \+ HC\^2\]"):
        mhc.mhc_sinkhorn_bwd(make(4, 9), make(9), one, make(4, 2, 2), tmax=1, sinkhorn_eps=1e-6)
