"""GRPO on given logits equals GRPO on hidden states, whose formulas `test_grpo` checks one by one."""

import inspect
from itertools import product

import pytest
import torch

from liger_kernel import _env
from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
from liger_kernel.ops.selective_log_softmax import (
    fused_selective_log_softmax,
    reference,
    selective_log_softmax,
    selective_log_softmax_backward,
    selective_log_softmax_forward,
)
from liger_kernel.transformers import grpo_loss
from liger_kernel.transformers.grpo_loss import GrpoLossFunction, triton_grpo_loss

B, L, V = 3, 4, 19
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
KINDS = [*product(CLIPPED, ("token", "sequence"), (None, 1.5))] + [
    (kind, "token", None) for kind in ("cispo", "sapo", "vespo")
]


def _batch(device, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(B, L + 1, V, generator=g)
    ids = torch.randint(V, (B, L), generator=g)
    mask = torch.arange(L) < torch.tensor([4, 1, 3])[:, None]
    old = reference(logits[:, :-1], ids) + 0.4 * torch.randn(B, L, generator=g)
    ref = old + 0.3 * torch.randn(B, L, generator=g)
    advantages = torch.tensor([1.2, -0.8, 0.5])
    ratio = 0.5 + torch.rand(B, L, generator=g)
    logits = logits.to(device, dtype).requires_grad_()
    return logits, *(x.to(device) for x in (old, ref, ids, advantages, mask.long(), ratio))


def _through_a_head(logits, old, ref, ids, advantages, mask, ratio, **options):
    """The same loss, by a head that is the identity."""
    eye = torch.eye(V, device=logits.device, dtype=logits.dtype)
    return LigerFusedLinearGRPOLoss(**options)(
        logits[:, :-1], eye, ids, mask, advantages, ref_per_token_logps=ref, old_per_token_logps=old,
        vllm_is_ratio=ratio,
    )  # fmt: skip


@pytest.mark.parametrize(("loss_type", "level", "delta"), KINDS)
def test_equals_the_loss_on_hidden_states(loss_type, level, delta, path, device):
    logits, *rest, ratio = _batch(device)
    options = {
        "beta": 0.0 if delta else 0.04, "loss_type": loss_type, "importance_sampling_level": level, "delta": delta,
        "max_completion_length": 8, "temperature": 0.7, "use_bias_correction_kl": True,
    }  # fmt: skip
    with _env.using_impl("torch"):
        want, numbers = _through_a_head(logits, *rest, ratio, **options, epsilon_high=0.4)
    loss, found = triton_grpo_loss(logits, *rest, reduce=True, vllm_is_ratio=ratio, **options)
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(found, list(numbers))
    want_grad, got_grad = (torch.autograd.grad(x, logits)[0] for x in (want, loss))
    torch.testing.assert_close(got_grad, want_grad)
    assert got_grad[:, -1].abs().max() == 0


@pytest.mark.parametrize(("loss_type", "level", "delta"), KINDS)
def test_terms_add_up_to_the_loss(loss_type, level, delta, path, device):
    logits, *rest, ratio = _batch(device)
    options = {
        "loss_type": loss_type, "importance_sampling_level": level, "delta": delta, "vllm_is_ratio": ratio,
        "max_completion_length": 8,
    }  # fmt: skip
    mask = rest[-1]
    terms, kl, clipped = triton_grpo_loss(logits, *rest, **options)
    loss, found = triton_grpo_loss(logits, *rest, reduce=True, **options)
    for x in (terms, kl, clipped):
        assert x.shape == (B, L)
        assert x.dtype == torch.float32
        assert x[mask == 0].abs().max() == 0
    torch.testing.assert_close(grpo_loss._reduce_grpo_loss(terms, mask, loss_type, 8), loss)
    torch.testing.assert_close(
        [grpo_loss._masked_mean(x, mask) for x in (kl, clipped)], found
    )  # fmt: skip
    weights = torch.randn(B, L, generator=torch.Generator().manual_seed(1)).to(device)
    (got,) = torch.autograd.grad((terms * weights).sum(), logits)
    assert got.shape == logits.shape
    assert got[:, :-1][mask == 0].abs().max() == 0


@pytest.mark.parametrize("inplace", [False, True])
def test_in_place_only_when_asked(inplace, path, device):
    logits, *rest, _ = _batch(device)
    kept = logits.detach().clone()
    want = torch.autograd.grad(triton_grpo_loss(logits, *rest, reduce=True)[0], logits)[0]
    torch.testing.assert_close(logits.detach(), kept, rtol=0, atol=0)
    loss, _ = triton_grpo_loss(logits, *rest, reduce=True, inplace=inplace)
    got = torch.autograd.grad(loss, logits, retain_graph=True)[0]
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert (got.data_ptr() == logits.data_ptr()) == inplace
    if inplace:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(loss, logits)


def test_function_has_its_own_defaults(path, device):
    logits, *rest, _ = _batch(device)
    loss, found = GrpoLossFunction.apply(logits, *rest, 0.7, 0.04, 0.2, 0.3, False)
    want, numbers = triton_grpo_loss(
        logits, *rest, temperature=0.7, eps_high=0.3, loss_type="grpo", reduce=True
    )
    torch.testing.assert_close((loss, *found), (want, *numbers))
    phi = torch.tensor([[0.5], [1.5], [2.0]], device=device)
    given = GrpoLossFunction.apply(
        logits, *rest, 0.7, 0.0, 0.2, 0.3, False, "vespo", None, False, phi_seq=phi
    )[0]
    logp = reference(logits[:, :-1], rest[2], temperature=0.7)
    torch.testing.assert_close(given, -phi * rest[3][:, None] * logp * rest[4])
    names = list(inspect.signature(GrpoLossFunction.apply).parameters)
    assert names[10:14] == ["inplace", "loss_type", "max_completion_length", "reduce"]


def test_without_mask_old_or_reference(path, device):
    logits, _, _, ids, advantages, *_ = _batch(device)
    terms, kl, clipped = triton_grpo_loss(logits, None, None, ids, advantages, beta=0.0)
    assert kl is None
    assert clipped.sum() == 0
    torch.testing.assert_close(terms, -advantages[:, None].expand(B, L))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_selective_log_softmax(dtype, path, device):
    logits, _, _, ids, _, mask, _ = _batch(device, dtype)
    prompt = torch.zeros(B, 2, dtype=torch.int64, device=device)
    got = fused_selective_log_softmax(logits, torch.cat([prompt, ids], 1), 0.8, mask)
    assert got.dtype == torch.float32
    assert not got.requires_grad
    torch.testing.assert_close(got, reference(logits[:, :-1], ids, temperature=0.8).detach() * mask)


def test_selective_log_softmax_of_strided_logits(path, device):
    logits, _, _, ids, *_ = _batch(device)
    z = torch.randn(V, L, B, device=device).permute(2, 1, 0).requires_grad_()
    upstream = torch.randn(B, 1, device=device).expand(B, L)
    for x in (z, logits[:, 1:].detach().requires_grad_()):
        got, want = selective_log_softmax(x, ids), reference(x, ids)
        torch.testing.assert_close(got, want)
        both = [torch.autograd.grad(y, x, upstream)[0] for y in (got, want)]
        torch.testing.assert_close(*both)


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
def test_launchers_are_operators(path, device):
    logits, _, _, ids, *_ = _batch(device)
    z, y = logits[:, :-1].reshape(-1, V).detach(), ids.reshape(-1)
    kernels = _env.impl("linear_logprob") != "torch"
    stats = selective_log_softmax_forward(z, y, 0.9, -100, kernels)
    dlogp = torch.randn_like(stats[0])
    torch.library.opcheck(selective_log_softmax_forward.operator, (z, y, 0.9, -100, kernels))
    torch.library.opcheck(
        selective_log_softmax_backward.operator, (z, y, stats, dlogp, 0.9, -100, kernels)
    )


def test_compiles_to_one_graph(path, device):
    logits, *rest, _ = _batch(device)

    def loss(z):
        return triton_grpo_loss(z, *rest, reduce=True, loss_type="vespo")[0]

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    both = [torch.autograd.grad(f(logits), logits)[0] for f in (compiled, loss)]
    torch.testing.assert_close(*both)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "ppo"}, "loss_type must be one of"),
        ({"loss_type": "cispo", "delta": 1.5}, "no use for delta"),
        ({"loss_type": "vespo", "importance_sampling_level": "sequence"}, "token level"),
        ({"sapo_temperature_pos": 0.0}, "must be positive"),
        ({"loss_type": "dr_grpo", "reduce": True}, "max_completion_length"),
        ({"vllm_is_ratio": torch.ones(L)}, "vllm_is_ratio must be"),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"ref_logp": None}, "needs a reference"),
        ({"completion_ids": torch.zeros(B, L + 1, dtype=torch.int64)}, r"logits must be \[B, L \+ 1, V\]"),
        ({"advantages": torch.zeros(B, L)}, r"advantages must be \[3\]"),
    ],
)  # fmt: skip
def test_what_is_refused(options, message):
    logits, old, ref, ids, advantages, mask, _ = _batch("cpu")
    known = {
        "old_logp": old, "ref_logp": ref, "completion_ids": ids, "advantages": advantages, "completion_mask": mask,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        triton_grpo_loss(logits, **{**known, **options})
