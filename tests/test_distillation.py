"""Losses against a teacher beyond their rows: textbook formulas as a witness, adversarial entries, stored teachers,
vocabularies of different size, the classes.
"""

import pytest
import torch
import torch.nn.functional as F

from liger_kernel import chunked_loss, functional
from liger_kernel.bench.memory import PeakMemory
from liger_kernel.chunked_loss import functional as chunked_functional
from liger_kernel.chunked_loss.fused_linear_distillation import (
    DistillationOptions,
    LigerFusedLinearDistillationBase,
)
from liger_kernel.chunked_loss.jsd_loss import LigerFusedLinearJSDFunction
from liger_kernel.ops import fused_ce_tvd as ce_tvd
from liger_kernel.ops import fused_linear_jsd as linear_jsd
from liger_kernel.ops import fused_linear_kl_div as linear_kl
from liger_kernel.ops.linear_distillation import linear_distillation
from liger_kernel.testing.properties import Maker
from liger_kernel.transformers import (
    LigerFusedCETVDLoss,
    LigerFusedLinearJSD,
    LigerFusedLinearKLDivLoss,
)

# The interpreter computes with numpy, which warns where hardware quietly makes an infinity or a NaN.
pytestmark = [
    pytest.mark.filterwarnings("ignore:(invalid value|divide by zero|overflow):RuntimeWarning"),
    pytest.mark.usefixtures("path"),
]
KINDS = ["kl", "reverse_kl", "jsd", "tvd", "cosine"]
NONE, INF, IGNORE = float("-inf"), float("inf"), -100
N, H, T_H, V = 4, 3, 2, 6


def _batch(device, classes=V, seed=0):
    g = torch.Generator().manual_seed(seed)
    draw = [torch.randn(s, generator=g) for s in ((N, H), (V, H), (N, T_H), (classes, T_H))]
    targets = torch.tensor([1, IGNORE, 5, 0], device=device)
    hidden, weight, t_hidden, t_weight = (2 * t.to(device) for t in draw)
    return hidden.requires_grad_(), weight.requires_grad_(), t_hidden, t_weight, targets


def _textbook(x, y, kind, beta=0.5):
    """Row by row in float64, in probabilities; x, y: logits."""
    if kind == "cosine":
        return beta * (1 - (x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1)))
    return _of_probabilities(x.softmax(-1), y.softmax(-1), kind, beta)


def _of_probabilities(q, p, kind, beta=0.5):
    def kl(a, b):
        return torch.special.xlogy(a, a / b).sum(-1)

    m = beta * p + (1 - beta) * q
    return {
        "kl": lambda: kl(p, q),
        "reverse_kl": lambda: kl(q, p),
        "jsd": lambda: beta * kl(p, m) + (1 - beta) * kl(q, m),
        "tvd": lambda: (p - q).abs().sum(-1) / 2,
    }[kind]()


def _grads(loss, *leaves):
    return torch.autograd.grad(loss, leaves, retain_graph=True)


