"""The GRPO family: every loss against a formula written out token by token, in one pass, several, or two."""

import inspect
import math
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import distributed

from liger_kernel import chunked_loss
from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss, grpo_loss
from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase
from liger_kernel.chunked_loss.grpo_loss import (
    LigerFusedLinearGRPOFunction,
    clip_coef_fn,
    get_gamma_weights,
    k3_loss_fn,
    sapo_loss_fn,
)
from liger_kernel.testing.tolerance import assert_close_to_truth

pytestmark = pytest.mark.plain

B, T, H, V = 4, 10, 8, 23
LENGTHS = (10, 6, 1, 5)
BUDGETS = (None, 5000, 1)  # one chunk; sequences over two chunks; a sequence longer than a chunk
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
UNCLIPPED = ("cispo", "sapo", "vespo")
KINDS = [*product(CLIPPED, ("token", "sequence"), (None, 1.5))] + [
    (kind, "token", None) for kind in UNCLIPPED
]
DEFAULTS = {
    "beta": 0.04, "epsilon_low": 0.2, "epsilon_high": 0.3, "max_completion_length": 12, "delta": None,
    "importance_sampling_level": "token", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05,
    "use_bias_correction_kl": False, "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0, "entropy_coef": 0.0,
}  # fmt: skip


