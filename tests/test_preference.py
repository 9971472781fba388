"""Preference losses against their formulas, written again here in float64 from logits."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from liger_kernel import chunked_loss
from liger_kernel.chunked_loss import functional
from liger_kernel.chunked_loss.fused_linear_preference import LigerFusedLinearPreferenceBase
from liger_kernel.chunked_loss.fused_linear_unpaired_preference import (
    LigerFusedLinearUnpairedPreferenceBase,
)
from liger_kernel.chunked_loss.preference import HeadOptions
from liger_kernel.ops.head import objective as engine
from liger_kernel.testing.tolerance import assert_close_to_truth

N, T, H, V, REF_H = 3, 7, 9, 37, 5
IGNORE = -100
# one chunk; one pair a chunk; a pair that does not fit (row: 8 bytes x (V + 2H), at least 8 rows)
BUDGETS = {"one": None, "pairs": 16 * 8 * (V + 2 * H), "split": 1}
PLAIN = {"softcap": None, "pre_scale": 1.0, "post_scale": 1.0}
CAPPED = {"softcap": 1.5, "pre_scale": 0.7, "post_scale": 1.3}
SCALED = {"softcap": None, "pre_scale": 0.7, "post_scale": 1.3}

MASKS = {
    "none": lambda t: t,
    "random": lambda t: t.masked_fill(torch.rand(t.shape, generator=_rng(5)) < 0.4, IGNORE),
    "first": lambda t: _set(t, (slice(None), 0)),
    "only the last token": lambda t: _set(t, (slice(None), slice(None, -1))),
    "one pair": lambda t: _set(t, ([1, 1 + N],)),
    "chosen of one pair": lambda t: _set(t, (1,)),
    "everything": lambda t: torch.full_like(t, IGNORE),
}


def _rng(seed):
    return torch.Generator().manual_seed(seed)


def _set(target, where):
    target = target.clone()
    target[where] = IGNORE
    return target


@dataclass
class Data:
    """A batch, its head and its reference; float64 unless asked otherwise."""

    mask: str = "random"
    dtype: torch.dtype = torch.float64
    head: dict = field(default_factory=lambda: PLAIN)
    ref_head: dict = field(default_factory=lambda: PLAIN)
    seed: int = 0

    def __post_init__(self):
        rng = _rng(self.seed)

        def draw(*shape):
            return torch.randn(shape, generator=rng, dtype=torch.float64).to(self.dtype)

        self.policy = draw(2 * N, T, H), draw(V, H) / 2, draw(V)
        self.reference = draw(2 * N, T, REF_H), draw(V, REF_H) / 2, draw(V)
        target = torch.randint(V, (2 * N, T), generator=rng)
        self.target = MASKS[self.mask](target)
        self.nll_target = target
        self.labels = torch.tensor([True, False, False, True, True, False])
        self.hidden, self.weight, self.bias = self.policy
        for t in self.policy:
            t.requires_grad_()

    def grads(self, loss):
        return torch.autograd.grad(loss, self.policy)


def logits(hidden, weight, bias, softcap, pre_scale, post_scale):
    z = pre_scale * (hidden @ weight.T + bias)
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    return post_scale * (z if softcap is None else softcap * torch.tanh(z / softcap))


def sequence_logps(z, target, average):
    valid = target != IGNORE
    each = z.log_softmax(-1).gather(-1, target.clamp(min=0)[..., None])[..., 0] * valid
    return each.sum(-1) / (valid.sum(-1).clamp(min=1) if average else 1)


def logsig(x):
    return -torch.log1p(torch.exp(-x))


def smoothed(d, s):
    return -(1 - s) * logsig(d) - s * logsig(-d)


def odds(mean_logp):
    p = mean_logp.clamp(max=-torch.finfo(mean_logp.dtype).eps).exp()
    return (p / (1 - p)).log()


def dpo_formula(rw, rl, beta, loss_type, s=0.0, tau=0.05):
    d, sig = beta * (rw - rl), torch.sigmoid
    return {
        "sigmoid": lambda: smoothed(d, s),
        "hinge": lambda: (1 - d).clamp(min=0),
        "ipo": lambda: (rw - rl - 1 / (2 * beta)) ** 2,
        "exo_pair": lambda: (
            sig(d) * (logsig(d) - torch.tensor(1 - s).log()) + sig(-d) * (logsig(-d) - torch.tensor(s).log())
        ),
        "nca_pair": lambda: -logsig(beta * rw) - 0.5 * logsig(-beta * rw) - 0.5 * logsig(-beta * rl),
        "robust": lambda: (-(1 - s) * logsig(d) + s * logsig(-d)) / (1 - 2 * s),
        "bco_pair": lambda: -logsig(beta * rw) - logsig(-beta * rl),
        "sppo_hard": lambda: (rw - 1 / (2 * beta)) ** 2 + (rl + 1 / (2 * beta)) ** 2,
        "apo_zero": lambda: 1 - sig(beta * rw) + sig(beta * rl),
        "apo_down": lambda: sig(beta * rw) + 1 - sig(d),
        "discopop": lambda: -logsig(d) * (1 - sig(d / tau)) + torch.exp(-d) * sig(d / tau),
    }[loss_type]()  # fmt: skip


@dataclass
class Loss:
    """One setting of one loss: how it is called, and what it should give."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    reference: bool = False
    nll_target: bool = False

    def __str__(self):
        told = [f"{k}={v}" for k, v in self.options.items()]
        return "-".join([self.name, *told, *(["reference"] if self.reference else [])])

    def call(self, data, **more):
        more |= (
            data.head
            if self.name == "KTO" or not self.reference
            else {**data.head, "ref_head": data.ref_head}
        )
        if self.name == "KTO":
            more["ref_head"] = data.ref_head
        options = dict(self.options)
        kl = options.pop("kl", None)
        if self.name in ("DPO", "KTO"):
            options["use_ref_model"] = self.reference
        loss = getattr(chunked_loss, f"LigerFusedLinear{self.name}Loss")(**options, **more)
        h, w, b = data.policy
        reference = data.reference if self.reference else (None, None, None)
        if self.name == "KTO":
            return loss(h, w, data.target, b, data.labels, *reference, kl)
        if self.name == "DPO":
            return loss(w, h, data.target, b, *reference)
        extra = {"nll_target": data.nll_target} if self.nll_target else {}
        return loss(w, h, data.target, b, **extra)

    def expected(self, data):
        return self.kto(data) if self.name == "KTO" else self.paired(data)

    def lengths(self):
        return self.options.get("average_log_prob", False) or self.options.get("loss_type") == "ipo" or (
            self.name in ("ORPO", "SimPO")
        )  # fmt: skip

    def paired(self, data):
        o = {
            "beta": 0.1,
            "alpha": 1.0,
            "label_smoothing": 0.0,
            "compute_nll_loss": self.name != "DPO",
            **self.options,
        }
        z, beta, s = logits(*data.policy, **data.head), o["beta"], o["label_smoothing"]
        logps = sequence_logps(z, data.target, self.lengths())
        ratios = logps
        if self.reference:
            theirs = sequence_logps(
                logits(*data.reference, **data.ref_head), data.target, self.lengths()
            )
            ratios = logps - theirs
        (lw, ll), (rw, rl) = logps.split(N), ratios.split(N)
        aux = []
        if self.name == "CPO":
            each = smoothed(beta * (lw - ll), s)
        elif self.name == "SimPO":
            each = smoothed(beta * (lw - ll) - o.get("gamma", 0.5), s)
        elif self.name == "ORPO":
            ratio = odds(lw) - odds(ll)
            each, aux = -beta * logsig(ratio), [logsig(ratio).mean(), ratio.mean()]
        else:
            each = dpo_formula(
                rw, rl, beta, o.get("loss_type", "sigmoid"), s, o.get("discopop_tau", 0.05)
            )
        labels = (data.nll_target if self.nll_target else data.target)[:N]
        valid = data.target != IGNORE
        nll = F.cross_entropy(
            z[:N].flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum"
        )
        nll = (
            nll / (labels != IGNORE).sum().clamp(min=1)
            if o["compute_nll_loss"]
            else torch.zeros(())
        )
        halves = zip(z.split(N), valid.split(N), strict=True)
        means = [x[v].sum() / (v.sum().clamp(min=1) * V) for x, v in halves]
        loss = o["alpha"] * nll + each.mean() * valid.any()
        return loss, [lw, ll, *means, nll, beta * rw, beta * rl, *aux]

    def kto(self, data):
        z, beta, up = logits(*data.policy, **data.head), self.options.get("beta", 0.1), data.labels
        logps = sequence_logps(z, data.target, self.lengths())
        ratios = logps
        if self.reference:
            ratios = logps - sequence_logps(
                logits(*data.reference, **data.ref_head), data.target, self.lengths()
            )
        kl = self.options.get("kl", 0.0)
        sign = torch.where(up, 1.0, -1.0)
        valid = data.target != IGNORE
        loss = (1 - torch.sigmoid(beta * (ratios - kl) * sign)).mean() * valid.any()
        per_sequence = (z.sum(-1) * valid).sum(-1)
        sums = [x[side].sum() for x in (logps, per_sequence, beta * ratios) for side in (up, ~up)]
        return loss, sums


