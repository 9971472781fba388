"""DeepSpeed: parameters that are empty outside the forward of the module that owns them (ZeRO-3)."""

import copy
import importlib
import math

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same, mean, mine, run
from models import batch, step, tiny
from tiny_run import EXAMPLES, checkpoint, example, write

import liger_kernel

pytest.importorskip("transformers")
pytestmark = pytest.mark.plain


# The protocol, without DeepSpeed


class _Sharded:
    """What ZeRO-3 does to a model: hooks fill a module's own parameters around its forward and its backward.

    A parameter elsewhere has no elements. Gradients are averaged over the ranks when they are complete.
    """

    def __init__(self, model):
        self.model = model
        self.full = {p: p.detach().clone() for p in model.parameters()}
        self.gradients = {}
        for parameter in self.full:
            parameter.data = parameter.data.new_empty(0)
            parameter.register_post_accumulate_grad_hook(self._reduce)
        for module in model.modules():
            if any(True for _ in module.parameters(recurse=False)):
                module.register_forward_pre_hook(self._gather)
                module.register_forward_hook(self._release)
                module.register_full_backward_pre_hook(self._gather)

    def _gather(self, module, *_):
        for parameter in module.parameters(recurse=False):
            parameter.data = self.full[parameter].clone()

    def _release(self, module, *_):
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.new_empty(0)

    def _reduce(self, parameter):
        self.gradients[parameter] = mean(parameter.grad)
        parameter.grad = None
        parameter.data = parameter.data.new_empty(0)


def _protocol(tied):
    plain = tiny("llama", tie_word_embeddings=tied)
    model = copy.deepcopy(plain)
    whole = batch(rows=2 * dist.get_world_size())
    expected, wanted = step(plain, **whole)
    liger_kernel.patch(model)
    sharded = _Sharded(model)
    for _ in range(2):
        outputs = model(**mine(whole))
        assert outputs.logits is None
        outputs.loss.backward()
        torch.testing.assert_close(mean(outputs.loss), expected.loss.detach())
        assert_same({n: sharded.gradients[p] for n, p in model.named_parameters()}, wanted)
        assert all(p.numel() == 0 for p in model.parameters())


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_parameters_that_exist_around_their_module_only(tied):
    run(_protocol, 2, tied)


# DeepSpeed


def _without_extension():
    """It is built at first use; the processes of one machine do without."""
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None


def _deepspeed(stage, tied):
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    _without_extension()
    plain = tiny("llama", tie_word_embeddings=tied)
    model = copy.deepcopy(plain)
    whole = batch(rows=2 * dist.get_world_size())
    expected, wanted = step(plain, **whole)
    liger_kernel.patch(model)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for _ in range(2):
        outputs = engine(**mine(whole))
        assert outputs.logits is None
        engine.backward(outputs.loss)
        torch.testing.assert_close(mean(outputs.loss), expected.loss.detach())
        found = {n: safe_get_full_grad(p) for n, p in engine.module.named_parameters()}
        assert_same(found, wanted)
        engine.step()


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed(stage, tied, monkeypatch):
    pytest.importorskip("deepspeed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    run(_deepspeed, 2, stage, tied, timeout=120)


def _example(folder):
    import deepspeed

    _without_extension()
    deepspeed.init_distributed("gloo", dist_init_required=False)  # it joins the processes' group
    arguments = [str(folder), str(folder / "text.txt"), "--steps=2", "--seq=16", f"--out={folder}"]
    return example("trainer", [*arguments, f"--deepspeed={EXAMPLES / 'zero3.json'}"])


def test_the_example_and_its_configuration(tmp_path, monkeypatch):
    pytest.importorskip("deepspeed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    write(tmp_path, words=4000)
    checkpoint(tmp_path)
    first, second = run(_example, 2, tmp_path, timeout=120)
    assert first == second
    assert len(first) == 2
    assert all(math.isfinite(loss) for loss in first)