class Batch:
    """Four sequences of which each has its own mask; one of them begins with a masked token."""

    def __init__(self, dtype=torch.float64, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.hidden = torch.randn(B, T, H, generator=g, dtype=torch.float64).to(dtype)
        self.weight = torch.randn(V, H, generator=g, dtype=torch.float64).to(dtype)
        self.bias = torch.randn(V, generator=g, dtype=torch.float64).to(dtype)
        self.ids = torch.randint(V, (B, T), generator=g)
        self.mask = (torch.arange(T) < torch.tensor(LENGTHS)[:, None]).long()
        self.mask[1, 0] = 0
        self.advantages = torch.tensor([1.3, -0.7, 0.4, -1.1]).to(dtype)
        shift = torch.tensor([0.3, -0.4, 0.5, 0.1])[:, None]
        noise = torch.randn(B, T, generator=g)
        with torch.no_grad():
            self.old = self.logp(*self.leaves())[0] + shift.double() + 0.3 * noise
        self.ref = self.old + 0.3 * torch.randn(B, T, generator=g, dtype=torch.float64)
        self.ratio = 0.5 + torch.rand(B, T, generator=g, dtype=torch.float64)

    def leaves(self):
        return [x.detach().clone().requires_grad_() for x in (self.hidden, self.weight, self.bias)]

    def logp(self, hidden, weight, bias, temperature=1.0, softcap=None, pre=1.0, post=1.0):
        """Eager log-probs and entropies, `[B, T]`."""
        z = pre * F.linear(hidden, weight, bias).to(
            torch.promote_types(hidden.dtype, torch.float32)
        )
        z = z if softcap is None else softcap * torch.tanh(z / softcap)
        log_p = (z * post / temperature).log_softmax(-1)
        return log_p.gather(-1, self.ids[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)

    def rest(self, **changed):
        """Everything after the weight, as keywords."""
        known = {
            "selected_token_ids": self.ids, "attention_mask": self.mask, "advantages": self.advantages,
            "ref_per_token_logps": self.ref, "old_per_token_logps": self.old,
        }  # fmt: skip
        return {**known, **changed}


def formula(logp, entropy, batch, loss_type, old, ref, ratio=None, items=None, **options):
    """The contract's table, one token at a time: -> loss, mean KL, clip ratio."""
    o = {**DEFAULTS, **options}
    mask, places = batch.mask.bool(), batch.mask.nonzero().tolist()
    lengths, total = mask.sum(1).tolist(), max(int(mask.sum()), 1)
    ratio = None if ratio is None else ratio.reshape(B, -1).expand(B, T)
    log_ratio = logp - old
    loss, kl_sum, clipped = logp.new_zeros(()), 0.0, 0
    for b, t in places:
        a, n, lp = batch.advantages[b].item(), lengths[b], logp[b, t]
        rho = log_ratio[b, t].exp()
        if o["importance_sampling_level"] == "sequence":
            rho = (log_ratio[b][mask[b]].sum() / n).exp()
        value, low, high = rho.item(), 1 - o["epsilon_low"], 1 + o["epsilon_high"]
        if loss_type == "cispo":
            term = -min(value, o["epsilon_high"]) * a * lp
            clipped += value > o["epsilon_high"] and a > 0
        elif loss_type == "sapo":
            tau = o["sapo_temperature_pos"] if a > 0 else o["sapo_temperature_neg"]
            term = -a * torch.sigmoid(tau * (rho - 1)) * 4 / tau
        elif loss_type == "vespo":
            log_w = log_ratio[b][mask[b]].sum().item()
            if ratio is not None:
                per_token = ratio[b][mask[b]].log().sum().item()
                log_w += per_token if options["ratio_per_token"] else math.log(ratio[b, 0].item())
            k, lam = (o[f"vespo_{x}_{'pos' if a >= 0 else 'neg'}"] for x in ("k", "lambda"))
            term = -math.exp(lam + k * log_w - lam * math.exp(log_w)) * a * lp
        else:
            bounded = rho if o["delta"] is None or value < o["delta"] else rho * 0 + o["delta"]
            kept = rho if low <= value <= high else rho * 0 + (low if value < low else high)
            term = -min(bounded * a, kept * a, key=torch.Tensor.item)
            clipped += (value < low and a < 0) or (value > high and a > 0)
        if ratio is not None and loss_type != "vespo":
            term = term * ratio[b, t]
        if o["beta"]:
            gap = ref[b, t] - lp
            kl = (gap.exp() - gap - 1) * (rho if o["use_bias_correction_kl"] else 1)
            kl_sum += kl.item()
            term = term + o["beta"] * kl
        term = term - o["entropy_coef"] * entropy[b, t]
        scale = {
            "grpo": 1 / (B * n), "sapo": 1 / (B * n), "bnpo": 1 / total, "luspo": n / (B * T),
            "dr_grpo": 1 / (B * o["max_completion_length"]),
        }.get(loss_type, 1 / (total if items is None else float(items)))  # fmt: skip
        loss = loss + term * scale
    return loss, kl_sum / total, clipped / total


def check(batch, loss_type, budgets=BUDGETS, transforms=None, items=None, ratio=None, **options):
    """Loss, metrics and all gradients against autograd of the formula, for every budget."""
    leaves = batch.leaves()
    eager = dict(zip(("softcap", "pre", "post", "temperature"), transforms or (), strict=False))
    logp, entropy = batch.logp(*leaves, **eager)
    per_token = {"ratio_per_token": ratio is not None and ratio.dim() == 2 and ratio.shape[1] > 1}
    want, kl, clip = formula(
        logp, entropy, batch, loss_type, batch.old, batch.ref, ratio, items, **options, **per_token
    )
    grads = torch.autograd.grad(want, leaves)
    names = ("softcap", "pre_scale", "post_scale", "temperature")
    extra = dict(zip(names, transforms or (), strict=False))
    for budget in budgets:
        fn = LigerFusedLinearGRPOLoss(
            loss_type=loss_type, memory_budget=budget, **{**DEFAULTS, **options}, **extra
        )
        hidden, weight, bias = batch.leaves()
        rest = batch.rest(vllm_is_ratio=ratio, num_items_in_batch=items, bias=bias)
        loss, metrics = fn(hidden, weight, **rest)
        got = torch.autograd.grad(loss, (hidden, weight, bias))
        torch.testing.assert_close(loss, want, rtol=1e-9, atol=1e-12, check_dtype=False)
        for g, w in zip(got, grads, strict=True):
            torch.testing.assert_close(g, w, rtol=1e-8, atol=1e-11)
        beta = options.get("beta", DEFAULTS["beta"])
        assert len(metrics) == (2 if beta else 1)
        torch.testing.assert_close(metrics[-1].item(), clip, rtol=1e-6, atol=0)
        if beta:
            torch.testing.assert_close(metrics[0].item(), kl, rtol=1e-6, atol=1e-9)
    return clip


# Every option ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kl", ["none", "plain", "corrected"])
@pytest.mark.parametrize("ratio", [None, "B", "B1", "BT"])
@pytest.mark.parametrize(("loss_type", "level", "delta"), KINDS)
def test_equals_the_formula(loss_type, level, delta, ratio, kl):
    batch = Batch()
    ratios = {"B": batch.ratio[:, 0], "B1": batch.ratio[:, :1], "BT": batch.ratio}
    clip = check(
        batch, loss_type, ratio=ratios.get(ratio), importance_sampling_level=level, delta=delta,
        beta=0.0 if kl == "none" else 0.04, use_bias_correction_kl=kl == "corrected",
    )  # fmt: skip
    assert (clip > 0) == (loss_type not in ("sapo", "vespo"))


@pytest.mark.parametrize("loss_type", [*CLIPPED, *UNCLIPPED])
def test_entropy_bonus_and_logit_transforms(loss_type):
    check(Batch(), loss_type, transforms=(3.0, 0.7, 1.3, 0.9), entropy_coef=0.02)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_entropy_bonus_of_whole_sequences(level):
    check(Batch(), "luspo", importance_sampling_level=level, entropy_coef=0.5, beta=0.0)


@pytest.mark.parametrize("items", [37, 37.0, torch.tensor(37), torch.tensor(37.0)])
@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "vespo"])
def test_number_of_items(loss_type, items):
    check(Batch(), loss_type, budgets=(None,), items=items)