LOSSES = [
    Loss("CPO"),
    Loss("CPO", {"beta": 0.3, "alpha": 0.5, "label_smoothing": 0.2}),
    Loss("CPO", {"average_log_prob": True, "compute_nll_loss": False}),
    Loss("SimPO", {"beta": 2.0, "gamma": 1.1}),
    Loss("SimPO", {"compute_nll_loss": False, "label_smoothing": 0.1, "alpha": 3.0}),
    Loss("ORPO"),
    Loss("ORPO", {"beta": 0.7, "compute_nll_loss": False}),
    Loss("ORPO", {"beta": 0.7}, nll_target=True),
    Loss("DPO", {"compute_nll_loss": True, "alpha": 0.3}),
    Loss("DPO", {"label_smoothing": 0.2}, reference=True),
    Loss("DPO", {"average_log_prob": True, "beta": 0.5}, reference=True),
    Loss("DPO", {"loss_type": "hinge"}, reference=True),
    Loss("DPO", {"loss_type": "ipo"}, reference=True),
    Loss("DPO", {"loss_type": "ipo", "beta": 0.4}),
    Loss("DPO", {"loss_type": "exo_pair", "label_smoothing": 0.1}, reference=True),
    Loss("DPO", {"loss_type": "nca_pair"}, reference=True),
    Loss("DPO", {"loss_type": "robust", "label_smoothing": 0.2}, reference=True),
    Loss("DPO", {"loss_type": "bco_pair"}, reference=True),
    Loss("DPO", {"loss_type": "sppo_hard"}, reference=True),
    Loss("DPO", {"loss_type": "apo_zero"}, reference=True),
    Loss("DPO", {"loss_type": "apo_down"}, reference=True),
    Loss("DPO", {"loss_type": "discopop", "beta": 0.02, "discopop_tau": 0.5}, reference=True),
    Loss("KTO"),
    Loss("KTO", {"beta": 0.3, "kl": torch.tensor(0.7)}, reference=True),
    Loss("KTO", {"beta": 2.0, "average_log_prob": True, "kl": 0.2}, reference=True),
]  # fmt: skip


