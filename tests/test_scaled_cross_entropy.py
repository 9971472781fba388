"""The per-token form that reinforcement-learning trainers import."""

import pytest
import torch

from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction as Scaled

pytestmark = pytest.mark.plain


def _batch():
    torch.manual_seed(0)
    hidden = torch.randn(9, 8, requires_grad=True)
    weight = torch.randn(21, 8, requires_grad=True)
    target = torch.randint(21, (9,))
    target[3] = -100
    return hidden, weight, target


def test_the_call_of_a_ppo_head():
    hidden, weight, target = _batch()
    nll, entropy = Scaled.apply(hidden, weight, target, 0.7, -100, 1, True)
    log_p = (hidden @ weight.t() / 0.7).log_softmax(-1)
    valid = target != -100
    want = -log_p.gather(-1, target.clamp(0)[:, None])[:, 0] * valid
    want_entropy = -(log_p.exp() * log_p).sum(-1) * valid
    torch.testing.assert_close(nll, want)
    torch.testing.assert_close(entropy, want_entropy)
    weights = torch.randn(9), torch.randn(9)
    got = torch.autograd.grad((nll * weights[0] + entropy * weights[1]).sum(), (hidden, weight))
    wants = torch.autograd.grad(
        (want * weights[0] + want_entropy * weights[1]).sum(), (hidden, weight)
    )
    for g, w in zip(got, wants, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)


def test_selected_ids_keep_order_and_duplicates():
    hidden, weight, target = _batch()
    nll, selected = Scaled.apply(hidden, weight, target, selected_token_ids=torch.tensor([5, 0, 5]))
    log_p = (hidden @ weight.t()).log_softmax(-1)[:, [5, 0, 5]] * (target != -100)[:, None]
    torch.testing.assert_close(selected, log_p)
    got = torch.autograd.grad(selected.square().sum() + nll.sum(), hidden, retain_graph=True)[0]
    plain = -(hidden @ weight.t()).log_softmax(-1).gather(-1, target.clamp(0)[:, None])[:, 0]
    want = torch.autograd.grad(log_p.square().sum() + (plain * (target != -100)).sum(), hidden)[0]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    none = torch.empty(0, dtype=torch.int64)
    assert Scaled.apply(hidden, weight, target, selected_token_ids=none)[1].shape == (9, 0)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"temperature": "1"}, TypeError, "temperature"),
        ({"temperature": 0.0}, ValueError, "temperature"),
        ({"temperature": float("inf")}, ValueError, "temperature"),
        ({"m_tiles_per_cluster": 1.0}, TypeError, "m_tiles"),
        ({"m_tiles_per_cluster": 0}, ValueError, "m_tiles"),
        ({"return_entropy": 1}, TypeError, "return_entropy"),
        ({"selected_token_ids": torch.tensor([21])}, ValueError, "selected_token_ids"),
    ],
)
def test_bad_arguments(change, error, message):
    with pytest.raises(error, match=message):
        Scaled.apply(*_batch(), **change)


def test_target_out_of_range():
    hidden, weight, target = _batch()
    target[0] = 21
    with pytest.raises(IndexError, match=r"target\[0\] is 21"):
        Scaled.apply(hidden, weight, target)