@pytest.mark.parametrize("loss_type", [*CLIPPED, *UNCLIPPED])
def test_micro_batches_add_up_to_the_whole(loss_type):
    """Divided by the tokens of all of them, or weighted by their share of sequences or tokens."""
    batch = Batch()
    fn = LigerFusedLinearGRPOLoss(loss_type=loss_type, return_count=True, max_completion_length=12)
    hidden, weight, _ = batch.leaves()
    whole, (*_, counts) = fn(hidden, weight, **batch.rest())
    assert counts.tolist() == [B, batch.mask.sum()]
    parts = []
    for s in (slice(0, 1), slice(1, 4)):
        rest = {k: x[s] for k, x in batch.rest().items()}
        part, (*_, own) = fn(hidden[s], weight, **rest, num_items_in_batch=counts[1])
        share = own / counts
        by_items = loss_type in ("dapo", "cispo", "vespo")
        parts.append(part if by_items else part * share[int(loss_type == "bnpo")])
    torch.testing.assert_close(sum(parts), whole)
    want = torch.autograd.grad(whole, (hidden, weight), retain_graph=True)
    for g, w in zip(torch.autograd.grad(sum(parts), (hidden, weight)), want, strict=True):
        torch.testing.assert_close(g, w)


# What may be left out -----------------------------------------------------------------------------


@pytest.mark.parametrize(("loss_type", "level", "delta"), KINDS)
def test_without_old_log_probs_the_ratio_is_one(loss_type, level, delta):
    batch = Batch()
    fn = LigerFusedLinearGRPOLoss(
        loss_type=loss_type, importance_sampling_level=level, delta=delta, max_completion_length=9
    )
    results = []
    for given in (False, True):
        hidden, weight, bias = batch.leaves()
        old = batch.logp(hidden, weight, bias)[0].detach() if given else None
        loss, metrics = fn(hidden, weight, **batch.rest(old_per_token_logps=old), bias=bias)
        results.append((loss, *metrics, *torch.autograd.grad(loss, (hidden, weight, bias))))
    torch.testing.assert_close(*results)
    if loss_type != "cispo":
        assert results[0][2] == 0