def _agree(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_textbook_with_every_option(kind, device):
    """Softcap, scales and bias of student and teacher, temperature, hard loss, ignored tokens, float64 as witness."""
    hidden, weight, t_hidden, t_weight, targets = _batch(device)
    bias = torch.linspace(-1, 1, V, device=device).requires_grad_()
    t_bias = torch.linspace(1, -2, V, device=device)
    beta = 0.3 if kind in ("jsd", "cosine") else None
    out = linear_distillation(
        hidden, weight, targets, teacher_hidden=t_hidden, teacher_weight=t_weight, teacher_bias=t_bias, kind=kind,
        beta=beta, weight_soft=0.7, weight_hard=0.4, temperature=1.5, bias=bias, softcap=3.0, pre_scale=0.8,
        post_scale=1.2, teacher_softcap=2.0, teacher_pre_scale=1.3, teacher_post_scale=0.9, memory_budget=64,
    )  # fmt: skip
    leaves = [t.detach().double().requires_grad_() for t in (hidden, weight, bias)]
    h, w, b = leaves
    z = 1.2 * 3.0 * torch.tanh(0.8 * (h @ w.t() + b) / 3.0)
    y = 0.9 * 2.0 * torch.tanh(1.3 * (t_hidden @ t_weight.t() + t_bias).double() / 2.0)
    counted = targets != IGNORE
    soft = _textbook(z / 1.5, y / 1.5, kind, beta or 0.5)[counted].mean()
    hard = F.cross_entropy(z, targets, ignore_index=IGNORE)
    loss = 0.7 * soft + 0.4 * hard
    _agree([out.loss, out.soft, out.hard, out.count], [loss, soft, hard, counted.sum()])
    _agree(_grads(out.loss, hidden, weight, bias), _grads(loss, *leaves))


# Zeros -----------------------------------------------------------------------------------------------------

# biases of student and teacher over hidden states of 0: their logits
LOGITS = {
    "student has a 0": ([0.0, NONE, 1.0], [0.0, 1.0, 2.0]),
    "teacher has a 0": ([0.0, 1.0, 2.0], [0.0, NONE, 1.0]),
    "both have the same 0": ([0.0, NONE, 1.0], [0.5, NONE, 0.0]),
    "disjoint": ([0.0, NONE, NONE], [NONE, 0.0, 1.0]),
    "300 apart": ([0.0, -300.0, 300.0], [300.0, 0.0, -300.0]),
    "far from 0": ([1e4, 1e4 - 300, 1e4 + 1], [-1e4, -1e4 - 1, -1e4 - 300]),
}


def _of_logits(device, x, y, kind, stored=False):
    bias = torch.tensor(x, device=device).requires_grad_()
    hidden, weight = torch.zeros(1, 2, device=device), torch.zeros(len(x), 2, device=device)
    teacher = {
        "teacher_hidden": hidden,
        "teacher_weight": weight,
        "teacher_bias": torch.tensor(y, device=device),
    }
    if stored:
        teacher = {"teacher_log_probs": torch.tensor([y], device=device).log_softmax(-1)}
        if stored == "top":
            teacher["teacher_ids"] = torch.arange(len(x) - 1, device=device)[None]
            teacher["teacher_log_probs"] = teacher["teacher_log_probs"][:, :-1]
    loss = linear_distillation(hidden, weight, bias=bias, kind=kind, **teacher).loss
    return loss.detach(), torch.autograd.grad(loss, bias)[0]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LOGITS)
def test_never_nan(name, kind, device):
    x, y = LOGITS[name]
    for stored in (False, True, "top") if kind != "cosine" else (False,):
        loss, gradient = _of_logits(device, x, y, kind, stored)
        assert not loss.isnan(), stored
        assert gradient.isfinite().all(), stored
        if kind == "cosine" or not ("kl" in kind and NONE in x + y):
            continue
        q, p = (torch.tensor(v).double().softmax(-1) for v in (x, y))
        infinite = ((p > 0) & (q == 0)).any() if kind == "kl" else ((q > 0) & (p == 0)).any()
        assert loss.isinf() == infinite, stored


@pytest.mark.parametrize("kind", ["jsd", "tvd"])
@pytest.mark.parametrize("name", LOGITS)
def test_zeros_have_the_right_value(name, kind, device):
    x, y = LOGITS[name]
    q, p = (torch.tensor([v], device=device).double().softmax(-1) for v in (x, y))
    want = _of_probabilities(q, p, "tvd") if kind == "tvd" else torch.special.entr((p + q) / 2).sum(
        -1) - (torch.special.entr(p).sum(-1) + torch.special.entr(q).sum(-1)) / 2  # fmt: skip
    for stored in (False, True, "top"):
        loss, _ = _of_logits(device, x, y, kind, stored)
        torch.testing.assert_close(loss.double(), want[0], rtol=1e-5, atol=1e-6)


def test_a_gap_of_300_is_exact(device):
    for kind in ("kl", "reverse_kl"):
        loss, gradient = _of_logits(device, [0.0, -300.0], [-300.0, 0.0], kind)
        torch.testing.assert_close(loss.item(), 300.0)
        assert gradient.isfinite().all()


