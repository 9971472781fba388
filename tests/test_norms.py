"""What the properties cannot say of the norms: digits, outputs nobody uses, layers, the contract's entry points."""

import pytest
import torch
from cases import CASES
from isolated import run

from liger_kernel import _env
from liger_kernel.ops import _rms_kernels
from liger_kernel.ops.fused_add_rms_norm import fused_add_rms_norm
from liger_kernel.ops.gated_rms_norm import gated_rms_norm
from liger_kernel.ops.layer_norm import layer_norm
from liger_kernel.ops.modulated_rms_norm import modulated_rms_norm
from liger_kernel.ops.rms_norm import rms_norm
from liger_kernel.testing import properties
from liger_kernel.transformers import norm


@pytest.fixture
def kernels(device):
    if not _env.triton_runs_on(device.type):
        pytest.skip("kernels need an accelerator or TRITON_INTERPRET=1")
    with _env.using_impl("triton"):
        yield device


@pytest.mark.parametrize("width", [300, 33000])
def test_layer_norm_keeps_the_digits_of_rows_far_from_zero(kernels, width):
    """Values of 1e4 with a spread of 1: E[x^2] - E[x]^2 would leave no digit of the variance."""
    x = (1e4 + torch.randn(1, width, generator=torch.Generator().manual_seed(0))).to(kernels)
    truth = torch.nn.functional.layer_norm(x.double(), (width,), eps=1e-6)
    y = layer_norm(x, None)
    assert (y - truth).abs().max() < 2e-6
    constant = torch.full((1, width), 12345.678, device=kernels)
    assert layer_norm(constant, None).abs().max() < 1e-3


@pytest.mark.parametrize("used", ["y", "s"])
def test_fused_add_with_one_output_in_use(kernels, used):
    make = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=make).to(kernels) for shape in ((3, 9), (3, 9), (9,))]
    leaves, copies = ([t.clone().requires_grad_() for t in tensors] for _ in range(2))
    index = "ys".index(used)
    fused_add_rms_norm(*leaves)[index].sum().backward()
    fused_add_rms_norm(*copies, impl="torch")[index].sum().backward()
    for leaf, copy in zip(leaves, copies, strict=True):
        assert (leaf.grad is None) == (copy.grad is None)
        if leaf.grad is not None:
            torch.testing.assert_close(leaf.grad, copy.grad)


def test_gradients_of_both_inputs_are_separate_memory(kernels):
    """They are one tensor inside; what lands on two leaves must not share storage."""
    x, r = (torch.randn(3, 9, device=kernels, requires_grad=True) for _ in range(2))
    fused_add_rms_norm(x, r, None)[0].sum().backward()
    before = r.grad.clone()
    x.grad.zero_()
    assert torch.equal(r.grad, before)


def test_groups_beyond_a_program_take_the_torch_path(kernels):
    x = torch.randn(1, 16385, device=kernels)
    with pytest.raises(RuntimeError, match="more than a program holds"):
        gated_rms_norm(x, x, x[0], impl="triton")
    with pytest.raises(RuntimeError, match="more than a program holds"):
        modulated_rms_norm(x, None, x, impl="triton")
    assert gated_rms_norm(x, x, x[0]).shape == x.shape


# Backward of few rows in one launch, of many with partial sums

FEW = [(1, 1), (1, 1024), (3, 129), (64, 33), (3, 8191)]
MANY = [(513, 8), (520, 256)]
RMS_ROWS = [case for case in CASES if case.op.name in ("rms_norm", "fused_add_rms_norm")]
PLAIN_ROWS = [case for case in RMS_ROWS if not case.label]


@pytest.mark.parametrize("shape", FEW + MANY, ids=str)
@pytest.mark.parametrize("case", RMS_ROWS, ids=lambda case: case.name)
def test_few_and_many_rows_are_accurate(kernels, ran, case, shape):
    """Every casting mode, an offset, mixed dtypes, a gradient to add, no weight; each way has its kernel."""
    for options in case.cover():
        for dtype in {case.dtypes[0], torch.float16} - {torch.bfloat16}:  # the interpreter cuts it
            properties.accurate(case, shape, options, dtype, kernels)
    backward = {_rms_kernels.backward_few_kernel, _rms_kernels.backward_kernel}
    wanted = _rms_kernels.backward_few_kernel if shape in FEW else _rms_kernels.backward_kernel
    assert ran & backward == {wanted}


@pytest.mark.parametrize("shape", [(9, 130), (513, 9)], ids=str)
@pytest.mark.parametrize("case", PLAIN_ROWS, ids=lambda case: case.name)
@pytest.mark.parametrize(
    "check",
    [properties.written, properties.repeatable, properties.partial, properties.layouts],
    ids=lambda check: check.__name__,
)
def test_few_and_many_rows_keep(kernels, check, case, shape):
    """The same bits again, whatever is needed, in memory of any content; any layout."""
    for options in case.cover():
        check(case, shape, options, torch.bfloat16, kernels)