@pytest.mark.parametrize("loss_type", ["grpo", "vespo"])
def test_reference_from_its_hidden_states(loss_type):
    batch, other = Batch(), Batch(seed=5)
    theirs = [x.requires_grad_() for x in (other.hidden, other.weight, other.bias)]
    fn = LigerFusedLinearGRPOLoss(loss_type=loss_type, temperature=0.8, softcap=5.0)
    hidden, weight, _ = batch.leaves()
    ref = batch.logp(*theirs, temperature=0.8, softcap=5.0)[0]
    want, want_metrics = fn(hidden, weight, **batch.rest(ref_per_token_logps=ref))
    rest = batch.rest(ref_per_token_logps=None)
    names = ("ref_input", "ref_weight", "ref_bias")
    got, got_metrics = fn(hidden, weight, **rest, **dict(zip(names, theirs, strict=True)))
    torch.testing.assert_close((got, *got_metrics), (want, *want_metrics))
    got.backward()
    assert all(x.grad is None for x in theirs)


def test_reference_with_transforms_of_its_own():
    batch, other = Batch(), Batch(seed=5)
    theirs = {"ref_input": other.hidden, "ref_weight": other.weight, "ref_bias": other.bias}
    ref = batch.logp(other.hidden, other.weight, other.bias, temperature=0.8, softcap=2.0, post=1.5)
    fn = LigerFusedLinearGRPOLoss(
        temperature=0.8, softcap=5.0, ref_head={"softcap": 2.0, "post_scale": 1.5}
    )
    want = fn(batch.hidden, batch.weight, **batch.rest(ref_per_token_logps=ref[0]))
    got = fn(batch.hidden, batch.weight, **batch.rest(ref_per_token_logps=None), **theirs)
    torch.testing.assert_close(got, want)
    fn.ref_head = {"cap": 2.0}
    with pytest.raises(ValueError, match="ref_head takes softcap, pre_scale, post_scale; got cap"):
        fn(batch.hidden, batch.weight, **batch.rest(ref_per_token_logps=None), **theirs)


def test_frozen_parts_and_no_grad():
    batch, fn = Batch(), LigerFusedLinearGRPOLoss()
    hidden, weight, bias = batch.leaves()
    want = fn(hidden, weight, **batch.rest(), bias=bias)
    loss, _ = fn(hidden, weight.detach(), **batch.rest(), bias=bias.detach())
    loss.backward()
    assert hidden.grad.abs().sum() > 0
    with torch.no_grad():
        got = fn(hidden, weight, **batch.rest(), bias=bias)
    assert not got[0].requires_grad
    torch.testing.assert_close((got[0], *got[1]), (want[0].detach(), *want[1]))
    assert not any(m.requires_grad for m in want[1])


# Masks and extremes -------------------------------------------------------------------------------


@pytest.mark.parametrize(("loss_type", "level", "delta"), KINDS)
def test_masked_places_may_hold_anything(loss_type, level, delta):
    """A sequence without tokens, and NaN or infinities wherever the mask is 0."""
    batch = Batch()
    batch.mask[2] = 0
    bad = batch.mask == 0
    batch.advantages[2] = 5.0
    clean = (batch.hidden, batch.old, batch.ref, batch.ratio)
    spoiled = [x.clone() for x in clean]
    for x, value in zip(spoiled, ("nan", "-inf", "nan", "nan"), strict=True):
        x[bad] = float(value)
    options = {"importance_sampling_level": level, "delta": delta, "max_completion_length": 12}
    for budget in BUDGETS:
        fn = LigerFusedLinearGRPOLoss(loss_type=loss_type, memory_budget=budget, **options)
        found = []
        for hidden, old, ref, ratio in (spoiled, clean):
            h, w = hidden.clone().requires_grad_(), batch.weight.clone().requires_grad_()
            rest = batch.rest(old_per_token_logps=old, ref_per_token_logps=ref, vllm_is_ratio=ratio)
            loss, metrics = fn(h, w, **rest)
            found.append((loss, *metrics, *torch.autograd.grad(loss, (h, w))))
        torch.testing.assert_close(*found)
        assert all(torch.isfinite(x).all() for x in found[0])


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("mask_dtype", [torch.int64, torch.bool, torch.float32])
@pytest.mark.parametrize(("loss_type", "level", "delta"), KINDS)
def test_no_token_is_zero(loss_type, level, delta, mask_dtype, budget):
    batch = Batch()
    batch.mask = torch.zeros(B, T, dtype=mask_dtype)
    hidden, weight, _ = batch.leaves()
    fn = LigerFusedLinearGRPOLoss(
        loss_type=loss_type, importance_sampling_level=level, delta=delta, max_completion_length=12,
        memory_budget=budget,
    )  # fmt: skip
    loss, metrics = fn(hidden, weight, **batch.rest())
    loss.backward()
    assert loss == 0
    assert all(m == 0 for m in metrics)
    assert hidden.grad.abs().max() == 0
    assert weight.grad.abs().max() == 0