def check(loss, data, budget=None):
    (got, metrics), (want, expected) = loss.call(data, memory_budget=budget), loss.expected(data)
    torch.testing.assert_close(got, want, check_dtype=False)
    assert isinstance(metrics, tuple)
    assert len(metrics) == len(expected)
    for k, (m, e) in enumerate(zip(metrics, expected, strict=True)):
        assert not m.requires_grad
        torch.testing.assert_close(
            m, e.detach(), check_dtype=False, msg=lambda s, k=k: f"metric {k}: {s}"
        )
    for g, e in zip(data.grads(3 * got), data.grads(3 * want), strict=True):
        torch.testing.assert_close(g, e)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_formula(loss, budget):
    check(loss, Data(), BUDGETS[budget])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_masks(loss, mask):
    check(loss, Data(mask), BUDGETS["pairs"])


@pytest.mark.parametrize("head", [CAPPED, SCALED], ids=["capped", "scaled"])
@pytest.mark.parametrize("loss", [x for x in LOSSES if len(x.options) > 1 or x.reference], ids=str)
def test_transforms_of_policy_and_reference(loss, head):
    check(loss, Data(head=head, ref_head=PLAIN), BUDGETS["pairs"])
    if loss.reference:
        check(loss, Data(head=PLAIN, ref_head=head), BUDGETS["split"])


