"""Megatron's output layer and loss in one: the numbers of one process, dW in `main_grad` and nowhere else."""

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same, run
from standin_megatron import REAL, data_parallel, gpt, head_model, megatron, start
from torch import nn

from liger_kernel.megatron import apply_liger_kernel_to_megatron

pytestmark = pytest.mark.plain
S, B, WIDTH, CLASSES = 8, 2, 256, 2048


def _apply():
    apply_liger_kernel_to_megatron(fused_linear_cross_entropy=True)


def _both_layouts():
    start()
    _apply()
    for sequence_parallel in (False, True):
        _one_layer(sequence_parallel)


def _one_layer(sequence_parallel):
    """Three micro-batches, the last without fusion, against the whole weight on every rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = head_model(WIDTH, CLASSES, sequence_parallel)
    layer, weight = model.output_layer, model.output_layer.weight
    parts = [torch.empty_like(weight) for _ in range(world)]
    dist.all_gather(parts, weight.detach())
    whole = torch.cat(parts).requires_grad_()
    draw = torch.Generator().manual_seed(3)
    for fused in (True, True, False):
        layer.gradient_accumulation_fusion = fused
        weight.grad_added_to_main_grad = False
        labels = torch.randint(CLASSES, (B, S), generator=draw)
        labels[0, 2], labels[1, 5] = -1, -100
        hidden, dloss = torch.randn(S, B, WIDTH, generator=draw), torch.rand(B, S, generator=draw)
        mine = hidden.chunk(world)[rank] if sequence_parallel else hidden
        mine = mine.clone().requires_grad_()
        logits, bias = layer(mine)
        assert bias is None
        loss = model.compute_language_model_loss(labels, logits)
        loss.backward(dloss)
        assert weight.grad_added_to_main_grad == fused
        assert weight.grad is None

        hidden.requires_grad_()
        target = labels.where(labels >= 0, -100).t().flatten()
        wanted = nn.functional.cross_entropy(
            (hidden @ whole.t()).flatten(0, 1), target, reduction="none"
        )
        wanted = wanted.view(S, B).t()
        wanted.backward(dloss)
        torch.testing.assert_close(loss, wanted)
        dh = hidden.grad.chunk(world)[rank] if sequence_parallel else hidden.grad
        torch.testing.assert_close(mine.grad, dh)
        torch.testing.assert_close(weight.main_grad, whole.grad.chunk(world)[rank])


def test_gradients_go_to_main_grad():
    """All tokens on every rank, and under sequence parallelism some on each."""
    run(_both_layouts, 2, timeout=60)


def _looked_at():
    """Whatever is done to the promise but its loss happens to Megatron's logits; other calls get them at once."""
    start()
    _apply()
    layers = megatron("tensor_parallel.layers")
    forward = layers.ColumnParallelLinear.forward
    _apply()
    assert layers.ColumnParallelLinear.forward is forward
    model = head_model(WIDTH, CLASSES, False)
    layer = model.output_layer
    hidden = torch.randn(S, B, WIDTH, requires_grad=True)
    layer.eval()
    real = layer(hidden)[0]
    assert isinstance(real, torch.Tensor)
    layer.train()
    with torch.no_grad():
        assert isinstance(layer(hidden)[0], torch.Tensor)
    layer.disable_grad_reduce = True
    assert isinstance(layer(hidden)[0], torch.Tensor)
    layer.disable_grad_reduce = False
    uses = (
        lambda z: z * 2, lambda z: 1 - z, lambda z: z[0], lambda z: z.transpose(0, 1), torch.tanh,
        lambda z: torch.cat([z, z]), lambda z: torch.tensor(len(z)),
    )  # fmt: skip
    for use in uses:
        promise = layer(hidden)[0]
        assert not isinstance(promise, torch.Tensor)
        with torch.no_grad():
            torch.testing.assert_close(use(promise), use(real))
        assert promise.requires_grad
    with pytest.raises(AttributeError):
        layer(hidden)[0]._private  # noqa: B018
    changed, labels = layer(hidden)[0], torch.randint(CLASSES, (B, S))
    changed.mul_(3)
    loss = model.compute_language_model_loss(labels, changed)
    wanted = nn.functional.cross_entropy(
        3 * real.flatten(0, 1), labels.t().flatten(), reduction="none"
    )
    torch.testing.assert_close(loss, wanted.view(S, B).t())


def test_a_promise_that_is_looked_at():
    run(_looked_at, 1)


def _missing_method():
    start()
    layer = megatron("tensor_parallel.layers").ColumnParallelLinear
    forward = layer.forward
    del megatron(
        "models.common.language_module.language_module"
    ).LanguageModule.compute_language_model_loss
    with pytest.raises(ImportError, match="LanguageModule has no compute_language_model_loss"):
        _apply()
    assert layer.forward is forward


def test_a_missing_method_changes_nothing():
    run(_missing_method, 1)


# A whole model


def _sums(model):
    ids = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(1))
    mask, places = torch.ones(1, 1, 8, 8).triu(1).bool(), torch.arange(8).expand(2, 8)
    for _ in range(2):
        loss = model(ids, places, mask, labels=ids)
        loss.mean().backward()
    return loss.detach(), {name: p.main_grad.clone() for name, p in model.named_parameters()}


def _whole_model():
    start()
    shipped = {}
    for tied in (False, True):
        model = gpt(tied=tied)
        shipped[tied] = model.state_dict(), *_sums(data_parallel(model))
    _apply()
    for tied, (state, expected, wanted) in shipped.items():
        model = gpt(tied=tied)
        model.load_state_dict(state)
        model.output_layer.gradient_accumulation_fusion = True
        loss, found = _sums(data_parallel(model))
        head = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
        assert head.grad_added_to_main_grad
        torch.testing.assert_close(loss, expected)
        assert_same(found, wanted)


@pytest.mark.skipif(not REAL, reason="needs megatron-core")
def test_a_megatron_model():
    run(_whole_model, 2, timeout=120)