@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (0, 0)])
@pytest.mark.parametrize(("loss_type", "level", "delta"), KINDS)
def test_empty_batch_is_zero(loss_type, level, delta, shape):
    hidden, weight = torch.randn(*shape, H, requires_grad=True), torch.randn(V, H, requires_grad=True)  # fmt: skip
    fn = LigerFusedLinearGRPOLoss(
        loss_type=loss_type, importance_sampling_level=level, delta=delta, max_completion_length=12
    )
    ids, mask, advantages = torch.zeros(shape).long(), torch.ones(shape), torch.ones(shape[0])
    loss, metrics = fn(hidden, weight, ids, mask, advantages, ref_per_token_logps=mask)
    loss.backward()
    assert [loss.item(), *(m.item() for m in metrics)] == [0, 0, 0]
    assert weight.grad.abs().max() == 0


@pytest.mark.parametrize(("loss_type", "level", "delta"), KINDS)
@pytest.mark.parametrize("gap", [-500.0, 500.0])
def test_ratios_beyond_fp32_are_not_nan(loss_type, level, delta, gap):
    batch = Batch(torch.float32)
    hidden, weight, _ = batch.leaves()
    fn = LigerFusedLinearGRPOLoss(
        loss_type=loss_type, importance_sampling_level=level, delta=delta, max_completion_length=12,
        beta=0.0,
    )  # fmt: skip
    loss, _ = fn(hidden, weight, **batch.rest(old_per_token_logps=batch.old.float() - gap))
    loss.backward()
    assert all(torch.isfinite(x).all() for x in (loss, hidden.grad, weight.grad))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("loss_type", "level", "delta"), KINDS)
def test_16_bits_are_as_good_as_eager(loss_type, level, delta, dtype):
    options = {"importance_sampling_level": level, "delta": delta, "ratio_per_token": False}

    def eager(wide):
        batch = Batch(dtype)
        leaves = [x.to(wide).detach().requires_grad_() for x in batch.leaves()]
        found = formula(*batch.logp(*leaves), batch, loss_type, batch.old, batch.ref, **options)
        return dict(zip("lhwb", (found[0], *torch.autograd.grad(found[0], leaves)), strict=True))

    batch = Batch(dtype)
    fn = LigerFusedLinearGRPOLoss(
        loss_type=loss_type, importance_sampling_level=level, delta=delta, max_completion_length=12,
        epsilon_high=0.3,
    )  # fmt: skip
    hidden, weight, bias = batch.leaves()
    loss, _ = fn(hidden, weight, **batch.rest(), bias=bias)
    assert loss.dtype == torch.float32
    got = (loss.detach(), *torch.autograd.grad(loss, (hidden, weight, bias)))
    assert_close_to_truth(dict(zip("lhwb", got, strict=True)), eager(dtype), eager(torch.float64))


# The contract ---------------------------------------------------------------------------------------


def _parameters(function):
    found = inspect.signature(function).parameters.values()
    plain = [
        p for p in found if p.kind is p.POSITIONAL_OR_KEYWORD and p.name not in ("self", "ctx")
    ]
    return ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in plain)


