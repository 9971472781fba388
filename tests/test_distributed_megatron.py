"""Megatron-Core's norms, losses and activation: rebound everywhere, once, with Megatron's numbers on two ranks.

Against megatron-core itself where it is installed; else against a stand-in with the modules and calls that matter here.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same, run
from isolated import run as fresh
from standin_megatron import REAL, B, S, V, gpt, megatron, start
from torch import nn

from liger_kernel.megatron import (
    LigerMegatronCrossEntropy,
    LigerMegatronRMSNorm,
    LigerMegatronSwiGLU,
    apply_liger_kernel_to_megatron,
)
from liger_kernel.ops.swiglu import reference_packed

pytestmark = pytest.mark.plain

EVERYTHING = {"rms_norm": True, "cross_entropy": True, "swiglu": True}


def _config(**changes):
    known = {
        "normalization": "RMSNorm", "layernorm_zero_centered_gamma": False, "persist_layer_norm": False,
        "sequence_parallel": False, "memory_efficient_layer_norm": False,
    }  # fmt: skip
    return SimpleNamespace(**known | changes)


# What is rebound


def _rebinding():
    start()
    block, loss = megatron("transformer.transformer_block"), megatron("tensor_parallel")
    call_site = megatron("models.common.language_module.language_module")
    provider = megatron("models.backends").LocalSpecProvider
    apply_liger_kernel_to_megatron(rms_norm=False)
    assert not hasattr(loss.vocab_parallel_cross_entropy, "__liger_patched__")
    apply_liger_kernel_to_megatron(**EVERYTHING)
    after = [
        provider.layer_norm,
        block.LayerNormImpl,
        megatron("models.gpt.gpt_layer_specs").LNImpl,
        loss.vocab_parallel_cross_entropy,
        megatron("tensor_parallel.cross_entropy").vocab_parallel_cross_entropy,
        call_site.fused_vocab_parallel_cross_entropy,
        megatron("fusions.fused_bias_swiglu").SwiGLUFunction,
    ]
    assert all(new.__liger_patched__ for new in after)
    apply_liger_kernel_to_megatron(**EVERYTHING)
    assert provider.layer_norm is after[0]
    assert megatron("fusions.fused_bias_swiglu").SwiGLUFunction is after[-1]
    assert provider().layer_norm(rms_norm=True) is LigerMegatronRMSNorm
    assert provider().layer_norm(rms_norm=True, for_qk=True) is LigerMegatronRMSNorm
    other = _config(normalization="LayerNorm")
    assert type(provider().layer_norm(rms_norm=False)(other, 8)) is nn.LayerNorm
    assert type(block.LayerNormImpl(config=other, hidden_size=8, eps=1e-6)) is nn.LayerNorm
    ours = block.LayerNormImpl(config=_config(), hidden_size=8, eps=1e-6)
    assert type(ours) is LigerMegatronRMSNorm
    assert ours.variance_epsilon == 1e-6


def test_what_is_rebound():
    run(_rebinding, 1)


def _missing_name():
    start()
    before = megatron("tensor_parallel").vocab_parallel_cross_entropy
    del megatron("fusions.fused_bias_swiglu").SwiGLUFunction
    with pytest.raises(ImportError, match="fused_bias_swiglu has no SwiGLUFunction"):
        apply_liger_kernel_to_megatron(**EVERYTHING)
    assert megatron("tensor_parallel").vocab_parallel_cross_entropy is before


def test_a_missing_name_changes_nothing():
    run(_missing_name, 1)


def test_without_megatron():
    code = """
import sys
sys.modules["megatron"] = None
import liger_kernel.megatron
liger_kernel.megatron.apply_liger_kernel_to_megatron(rms_norm=False)
try:
    liger_kernel.megatron.apply_liger_kernel_to_megatron()
except ImportError as error:
    print(error)
