"""Cross entropy beyond its row: adversarial values, labels, in place, two backwards, and torch's own as a witness."""

import pytest
import torch
import torch.nn.functional as F

from liger_kernel import _env
from liger_kernel.ops import _ce_kernels
from liger_kernel.ops._ce_kernels import ce_rows
from liger_kernel.ops._ce_torch import ce_rows_torch
from liger_kernel.ops.cross_entropy import (
    LigerCrossEntropyFunction,
    cross_entropy,
    cross_entropy_backward,
    cross_entropy_forward,
)
from liger_kernel.testing.tolerance import assert_close_to_truth
from liger_kernel.transformers.loss import LigerCrossEntropyLoss

# The interpreter computes with numpy, which warns where hardware quietly makes an infinity or a NaN.
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:(invalid value|divide by zero|overflow|All-NaN):RuntimeWarning"
    ),
    pytest.mark.usefixtures("path"),
]
WIDTHS = [
    33,
    40009,
]  # a row in registers, a row in two passes; both with columns past a multiple of 16


def _draw(device, rows, width, seed=0, scale=3.0):
    make = torch.Generator().manual_seed(seed)
    z = torch.randn(rows, width, generator=make) * scale
    return z.to(device), torch.randint(width, (rows,), generator=make).to(device)


def _run(function, z, upstream=1.0):
    leaf = z.detach().requires_grad_()
    loss = function(leaf)
    (gradient,) = torch.autograd.grad(
        loss, leaf, torch.as_tensor(upstream, dtype=loss.dtype, device=z.device).expand(loss.shape)
    )
    return {"loss": loss.detach(), "gradient": gradient}


def _judge(z, target, upstream=1.0, weight=None, **options):
    """Our loss and gradient against F.cross_entropy in float64, beside F.cross_entropy in the same dtype."""
    wide = None if weight is None else weight.double()
    ours = _run(lambda x: cross_entropy(x, target, weight, **options).loss, z, upstream)
    eager = _run(lambda x: F.cross_entropy(x, target, weight, **options), z, upstream)
    truth = _run(lambda x: F.cross_entropy(x, target, wide, **options), z.double(), upstream)
    assert_close_to_truth(ours, eager, truth)
    return ours


@pytest.mark.parametrize("width", [1, 2, 7, 1000, *WIDTHS])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_agrees_with_torch(device, width, reduction):
    z, target = _draw(device, 6, width)
    target[1] = target[4] = -100
    _judge(z, target, upstream=0.7, reduction=reduction)
    if width > 1:
        weight = torch.rand(width, device=device)
        _judge(z, target, reduction=reduction, label_smoothing=0.2, weight=weight)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    "change",
    [
        lambda z: z - 3e4,
        lambda z: z + 1e4 * torch.arange(-2, 3, device=z.device)[:, None],
        lambda z: z.index_fill(1, torch.tensor([5], device=z.device), 90.0),
        lambda z: (
            z.index_fill(1, torch.tensor([width_end], device=z.device), 90.0)
            if (width_end := z.shape[1] - 1)
            else z
        ),
        lambda z: z.masked_fill(torch.arange(z.shape[1], device=z.device) % 3 == 0, float("-inf")),
        lambda z: z * 0,
    ],
    ids=[
        "very negative",
        "row offsets",
        "one peak",
        "peak in the last column",
        "-inf entries",
        "constant",
    ],
)
def test_adversarial_values(device, width, change):
    z, target = _draw(device, 5, width)
    target -= (target % 3 == 0).long() * target.clamp(max=1)  # off the columns that become -inf
    target = target.where(target % 3 != 0, 1)
    _judge(change(z), target)


@pytest.mark.parametrize("width", WIDTHS)
def test_confident_rows_keep_their_digits(device, width):
    z, target = _draw(device, 4, width, scale=0.1)
    z[torch.arange(4), target] = 16.0
    _judge(z, target, reduction="none")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("width", WIDTHS)
