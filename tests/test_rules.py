"""Rules that settle doubts: which path runs, who sees operators by name, what is written, which dtype a loss has."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from liger_kernel import _env
from liger_kernel.ops.cross_entropy import cross_entropy
from liger_kernel.ops.fused_linear_cross_entropy import fused_linear_cross_entropy
from liger_kernel.ops.rms_norm import OP as RMS_NORM
from liger_kernel.ops.rms_norm import rms_norm
from liger_kernel.transformers.norm import LigerRMSNorm


class _Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def kernels(device):
    if not _env.triton_runs_on(device.type):
        pytest.skip("kernels need an accelerator or TRITON_INTERPRET=1")
    return device


def test_a_dispatch_mode_sees_named_operators(kernels):
    x = torch.randn(3, 8, device=kernels, requires_grad=True)
    w = torch.randn(8, device=kernels, requires_grad=True)
    plain = torch.autograd.grad(rms_norm(x, w).sum(), (x, w))
    with _Seen() as seen:
        watched = torch.autograd.grad(rms_norm(x, w).sum(), (x, w))
    assert "liger_kernel.rms_norm_forward_kernel.default" in seen.names
    assert "liger_kernel.rms_norm_backward_kernel.default" in seen.names
    for a, b in zip(plain, watched, strict=True):
        assert torch.equal(a, b)


def test_selective_checkpointing_can_name_an_operator(kernels):
    from torch.utils.checkpoint import (
        CheckpointPolicy,
        checkpoint,
        create_selective_checkpoint_contexts,
    )

    asked = []

    def policy(ctx, op, *args, **kwargs):
        asked.append(str(op))
        return CheckpointPolicy.MUST_SAVE

    x = torch.randn(3, 8, device=kernels, requires_grad=True)
    w = torch.randn(8, device=kernels, requires_grad=True)
    want = torch.autograd.grad(rms_norm(x, w).sum(), (x, w))
    y = checkpoint(
        rms_norm, x, w, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy)
    )  # fmt: skip
    got = torch.autograd.grad(y.sum(), (x, w))
    assert any("rms_norm_forward_kernel" in name for name in asked)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "auto"),
        ({"LIGER_KERNEL_IMPL": "torch"}, "torch"),
        ({"LIGER_KERNEL_IMPL": "nvidia-triton"}, "triton"),
        ({"LIGER_KERNEL_IMPL": "torch", "LIGER_KERNEL_IMPL_RMS_NORM": "triton"}, "triton"),
        ({"LIGER_KERNEL_IMPL_ROPE": "torch"}, "auto"),
    ],
)
def test_environment_chooses_the_path(variables, expected, monkeypatch, fresh_impl):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert _env.impl("rms_norm") == expected


@pytest.mark.parametrize("vendor", ["cutile", "cutedsl", "cute", "ascend"])
def test_vendor_names_warn_once_and_mean_auto(vendor, monkeypatch, fresh_impl):
    monkeypatch.setenv("LIGER_KERNEL_IMPL", vendor)
    _env.warn_once.cache_clear()
    with pytest.warns(UserWarning, match=vendor):
        assert _env.impl("rms_norm") == "auto"
    assert _env.impl("swiglu") == "auto"  # no second warning: warnings are errors here


def test_unknown_path_names_the_choices(monkeypatch, fresh_impl):
    monkeypatch.setenv("LIGER_KERNEL_IMPL", "trition")
    with pytest.raises(ValueError, match="auto, triton, torch"):
        _env.impl("rms_norm")


def test_asking_for_kernels_where_there_are_none_says_why():
    x = torch.randn(2, 4, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"cannot run here: "):
        RMS_NORM(x, None, 1e-6, 0.0, "llama", impl="triton")


@pytest.mark.parametrize("in_place", [True, False])
def test_in_place_never_touches_the_callers_tensors(in_place, device):
    norm = LigerRMSNorm(16, in_place=in_place).to(device)
    x = torch.randn(4, 16, device=device, requires_grad=True)
    dy = torch.randn(4, 16, device=device)
    kept, kept_dy = x.detach().clone(), dy.clone()
    y = norm(x)
    first = torch.autograd.grad(y, x, dy, retain_graph=True)[0].clone()
    second = torch.autograd.grad(y, x, dy)[0]
    assert torch.equal(first, second)
    assert torch.equal(x, kept)
    assert torch.equal(dy, kept_dy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype_of_a_loss(dtype, device):
    logits = torch.randn(6, 10, device=device).to(dtype)
    target = torch.randint(10, (6,), device=device)
    assert cross_entropy(logits, target).loss.dtype == dtype
    hidden, weight = logits, torch.randn(10, 10, device=device).to(dtype)
    assert fused_linear_cross_entropy(hidden, weight, target).loss.dtype == torch.float32


def test_logits_are_written_only_when_asked(device):
    logits = torch.randn(6, 10, device=device)
    kept = logits.clone()
    target = torch.randint(10, (6,), device=device)
    target[0] = -100
    cross_entropy(logits, target)
    cross_entropy(logits.clone().requires_grad_(), target).loss.backward()
    assert torch.equal(logits, kept)
