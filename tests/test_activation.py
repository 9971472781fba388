"""What the properties cannot say of softmax, sparsemax, squared ReLU, DyT, PolyNorm and GroupNorm: numbers that are
none, rows that are hard, and the layers and names around the ops.
"""

import pytest
import torch
from torch import nn

from liger_kernel import _env
from liger_kernel.ops.dyt import dyt, liger_dyt_bwd, liger_dyt_fwd
from liger_kernel.ops.group_norm import group_norm, group_norm_backward, group_norm_forward
from liger_kernel.ops.poly_norm import poly_norm, poly_norm_backward, poly_norm_forward
from liger_kernel.ops.relu_squared import relu_squared, relu_squared_backward, relu_squared_forward
from liger_kernel.ops.softmax import softmax
from liger_kernel.ops.sparsemax import sparsemax
from liger_kernel.transformers import (
    LigerDyT,
    LigerPolyNorm,
    LigerReLUSquared,
    LigerSoftmax,
    LigerSparsemax,
)
from liger_kernel.transformers.group_norm import LigerGroupNorm

INF, NAN = float("inf"), float("nan")


@pytest.fixture
def kernels(device):
    if not _env.triton_runs_on(device.type):
        pytest.skip("kernels need an accelerator or TRITON_INTERPRET=1")
    return device


# Numbers that are none


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("width", [5, 33000])
@pytest.mark.parametrize("function", [softmax, sparsemax], ids=lambda f: f.__name__)
def test_infinities_and_nan_in_a_row(function, width, path, device):
    x = torch.zeros(4, width, device=device)
    x[0, 1:] = -INF
    x[1, :] = -INF
    x[2, 2] = NAN
    y = function(x)
    assert y[0, 0] == 1
    assert not y[0, 1:].any()
    assert y[1].isnan().all()
    assert y[2].isnan().all()
    torch.testing.assert_close(y[3], torch.full_like(y[3], 1 / width))


def test_relu_squared_keeps_nan(path, device):
    x = torch.tensor([NAN, -INF, -1.0, 0.0, 2.0, INF], device=device, requires_grad=True)
    y = relu_squared(x)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    torch.testing.assert_close(y.tolist(), [NAN, 0.0, 0.0, 0.0, 4.0, INF], equal_nan=True)
    torch.testing.assert_close(dx.tolist(), [NAN, 0.0, 0.0, 0.0, 4.0, INF], equal_nan=True)


# Sparsemax


@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_sparsemax_is_a_projection(offset, path, device):
    """Sums to 1, has true zeros, and does not see a common offset (powers of two stay exact beside it)."""
    x = torch.tensor([[1.0, 0.5, 0.25, -3.0], [0.0, 0.0, 0.0, 0.0], [9.0, 1.0, 1.0, 1.0]])
    y = sparsemax(x.to(device) + offset)
    expected = torch.tensor(
        [[0.75, 0.25, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0]], device=device
    )
    assert torch.equal(y, expected)


@pytest.mark.parametrize("width", [300, 33000])
def test_sparsemax_of_a_support_that_shrinks_slowly(width, path, device):
    """Every step of the search drops few entries; the result is that of sorting."""
    x = -torch.arange(width, device=device, dtype=torch.float32).sqrt()[None] / 100
    y, truth = sparsemax(x), sparsemax(x.double(), impl="torch")
    assert torch.equal(y > 0, truth > 0)
    torch.testing.assert_close(y.double(), truth, atol=1e-6, rtol=0)


# Layers and names