@pytest.mark.parametrize("shape", [(17, 8192), (1, 8193)], ids=str)
def test_few_rows_of_many_values(kernels, ran, shape):
    """They have partial sums."""
    weight = torch.ones(shape[-1], device=kernels, requires_grad=True)
    rms_norm(torch.randn(shape, device=kernels), weight).sum().backward()
    assert _rms_kernels.backward_kernel in ran
    assert _rms_kernels.backward_few_kernel not in ran


# Layers


def test_layers():
    x, r = torch.randn(2, 3, 5, 8)
    y, s = norm.LigerFusedAddRMSNorm(8, offset=1.0, casting_mode="gemma", init_fn="zeros")(x, r)
    torch.testing.assert_close(s, x + r)
    torch.testing.assert_close(y, norm.LigerRMSNorm(8)(s))
    scale, shift = torch.randn(2, 3, 1, 8)
    modulated = norm.LigerModulatedRMSNorm(8)
    expected = norm.LigerRMSNorm(8)(x) * (1 + scale) + shift
    torch.testing.assert_close(modulated(x, scale, shift), expected)
    assert norm.LigerModulatedRMSNorm(8, elementwise_affine=False).weight is None
    gated = norm.LigerGatedRMSNorm(8, norm_before_gate=False, group_size=4, activation="sigmoid")
    assert gated(x, r).shape == x.shape
    assert "norm_before_gate=False, group_size=4, activation='sigmoid'" in repr(gated)


def test_layer_norm_layer():
    layer = norm.LigerLayerNorm(8, eps=1e-5, bias=True)
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(layer(x), torch.nn.functional.layer_norm(x, (8,)))
    plain = torch.nn.LayerNorm(8)
    layer.load_state_dict(plain.state_dict())
    assert repr(layer) == "LigerLayerNorm(8, eps=1e-05)"
    assert (layer.hidden_size, layer.variance_epsilon) == (8, 1e-5)
    assert norm.LigerLayerNorm(8, impl="torch", backend="torch")(x).shape == x.shape
    with pytest.raises(ValueError, match="older spelling"):
        norm.LigerLayerNorm(8, impl="torch", backend="triton")(x)
    with pytest.raises(ValueError, match="init_fn must be one of"):
        norm.LigerLayerNorm(8, init_fn="noughts")
    with pytest.raises(ValueError, match="weight must have shape"):
        layer(torch.randn(2, 7))


# The contract's entry points


def test_kernel_entry_points():
    code = """
import torch
from liger_kernel import _env, ops
torch.set_default_device(_env.default_device())
x, r, z, w, b = (torch.randn(s, requires_grad=True) for s in ((4, 10), (4, 10), (2, 10), (10,), (10,)))
dy, ds = torch.randn(4, 10), torch.randn(4, 10)
same = torch.testing.assert_close
grads = lambda out, given, *inputs: torch.autograd.grad(out, inputs, given)

y, s = ops.LigerFusedAddRMSNormFunction.apply(x, r, w, 1e-6, 1.0, "gemma", False)
found, s2, rstd, block, warps, stages, mode = ops.fused_add_rms_norm_forward(x, r, w, 1e-6, 1.0, 1)
same(found, y), same(s2, s)
back = ops.fused_add_rms_norm_backward(dy, ds, s2, w, rstd, 1.0, mode, block, warps, stages, True)
same(back, grads((y, s), (dy, ds), x, r, w))

y = ops.LigerLayerNormFunction.apply(x, w, b, 1e-6)
found, x2, mean, rstd, block, warps = ops.layer_norm_forward(x, w, b, 1e-6)
same(found, y)
same(ops.layer_norm_backward(dy, x2, w, b, mean, rstd), grads(y, dy, x, w, b))
assert ops.layer_norm_backward(dy, x2, w, b, mean, rstd, needs_dw=False, needs_db=False)[1:] == (None, None)

for scale in (z, r):
    y = ops.LigerModulatedRMSNormFunction.apply(x, w, scale, scale, 1e-6, 0.0, "llama", True)
    found, x2, rstd, block, warps, per, mode = ops.modulated_rms_norm_forward(x, w, scale, scale, 1e-6, 0.0, 0)
    same(found, y)
    assert per == 4 // len(scale)
    back = ops.modulated_rms_norm_backward(dy, x2, w, scale, scale, rstd, 0.0, mode, block, warps, per, True)
    same(back[:2], grads(y, dy, x, w))
"""
    on_cpu = _env.default_device().type == "cpu"
    assert run(code, **({"TRITON_INTERPRET": "1"} if on_cpu else {})) == ""