def test_reference_head_follows_the_policy_by_default():
    data = Data(head=CAPPED, ref_head=CAPPED)
    loss = chunked_loss.LigerFusedLinearDPOLoss(**CAPPED)
    got, _ = loss(data.weight, data.hidden, data.target, data.bias, *data.reference)
    torch.testing.assert_close(got, Loss("DPO", reference=True).expected(data)[0])


def test_no_valid_token_gives_zero():
    for loss in LOSSES:
        data = Data("everything")
        if not loss.nll_target:
            got, metrics = loss.call(data)
            assert got.item() == 0
            assert not any(g.any() for g in data.grads(got))
            assert all(m.isfinite().all() for m in metrics)


# Chunks -----------------------------------------------------------------------------------------------


class Margin(LigerFusedLinearPreferenceBase):
    """A loss of a user's own: one hook."""

    calls: list[int] = []  # noqa: RUF012

    @staticmethod
    def preference_loss_fn(chosen_logps, rejected_logps, full_target, beta=0.1, power=1):
        Margin.calls.append(chosen_logps.shape[0])
        return (-beta * (chosen_logps - rejected_logps) ** power).sum() / (
            full_target.shape[0] // 2
        )


@pytest.mark.parametrize(
    ("budget", "calls", "passes"), [("one", [3], 1), ("pairs", [1] * 3, 1), ("split", [3], 2)]
)
def test_budgets_cut_as_meant(monkeypatch, budget, calls, passes):
    data, two = Data("none"), []
    whole = engine._two_passes
    monkeypatch.setattr(engine, "_two_passes", lambda *a: two.append(1) or whole(*a))
    Margin.calls.clear()
    head = HeadOptions(memory_budget=BUDGETS[budget])
    loss, metrics = Margin.apply(*data.policy[:2], data.target, head=head, power=3, beta=0.2)
    assert Margin.calls == calls
    assert len(two) == passes - 1
    logps = sequence_logps(data.hidden @ data.weight.T, data.target, True)
    want = -(0.2 * (logps[:N] - logps[N:]) ** 3).mean() - (
        (data.hidden @ data.weight.T)[:N]
        .log_softmax(-1)
        .gather(-1, data.target[:N, :, None])
        .mean()
    )
    torch.testing.assert_close(loss, want)
    assert len(metrics) == 5


