"""QLoRA with the real packages: on layers of bitsandbytes or torchao a patched model takes the plain one's steps."""

import copy

import pytest
import torch
from models import assert_same_step, batch, tiny
from torch import nn

import liger_kernel

pytestmark = [pytest.mark.plain, pytest.mark.filterwarnings("ignore")]
peft = pytest.importorskip("peft")


def _bitsandbytes(bits):
    library = pytest.importorskip("bitsandbytes")

    def quantised(linear):
        sizes = (linear.in_features, linear.out_features)
        if bits == 4:
            layer = library.nn.Linear4bit(*sizes, bias=False, compute_dtype=torch.float32)
            layer.weight = library.nn.Params4bit(linear.weight.data, requires_grad=False)
        else:
            layer = library.nn.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False)
            layer.weight = library.nn.Int8Params(linear.weight.data, requires_grad=False)
        return layer.to("cpu")

    return quantised


def _torchao():
    quantization = pytest.importorskip("torchao.quantization")

    def quantised(linear):
        layer = nn.Linear(linear.in_features, linear.out_features, bias=False)
        layer.weight = nn.Parameter(linear.weight.data, requires_grad=False)
        quantization.quantize_(layer, quantization.Int8WeightOnlyConfig())
        return layer

    return quantised


KINDS = {"bitsandbytes, 4 bits": (_bitsandbytes, 4), "torchao, int8": (_torchao,)}


def _model(kind, head):
    make, *arguments = KINDS[kind]
    quantised = make(*arguments)
    model = tiny("llama", hidden_size=64, intermediate_size=64, vocab_size=128)
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is nn.Linear and (head or name != "lm_head"):
                setattr(parent, name, quantised(layer))
    targets = "all-linear" if not head else ["q_proj", "down_proj", "lm_head"]
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(model, config).train()


@pytest.mark.parametrize(
    "head", [False, True], ids=["plain head", "quantised head with an adapter"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_training_step(kind, head):
    torch.manual_seed(0)
    plain = _model(kind, head)
    patched = copy.deepcopy(plain)
    with liger_kernel.patched(patched) as report:
        assert report.count("head") == 1
        assert report.count("rms_norm") == 5
        outputs = assert_same_step(plain, patched, 1e-4, **batch())
        assert outputs.logits is None