def test_infinite_reverse_kl_has_the_gradient_of_its_finite_terms(device):
    x, y = [0.3, 1.0, -0.5], [0.0, NONE, 1.0]
    loss, gradient = _of_logits(device, x, y, "reverse_kl")
    leaf = torch.tensor(x, device=device).double().requires_grad_()
    log_q, log_p = leaf.log_softmax(-1), torch.tensor(y, device=device).double().log_softmax(-1)
    q, gap = log_q.exp()[[0, 2]], log_q[[0, 2]] - log_p[[0, 2]]
    finite = (q * gap).sum()
    assert loss == INF
    _agree([gradient], _grads(finite, leaf))


def test_nan_is_not_hidden(device):
    for kind in KINDS:
        for x, y in (
            ([0.0, float("nan"), 1.0], [0.0, 1.0, 2.0]),
            ([0.0, 1.0, 2.0], [0.0, float("nan"), 1.0]),
        ):
            assert _of_logits(device, x, y, kind)[0].isnan()  # fmt: skip
    assert _of_logits(device, [0.0, 1.0, float("nan")], [0.0, 1.0, 2.0], "kl", "top")[0].isnan()


# Stored teachers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS[:4])
def test_stored_log_probs_are_the_online_teacher(kind, device):
    hidden, weight, t_hidden, t_weight, targets = _batch(device)
    teacher = {"teacher_hidden": t_hidden, "teacher_weight": t_weight}
    log_p = (t_hidden @ t_weight.t() / 2.0).log_softmax(-1)  # at the temperature of the loss
    ids = torch.stack(
        [torch.randperm(V, generator=torch.Generator().manual_seed(i)) for i in range(N)]
    ).to(device)
    log_p_spoiled = log_p.masked_fill(
        (targets == IGNORE)[:, None], float("nan")
    )  # its rows are not read
    options = {"kind": kind, "temperature": 2.0, "weight_hard": 0.5}
    want = linear_distillation(hidden, weight, targets, **teacher, **options).loss
    full = linear_distillation(
        hidden, weight, targets, teacher_log_probs=log_p_spoiled, **options
    ).loss
    every = linear_distillation(
        hidden, weight, targets, teacher_log_probs=log_p.gather(-1, ids), teacher_ids=ids.int(), **options
    ).loss  # fmt: skip
    for got in (full, every):
        _agree([got, *_grads(got, hidden, weight)], [want, *_grads(want, hidden, weight)])


@pytest.mark.parametrize("kind", KINDS[:4])
def test_top_k_counts_the_rest_as_one_class(kind, device):
    hidden, weight, t_hidden, t_weight, targets = _batch(device)
    p, ids = (0.2 * t_hidden @ t_weight.t()).softmax(-1).topk(2)
    ids[3, 1] = -1  # an unused slot: that class is one of the rest
    targets[0] = ids[0, 1]  # a label among the known classes
    out = linear_distillation(
        hidden, weight, targets, teacher_log_probs=p.log().to(torch.float32), teacher_ids=ids, kind=kind,
        weight_hard=0.5,
    )  # fmt: skip
    leaves = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    z = leaves[0] @ leaves[1].t()
    losses = []
    for i in (targets != IGNORE).nonzero().view(-1).tolist():
        known = ids[i][ids[i] >= 0]
        some_p, some_q = p[i, : len(known)].double(), z[i].softmax(-1)[known]
        rest = [torch.cat([v, 1 - v.sum(-1, keepdim=True)]) for v in (some_q, some_p)]
        losses.append(_of_probabilities(*rest, kind))
    want = torch.stack(losses).mean() + 0.5 * F.cross_entropy(z, targets)
    _agree([out.loss, *_grads(out.loss, hidden, weight)], [want, *_grads(want, *leaves)])


def test_the_mass_of_the_rest_keeps_its_digits(device):
    """The known classes hold all but 1e-12 of the student: 1 - sum would be 0 or rounding."""
    x = torch.tensor([20.0, 19.0, -8.0, -9.0], device=device).requires_grad_()
    hidden, weight = torch.zeros(1, 2, device=device), torch.zeros(4, 2, device=device)
    log_p = torch.tensor([[0.5, 0.25]], device=device).log()
    ids = torch.tensor([[0, 1]], device=device)
    loss = linear_distillation(
        hidden, weight, bias=x, teacher_log_probs=log_p, teacher_ids=ids
    ).loss
    q = x.detach().double().log_softmax(-1)
    rest = q[2:].logsumexp(-1)
    want = (
        0.5 * (-q[0]) + 0.25 * (-q[1]) + 0.25 * (-rest) - (0.5 + 2 * 0.5) * torch.tensor(2.0).log()
    )
    torch.testing.assert_close(loss.item(), want.item(), rtol=1e-6, atol=0)
    (gradient,) = torch.autograd.grad(loss, x)
    share = (q[2:] - rest).exp()
    want = torch.cat([q[:2].exp() - log_p[0].double().exp(), q[2:].exp() - 0.25 * share])
    torch.testing.assert_close(gradient.double(), want, rtol=1e-5, atol=1e-7)


