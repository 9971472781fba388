"""KL, JSD and TVD beyond their rows: torch as a witness, adversarial entries, labels, two
backwards, trained teachers.
"""

import math

import pytest
import torch
import torch.nn.functional as F

from liger_kernel import _env, functional
from liger_kernel.ops import LigerJSDFunction, LigerKLDivLossFunction, LigerTVDLossFunction
from liger_kernel.ops.jsd import jsd, jsd_backward, jsd_forward
from liger_kernel.ops.kl_div import kl_div
from liger_kernel.ops.tvd import tvd
from liger_kernel.testing.tolerance import assert_close_to_truth
from liger_kernel.transformers import LigerJSD, LigerKLDIVLoss, LigerTVDLoss
from liger_kernel.transformers import functional as liger_functional

# The interpreter computes with numpy, which warns where hardware quietly makes an infinity or a NaN.
pytestmark = [
    pytest.mark.filterwarnings("ignore:(invalid value|divide by zero|overflow):RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning"),  # torch's own
    pytest.mark.usefixtures("path"),
]
BETAS = [0.0, 0.1, 0.5, 0.9, 1.0]
NONE, INF = float("-inf"), float("inf")


def _log_probs(device, rows, width, seed=0, scale=3.0):
    make = torch.Generator().manual_seed(seed)
    drawn = (torch.randn(rows, width, generator=make) * scale for _ in range(2))
    return tuple(z.log_softmax(-1).to(device) for z in drawn)


def _run(function, x, y, upstream=1.0, **options):
    leaf = x.detach().requires_grad_()
    loss = function(leaf, y, **options)
    (gradient,) = torch.autograd.grad(loss, leaf, torch.full_like(loss, upstream))
    return {"loss": loss.detach(), "gradient": gradient}


def _jsd_in_probabilities(x, y, beta=0.5):
    """What textbooks write; right in float64 as long as nothing underflows."""
    q, p = x.exp(), y.exp()
    m = beta * p + (1 - beta) * q
    return (beta * p * (p / m).log() + (1 - beta) * q * (q / m).log()).sum() / x.shape[0]


@pytest.mark.parametrize("width", [1, 7, 1000, 4097, 9001])
@pytest.mark.parametrize("reduction", ["batchmean", "mean", "sum", "none"])
@pytest.mark.parametrize("log_target", [False, True])
def test_kl_agrees_with_torch(device, width, reduction, log_target):
    x, y = _log_probs(device, 3, width)
    y = y if log_target else y.exp()
    options = {"reduction": reduction, "log_target": log_target}
    ours = _run(kl_div, x, y, 0.7, **options)
    assert_close_to_truth(
        ours,
        _run(F.kl_div, x, y, 0.7, **options),
        _run(F.kl_div, x.double(), y.double(), 0.7, **options),
    )
    assert ours["loss"].dtype == torch.float32


@pytest.mark.parametrize("width", [2, 7, 1000, 9001])
@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_jsd_agrees_with_the_textbook(device, width, beta):
    x, y = _log_probs(device, 3, width)
    assert_close_to_truth(
        _run(jsd, x, y, 0.7, beta=beta),
        _run(_jsd_in_probabilities, x, y, 0.7, beta=beta),
        _run(_jsd_in_probabilities, x.double(), y.double(), 0.7, beta=beta),
    )


def test_jsd_ends_are_the_two_kl(device):
    x, y = _log_probs(device, 3, 50)
    kl = kl_div(x, y, log_target=True)
    torch.testing.assert_close(jsd(x, y, beta=0.0), kl)
    torch.testing.assert_close(jsd(y, x, beta=1.0), kl)


# Zeros ------------------------------------------------------------------------------------------------

# student's, teacher's log-probability, and what the entry adds: (beta, P, Q) -> value
ENTRIES = {
    "both 0": (NONE, NONE, lambda beta, p, q: 0.0),
    "student 0": (NONE, -0.5, lambda beta, p, q: -beta * math.log(beta) * p if beta else INF),
    "teacher 0": (
        -0.5,
        NONE,
        lambda beta, p, q: -(1 - beta) * math.log1p(-beta) * q if beta < 1 else INF,
    ),
    "student 300 below": (
        -300.0,
        -0.0,
        lambda beta, p, q: -beta * math.log(beta) if beta else 300.0,
    ),
    "both far down": (-1e4, -1e4 - 300, lambda beta, p, q: 0.0),
}


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_jsd_is_never_nan(device, beta, entry, dtype):
    student, teacher, value = ENTRIES[entry]
    x, y = (torch.full((2, 3), v, device=device, dtype=dtype) for v in (student, teacher))
    got = _run(jsd, x, y, beta=beta)
    expected = 3 * value(beta, math.exp(teacher), math.exp(student))
    torch.testing.assert_close(got["loss"].item(), expected, rtol=1e-2, atol=1e-6)
    assert not got["gradient"].isnan().any()
    if student == NONE and beta > 0.0:
        assert (got["gradient"] == 0).all()