def test_bad_logits_are_never_hidden(device, width, bad):
    z, target = _draw(device, 3, width)
    z[1, width // 2] = bad
    got = _run(
        lambda x: cross_entropy(x, target, reduction="none", return_predicted_tokens=True).loss, z
    )
    assert got["loss"].isnan().tolist() == [False, True, False]
    assert got["gradient"].isnan().all(1).tolist() == [False, True, False]
    assert not got["gradient"][[0, 2]].isnan().any()


@pytest.mark.parametrize("width", WIDTHS)
def test_row_of_minus_infinity_is_nan(device, width):
    z, target = _draw(device, 2, width)
    z[0] = float("-inf")
    loss = cross_entropy(z, target, reduction="none").loss
    assert loss.isnan().tolist() == [True, False]


@pytest.mark.parametrize("width", WIDTHS)
def test_target_of_minus_infinity(device, width):
    z, target = _draw(device, 2, width)
    z[0, target[0]] = float("-inf")
    loss = cross_entropy(z, target, reduction="none").loss
    assert loss[0] == float("inf")
    assert loss[1].isfinite()
    smoothed = cross_entropy(z, target, reduction="none", label_smoothing=0.1).loss
    assert smoothed[0] == float("inf")


def test_rubbish_in_ignored_rows_stays_there(device):
    z, target = _draw(device, 4, 33)
    target[2] = -100
    z[2] = float("nan")
    got = _run(lambda x: cross_entropy(x, target).loss, z)
    assert got["loss"].isfinite()
    assert (got["gradient"][2] == 0).all()
    assert got["gradient"].isfinite().all()


@pytest.mark.parametrize("label", [33, 1 << 40, -1, -101])
def test_label_out_of_range_is_named(device, label, monkeypatch):
    z, target = _draw(device, 4, 33)
    target[2] = label
    monkeypatch.setenv("LIGER_KERNEL_VALIDATE", "1")
    with pytest.raises(IndexError, match=rf"target\[2\] is {label}"):
        cross_entropy(z, target)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("label", [1 << 40, -1])
def test_label_out_of_range_is_nan_below_the_check(device, width, label, path):
    z, target = _draw(device, 3, width)
    target[1] = label
    per_row, out = ce_rows if path == "triton" else ce_rows_torch, torch.empty_like(z)
    stats = per_row(
        z, target, None, torch.ones(2, device=device), None, out, V=width, want_argmax=True
    )
    assert stats.loss.isnan().tolist() == out.isnan().all(1).tolist() == [False, True, False]
    assert stats.predicted[1] == -1


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_nothing_valid(device, reduction, weighted):
    z, _ = _draw(device, 3, 33)
    target = torch.full((3,), -100, device=device)
    weight = torch.rand(33, device=device) if weighted else None
    got = _run(
        lambda x: cross_entropy(x, target, weight, reduction=reduction, lse_square_scale=0.1).loss,
        z,
    )
    assert (got["loss"] == 0).all()
    assert (got["gradient"] == 0).all()


def test_no_tokens(device):
    z, target = torch.empty(0, 33, device=device), torch.empty(0, dtype=torch.long, device=device)
    got = _run(lambda x: cross_entropy(x, target).loss, z)
    assert got["loss"] == 0
    assert got["gradient"].shape == (0, 33)
    everything = cross_entropy(
        z, target, reduction="none", return_token_accuracy=True, return_predicted_tokens=True
    )
    assert (
        everything.loss.shape
        == everything.token_accuracy.shape
        == everything.predicted_tokens.shape
        == (0,)
    )


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_second_backward(device, reduction, dtype):
    z, target = _draw(device, 4, 33)
    leaf = z.to(dtype).requires_grad_()
    loss = cross_entropy(leaf, target, reduction=reduction).loss
    upstream = torch.full_like(loss, 0.5)
    (first,) = torch.autograd.grad(loss, leaf, upstream, retain_graph=True)
    kept = first.clone()
    (second,) = torch.autograd.grad(loss, leaf, upstream, retain_graph=True)
    assert torch.equal(first, kept)
    assert first.data_ptr() != second.data_ptr()
    torch.testing.assert_close(first, second)
    torch.autograd.grad(loss, leaf, upstream)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, leaf, upstream)


def test_fp16_gradient_meets_the_loss_scale_before_rounding(device):
    z, target = _draw(device, 64, 33)
    target[8:] = target[8:] * 0
    z[:, 0] += 12.0
    _judge(z.half(), target, upstream=1024.0)