def test_an_id_past_the_vocabulary_is_nan(device):
    hidden, weight, *_ = _batch(device)
    log_p = torch.full((N, 1), -0.5, device=device)
    ids = torch.tensor([0, 1, 2, V], device=device)[:, None]
    loss = linear_distillation(hidden, weight, teacher_log_probs=log_p, teacher_ids=ids).loss
    assert loss.isnan()


# Vocabularies, tokens, counts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_larger_teacher_meets_logits_of_zero(kind, device):
    hidden, weight, t_hidden, t_weight, targets = _batch(device, classes=V + 3)
    out = linear_distillation(
        hidden, weight, targets, teacher_hidden=t_hidden, teacher_weight=t_weight, kind=kind, weight_hard=1.0,
        softcap=5.0,
    )  # fmt: skip
    leaves = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    z = 5.0 * torch.tanh(leaves[0] @ leaves[1].t() / 5.0)
    soft = _textbook(F.pad(z, (0, 3)), (t_hidden @ t_weight.t()).double(), kind)
    want = soft[targets != IGNORE].mean() + F.cross_entropy(z, targets)
    _agree([out.loss, *_grads(out.loss, hidden, weight)], [want, *_grads(want, *leaves)])


def test_ignored_tokens_never_reach_a_product(device):
    hidden, weight, t_hidden, t_weight, targets = _batch(device)
    teacher = {"teacher_weight": t_weight, "kind": "jsd", "weight_hard": 1.0}
    want = linear_distillation(hidden, weight, targets, teacher_hidden=t_hidden, **teacher).loss
    ignored = (targets == IGNORE)[:, None]
    spoiled = hidden.detach().masked_fill(ignored, float("nan")).requires_grad_()
    got = linear_distillation(
        spoiled, weight, targets, teacher_hidden=t_hidden.masked_fill(ignored, float("nan")), **teacher
    ).loss  # fmt: skip
    _agree([got, *_grads(got, spoiled, weight)], [want, *_grads(want, hidden, weight)])


def test_no_valid_token_is_zero(device):
    hidden, weight, t_hidden, t_weight, targets = _batch(device)
    nobody = torch.full_like(targets, IGNORE)
    teacher = {"teacher_hidden": t_hidden, "teacher_weight": t_weight}
    for targets, hint in (
        (nobody, None),
        (nobody, N),
    ):  # a wrong hint sends them through the kernel
        out = linear_distillation(
            hidden, weight, targets, **teacher, weight_hard=1.0, num_valid=hint
        )
        assert out.loss == out.soft == out.hard == out.count == 0
        assert all(g.abs().max() == 0 for g in _grads(out.loss, hidden, weight))


def test_sum_and_count(device):
    hidden, weight, t_hidden, t_weight, targets = _batch(device)
    args = (hidden, weight, t_hidden, t_weight, targets)
    mean, count = linear_jsd.fused_linear_jsd(*args, return_count=True)
    total, _ = linear_jsd.fused_linear_jsd(*args, reduction="sum", return_count=True)
    assert count == 3
    torch.testing.assert_close(total, 3 * mean)
    p = (t_hidden @ t_weight.t()).softmax(-1)
    mean, count = linear_kl.fused_linear_kl_div(
        hidden, weight, p, targets, "mean", return_count=True
    )
    total = linear_kl.fused_linear_kl_div(hidden, weight, p, targets, "sum")
    assert count == 3
    torch.testing.assert_close(total, 3 * V * mean)