def test_argument_orders_and_defaults():
    assert _parameters(LigerFusedLinearGRPOLoss.__init__) == (
        "beta=0.04, compiled=True, use_ref_model=True, chunk_size=1, epsilon_low=0.2, epsilon_high=0.2, "
        "loss_type='dapo', max_completion_length=None, importance_sampling_level='token', sapo_temperature_pos=1.0, "
        "sapo_temperature_neg=1.05, temperature=1.0, delta=None, use_bias_correction_kl=False, vespo_k_pos=2.0, "
        "vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0"
    )
    assert _parameters(LigerFusedLinearGRPOLoss.forward) == (
        "_input, lin_weight, selected_token_ids, attention_mask, advantages, bias=None, ref_per_token_logps=None, "
        "old_per_token_logps=None, ref_input=None, ref_weight=None, ref_bias=None, vllm_is_ratio=None, "
        "num_items_in_batch=None"
    )
    data = (
        "_input, weight, selected_token_ids, attention_mask, advantages, bias=None, ref_per_token_logps=None, "
        "old_per_token_logps=None, ref_input=None, ref_weight=None, ref_bias=None, "
    )
    vespo = "vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0, num_items_in_batch=None"
    assert _parameters(LigerFusedLinearGRPOFunction.apply) == data + (
        "beta=0.04, epsilon_low=0.2, epsilon_high=0.2, loss_type='dapo', max_completion_length=None, "
        "importance_sampling_level='token', sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, temperature=1.0, "
        "compiled=True, use_ref_model=True, chunk_size=1, vllm_is_ratio=None, delta=None, "
        "use_bias_correction_kl=False, " + vespo
    )
    assert _parameters(LigerFusedLinearPPOBase.forward) == "cls, " + data + (
        "epsilon_low=0.2, epsilon_high=0.2, beta=0.04, loss_type='dapo', max_completion_length=None, "
        "importance_sampling_level='token', temperature=1.0, compiled=True, use_ref_model=False, chunk_size=1, "
        "sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, vllm_is_ratio=None, delta=None, "
        "use_bias_correction_kl=False, " + vespo
    )


def test_function_equals_module():
    batch = Batch()
    hidden, weight, bias = batch.leaves()
    want = LigerFusedLinearGRPOLoss(loss_type="bnpo", epsilon_high=0.1, temperature=0.7)(
        hidden, weight, **batch.rest(), bias=bias
    )
    data = (
        hidden,
        weight,
        batch.ids,
        batch.mask,
        batch.advantages,
        bias,
        batch.ref,
        batch.old,
        None,
        None,
        None,
    )
    options = (0.04, 0.2, 0.1, "bnpo", None, "token", 1.0, 1.05, 0.7)
    got = chunked_loss.functional.liger_fused_linear_grpo(*data, *options)
    torch.testing.assert_close((got[0], *got[1]), (want[0], *want[1]))


def test_options_written_after_construction_count():
    batch, fn = Batch(), LigerFusedLinearGRPOLoss()
    fn.beta, fn.loss_type, fn.someone_elses = 0.0, "grpo", object()
    hidden, weight, _ = batch.leaves()
    loss, metrics = fn(hidden, weight, **batch.rest(ref_per_token_logps=None))
    want, _ = LigerFusedLinearGRPOLoss(beta=0.0, loss_type="grpo")(hidden, weight, **batch.rest())
    assert len(metrics) == 1
    torch.testing.assert_close(loss, want)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "ppo"}, "loss_type must be one of 'grpo'"),
        ({"importance_sampling_level": "batch"}, "importance_sampling_level must be one of"),
        *(({"loss_type": k, "importance_sampling_level": "sequence"}, "token level") for k in UNCLIPPED),
        *(({"loss_type": k, "delta": 2.0}, "no use for delta=2.0") for k in UNCLIPPED),
        ({"delta": 0.0}, "delta .* must be positive; got 0.0"),
        ({"sapo_temperature_pos": 0.0}, "sapo_temperature_pos must be positive; got 0.0"),
        ({"sapo_temperature_neg": -1.0}, "sapo_temperature_neg must be positive; got -1.0"),
    ],
)  # fmt: skip
def test_options_that_do_not_apply(options, message):
    with pytest.raises(ValueError, match=message):
        LigerFusedLinearGRPOLoss(**options)
    batch = Batch()
    with pytest.raises(ValueError, match=message):
        LigerFusedLinearGRPOFunction.apply(batch.hidden, batch.weight, **batch.rest(), **options)


