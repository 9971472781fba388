"""Losses of one's own on the head: one pass equals two passes equals eager, for any budget and any mask."""

import pytest
import torch
import torch.nn.functional as F

from liger_kernel import _env
from liger_kernel.ops import _logp_kernels, _logp_torch
from liger_kernel.ops import linear_logprob as lp
from liger_kernel.ops.fused_linear_cross_entropy import fused_linear_cross_entropy
from liger_kernel.ops.head import exponentials, objective
from liger_kernel.ops.head.objective import fused_linear_objective
from liger_kernel.ops.head.params import HeadParams
from liger_kernel.ops.head.rows import RowMath
from liger_kernel.ops.head.shard import VocabShard

SEQUENCES, LENGTH, WIDTH, VOCAB = 5, 24, 8, 37


def _batch(device, mask="random"):
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(SEQUENCES, LENGTH, WIDTH, generator=g).to(device).requires_grad_()
    weight = torch.randn(VOCAB, WIDTH, generator=g).to(device).requires_grad_()
    bias = torch.randn(VOCAB, generator=g).to(device).requires_grad_()
    targets = torch.randint(VOCAB, (SEQUENCES, LENGTH), generator=g)
    hide = torch.rand(SEQUENCES, LENGTH, generator=g) < 0.4
    if mask == "first":
        hide[:, 0] = True
    elif mask == "one sequence":
        hide[2] = True
    elif mask == "all":
        hide[:] = True
    elif mask == "only last":
        hide[:] = True
        hide[:, -1] = False
    elif mask == "none":
        hide[:] = False
    return hidden, weight, bias, targets.masked_fill(hide, -100).to(device)


def _per_sequence(logp, entropy):
    """A loss that needs whole sequences: -logsigmoid of the sum, and the square of the mean entropy."""
    return -F.logsigmoid(logp.sum(1) + 3).sum() + entropy.mean(1).square().sum()


def _objective(tokens):
    seq = tokens.index // LENGTH
    zeros = tokens.logp.new_zeros(SEQUENCES)
    lo, hi = tokens.groups
    logp = zeros.index_add(0, seq, tokens.logp)[lo:hi]
    entropy = zeros.index_add(0, seq, tokens.entropy)[lo:hi] / LENGTH
    return -F.logsigmoid(logp + 3).sum() + entropy.square().sum(), logp.detach()