PARTS = {
    **{
        kind: lambda h, w, t_h, t_w, y, kind=kind, **o: linear_distillation(
            h, w, y, teacher_hidden=t_h, teacher_weight=t_w, kind=kind, weight_hard=0.3, **o
        )
        for kind in KINDS
    },
    "fused_linear_jsd": lambda *args, **o: linear_jsd.fused_linear_jsd(*args, 0.3, return_count=True, **o),
    "fused_linear_kl_div": lambda h, w, t_h, t_w, y, reduction="batchmean": (
        linear_kl.fused_linear_kl_div(
            h, w, (t_h @ t_w.t()).softmax(-1), y, reduction=reduction, return_count=True
        )
    ),
    "JSD": lambda *args, **o: chunked_loss.LigerFusedLinearJSDLoss(return_count=True, **o)(*args),
    "cosine class": lambda *args, **o: chunked_loss.LigerFusedLinearCosineSimilarityLoss(
        return_count=True, **o
    )(*args),
    "formula": lambda *args, **o: _MSE.apply(
        *args, head=DistillationOptions(return_count=True, **o)
    ),
}  # fmt: skip


@pytest.mark.plain
@pytest.mark.parametrize("name", PARTS)
def test_micro_batches_add_up_to_the_whole(name, device):
    """Sums of parts over the count of all, one part without any token that counts."""
    hidden, weight, *teacher, targets = _batch(device)

    def call(some, **options):
        t_hidden, t_weight = teacher
        found = PARTS[name](
            hidden[some], weight, t_hidden[some], t_weight, targets[some], **options
        )
        return found if isinstance(found, tuple) else (found.loss, found.count)

    whole, count = call(slice(None))
    assert count == 3
    sums, counts = zip(*(call(some, reduction="sum") for some in ([0], [1], [2, 3])), strict=True)
    assert [int(c) for c in counts] == [1, 0, 2]
    total = sum(sums) / sum(counts)
    _agree([total, *_grads(total, hidden, weight)], [whole, *_grads(whole, hidden, weight)])


def test_a_part_of_weight_zero_may_be_infinite(device):
    bias = torch.tensor([0.0, NONE], device=device)
    hidden, weight = torch.zeros(1, 2, device=device), torch.zeros(2, 2, device=device)
    out = linear_distillation(
        hidden, weight, torch.zeros(1, dtype=torch.int64, device=device), bias=bias, weight_soft=0.0, weight_hard=1.0,
        teacher_hidden=hidden, teacher_weight=weight,
    )  # fmt: skip
    assert out.loss == 0
    assert out.soft == INF


# Gradients ------------------------------------------------------------------------------------------------------


def test_two_backwards_frozen_parts_and_a_constant_teacher(device):
    hidden, weight, t_hidden, t_weight, targets = _batch(device)
    t_weight.requires_grad_()
    loss = 0.5 * linear_jsd.fused_linear_jsd(hidden, weight, t_hidden, t_weight, targets)
    first = [g.clone() for g in _grads(loss, hidden, weight)]
    _agree(_grads(loss, hidden, weight), first)
    assert torch.autograd.grad(loss, t_weight, allow_unused=True, retain_graph=True)[0] is None
    frozen = 0.5 * linear_jsd.fused_linear_jsd(hidden, weight.detach(), t_hidden, t_weight, targets)
    _agree(_grads(frozen, hidden), first[:1])
    with torch.no_grad():
        assert not linear_jsd.fused_linear_jsd(hidden, weight, t_hidden, t_weight).requires_grad


def test_fp16_gradients_wait_for_the_loss_scale(device):
    hidden, weight, t_hidden, t_weight, _ = _batch(device)
    low = [t.detach().half().requires_grad_() for t in (hidden, weight)]
    loss = linear_distillation(
        *low, teacher_hidden=t_hidden.half(), teacher_weight=t_weight.half(), weight_soft=1e-7
    ).loss  # fmt: skip
    got = torch.autograd.grad(loss * 1e6, low)
    plain = linear_distillation(
        hidden, weight, teacher_hidden=t_hidden, teacher_weight=t_weight
    ).loss
    for g, want in zip(got, _grads(0.1 * plain, hidden, weight), strict=True):
        assert (g - want).norm() <= 2e-2 * want.norm()