def _rows(device, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(device)


def test_layers_compute_what_they_say(device):
    x = _rows(device, 3, 4, 8)
    assert torch.equal(LigerReLUSquared()(x), relu_squared(x))
    assert torch.equal(LigerSoftmax()(x), softmax(x))
    assert torch.equal(LigerSparsemax(1)(x), sparsemax(x, 1))
    layer = LigerDyT(8, init_alpha=0.25).to(device)
    torch.testing.assert_close(layer(x), torch.tanh(0.25 * x))
    assert set(layer.state_dict()) == {"alpha", "gamma", "beta"}
    assert set(LigerDyT(8, beta=False).state_dict()) == {"alpha", "gamma"}
    cubic = LigerPolyNorm().to(device)
    assert torch.equal(cubic(x), poly_norm(x, cubic.weight, cubic.bias))
    assert cubic.weight.tolist() == pytest.approx([1 / 3] * 3)
    assert cubic.bias.tolist() == [1.0]


def test_group_norm_takes_the_place_of_torchs(device):
    x = _rows(device, 2, 6, 5)
    plain = nn.GroupNorm(3, 6, eps=1e-6).to(device)
    nn.init.normal_(plain.weight)
    nn.init.normal_(plain.bias)
    layer = LigerGroupNorm(6, 3, bias=True).to(device)
    assert not layer.bias.any()
    layer.load_state_dict(plain.state_dict())
    torch.testing.assert_close(layer(x), plain(x))
    with pytest.raises(ValueError, match="got 4 and 6"):
        LigerGroupNorm(6, 4)


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        (LigerGroupNorm(6, 3), "LigerGroupNorm(6, 3, eps=1e-06)"),
        (LigerDyT(8, beta=False), "LigerDyT(8, beta=False, init_alpha=0.5)"),
        (LigerPolyNorm(), "LigerPolyNorm(eps=1e-06)"),
        (LigerSparsemax(), "LigerSparsemax(dim=-1)"),
    ],
)
def test_a_layer_says_what_it_is(layer, text):
    assert repr(layer) == text


def _grads(function, *leaves):
    leaves = [x.clone().requires_grad_() for x in leaves]
    y = function(*leaves)
    return y, torch.autograd.grad(y, leaves, torch.ones_like(y))


def test_passes_outside_autograd(kernels):
    """The forward and backward functions by name agree with autograd's own use of the kernels."""
    x, ones = _rows(kernels, 3, 8), torch.ones(3, 8, device=kernels)
    w, b = _rows(kernels, 3), _rows(kernels, 1)

    y, grads = _grads(relu_squared, x)
    assert torch.equal(relu_squared_forward(x), y)
    assert torch.equal(relu_squared_backward(x, ones), grads[0])

    y, grads = _grads(poly_norm, x, w, b)
    found, _, _, rstd, block, warps = poly_norm_forward(x, w, b)
    assert torch.equal(found, y)
    for ours, theirs in zip(
        poly_norm_backward(ones, x, w, rstd, block, warps, True), grads, strict=True
    ):
        assert torch.equal(ours, theirs)

    alpha, gamma, beta = _rows(kernels, 1), _rows(kernels, 8), _rows(kernels, 8)
    y, grads = _grads(dyt, x, alpha, gamma, beta)
    assert torch.equal(liger_dyt_fwd(x, alpha, gamma, beta), y)
    for ours, theirs in zip(liger_dyt_bwd(ones, x, alpha, gamma, beta), grads, strict=True):
        assert torch.equal(ours, theirs)
    assert liger_dyt_bwd(ones, x, alpha, gamma, None)[3] is None

    x, w, b = _rows(kernels, 2, 4, 3), _rows(kernels, 4), 1 + _rows(kernels, 4)
    y, grads = _grads(lambda x, w, b: group_norm(x, 2, w, b), x, w, b)
    found, _, mean, rstd, _ = group_norm_forward(x, 4, 2, w, b, 1e-6)
    assert torch.equal(found, y)
    assert mean.shape == rstd.shape == (2, 2)
    for ours, theirs in zip(
        group_norm_backward(torch.ones_like(x), x, w, b, mean, rstd, 4, 2), grads, strict=True
    ):
        torch.testing.assert_close(ours, theirs)