def test_subclass_in_the_style_of_autograd_functions():
    class Signed(LigerFusedLinearPreferenceBase):
        @staticmethod
        def preference_loss_fn(chosen_logps, rejected_logps, full_target, ref_chosen_logps=None,
                               ref_rejected_logps=None, beta=0.1):  # fmt: skip
            d = chosen_logps - ref_chosen_logps - rejected_logps + ref_rejected_logps
            return -beta * d.sum() / (full_target.shape[0] // 2), d, d.sum()

        @classmethod
        def forward(cls, ctx, _input, weight, target, bias, ref_input, ref_weight, ref_bias):
            return super().forward(
                cls=cls, ctx=ctx, _input=_input, weight=weight, target=target, bias=bias, use_ref_model=True,
                ref_input=ref_input, ref_weight=ref_weight, ref_bias=ref_bias, compute_nll_loss=False,
                average_log_prob=False, head=HeadOptions(memory_budget=BUDGETS["pairs"]),
            )  # fmt: skip

    class Raw(LigerFusedLinearUnpairedPreferenceBase):
        @staticmethod
        def preference_loss_fn(log_prob_chunk, preference_labels_chunk, full_target, strength=1.0):
            return -strength * log_prob_chunk[preference_labels_chunk].sum() / full_target.shape[0]

    data = Data()
    loss, (*_, d, total) = Signed.apply(
        data.hidden, data.weight, data.target, data.bias, *data.reference
    )
    _, expected = Loss("DPO", {"beta": 1.0}, reference=True).expected(data)
    want = expected[5] - expected[6]
    torch.testing.assert_close(d, want.detach())
    torch.testing.assert_close(total, want.sum().detach())
    torch.testing.assert_close(loss, -0.1 * want.mean())
    loss, metrics = Raw.apply(
        data.hidden, data.weight, data.target, data.labels, data.bias, strength=2.0
    )
    torch.testing.assert_close(loss.detach(), -2 * metrics[0] / (2 * N))
    assert len(metrics) == 4
    for base in (LigerFusedLinearPreferenceBase, LigerFusedLinearUnpairedPreferenceBase):
        with pytest.raises(NotImplementedError, match="must define preference_loss_fn"):
            base.preference_loss_fn()


# Conventions ------------------------------------------------------------------------------------------


def test_positional_orders_of_the_functions():
    """As the contract fixes them: they differ from class to class."""
    data, (h, w, b) = Data(), Data().policy
    t, reference = data.target, data.reference
    same = torch.testing.assert_close
    for name, function, args in [
        ("CPO", functional.liger_fused_linear_cpo, (IGNORE, 0.3, 0.5, 0.2, True, False, True, 4)),
        (
            "SimPO",
            functional.liger_fused_linear_simpo,
            (IGNORE, 0.3, 0.5, 0.2, True, False, 0.9, 4),
        ),
        (
            "ORPO",
            functional.liger_fused_linear_orpo,
            (IGNORE, 0.3, True, data.nll_target, False, 4),
        ),
    ]:
        options = {
            "beta": 0.3,
            "alpha": 0.5,
            "label_smoothing": 0.2,
            "average_log_prob": True,
            "gamma": 0.9,
        }
        loss = Loss(name, options if name != "ORPO" else {"beta": 0.3}, nll_target=name == "ORPO")
        same(function(h, w, t, b, *args)[0], loss.expected(data)[0])
    got = functional.liger_fused_linear_dpo(
        h, w, t, b, *reference, IGNORE, 0.3, True, False, True, True, 4, "robust", 0.2, 0.05, 0.5
    )
    options = {
        "beta": 0.3,
        "alpha": 0.5,
        "label_smoothing": 0.2,
        "average_log_prob": True,
        "compute_nll_loss": True,
    }
    same(got[0], Loss("DPO", {**options, "loss_type": "robust"}, reference=True).expected(data)[0])
    got = functional.liger_fused_linear_kto(
        h, w, t, data.labels, b, *reference, torch.tensor(0.4), IGNORE, 0.3, False, True, True, 4
    )
    want = Loss("KTO", {"beta": 0.3, "kl": 0.4, "average_log_prob": True}, reference=True)
    same(got[0], want.expected(data)[0])
    # defaults that differ from the classes': no NLL in SimPO, a reference in KTO
    simpo = functional.liger_fused_linear_simpo(h, w, t, b)[0]
    same(simpo, Loss("SimPO", {"compute_nll_loss": False}).expected(data)[0])
    with pytest.raises(ValueError, match="ref_input and ref_weight"):
        functional.liger_fused_linear_kto(h, w, t, data.labels, b)


def test_as_trl_calls_them():
    data, ref = Data(), Data().reference
    dpo = chunked_loss.LigerFusedLinearDPOLoss(beta=0.1, loss_type="sigmoid")
    _, metrics = dpo(data.weight, data.hidden, data.target, data.bias, *ref)
    assert [m.shape for m in metrics] == [(N,), (N,), (), (), (), (N,), (N,)]
    assert metrics[4].item() == 0
    kto = chunked_loss.LigerFusedLinearKTOLoss(beta=0.1, use_ref_model=True, ignore_index=IGNORE)
    _, metrics = kto(
        _input=data.hidden, lin_weight=data.weight, target=data.target, bias=data.bias,
        preference_labels=data.labels, ref_input=ref[0], ref_weight=ref[1], ref_bias=ref[2], kl=torch.tensor([0.5]),
    )  # fmt: skip
    assert len(metrics) == 6
    assert all(m.nansum().shape == () for m in metrics)


def test_another_ignore_index_and_frozen_parts():
    data, loss = Data(), Loss("CPO", {"beta": 0.3})
    want = loss.expected(data)[0]
    moved = torch.where(data.target == IGNORE, V - 1, data.target.clamp(max=V - 2))
    kept = torch.where(moved == V - 1, IGNORE, moved)
    data.target = kept
    want = loss.expected(data)[0]
    frozen = chunked_loss.LigerFusedLinearCPOLoss(V - 1, beta=0.3)
    got, _ = frozen(data.weight.detach(), data.hidden, moved, data.bias)
    torch.testing.assert_close(got, want)
    (grad,) = torch.autograd.grad(got, data.hidden)
    torch.testing.assert_close(grad, data.grads(want)[0])
    with torch.no_grad():
        assert not frozen(data.weight, data.hidden, moved)[0].requires_grad


def test_padding_may_hold_anything():
    """NaN in the hidden states of ignored tokens reaches neither loss nor metrics."""
    data, clean = Data("only the last token"), Data("only the last token")
    with torch.no_grad():
        data.hidden[:, :-1] = float("nan")
    for head in (PLAIN, CAPPED):
        loss = chunked_loss.LigerFusedLinearDPOLoss(use_ref_model=False, **head)
        got, metrics = loss(data.weight, data.hidden, data.target, data.bias)
        want, expected = loss(clean.weight, clean.hidden, clean.target, clean.bias)
        torch.testing.assert_close(got, want)
        for m, e in zip(metrics, expected, strict=True):
            torch.testing.assert_close(m, e)


def test_extreme_margins_stay_finite():
    """Log-ratios of thousands: no formula may overflow."""
    data = Data("none")
    with torch.no_grad():
        data.weight *= 1e4
    for loss in LOSSES:
        value, metrics = loss.call(data)
        assert value.isfinite(), str(loss)
        assert all(g.isfinite().all() for g in data.grads(value)), str(loss)
        assert all(m.isfinite().all() for m in metrics), str(loss)


@pytest.mark.parametrize(
    "loss",
    [
        Loss("DPO", {"compute_nll_loss": True}, reference=True), Loss("ORPO", nll_target=True), Loss("KTO"),
        Loss("CPO"), Loss("SimPO"),
    ],
    ids=str,
)  # fmt: skip
def test_micro_batches_add_up(loss):
    """Shares of the whole batch's pairs and tokens, given back with the counts to make them from."""
    whole = Data(mask="first")
    wanted, metrics = loss.call(whole, return_count=True)
    items, tokens = metrics[-1]
    unpaired = loss.name == "KTO"
    nll_target = whole.nll_target if loss.nll_target else whole.target
    counted = 0 if unpaired else int((nll_target[:N] != IGNORE).sum())
    assert (items, tokens) == (2 * N if unpaired else N, counted)
    total, grads = 0.0, []
    for some in ([0], [1, 2]):
        part, rows = Data(mask="first"), [*some, *(i + N for i in some)]
        h, w, b = part.policy
        part.policy = (h[rows], w, b)
        part.reference = (part.reference[0][rows], *part.reference[1:])
        part.target, part.nll_target, part.labels = (
            t[rows] for t in (part.target, part.nll_target, part.labels)
        )
        found, _ = loss.call(part, num_items_in_batch=items, num_tokens_in_batch=tokens)
        total = total + found.detach()
        grads.append(torch.autograd.grad(found, (h, w, b)))
    torch.testing.assert_close(total, wanted.detach())
    for parts, grad in zip(zip(*grads, strict=True), whole.grads(wanted), strict=True):
        torch.testing.assert_close(sum(parts), grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("loss", [LOSSES[1], LOSSES[5], LOSSES[9]], ids=str)
def test_precision(loss, dtype):
    """In the dtypes of training, on whichever path runs: no worse than twice eager's error.

    Judged are vectors, all that the loss is made of; one scalar's own rounding error is luck.
    """
    found = [{}, {}, {}]
    for seed in range(3):
        data, wide = Data(dtype=dtype, seed=seed), Data(dtype=dtype, seed=seed)
        wide.policy = tuple(t.detach().double().requires_grad_() for t in data.policy)
        wide.reference = tuple(t.double() for t in data.reference)
        results = loss.call(data, memory_budget=BUDGETS["pairs"])
        assert {t.dtype for t in (results[0], *results[1])} == {torch.float32}
        judged = (results, data), (loss.expected(data), data), (loss.expected(wide), wide)
        for rows, ((value, metrics), of) in zip(found, judged, strict=True):
            dh, dw, db = of.grads(value)
            vectors = {
                "logps": metrics[:2],
                "rewards": metrics[5:7],
                "dh": [dh],
                "dw": [dw],
                "db": [db],
            }
            for name, tensors in vectors.items():
                rows.setdefault(name, []).extend(t.detach() for t in tensors)
    assert_close_to_truth(*({k: torch.stack(v) for k, v in rows.items()} for rows in found))


def test_autocast_leaves_losses_and_metrics_alone():
    """Weights of fp32, hidden states of bf16, as a trainer brings them: metrics are not rounded to bf16."""
    data, loss = Data(dtype=torch.float32), chunked_loss.LigerFusedLinearCPOLoss()
    with torch.no_grad():
        data.hidden.copy_(data.hidden.bfloat16())
    args = data.weight, data.hidden, data.target, data.bias
    want = loss(*args)[1]
    with torch.autocast("cpu", torch.bfloat16):
        got = loss(*args)[1]
    torch.testing.assert_close(got[2:4], want[2:4])


# What is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("DPO", {"loss_type": "dpo"}, "loss_type must be one of 'sigmoid'"),
        ("DPO", {"loss_type": "robust", "label_smoothing": 0.5}, r"in \[0, 0.5\); got 0.5"),
        ("DPO", {"loss_type": "exo_pair"}, r"in \(0, 1\); got 0.0"),
        ("DPO", {"loss_type": "hinge", "label_smoothing": 0.1}, "no meaning for loss_type='hinge'"),
        ("DPO", {"label_smoothing": 1.5}, r"must lie in \[0, 1\]; got 1.5"),
        ("DPO", {"beta": 0.0}, "beta must be positive"),
        ("DPO", {"loss_type": "discopop", "discopop_tau": 0.0}, "discopop_tau must be positive"),
        (
            "DPO",
            {"ref_head": {"cap": 3.0}},
            "ref_head takes softcap, pre_scale, post_scale; got cap",
        ),
        ("CPO", {"label_smoothing": -0.1}, r"must lie in \[0, 1\]"),
        ("SimPO", {"label_smoothing": 2}, r"must lie in \[0, 1\]"),
        ("ORPO", {"chunk_size": 0}, "chunk_size must be a positive integer; got 0"),
        ("KTO", {"chunk_size": 1.5}, "chunk_size must be a positive integer; got 1.5"),
    ],
)
def test_wrong_options(name, options, message):
    with pytest.raises(ValueError, match=message):
        getattr(chunked_loss, f"LigerFusedLinear{name}Loss")(**options)