@pytest.mark.parametrize("kind", ["random", "expanded", "strided", "first is zero"])
def test_per_token_upstream(device, kind):
    z, target = _draw(device, 5, 33)
    upstream = {
        "random": torch.randn(5),
        "expanded": torch.tensor(0.3).expand(5),
        "strided": torch.randn(15)[::3],
        "first is zero": torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0]),
    }[kind].to(device)
    _judge(z, target, upstream=upstream, reduction="none")


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_inplace(device, reduction, dtype):
    z, target = _draw(device, 4, 33)
    z = z.to(dtype)
    expected = _run(lambda x: cross_entropy(x, target, reduction=reduction).loss, z)
    leaf = z.clone().requires_grad_()
    logits = leaf * 1
    loss = cross_entropy(logits, target, reduction=reduction, inplace=True).loss
    kept = []
    logits.register_hook(lambda g: kept.append(g.data_ptr()))
    loss.backward(torch.ones_like(loss), retain_graph=True)
    assert kept == [logits.data_ptr()]
    assert torch.equal(leaf.grad, expected["gradient"])
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward(torch.ones_like(loss))


def test_inplace_is_known_to_autograd(device):
    leaf, target = (
        torch.randn(4, 33, device=device, requires_grad=True),
        torch.zeros(4, dtype=torch.long, device=device),
    )
    logits = leaf.exp()  # keeps its output for backward
    loss = cross_entropy(logits, target, inplace=True).loss
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with pytest.raises(ValueError, match="leaf"):
        cross_entropy(leaf, target, inplace=True)


def test_inputs_are_left_alone(device):
    z, target = _draw(device, 4, 33)
    target[0] = -100
    before = z.clone()
    cross_entropy(z, target, inplace=True)
    _run(lambda x: cross_entropy(x, target).loss, z)
    assert torch.equal(z, before)


def test_padded_rows(device):
    """V = 50257 in rows padded to a multiple of 64, the gradient in place: the padding is neither read nor written."""
    for per_row in (
        (ce_rows, ce_rows_torch) if _env.triton_runs_on(device.type) else (ce_rows_torch,)
    ):
        z, target = _draw(device, 3, 50257)
        buffer = torch.full((3, 50304), float("nan"), device=device)
        buffer[:, :50257] = z
        stats = per_row(
            buffer, target, None, torch.full((2,), 1 / 3, device=device), None, buffer, V=50257
        )
        expected = _run(lambda x: F.cross_entropy(x, target), z)  # noqa: B023
        torch.testing.assert_close(stats.loss.sum(), expected["loss"])
        torch.testing.assert_close(buffer[:, :50257], expected["gradient"])
        assert buffer[:, 50257:].isnan().all()


def _scaled(x, target, pre_scale, softcap, post_scale, token_scaling, upstream):
    x = post_scale * softcap * torch.tanh(pre_scale * x / softcap)
    loss = F.cross_entropy(x, target, reduction="none")
    if token_scaling:
        loss = loss * (-loss).exp().detach()
    return loss, x.logsumexp(-1)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("token_scaling", [False, True])
def test_rows_of_the_head(device, width, token_scaling, path):
    """Scales on both sides of the cap, token scaling, upstream and scales together."""
    z, target = _draw(device, 4, width)
    per_row, out = ce_rows if path == "triton" else ce_rows_torch, torch.empty_like(z)
    upstream = torch.tensor([0.0, -1.0, 2.0, 0.5], device=device)
    transform = {
        "pre_scale": 0.5,
        "softcap": 4.0,
        "post_scale": 3.0,
        "token_scaling": token_scaling,
    }
    stats = per_row(
        z,
        target,
        None,
        torch.tensor([0.3, 1.0], device=device),
        upstream,
        out,
        V=width,
        **transform,
    )
    found = {"loss": stats.loss, "lse": stats.lse, "gradient": out}

    def formula(x):
        leaf = x.requires_grad_()
        loss, lse = _scaled(leaf, target, **transform, upstream=upstream)
        (gradient,) = torch.autograd.grad(0.3 * loss, leaf, upstream.to(x.dtype))
        return {"loss": 0.3 * loss.detach(), "lse": lse.detach(), "gradient": gradient}

    assert_close_to_truth(found, formula(z.clone()), formula(z.double()))


@pytest.mark.parametrize("width", WIDTHS)
def test_prediction_takes_the_first_of_equals(device, width):
    z = torch.zeros(3, width, device=device)
    z[1, [7, width - 1]] = 2.0
    z[2, width - 1] = 5.0
    target = torch.tensor([0, 7, -100], device=device)
    options = {"return_token_accuracy": True, "return_predicted_tokens": True}
    found = cross_entropy(z, target, reduction="none", **options)
    assert found.predicted_tokens.tolist() == [0, 7, -1]
    assert found.token_accuracy.tolist() == [1.0, 1.0, 0.0]
    assert cross_entropy(z, target, reduction="sum", **options).token_accuracy == 1.0