@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [(NONE, 0.0, 0.0), (-1.0, 0.0, 0.0), (NONE, 0.5, INF), (-300.0, 1.0, 300.0)],
)
@pytest.mark.parametrize("log_target", [False, True])
def test_kl_is_never_nan(device, x, y, expected, log_target):
    pred, true = torch.full((1, 1), x, device=device), torch.full((1, 1), y, device=device)
    got = _run(kl_div, pred, true.log() if log_target else true, log_target=log_target, eps=0.0)
    torch.testing.assert_close(got["loss"].item(), expected)
    torch.testing.assert_close(got["gradient"].item(), -y)


def test_nan_is_not_hidden(device):
    x, y = _log_probs(device, 2, 5)
    for bad in (
        (x.masked_fill(x == x[1, 2], math.nan), y),
        (x, y.masked_fill(y == y[1, 2], math.nan)),
    ):
        assert kl_div(*bad, log_target=True).isnan()
        assert tvd(*bad).isnan()
        for beta in BETAS:
            assert jsd(*bad, beta=beta).isnan()


@pytest.mark.parametrize("beta", [1e-9, 0.3, 1 - 1e-9])
def test_jsd_keeps_its_digits(device, beta):
    """Where student and teacher nearly agree, and where one weight is almost everything."""
    y = _log_probs(device, 2, 40)[1]
    x = y + 1e-4 * torch.linspace(-1, 1, 40, device=device)
    q, gap = x.double().exp(), y.double() - x.double()
    truth = -(1 - beta) * q * torch.log1p(beta * torch.expm1(gap)) / 2
    got = _run(jsd, x, y, beta=beta)["gradient"].double()
    assert ((got - truth).abs() <= 1e-6 * q).all()
    far = torch.tensor([[0.0, NONE]], device=device), torch.tensor([[NONE, 0.0]], device=device)
    entropy = -beta * math.log(beta) - (1 - beta) * math.log1p(-beta)
    torch.testing.assert_close(jsd(*far, beta=beta).item(), entropy)


# Layouts ----------------------------------------------------------------------------------------------

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
TOLERANCES = {F32: 1e-5, BF16: 1e-2}
# more elements from row to row than columns, and type, of student and teacher
LAYOUTS = {
    "fp32": (0, F32, 0, F32),
    "bf16": (0, BF16, 0, BF16),
    "two types": (0, BF16, 0, F32),
    "two types, shifted by 16 elements": (0, F32, 16, F16),
    "student padded": (7, F32, 0, F32),
    "both padded": (3, BF16, 11, BF16),
}
# how many of student and teacher are probabilities, and the loss
GIVEN = {
    "kl_div": (1, lambda x, y, labels: kl_div(x, y, "none")),
    "jsd": (0, lambda x, y, labels: jsd(x, y, labels, 0.3)),
    "tvd": (2, lambda x, y, labels: tvd(x, y, labels, "none")),
}


def _spaced(values, more, dtype):
    """The values in rows that lie `more` elements further apart than they are long, with NaN between."""
    rows, width = values.shape
    space = values.new_full((rows, width + more), math.nan, dtype=dtype)
    space[:, :width] = values
    return space[:, :width]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", GIVEN)
@pytest.mark.parametrize("width", [1, 15, 17, 33, 4099])
def test_any_width_and_stride(device, name, width, layout):
    """Columns before the first multiple of 16 bytes, and behind the last; no other is read."""
    more_x, type_x, more_y, type_y = LAYOUTS[layout]
    probabilities, loss = GIVEN[name]
    x, y = _log_probs(device, 5, width)
    x, y = x.exp() if probabilities > 1 else x, y.exp() if probabilities else y
    x, y = _spaced(x, more_x, type_x), _spaced(y, more_y, type_y)
    labels = torch.tensor([3, -100, 1, 5, 0], device=device)
    ours, again, eager, truth = (
        _run(loss, a, b, labels=labels)
        for a, b in [(x, y), (x, y), (x.float(), y.float()), (x.double(), y.double())]
    )
    assert all(torch.equal(ours[key], again[key]) for key in ours)
    eager["gradient"] = eager["gradient"].to(type_x)
    assert_close_to_truth(ours, eager, truth)