def test_unknown_option():
    with pytest.raises(TypeError, match="soft_cap"):
        chunked_loss.LigerFusedLinearCPOLoss(soft_cap=3.0)


def test_wrong_calls():
    data = Data()
    h, w, t, b = data.hidden, data.weight, data.target, data.bias
    dpo, kto = chunked_loss.LigerFusedLinearDPOLoss(), chunked_loss.LigerFusedLinearKTOLoss()
    cpo, orpo = chunked_loss.LigerFusedLinearCPOLoss(), chunked_loss.LigerFusedLinearORPOLoss()
    for message, call in [
        ("needs ref_weight; pass", lambda: dpo(w, h, t, b, data.reference[0])),
        ("as many rejected ones; got 5", lambda: cpo(w, h[:5], t[:5])),
        ("got 0 sequences", lambda: cpo(w, h[:0], t[:0])),
        (r"\[B, T, H\] and target \[B, T\]; got \[6, 7, 9\] and \[6, 6\]", lambda: cpo(w, h, t[:, 1:])),
        ("nll_target must be", lambda: orpo(w, h, t, b, t[:, 1:])),
        ("preference_labels are missing", lambda: kto(h, w, t)),
        ("preference_labels must be", lambda: kto(h, w, t, b, data.labels[:3])),
        ("kl must be one number", lambda: kto(h, w, t, b, data.labels, kl=torch.zeros(6))),
        ("hidden states have width 9", lambda: cpo(w[:, 1:], h, t)),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call()


def test_names_are_found():
    own = ("CPO", "DPO", "ORPO", "SimPO", "KTO")
    assert {f"LigerFusedLinear{n}Loss" for n in own} <= set(dir(chunked_loss))
    assert {f"liger_fused_linear_{n.lower()}" for n in own} <= set(dir(functional))
    for module in (chunked_loss, functional):
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            module.nothing  # noqa: B018
    function = chunked_loss.dpo_loss.LigerFusedLinearDPOFunction
    assert functional.liger_fused_linear_dpo == function.apply
    assert functional.LigerFusedLinearDPOFunction is function
