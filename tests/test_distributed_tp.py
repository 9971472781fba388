"""Hugging Face's tensor parallelism (`tp_plan="auto"`), patched: the loss and gradients of the model as shipped."""

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same, full, run
from models import batch, step, tiny
from torch.distributed.tensor import DTensor

import liger_kernel
from liger_kernel.transformers.monkey_patch import _apply_liger_kernel

pytest.importorskip("transformers")
pytestmark = [pytest.mark.plain, pytest.mark.filterwarnings("ignore")]


def _load(folder, **options):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, tp_plan="auto", attn_implementation="eager", **options
    ).train()


def _gradients(found):
    return {name: full(gradient) for name, gradient in found.items()}


def _split_heads(folder, by_class, family):
    plain = tiny(family, vocab_size=100)  # not every version of transformers splits an odd one
    if dist.get_rank() == 0:
        plain.save_pretrained(folder)
    dist.barrier()
    expected, wanted = step(plain, **batch())
    shipped_outputs, shipped = step(_load(folder), **batch())
    if by_class:
        _apply_liger_kernel(family)
    model = _load(folder)
    if not by_class:
        report = liger_kernel.patch(model)
        assert report.count("gated_mlp") == 2
    assert isinstance(model.lm_head.weight, DTensor)
    outputs, found = step(model, **batch())
    assert outputs.logits is None
    torch.testing.assert_close(shipped_outputs.loss, expected.loss)
    torch.testing.assert_close(outputs.loss, expected.loss)
    assert_same(_gradients(found), _gradients(shipped))
    assert_same(_gradients(found), wanted)
    with torch.no_grad():
        whole = model.eval()(input_ids=batch()["input_ids"]).logits
    torch.testing.assert_close(full(whole), plain.eval()(input_ids=batch()["input_ids"]).logits)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("by_class", [False, True], ids=["instance", "class"])
def test_tensor_parallel(tmp_path, by_class, family):
    """qwen3 has norms of single heads, whose weights get part of their gradient on each rank."""
    run(_split_heads, 2, tmp_path, by_class, family)