@pytest.mark.parametrize("upstream", ["dense", "padded", "of one number", "transposed", "of a row"])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("width", [1, 17, 33, 4099])
def test_upstream_of_any_stride(device, width, dtype, upstream):
    x, y = (t.to(dtype) for t in _log_probs(device, 5, width))
    drawn = _log_probs(device, 5, width, seed=1)[0]
    given = {
        "dense": drawn,
        "padded": _spaced(drawn, 2, F32),
        "of one number": drawn[:1, :1].expand(5, width),
        "transposed": drawn.t().contiguous().t(),
        "of a row": drawn[:1].expand(5, width),
    }[upstream]

    def gradient(a, b):
        leaf = a.detach().requires_grad_()
        loss = kl_div(leaf, b, "none", log_target=True)
        return torch.autograd.grad(loss, leaf, given.to(loss.dtype))[0]

    ours, truth = gradient(x, y), gradient(x.double(), y.double())
    assert torch.equal(ours, gradient(x, y))
    torch.testing.assert_close(ours, truth.to(dtype), atol=1e-6, rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_vocabulary_of_odd_size(device, dtype):
    x, y = (t.to(dtype) for t in _log_probs(device, 3, 50257))
    ours, again, truth = (
        _run(kl_div, a, b, log_target=True) for a, b in [(x, y), (x, y), (x.double(), y.double())]
    )
    for key, right in truth.items():
        assert torch.equal(ours[key], again[key])
        torch.testing.assert_close(ours[key].double(), right, atol=1e-6, rtol=TOLERANCES[dtype])


# Labels -----------------------------------------------------------------------------------------------

LABELLED = [
    lambda x, y, labels: jsd(x, y, labels),
    lambda x, y, labels: tvd(x, y, labels, "sum"),
    lambda x, y, labels: tvd(x, y, labels, "mean"),
    lambda x, y, labels: tvd(x, y, labels),
]


@pytest.mark.parametrize("loss", LABELLED)
@pytest.mark.parametrize("integers", [torch.int64, torch.int32])
def test_ignored_rows_are_as_if_absent(device, loss, integers):
    x, y = _log_probs(device, 5, 9)
    labels = torch.tensor([3, -100, -1, 5, -100], device=device, dtype=integers)
    kept = labels != -100
    alone = _run(lambda a, b: loss(a, b, None), x[kept], y[kept], 0.7)
    x[~kept], y[~kept] = math.nan, math.inf
    got = _run(lambda a, b: loss(a, b, labels), x, y, 0.7)
    torch.testing.assert_close(got["loss"], alone["loss"])
    torch.testing.assert_close(got["gradient"][kept], alone["gradient"])
    assert (got["gradient"][~kept] == 0).all()
    nothing = _run(lambda a, b: loss(a, b, torch.full_like(labels, -100)), x, y)
    assert nothing["loss"] == 0
    assert (nothing["gradient"] == 0).all()


# Autograd ---------------------------------------------------------------------------------------------

LOSSES = {
    "kl_div": lambda x, y: kl_div(x, y.exp()),
    "kl_div none": lambda x, y: kl_div(x, y, "none", True).sum(),
    "jsd": lambda x, y: jsd(x, y),
    "reverse": lambda x, y: jsd(x, y, beta=1.0),
    "tvd": lambda x, y: tvd(x, y),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_two_backwards(device, name, dtype):
    x, y = (t.to(dtype) for t in _log_probs(device, 3, 70))
    leaf = x.requires_grad_()
    loss = LOSSES[name](leaf, y)
    first, second, scaled = (
        torch.autograd.grad(loss, leaf, torch.full_like(loss, v), retain_graph=True)[0]
        for v in (1.0, 1.0, 4.0)
    )
    assert first.dtype == dtype
    torch.testing.assert_close(first, second)  # the first was made in forward, by another kernel
    torch.testing.assert_close(scaled, 4 * first, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_second_derivative(device, name, path):
    x, y = _log_probs(device, 2, 5)
    leaf = x.requires_grad_()
    (gradient,) = torch.autograd.grad(LOSSES[name](leaf, y), leaf, create_graph=True)
    if path == "triton":
        with pytest.raises(RuntimeError, match="no second derivative"):
            gradient.sum().backward()
    elif name in ("jsd", "reverse"):
        assert torch.autograd.grad(gradient.sum(), leaf)[0].isfinite().all()


@pytest.mark.parametrize("name", LOSSES)
def test_trained_teacher_gets_its_gradient(device, name):
    x, y = _log_probs(device, 2, 5)
    wide = [t.double().requires_grad_() for t in (x, y)]
    truth = torch.autograd.grad(LOSSES[name](*wide), wide)
    leaves = [t.requires_grad_() for t in (x, y)]
    found = torch.autograd.grad(LOSSES[name](*leaves), leaves)
    for ours, right in zip(found, truth, strict=True):
        torch.testing.assert_close(ours, right.float())


def test_kernels_asked_for_refuse_a_trained_teacher(device):
    if not _env.triton_runs_on(device.type):
        pytest.skip("no kernels here")
    x, y = (t.requires_grad_() for t in _log_probs(device, 2, 5))
    with pytest.raises(RuntimeError, match="target requires grad"):
        jsd(x, y, impl="triton")
    with torch.no_grad():
        jsd(x, y, impl="triton")


# Names ------------------------------------------------------------------------------------------------


def test_layers_and_functions(device):
    x, y = _log_probs(device, 4, 6)
    p, labels = y.exp(), torch.tensor([1, -100, 2, 3], device=device)
    mean, batchmean = kl_div(x, p, "mean"), kl_div(x, p, "batchmean")
    assert torch.equal(LigerKLDIVLoss()(x, p), mean)
    layer = LigerKLDIVLoss(1e-10, reduction="batchmean", log_target=True)
    assert torch.equal(layer(x, y), kl_div(x, y, log_target=True))
    assert torch.equal(liger_functional.liger_kl_div(x, p), mean)
    assert torch.equal(functional.kl_div(x, p), batchmean)
    assert torch.equal(LigerKLDivLossFunction.apply(x, p), batchmean)
    assert issubclass(LigerKLDIVLoss, torch.nn.KLDivLoss)

    divergence = jsd(x, y, labels, 0.3)
    assert torch.equal(LigerJSD(beta=0.3)(x, y, labels), divergence)
    assert torch.equal(liger_functional.liger_jsd(x, y, labels, 0.3), divergence)
    assert torch.equal(functional.jsd(x, y, labels, 0.3), divergence)
    assert torch.equal(LigerJSDFunction.apply(x, y, labels, 0.3), divergence)
    with _env.using_impl("torch"):
        plain = jsd(x, y, labels, 0.3)
    assert torch.equal(LigerJSDFunction.apply(x, y, labels, 0.3, -100, "torch", None), plain)
    loss, dx = jsd_forward(x, y, labels, 0.3, -100, True)
    assert torch.equal(loss, divergence)
    gradient = _run(jsd, x, y, 2.0, shift_labels=labels, beta=0.3)["gradient"]
    torch.testing.assert_close(jsd_backward(dx, torch.tensor(2.0, device=device)), gradient)
    assert torch.equal(jsd_forward(x, y, labels, 0.3, -100, False)[0], jsd(x, y, beta=0.3))
    assert jsd(x.bfloat16(), y.bfloat16()).dtype == torch.bfloat16

    q = x.exp()
    assert torch.equal(LigerTVDLoss()(q, p, labels), tvd(q, p, labels, "batchmean"))
    assert torch.equal(liger_functional.liger_tvd(q, p, labels), tvd(q, p, labels, "mean"))
    assert torch.equal(LigerTVDLossFunction.apply(q, p), tvd(q, p))
    assert "beta=0.3" in repr(LigerJSD(0.3))
    assert "'mean'" in repr(LigerTVDLoss("mean"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LigerJSD(beta=2.0), "beta must lie in"),
        (lambda: LigerTVDLoss("average"), "reduction must be one of"),
        (lambda: LigerKLDIVLoss(reduction="average"), "reduction must be one of"),
        (lambda: LigerKLDIVLoss(eps=-1.0), "eps must not be negative"),
    ],
)
def test_layers_refuse_bad_options(make, message):
    with pytest.raises(ValueError, match=message):
        make()