def test_twice_differentiable_on_the_torch_path(device, path):
    z, target = _draw(device, 3, 5)
    leaf = z.double().requires_grad_() if path == "torch" else z.requires_grad_()

    def loss(x):
        return cross_entropy(x, target, softcap=4.0, lse_square_scale=0.1).loss

    if path == "torch":
        torch.autograd.gradgradcheck(loss, leaf)
        return
    (gradient,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="LIGER_KERNEL_IMPL_CROSS_ENTROPY=torch"):
        gradient.sum().backward()


def test_loss_only_makes_no_gradient(device):
    z, target = _draw(device, 4, 33)
    leaf = z.requires_grad_()
    with torch.no_grad():
        assert not cross_entropy(leaf, target).loss.requires_grad
    trained = cross_entropy(leaf, target, return_z_loss=True, return_token_accuracy=True)
    assert trained.loss.requires_grad
    assert not trained.z_loss.requires_grad
    assert not trained.token_accuracy.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes(device, dtype):
    z, target = _draw(device, 4, 33)
    found = cross_entropy(z.to(dtype), target, return_z_loss=True, return_token_accuracy=True)
    assert found.loss.dtype == found.z_loss.dtype == dtype
    assert found.token_accuracy.dtype == torch.float32
    assert torch.equal(found.loss, cross_entropy(z.to(dtype), target.int()).loss)


@pytest.mark.skipif(not _env.interpreting(), reason="real programs wait: test_gpu.py")
@pytest.mark.parametrize("width", [640, 1013])
@pytest.mark.parametrize(("parts", "softcap"), [(2, None), (4, 50.0), (8, None)])
def test_parts_of_a_row(width, parts, softcap, device, path, monkeypatch):
    """Programs that take turns cannot wait for one another: on a board that is full they do not, and the second time
    what they read is right."""
    if path == "torch":
        pytest.skip("has no programs")
    z, target = _draw(device, 8, width)
    target[:4] = torch.tensor([0, width - 1, -100, width])
    z[4], z[5] = float("-inf"), float("-inf")
    z[4, target[4]] = 0.0
    z[5, :9], target[5] = -200.0, width - 3
    z[6, 7] = float("nan")
    weight = torch.rand(width, device=device)
    scales, upstream = torch.full((2,), 0.25, device=device), torch.rand(8, device=device)

    def found(schedule):
        out = torch.full_like(z, 7.0)
        options = {"V": width, "lse_square_scale": 1e-3, "softcap": softcap, "token_scaling": True}
        with _ce_kernels._GRADIENT.using(schedule):
            stats = ce_rows(z, target, weight, scales, upstream, out, **options)
        return stats.numbers, out

    alone = found((1, 2, 0, 1))
    board = torch.ones(1 + 8 * parts, dtype=torch.int64, device=device)
    monkeypatch.setattr(_ce_kernels, "can_wait", lambda device: True)
    monkeypatch.setattr(_ce_kernels, "board", lambda *_: board)
    for _ in range(2):
        board[0] = 0
        shared = found((1, 2, 2, parts))
    assert board[0] == 8 * parts
    for got, want in zip(shared, alone, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7, equal_nan=True)


def test_contract_names(device):
    z, target = _draw(device, 4, 33)
    target[0] = -100
    options = (-100, 1e-3, 0.1, "mean", 5.0, True, True, True)
    found = LigerCrossEntropyFunction.apply(z, target, None, *options)
    leaf = z.clone().requires_grad_()
    *forward, gradient = cross_entropy_forward(leaf, target, None, *options)
    for a, b in zip(found, forward, strict=True):
        assert torch.equal(a, b)
    expected = _run(lambda x: LigerCrossEntropyFunction.apply(x, target, None, *options)[0], z, 0.5)
    torch.testing.assert_close(
        cross_entropy_backward(gradient, torch.tensor(0.5, device=device)), expected["gradient"]
    )


def test_layer(device):
    z, target = _draw(device, 4, 33)
    weight = torch.rand(33, device=device)
    layer = LigerCrossEntropyLoss(weight, label_smoothing=0.1, reduction="sum")
    torch.testing.assert_close(
        layer(z, target), F.cross_entropy(z, target, weight, label_smoothing=0.1, reduction="sum")
    )
    everything = LigerCrossEntropyLoss(return_predicted_tokens=True)(z, target)
    assert torch.equal(everything.predicted_tokens, z.argmax(-1))
    with pytest.raises(ValueError, match="LigerCrossEntropyLoss: reduction"):
        LigerCrossEntropyLoss(reduction="average")