@pytest.mark.parametrize(
    ("changed", "options", "message"),
    [
        ({"ref_per_token_logps": None}, {}, "beta != 0 needs a reference"),
        ({}, {"loss_type": "dr_grpo"}, "max_completion_length"),
        ({"advantages": torch.ones(B, T)}, {}, r"advantages must be \[4\]"),
        ({"attention_mask": torch.ones(B, T - 1)}, {}, r"attention_mask must be \[4, 10\]"),
        ({"selected_token_ids": torch.ones(B)}, {}, r"selected_token_ids \[B, T\]"),
        ({"old_per_token_logps": torch.ones(B)}, {}, r"old_per_token_logps must be \[4, 10\]"),
        ({"ref_per_token_logps": torch.ones(1, T)}, {}, r"ref_per_token_logps must be"),
        ({"vllm_is_ratio": torch.ones(T)}, {}, r"vllm_is_ratio must be \[4\], \[4, 1\] or \[4, 10\]"),
    ],
)  # fmt: skip
def test_inputs_that_do_not_fit(changed, options, message, monkeypatch):
    """And are refused before anything is computed of the policy."""
    monkeypatch.setattr(grpo_loss, "_through_head", None)
    batch = Batch()
    with pytest.raises(ValueError, match=message):
        LigerFusedLinearGRPOLoss(**options)(batch.hidden, batch.weight, **batch.rest(**changed))


def test_reference_model_may_be_refused():
    batch = Batch()
    rest = batch.rest(ref_per_token_logps=None, ref_input=batch.hidden, ref_weight=batch.weight)
    with pytest.raises(ValueError, match="use_ref_model=True"):
        LigerFusedLinearGRPOLoss(use_ref_model=False)(batch.hidden, batch.weight, **rest)


def test_normalizer_over_ranks(monkeypatch):
    normalizer = LigerFusedLinearPPOBase._compute_dapo_normalizer
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert normalizer(mask) == 3
    assert normalizer(torch.zeros(2, 3)) == 1
    assert normalizer(mask, 12) == 12
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(distributed, "all_reduce", lambda x: x.add_(6))
    assert normalizer(mask) == 4.5
    assert normalizer(mask, torch.tensor(12)) == 6


# Subclasses and pieces ------------------------------------------------------------------------------


class Reinforce(LigerFusedLinearPPOBase):
    @staticmethod
    def ppo_loss_fn(per_token_logps, attention_mask, advantages, full_attention_mask, **options):
        per_token = -advantages[:, None] * per_token_logps * attention_mask
        per_sequence = per_token.sum(-1)
        total = full_attention_mask.sum()
        return per_sequence.sum() / total, (attention_mask.sum() / total, per_sequence)


class Renamed(Reinforce):
    @classmethod
    def forward(cls, ctx, _input, weight, ids, mask, advantages):
        return super().forward(
            cls=cls, ctx=ctx, _input=_input, weight=weight, selected_token_ids=ids, attention_mask=mask,
            advantages=advantages, beta=0.0, memory_budget=5000,
        )  # fmt: skip