@pytest.mark.parametrize("mask", ["random", "first", "one sequence", "all", "only last", "none"])
@pytest.mark.parametrize("budget", [None, 8000, 400])
@pytest.mark.parametrize("softcap", [None, 4.0])
def test_groups(mask, budget, softcap, path, device):
    hidden, weight, bias, targets = _batch(device, mask)
    group = torch.arange(SEQUENCES, device=device)[:, None].expand(SEQUENCES, LENGTH)
    transform = {"softcap": softcap, "temperature": 0.8, "pre_scale": 0.5}
    loss, extras = fused_linear_objective(
        hidden, weight, targets, _objective, bias=bias, group=group, n_groups=SEQUENCES, entropy=True,
        memory_budget=budget, **transform,
    )  # fmt: skip
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight, bias)]
    truth = lp.reference(wide[0], wide[1], targets, bias=wide[2], return_entropy=True, **transform)
    want = _per_sequence(truth.logp, truth.entropy)
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.cat(extras).double(), truth.logp.sum(1), rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad(loss, (hidden, weight, bias))
    wants = torch.autograd.grad(want, wide)
    for g, w in zip(grads, wants, strict=True):
        torch.testing.assert_close(g.double(), w, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("mask", ["random", "one sequence", "all"])
def test_known_sizes_of_groups_ask_nothing_of_the_device(mask, path, device, monkeypatch):
    hidden, weight, bias, targets = _batch(device, mask)
    group = torch.arange(SEQUENCES, device=device)[:, None].expand(SEQUENCES, LENGTH)
    options = {
        "bias": bias,
        "group": group,
        "n_groups": SEQUENCES,
        "entropy": True,
        "memory_budget": 8000,
    }
    want, _ = fused_linear_objective(hidden, weight, targets, _objective, **options)
    options["group_sizes"] = (targets != -100).sum(1).tolist()
    with monkeypatch.context() as patch:
        for name in ("tolist", "nonzero", "__int__"):
            patch.setattr(torch.Tensor, name, None)
        loss, _ = fused_linear_objective(hidden, weight, targets, _objective, **options)
    grads, wants = (torch.autograd.grad(x, (hidden, weight, bias)) for x in (loss, want))
    for g, w in zip((loss, *grads), (want, *wants), strict=True):
        assert torch.equal(g, w)


def test_a_group_that_does_not_fit_takes_two_passes(path, device, monkeypatch):
    hidden, weight, bias, targets = _batch(device, "none")
    calls = []
    monkeypatch.setattr(objective, "_one_pass", lambda *a: calls.append(a))
    group = torch.zeros_like(targets)
    loss, extras = fused_linear_objective(
        hidden, weight, targets, lambda t: (t.logp.sum().square(), t.groups), bias=bias, group=group, n_groups=1,
        memory_budget=400,
    )  # fmt: skip
    truth = lp.reference(hidden, weight, targets, bias=bias).logp.sum().square()
    torch.testing.assert_close(loss, truth)
    assert extras == [(0, 1)]
    assert not calls


def test_tokens_on_their_own_need_no_groups(path, device):
    hidden, weight, _, targets = _batch(device)
    advantage = torch.randn(targets.shape, device=device)

    def policy(tokens):
        return -(advantage.reshape(-1)[tokens.index] * tokens.logp).sum(), None

    loss, extras = fused_linear_objective(hidden, weight, targets, policy, memory_budget=4000)
    want = -(advantage * lp.reference(hidden, weight, targets).logp).sum()
    torch.testing.assert_close(loss, want)
    assert len(extras) > 1
    got = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    again = torch.autograd.grad(loss, (hidden, weight))
    for g, a, w in zip(got, again, torch.autograd.grad(want, (hidden, weight)), strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(g, a)


def test_no_grad_makes_no_gradient(path, device, monkeypatch):
    from liger_kernel.ops.head import engine

    hidden, weight, _, targets = _batch(device)
    monkeypatch.setattr(engine.Sums, "add", None)
    with torch.no_grad():
        loss, _ = fused_linear_objective(hidden, weight, targets, lambda t: (t.logp.sum(), None))
    torch.testing.assert_close(loss, lp.reference(hidden, weight, targets).logp.sum())


def test_fp16_waits_for_the_loss_scale(path, device):
    """p / N underflows in fp16 unless the gradient is rounded after the upstream loss scale has come."""
    hidden, weight, _, targets = _batch(device)
    low = [t.detach().half().requires_grad_() for t in (hidden, weight)]
    loss, _ = fused_linear_objective(*low, targets, lambda t: (1e-6 * t.logp.sum(), None))
    grads = torch.autograd.grad(loss * 2.0**14, low)
    want = torch.autograd.grad(
        1e-6 * 2.0**14 * lp.reference(hidden, weight, targets).logp.sum(), (hidden, weight)
    )
    for g, w in zip(grads, want, strict=True):
        assert (g.float() - w).norm() <= 2e-2 * w.norm()


@pytest.mark.parametrize("shift", [-1e4, 0.0, 1e4])
def test_offsets_and_gaps_cost_no_digits(shift, path, device):
    """Logits a constant away from zero, 300-wide gaps and -inf entries: entropy and gradients stay finite and right."""
    math = RowMath(VOCAB, -100, path == "triton")
    z = torch.randn(4, VOCAB, device=device) * 3
    z[0, 5] += 300
    z[1, : VOCAB // 2] = float("-inf")
    truth = (z.double()).log_softmax(-1)
    z = z + shift
    truth = z.double().log_softmax(-1)
    y = torch.full((4,), VOCAB - 1, device=device)
    stats = math.stats(z, y, entropy=True)
    p = truth.exp()
    entropy = -torch.where(p > 0, p * truth, 0.0).sum(-1)
    torch.testing.assert_close(stats.logp.double(), truth[:, -1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(stats.entropy.double(), entropy, rtol=1e-5, atol=1e-5)
    one = torch.ones(4, device=device)
    math.gradient(z, z, y, stats, one, one, one)
    want = -p - torch.where(p > 0, p * (truth + entropy[:, None]), 0.0)
    want[:, -1] += 1
    torch.testing.assert_close(z.double(), want, rtol=1e-4, atol=1e-5)


def test_shapes_that_do_not_fit_are_refused(device):
    hidden, weight, _, targets = _batch(device)
    with pytest.raises(ValueError, match="one label for each row"):
        fused_linear_objective(hidden, weight, targets[:2], lambda t: (t.logp.sum(), None))
    with pytest.raises(ValueError, match="group must have the shape"):
        fused_linear_objective(
            hidden, weight, targets, lambda t: (t.logp.sum(), None), group=targets[0]
        )


def test_a_slice_of_the_vocabulary(device):
    """The kernels' own side of a sharded head: targets elsewhere, nowhere and here, coefficients c and d."""
    if not _env.triton_runs_on(device.type):
        pytest.skip("kernels need an accelerator or TRITON_INTERPRET=1")
    z = torch.randn(5, VOCAB, device=device)
    y = torch.tensor([0, VOCAB, -1, -100, VOCAB - 1], device=device)
    a, c, b, d = torch.randn(4, 5, device=device)
    found = []
    for kernels in (True, False):
        math = RowMath(VOCAB, -100, kernels, softcap=2.0, shard=VocabShard("none", 0, 2 * VOCAB))
        rows, write = (
            (_logp_kernels.logp_rows, _logp_kernels.logp_gradient)
            if kernels
            else (_logp_torch.logp_rows_torch, _logp_torch.logp_gradient_torch)
        )
        options = math._options()
        stats = rows(z, y, **options, want_entropy=True, want_argmax=True, want_gaps=True)
        out = torch.empty_like(z)
        write(out, z, y, stats, a, c, b, d, **options)
        found.append((*stats, out))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, equal_nan=True)
    logp, out = found[0][0], found[0][-1]
    assert logp[1] == -torch.inf
    assert logp[2].isnan()
    assert out[2].isnan().all()
    assert (out[3] == 0).all()
    assert out[[0, 1, 4]].isfinite().all()


def _peaked(device, dtype):
    """Hidden states and a head whose logits are as peaked, and as far from zero, as a trained model's."""
    torch.manual_seed(0)
    weight = torch.randn(VOCAB, 32, device=device)
    targets = torch.randint(VOCAB, (24,), device=device)
    hidden = weight[targets] + 0.5 * torch.randn(24, 32, device=device)
    targets[5] = -100
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


@pytest.mark.parametrize("softcap", [None, 50.0])
@pytest.mark.parametrize("logits_dtype", [torch.float32, "offset"])
def test_better_kept_logits(logits_dtype, softcap, path, device):
    """Nearer to float64 than logits rounded to bf16, log-probabilities, cross entropy and gradients."""
    hidden, weight, targets = _peaked(device, torch.bfloat16)
    bias = torch.randn(VOCAB, device=device, dtype=torch.bfloat16).requires_grad_()
    options = {"softcap": softcap, "memory_budget": 12 * VOCAB * 6, "accum_dtype": torch.float32}
    leaves = (hidden, weight, bias)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    truth = lp.reference(*exact[:2], targets, bias=exact[2], softcap=softcap).logp
    want = torch.autograd.grad(-truth.sum(), exact)

    def errors(kept):
        logp = lp.linear_logprob(
            hidden, weight, targets, bias=bias, logits_dtype=kept, **options
        ).logp
        loss = fused_linear_cross_entropy(
            hidden, weight, targets, bias, reduction="sum", logits_dtype=kept, **options
        ).loss
        yield (logp - truth).abs().max()
        yield (loss + truth.sum()).abs()
        for scalar in (-logp.sum(), loss):
            grads = torch.autograd.grad(scalar, leaves, retain_graph=True)
            yield from (
                (g.double() - w).norm() / w.norm() for g, w in zip(grads, want, strict=True)
            )

    rounded, better = (torch.stack(list(errors(kept))) for kept in (None, logits_dtype))
    if logits_dtype == torch.float32:
        assert better[0] <= 1e-5
    if exponentials.apply_to(hidden, HeadParams(weight), path == "triton"):
        assert (rounded[:2] <= 1e-5).all(), rounded  # logits are never rounded there
        return
    assert (better[:2] <= rounded[:2] / 3).all(), (better, rounded)
    # the logits' gradient and the result are rounded in any case
    assert (better[2:] <= 2 * 2.0**-8 + rounded[2:] / 3).all(), (better, rounded)


def test_unknown_logits_dtype(device):
    hidden, weight, _, targets = _batch(device)
    with pytest.raises(ValueError, match="logits_dtype must be None"):
        lp.linear_logprob(hidden, weight, targets, logits_dtype=torch.float16)