def test_autocast_and_mixed_dtypes(device):
    hidden, weight, t_hidden, t_weight, targets = _batch(device)
    want = linear_jsd.fused_linear_jsd(hidden, weight, t_hidden, t_weight, targets)
    with torch.autocast(device.type, torch.bfloat16):
        got = linear_jsd.fused_linear_jsd(hidden, weight, t_hidden, t_weight, targets)
    mixed = linear_jsd.fused_linear_jsd(hidden, weight, t_hidden.bfloat16(), t_weight, targets)
    assert got.dtype == mixed.dtype == torch.float32
    for loss in (got, mixed):
        torch.testing.assert_close(loss, want, rtol=2e-2, atol=0)
    for a, b in zip(_grads(got, hidden, weight), _grads(want, hidden, weight), strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() <= 3e-2 * b.norm()


def test_both_buffers_count_against_the_budget(path, device):
    if path == "triton" and device.type == "cpu":
        pytest.skip("too long for the interpreter; the plan is the same")
    tokens, classes, budget = 64, 2048, 1 << 17
    hidden, weight = (
        torch.randn(s, device=device).requires_grad_() for s in ((tokens, 8), (classes, 8))
    )
    t_hidden, t_weight = (torch.randn(s, device=device) for s in ((tokens, 8), (classes, 8)))

    def step():
        loss = linear_jsd.fused_linear_jsd(hidden, weight, t_hidden, t_weight, memory_budget=budget)
        return torch.autograd.grad(loss, (hidden, weight))

    step()
    with PeakMemory(device) as meter:
        step()
    own = 4 * (hidden.numel() + weight.numel())
    twin = 10 * budget if path == "torch" else 0  # wide copies of the rows of a chunk
    assert meter.bytes <= own + 2 * budget + twin + (64 << 10)


# Classes and names -------------------------------------------------------------------------------------------


def test_jsd_class(device):
    hidden, weight, t_hidden, t_weight, targets = _batch(device)
    loss, soft, hard = chunked_loss.LigerFusedLinearJSDLoss(
        weight_hard_loss=0.2,
        weight_soft_loss=0.9,
        beta=0.3,
        temperature=2.0,
        return_soft_hard_loss=True,
    )(hidden, weight, t_hidden, t_weight, targets)
    z, y, counted = hidden @ weight.t(), t_hidden @ t_weight.t(), targets != IGNORE
    want = _textbook(z.double() / 2, y.double() / 2, "jsd", 0.3)[counted].mean()
    _agree([soft, hard, loss], [want, F.cross_entropy(z, targets), 0.9 * soft + 0.2 * hard])
    assert loss.requires_grad
    assert not soft.requires_grad
    assert not hard.requires_grad
    got = chunked_functional.liger_fused_linear_jsd(
        hidden, weight, t_hidden, t_weight, targets, None, None, 0.2, 0.9, 0.3, IGNORE, 2.0
    )
    torch.testing.assert_close(got, loss)
    alone = chunked_loss.LigerFusedLinearJSDLoss(0.0, 1.0, return_count=True)
    only, count = alone(hidden, weight, t_hidden, t_weight, targets)
    torch.testing.assert_close(
        only, linear_jsd.fused_linear_jsd(hidden, weight, t_hidden, t_weight, targets)
    )
    assert count == 3
    stored = alone(hidden, weight, None, None, targets, teacher_log_probs=y.log_softmax(-1))[0]
    torch.testing.assert_close(stored, only)


def test_cosine_class(device):
    hidden, weight, t_hidden, t_weight, targets = _batch(device, classes=V + 1)
    loss = chunked_loss.LigerFusedLinearCosineSimilarityLoss(beta=0.8, teacher_softcap=4.0)
    got = loss(hidden, weight, t_hidden, t_weight, targets)
    z, y = hidden @ weight.t(), 4.0 * torch.tanh(t_hidden @ t_weight.t() / 4.0)
    soft = _textbook(F.pad(z, (0, 1)), y, "cosine", 0.8)[targets != IGNORE].mean()
    want = 0.5 * soft + 0.5 * F.cross_entropy(z, targets)
    _agree([got, *_grads(got, hidden, weight)], [want, *_grads(want, hidden, weight)])
    call = chunked_functional.liger_fused_linear_cosine
    got = call(
        hidden, weight, t_hidden, t_weight, targets, None, None, 0.5, 0.5, 0.8, teacher_softcap=4.0
    )
    torch.testing.assert_close(got, want)


class _MSE(LigerFusedLinearDistillationBase):
    @staticmethod
    def distillation_loss_fn(
        student_logits, teacher_logits, target=None, ignore_index=None, beta=0.5
    ):
        return beta * (student_logits - teacher_logits).square().sum()


class _JSD(LigerFusedLinearDistillationBase):
    distillation_loss_fn = staticmethod(LigerFusedLinearJSDFunction.distillation_loss_fn)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_formula_of_ones_own(dtype, device):
    hidden, weight, t_hidden, t_weight, targets = _batch(device)
    bias = torch.linspace(-1, 1, V, device=device).requires_grad_()
    given = [t.detach().to(dtype).requires_grad_() for t in (hidden, weight, bias)]
    teacher = t_hidden.to(dtype), t_weight.to(dtype)
    loss, soft, hard = _MSE.apply(
        given[0], given[1], *teacher, targets, given[2], temperature=2.0, weight_hard_loss=0.3, weight_soft_loss=0.1,
        return_soft_hard_loss=True,
    )  # fmt: skip
    z, counted = hidden @ weight.t() + bias, targets != IGNORE
    want_soft = 0.5 * ((z - t_hidden @ t_weight.t()) / 2).square().sum(-1)[counted].mean()
    want_hard = F.cross_entropy(z, targets)
    want = 0.1 * want_soft + 0.3 * want_hard
    room = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    found = [loss, soft, hard, *_grads(loss, *given)]
    for a, b in zip(
        found, [want, want_soft, want_hard, *_grads(want, hidden, weight, bias)], strict=True
    ):
        torch.testing.assert_close(a.float(), b, **room)


def test_the_formula_and_the_kernel_agree(device):
    args = _batch(device, classes=V + 2)
    want = LigerFusedLinearJSDFunction.apply(*args, None, None, 0.4, 0.6, 0.3, softcap=3.0)
    head = chunked_loss.fused_linear_distillation.DistillationOptions(softcap=3.0, memory_budget=64)
    got = _JSD.apply(*args, weight_hard_loss=0.4, weight_soft_loss=0.6, beta=0.3, head=head)
    _agree([got, *_grads(got, *args[:2])], [want, *_grads(want, *args[:2])])


def test_classes_refuse_what_they_cannot_do(device):
    jsd = chunked_loss.LigerFusedLinearJSDLoss
    for options in ({"beta": 2.0}, {"temperature": 0.0}, {"chunk_size": 0}, {"reduction": "none"}):
        with pytest.raises(ValueError, match=next(iter(options))):
            jsd(**options)
    with pytest.raises(TypeError, match="softcapp"):
        jsd(softcapp=1.0)
    with pytest.raises(NotImplementedError, match="distillation_loss_fn"):
        LigerFusedLinearDistillationBase.apply(*_batch(device))
    with pytest.raises(ValueError, match="reduction"):
        LigerFusedLinearKLDivLoss("none")
    with pytest.raises(ValueError, match="jsd_beta"):
        LigerFusedLinearJSD(jsd_beta=-1)


def test_layers_and_functions_under_other_names(device):
    hidden, weight, t_hidden, t_weight, targets = _batch(device)
    args = (hidden, weight, t_hidden, t_weight)
    want = linear_jsd.fused_linear_jsd(*args, targets, 0.3)
    torch.testing.assert_close(LigerFusedLinearJSD(0.3)(*args, targets), want)
    torch.testing.assert_close(functional.fused_linear_jsd(*args, targets, 0.3), want)
    loss, dx, dw = linear_jsd.fused_linear_jsd_forward(*args, targets, 0.3, IGNORE, True, 1.0)
    half = torch.tensor(0.5, device=device)
    _agree(
        [loss, *linear_jsd.fused_linear_jsd_backward(half, dx, dw)],
        [want, *_grads(0.5 * want, hidden, weight)],
    )
    p = (t_hidden @ t_weight.t()).softmax(-1)
    layer = LigerFusedLinearKLDivLoss("sum", temperature=2.0, softcap=4.0)
    want = linear_kl.fused_linear_kl_div(
        hidden, weight, p, targets, "sum", temperature=2.0, softcap=4.0
    )
    torch.testing.assert_close(layer(hidden, weight, p, targets), want)
    assert "temperature=2.0" in repr(layer)


# CE + TVD -----------------------------------------------------------------------------------------------------


def test_ce_tvd(device):
    make = torch.Generator().manual_seed(0)
    x, y = (2 * torch.randn(3, 7, generator=make).to(device) for _ in range(2))
    x[0, 2] = y[1, 3] = NONE
    target = torch.tensor([0, IGNORE, 6], device=device)
    leaf, wide = x.clone().requires_grad_(), x.double().requires_grad_()
    ce, tvd = LigerFusedCETVDLoss()(leaf, y, target)
    counted = target != IGNORE
    want = (
        F.cross_entropy(wide, target, reduction="none"),
        _textbook(wide, y.double(), "tvd") * counted,
    )
    up = torch.tensor([0.5, 1.0, 2.0], device=device), torch.tensor([3.0, 1.0, -1.0], device=device)
    _agree([ce, tvd], want)
    gradient = torch.autograd.grad((ce, tvd), leaf, up)[0]
    _agree([gradient], torch.autograd.grad(want, wide, up))
    assert torch.equal(leaf, x)
    *found, x_lse, y_lse, sigma = ce_tvd.fused_ce_tvd_forward(x, y, target, IGNORE)
    _agree(found, want)
    _agree(
        [ce_tvd.fused_ce_tvd_backward(*up, x, y, target, x_lse, y_lse, sigma, IGNORE)], [gradient]
    )


@pytest.mark.parametrize("name", ["distillation", "jsd", "kl", "top", "formula"])
def test_logits_kept_in_fp32(name, path, device):
    """Nearer to float64 than logits rounded to bf16, in both heads, stored teachers and formulas without a kernel."""
    make = Maker(torch.bfloat16, device, 5)
    hidden, weight, target = make(24, 32), make(50, 32), make.ids(50, 24)
    t_hidden, t_weight = make(24, 16), make(50, 16)
    hidden = (weight[target] * 2 + hidden).to(
        torch.bfloat16
    )  # peaked: rounding large logits costs most
    log_p = make(24, 50, scale=3.0).float().log_softmax(-1)

    def loss(h, w, t_h, t_w, **options):
        if name == "jsd":
            return linear_jsd.fused_linear_jsd(h, w, t_h, t_w, target, 0.3, **options)
        if name == "kl":
            return linear_kl.fused_linear_kl_div(h, w, log_p.exp(), target, **options)
        if name == "top":
            values, ids = log_p.topk(5, dim=-1)
            given = {"teacher_log_probs": values, "teacher_ids": ids}
            return linear_distillation(h, w, target, **given, **options).loss
        if name == "formula":
            return _Square.apply(h, w, t_h, t_w, target, head=DistillationOptions(**options))
        given = {"teacher_hidden": t_h, "teacher_weight": t_w}
        return linear_distillation(h, w, target, **given, weight_hard=0.5, **options).loss

    def gradients(*tensors, **options):
        leaves = [t.detach().requires_grad_() for t in tensors[:2]]
        found = loss(*leaves, *tensors[2:], **options)
        return found.detach().double(), *torch.autograd.grad(found, leaves)

    tensors = (hidden, weight, t_hidden, t_weight)
    exact = gradients(*(t.double() for t in tensors), impl="torch")
    budget = {"memory_budget": 12 * 50 * 8, "accum_dtype": torch.float32}
    errors = [
        [(g.double() - e).norm() / e.norm() for g, e in zip(found, exact, strict=True)]
        for found in (
            gradients(*tensors, **budget),
            gradients(*tensors, **budget, logits_dtype=torch.float32),
        )
    ]
    assert errors[1][0] <= 1e-5
    assert errors[1][0] <= errors[0][0] / 3, errors
    # the logits' gradient and the result are rounded in any case
    assert all(b <= 2 * 2.0**-8 + a / 3 for a, b in zip(*errors, strict=True)), errors


class _Square(LigerFusedLinearDistillationBase):
    @staticmethod
    def distillation_loss_fn(
        student_logits, teacher_logits, target=None, ignore_index=None, beta=0.5
    ):
        return (student_logits - teacher_logits).square().mean(-1).sum()