@pytest.mark.parametrize("loss", [Reinforce, Renamed])
def test_a_subclass_brings_its_own_loss(loss):
    batch = Batch()
    hidden, weight, _ = batch.leaves()
    got, (share, per_sequence) = loss.apply(hidden, weight, batch.ids, batch.mask, batch.advantages)
    logp = batch.logp(hidden, weight, torch.zeros(V, dtype=torch.float64))[0]
    each = -(batch.advantages[:, None] * logp * batch.mask).sum(-1)
    want = each.sum() / batch.mask.sum()
    torch.testing.assert_close((got, per_sequence), (want, each.detach()))
    torch.testing.assert_close(share.item(), 1.0)
    pair = (hidden, weight)
    torch.testing.assert_close(torch.autograd.grad(got, pair), torch.autograd.grad(want, pair))


def test_the_base_class_has_no_loss():
    batch = Batch()
    with pytest.raises(NotImplementedError, match="must define it"):
        LigerFusedLinearPPOBase.apply(batch.hidden, batch.weight, batch.ids, batch.mask, batch.advantages)  # fmt: skip


@pytest.mark.parametrize(("loss_type", "level", "delta"), KINDS)
def test_the_hook_on_given_log_probs(loss_type, level, delta):
    """Shares of parts of a batch add up to the loss, metrics to the metrics."""
    batch = Batch()
    options = {
        "loss_type": loss_type, "importance_sampling_level": level, "delta": delta, "max_completion_length": 12,
    }  # fmt: skip
    rest = batch.rest(vllm_is_ratio=batch.ratio)
    want, metrics = LigerFusedLinearGRPOLoss(**options)(batch.hidden, batch.weight, **rest)
    logp = LigerFusedLinearPPOBase.chunk_forward(batch.hidden, batch.weight, batch.ids)
    del rest["selected_token_ids"]
    parts = [
        LigerFusedLinearGRPOFunction.ppo_loss_fn(
            logp[s], full_attention_mask=batch.mask, **{k: x[s] for k, x in rest.items()}, **options
        )
        for s in (slice(0, 3), slice(3, 4))
    ]
    torch.testing.assert_close(sum(loss for loss, _ in parts), want)
    torch.testing.assert_close([a + b for a, b in zip(*(m for _, m in parts), strict=True)], [*metrics])  # fmt: skip


def test_helpers():
    p, q = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    torch.testing.assert_close(k3_loss_fn(p, q), (p - q).exp() - (p - q) - 1)
    rho = torch.tensor([0.5, 1.0, 1.5])
    torch.testing.assert_close(sapo_loss_fn(rho, 2.0), torch.sigmoid(2 * (rho - 1)) * 2)
    with pytest.raises(ValueError, match="must be positive"):
        sapo_loss_fn(rho, 0.0)
    assert clip_coef_fn(rho, 0.2, 0.3, "grpo")[0].tolist() == pytest.approx([0.8, 1.0, 1.3])
    capped, below, above = clip_coef_fn(rho.requires_grad_(), 0.2, 1.2, "cispo")
    assert capped.tolist() == pytest.approx([0.5, 1.0, 1.2])
    assert not capped.requires_grad
    assert (below.tolist(), above.tolist()) == ([False] * 3, [False, False, True])


def test_gamma_weights():
    advantages, mask = torch.tensor([1.0, -1.0, 0.0]), torch.tensor([[1, 1], [1, 0], [1, 1]])
    ratio = torch.tensor([[0.1, 0.2], [-0.3, float("nan")], [500.0, 0.0]])
    phi = get_gamma_weights(advantages, ratio, mask)
    assert phi.shape == (3, 1)
    want = [math.exp(3 + 2 * 0.3 - 3 * math.exp(0.3)), math.exp(2 - 3 * 0.3 - 2 * math.exp(-0.3))]
    assert phi[:2, 0].tolist() == pytest.approx(want)
    assert phi[2] == 0
    shared = get_gamma_weights(advantages, ratio, mask, torch.tensor([1.2, 0.9, 1.0]))
    log_w = 0.3 + math.log(1.2)
    assert shared[0].item() == pytest.approx(math.exp(3 + 2 * log_w - 3 * math.exp(log_w)))
    assert get_gamma_weights(torch.ones(1), torch.zeros(1, 3), torch.ones(1, 3)) == 1
