"""dW added to a sum that exists already, by the products that make it and with no other tensor of its size."""

import pytest
import torch

from liger_kernel.bench.memory import PeakMemory
from liger_kernel.ops.fused_linear_cross_entropy import fused_linear_cross_entropy
from liger_kernel.ops.linear_logprob import linear_logprob

N, H, V = 24, 256, 1024


def _leaves(device, dtype):
    torch.manual_seed(0)
    hidden, weight = torch.randn(N, H, device=device), torch.randn(V, H, device=device) * 0.1
    target = torch.randint(V, (N,), device=device)
    target[::5] = -100
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), target


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_an_fp32_sum_over_two_batches(dtype, device):
    """No farther from float64 than the gradient itself, rounded once to fp32, and the rest as without it."""
    hidden, weight, target = _leaves(device, dtype)
    total, upstream = torch.ones(V, H, device=device), torch.rand(N, device=device)
    options = {"reduction": "none", "memory_budget": 8 * V * hidden.element_size()}
    for _ in range(2):
        loss = fused_linear_cross_entropy(
            hidden, weight, target, accumulate_into=total, **options
        ).loss
        with PeakMemory(device) as peak:
            loss.backward(upstream)
    # of the second one: the first product of a GPU makes its library's workspace
    assert peak.bytes < V * H * hidden.element_size()
    assert weight.grad.layout == torch.sparse_coo
    assert weight.grad._nnz() == 0
    plain = [t.detach().clone().requires_grad_() for t in (hidden, weight)]
    for _ in range(2):
        logp = linear_logprob(*plain, target, memory_budget=options["memory_budget"]).logp
        logp.backward(-upstream)
    assert torch.equal(hidden.grad, plain[0].grad)
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    wanted = torch.nn.functional.cross_entropy(
        exact[0] @ exact[1].t(), target, reduction="none", ignore_index=-100
    )
    wanted.backward(2 * upstream.double())
    want = exact[1].grad
    error, usual = (float((g.double() - want).norm()) for g in (total - 1, plain[1].grad))
    assert error <= usual + 1e-6 * float(want.norm())


def test_the_gradient_itself_may_be_the_sum(device):
    hidden, weight, target = _leaves(device, torch.float32)
    linear_logprob(hidden, weight, target).logp.sum().backward()
    once = weight.grad.clone()
    linear_logprob(hidden, weight, target, accumulate_into=weight.grad).logp.sum().backward()
    torch.testing.assert_close(weight.grad, 2 * once)


def test_frozen_weights_and_no_tokens_leave_it_alone(device):
    hidden, weight, target = _leaves(device, torch.float32)
    total = torch.ones(V, H, device=device)
    frozen = linear_logprob(hidden, weight.detach(), target, accumulate_into=total)
    frozen.logp.sum().backward()
    none = torch.full_like(target, -100)
    linear_logprob(hidden, weight, none, accumulate_into=total).logp.sum().backward()
    assert (total == 1).all()


def test_what_does_not_fit_is_refused(device):
    hidden, weight, target = _leaves(device, torch.float32)
    for wrong in (torch.ones(V - 1, H, device=device), torch.ones(V, H, dtype=int, device=device)):
        with pytest.raises(ValueError, match="accumulate_into must be a floating-point"):
            linear_logprob(hidden, weight, target, accumulate_into=wrong)
    with pytest.raises(ValueError, match='reduction="none"'):
        fused_linear_cross_entropy(hidden, weight, target, accumulate_into=torch.ones_like(weight))


def test_it_is_no_part_of_a_graph(device):
    hidden, weight, target = _leaves(device, torch.float32)

    @torch.compile(backend="eager", fullgraph=True)
    def traced(h, w, y, into):
        return linear_logprob(h, w, y, accumulate_into=into).logp

    with pytest.raises(Exception, match="cannot be part of a graph"):
        traced(hidden, weight, target, torch.ones_like(weight))