"""
    assert "pip install megatron-core" in fresh(code)


# Numbers


def _losses():
    start()
    rank, world = dist.get_rank(), dist.get_world_size()
    draw = torch.Generator().manual_seed(0)
    whole, dloss = 3 * torch.randn(S, B, V, generator=draw), torch.rand(S, B, generator=draw)
    target = torch.randint(V, (S, B), generator=draw)
    unfused, fused = (
        megatron("tensor_parallel.cross_entropy"),
        megatron("fusions.fused_cross_entropy"),
    )
    names = "vocab_parallel_cross_entropy", "fused_vocab_parallel_cross_entropy"
    calls = [
        lambda z: getattr(unfused, names[0])(z, target),
        lambda z: getattr(unfused, names[0])(z, target, label_smoothing=0.2),
        lambda z: getattr(fused, names[1])(z, target, dist.group.WORLD),
    ]

    def outcomes():
        for call in calls:
            logits = whole.chunk(world, -1)[rank].clone().requires_grad_()
            loss = call(logits.clone())  # Megatron's own overwrites its argument
            yield loss.detach(), torch.autograd.grad(loss, logits, dloss)[0]

    wanted = list(outcomes())
    apply_liger_kernel_to_megatron(rms_norm=False, cross_entropy=True)
    for i, ((loss, found), (expected, gradient)) in enumerate(zip(outcomes(), wanted, strict=True)):
        torch.testing.assert_close(loss, expected)
        if REAL and i == 2:  # Megatron's fused loss rounds its gradient to bf16
            found = found.bfloat16().float()
        torch.testing.assert_close(found, gradient)
    # no label, whatever stands for it: no loss and no gradient, and the logits as they were
    logits = whole.chunk(world, -1)[rank].clone().requires_grad_()
    target[0, 0], target[1, 1] = -1, -100
    loss = calls[0](logits)
    loss.sum().backward()
    assert loss[0, 0] == loss[1, 1] == 0.0
    assert logits.grad[0, 0].count_nonzero() == 0
    torch.testing.assert_close(logits.detach(), whole.chunk(world, -1)[rank])


def test_vocabulary_parallel_losses():
    run(_losses, 2)


def _activations():
    start()
    fusion = megatron("fusions.fused_bias_swiglu")
    x, bias = torch.randn(S, B, 10), torch.randn(10)
    cases = [(x, None), (x[0], None), (x, bias), (x, None, False, True)]

    def outcomes():
        for first, *rest in cases:
            leaf = first.clone().requires_grad_()
            y = fusion.bias_swiglu_impl(leaf, *rest)
            yield y.detach()
            if rest == [None]:
                if not hasattr(fusion.SwiGLUFunction, "__liger_patched__") and not REAL:
                    y = reference_packed(leaf)  # the stand-in has no backward
                yield torch.autograd.grad(y.square().sum(), leaf)[0]

    wanted = list(outcomes())
    apply_liger_kernel_to_megatron(rms_norm=False, swiglu=True)
    torch.testing.assert_close(list(outcomes()), wanted)


def test_activation():
    run(_activations, 1)


# A whole model


def _one_step(model):
    ids = torch.randint(2 * V, (2, 8), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(1, 1, 8, 8).triu(1).bool()
    loss = model(ids, torch.arange(8).expand(2, 8), mask, labels=ids).mean()
    loss.backward()
    for name, parameter in model.named_parameters():  # as Megatron's finalize_model_grads does
        if getattr(parameter, "sequence_parallel", False) or ".q_" in name or ".k_" in name:
            dist.all_reduce(parameter.grad)
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def _gpt():
    start()
    shipped = gpt(qk_layernorm=True)
    expected, wanted = _one_step(shipped)
    apply_liger_kernel_to_megatron(**EVERYTHING)
    for parallel_tokens in (False, True):  # torch's norms refuse the second
        model = gpt(qk_layernorm=True, sequence_parallel=parallel_tokens)
        model.load_state_dict(shipped.state_dict())
        norms = [m for m in model.modules() if isinstance(m, LigerMegatronRMSNorm)]
        assert len(norms) == 9
        loss, found = _one_step(model)
        torch.testing.assert_close(loss, expected)
        assert_same(found, wanted)


@pytest.mark.skipif(not REAL, reason="needs megatron-core")
def test_a_megatron_model():
    run(_gpt, 2, timeout=120)


# The layers on their own


@pytest.mark.parametrize(
    ("config", "argument"), [(False, False), (True, False), (False, True)], ids=str
)
def test_norm(config, argument):
    norm = LigerMegatronRMSNorm(
        _config(layernorm_zero_centered_gamma=config, sequence_parallel=True), 8, 1e-6, zero_centered_gamma=argument
    )  # fmt: skip
    assert norm.weight.sequence_parallel is True
    assert norm.offset == float(config or argument)
    x = torch.randn(3, 2, 8)
    wanted = nn.functional.rms_norm(x, (8,), eps=1e-6)
    torch.testing.assert_close(norm(x), wanted)
    nn.init.normal_(norm.weight)
    norm.reset_parameters()
    torch.testing.assert_close(norm(x), wanted)
    assert "eps=1e-06" in repr(norm)


def test_norm_of_another_kind():
    with pytest.raises(ValueError, match="'LayerNorm'"):
        LigerMegatronRMSNorm(_config(normalization="LayerNorm"), 8)


def test_swiglu_layer():
    x = torch.randn(4, 6)
    torch.testing.assert_close(LigerMegatronSwiGLU()(x), reference_packed(x))
    with pytest.raises(RuntimeError, match="fallback_impl"):
        LigerMegatronSwiGLU()(x, bias=torch.zeros(6))
    asked = []
    layer = LigerMegatronSwiGLU(fallback_impl=lambda *args: asked.append(args) or x)
    assert layer(x, None, False, True) is x
    assert asked == [(x, None, False, True)]
    with pytest.raises(ValueError, match=r"\[N, 2F\] or \[S, B, 2F\]"):
        LigerMegatronSwiGLU()(torch.zeros(6))
    with pytest.raises(ValueError, match="even"):
        LigerMegatronSwiGLU()(torch.zeros(2, 5))


def test_loss_layer():
    loss = LigerMegatronCrossEntropy()
    assert (loss.label_smoothing_formula, loss.label_smoothing_mode) == ("megatron", "partition")
    logits, target = torch.randn(S, B, V), torch.randint(V, (S, B))
    wanted = nn.functional.cross_entropy(logits.view(-1, V), target.view(-1), reduction="none")
    torch.testing.assert_close(loss(logits, target), wanted.view(S, B))
