"""One pass is two passes is eager: any number of tokens, classes and chunks, any mask, logits far from ordinary.

Numbers are multiples of 1/8, so that the products are exact: what is left is the arithmetic of the losses.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from liger_kernel.ops.fused_linear_cross_entropy import fused_linear_cross_entropy
from liger_kernel.ops.head.objective import fused_linear_objective
from liger_kernel.ops.linear_distillation import linear_distillation
from liger_kernel.ops.linear_logprob import linear_logprob

IGNORED, H = -100, 3
MASKS = {
    "none": lambda y, g: y,
    "first": lambda y, g: torch.cat([torch.full_like(y[:1], IGNORED), y[1:]]),
    "all": lambda y, g: torch.full_like(y, IGNORED),
    "all but the last": lambda y, g: torch.cat([torch.full_like(y[:-1], IGNORED), y[-1:]]),
    "random": lambda y, g: y.masked_fill(torch.rand(y.shape, generator=g) < 0.5, IGNORED),
}
BIASES = {
    "ordinary": lambda v: torch.zeros(v),
    "very negative": lambda v: torch.full((v,), -5000.0),
    "far up": lambda v: torch.full((v,), 1e4),
    "far down": lambda v: torch.full((v,), -1e4),
    "one peak": lambda v: torch.nn.functional.pad(torch.full((1,), 300.0), (0, v - 1)),
    "a valley": lambda v: torch.nn.functional.pad(torch.full((1,), -1e4), (v - 1, 0)),
}
PROBLEMS = st.fixed_dictionaries(
    {
        "tokens": st.sampled_from([1, 2, 7, 8, 9, 31]),
        "classes": st.sampled_from([1, 2, 33, 127, 129]),
        "budget": st.sampled_from([1, 3000, 20000, None]),
        "mask": st.sampled_from(list(MASKS)),
        "bias": st.sampled_from(list(BIASES)),
        "teacher": st.sampled_from(list(BIASES)),
        "kind": st.sampled_from(["kl", "reverse_kl", "jsd", "tvd"]),
        "seed": st.integers(0, 99),
    }
)


def _eighths(g, *shape):
    return torch.randint(-16, 17, shape, generator=g) / 8.0


def _heads(p, device):
    """Hidden states, a student's head and its bias, a teacher's, labels, a weight for each token."""
    g = torch.Generator().manual_seed(p["seed"])
    n, v = p["tokens"], p["classes"]
    hidden, *heads = (_eighths(g, *shape) for shape in ((n, H), (v, H), (v, H)))
    student, teacher = (
        (head, BIASES[p[which]](v)) for head, which in zip(heads, ("bias", "teacher"), strict=True)
    )
    y = MASKS[p["mask"]](torch.randint(v, (n,), generator=g), g)
    everything = (hidden, *student, *teacher, y, torch.randn(n, generator=g))
    return tuple(t.to(device) for t in everything)


def _divergence(x, y, kind):
    """Row by row in float64, written in probabilities; differences of logs where those would be 0."""
    log_q, log_p = x.log_softmax(-1), y.log_softmax(-1)
    q, p = log_q.exp(), log_p.exp()
    if kind == "tvd":
        return (p - q).abs().sum(-1) / 2
    if kind == "jsd":
        log_m = torch.logaddexp(log_q, log_p) - torch.tensor(2.0).log()
        return ((p * (log_p - log_m)).sum(-1) + (q * (log_q - log_m)).sum(-1)) / 2
    return (p * (log_p - log_q)).sum(-1) if kind == "kl" else (q * (log_q - log_p)).sum(-1)


def _agree(found, wanted, leaves, exact, what, terms=0.0):
    """Values and gradients, relative to the largest there is, or to that of `terms` which cancel."""
    pairs = [(found, wanted)]
    got = torch.autograd.grad(found, leaves, retain_graph=True)
    pairs += zip(got, torch.autograd.grad(wanted, exact, retain_graph=True), strict=True)
    for a, b in pairs:
        assert a.isfinite().all(), what
        room = 2e-5 * b.abs().max() + 1e-6 * terms + 2e-6
        assert (a - b).abs().max() <= room, (what, (a - b).abs().max() / room)


def _check(p, device):
    *student, teacher, t_bias, y, weights = _heads(p, device)
    leaves = hidden, head, bias = [t.requires_grad_() for t in student]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    budget = {"memory_budget": p["budget"]}

    def objective(tokens):
        return (tokens.logp * weights[tokens.index]).sum(), None

    one, _ = fused_linear_objective(hidden, head, y, objective, bias=bias, **budget)
    two = (linear_logprob(hidden, head, y, bias=bias, **budget).logp * weights).sum()
    plain = fused_linear_cross_entropy(hidden, head, y, bias, reduction="sum", **budget).loss
    soft = linear_distillation(
        hidden, head, y, bias=bias, teacher_hidden=hidden, teacher_weight=teacher, teacher_bias=t_bias,
        kind=p["kind"], reduction="sum", **budget,
    ).loss  # fmt: skip
    z, counted = exact[0] @ exact[1].t() + exact[2], y != IGNORED
    log_p = z.log_softmax(-1).gather(-1, y.clamp(min=0)[:, None])[:, 0].where(counted, 0.0)
    wanted = (log_p * weights).sum()
    _agree(one, wanted, leaves, exact, "one pass")
    _agree(two, wanted, leaves, exact, "two passes")
    _agree(plain, -log_p.sum(), leaves, exact, "cross entropy")
    theirs = (exact[0] @ teacher.double().t() + t_bias).detach()
    each = _divergence(z, theirs, p["kind"]).where(counted, 0.0)
    terms = (z.log_softmax(-1) - theirs.log_softmax(-1)).abs().max() if "kl" in p["kind"] else 0.0
    _agree(soft, each.sum(), leaves, exact, p["kind"], terms)


quietly = settings(
    deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip


@pytest.mark.plain
@settings(quietly, max_examples=150)
@given(problem=PROBLEMS)
def test_any_problem(problem, device):
    _check(problem, device)


@pytest.mark.filterwarnings("ignore:(invalid value|divide by zero|overflow):RuntimeWarning")
@settings(quietly, max_examples=8)
@given(problem=PROBLEMS)
def test_any_problem_in_kernels(problem, path, device):
    _check(problem, device)
