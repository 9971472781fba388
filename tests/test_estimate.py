"""Estimates against steps that were measured: small models here, Llama-3.2-1B on an H200."""

import copy

import pytest
import torch
from models import config_of, step

from liger_kernel import _env
from liger_kernel.bench.memory import PeakMemory
from liger_kernel.cli import main

pytest.importorskip("transformers")
from liger_kernel.estimate.fit import largest
from liger_kernel.estimate.step import VARIANTS, empty, estimate

pytestmark = [
    pytest.mark.plain,
    # PEFT 0.21 still asks transformers 5.24 by the old name
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]
AS_SHIPPED, PATCHED, REBUILT, CHECKPOINTED = VARIANTS
BATCH, SEQ = 3, 64
SMALL = {
    "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "vocab_size": 99, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


def _config(family, attention="eager"):
    config = config_of(family, **SMALL)
    config._attn_implementation = attention
    return config


def _measured(config, variant, dtype):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype).train()
    ids = torch.randint(3, 99, (BATCH, SEQ))
    with variant.applied(model):
        step(model, input_ids=ids, labels=ids, use_cache=False)
        model.zero_grad()
        with PeakMemory(torch.device("cpu")) as meter:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return meter.bytes


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
def test_within_ten_percent(family, variant):
    config = _config(family)
    found = estimate(empty(copy.deepcopy(config), torch.float32), variant, BATCH, SEQ, "sgd")
    assert found.peak - found.weights == pytest.approx(
        _measured(config, variant, torch.float32), rel=0.1
    )


@pytest.mark.parametrize("variant", [AS_SHIPPED, REBUILT], ids=lambda v: v.name)
def test_flash_attention_and_bf16(variant):
    config = _config("llama", "sdpa")
    found = estimate(empty(copy.deepcopy(config), torch.bfloat16), variant, BATCH, SEQ, "sgd")
    assert found.peak - found.weights == pytest.approx(
        _measured(config, variant, torch.bfloat16), rel=0.1
    )


# MiB above weights and optimizer state at the peak of a step of 4 x 2048 tokens, see NOTES.md
@pytest.mark.parametrize(("variant", "measured"), [(AS_SHIPPED, 30_516), (PATCHED, 13_341)])
def test_llama_1b_on_an_accelerator(variant, measured):
    from liger_kernel.train.model import find

    model = empty(find("llama-1b").config, torch.bfloat16)
    found = estimate(model, variant, 4, 2048, "adamw", memory=140 << 30)
    assert (found.peak - found.weights) / _env.MIB == pytest.approx(measured, rel=0.03)


def test_parts():
    model = empty(_config("llama"), torch.bfloat16)
    adamw, sgd = (estimate(model, REBUILT, 1, 16, name, 80 << 30) for name in ("adamw", "sgd"))
    assert adamw.gradients == sum(p.nbytes for p in model.parameters())
    assert adamw.weights == adamw.gradients + sum(b.nbytes for b in model.buffers())
    assert (adamw.optimizer, sgd.optimizer) == (2 * adamw.gradients, 0)
    assert adamw.peak - sgd.peak == adamw.optimizer
    assert {"norms", "linear layers", "attention", "head and loss"} <= set(adamw.activations)
    assert "gated activations" not in adamw.activations


def test_adapters():
    pytest.importorskip("peft")
    model = empty(_config("llama", "sdpa"), torch.bfloat16, rank=4)
    shipped, kept, rebuilt = (
        estimate(model, v, 1, 64, "adamw", 80 << 30) for v in (AS_SHIPPED, PATCHED, REBUILT)
    )
    assert kept.gradients == sum(p.nbytes for p in model.parameters() if p.requires_grad)
    # PEFT's fp32 copies of seven inputs a layer
    copies = 3 * 64 * (6 * 64 + 160) * 4
    before, after = (found.activations["linear layers"] for found in (shipped, kept))
    assert before - after == copies
    # outputs of two norms and an activation a layer, but for the first norm's, which needs no gradient
    outputs = 64 * (3 * (2 * 64 + 160) - 64) * 2
    saved = sum(kept.activations.values()) - sum(rebuilt.activations.values())
    assert saved == pytest.approx(outputs, rel=0.01)  # less the copies of the norms' weights


@pytest.mark.parametrize("answer", [0, 1, 3, 7, 40, 1000])
@pytest.mark.parametrize("start", [1, 4, 64])
def test_largest(answer, start):
    calls = []

    def peak(n):
        calls.append(n)
        return 100 + 10 * n + n * n // 1000

    assert largest(peak, peak(answer) + 5, start) == answer
    assert largest(lambda n: n, 1000, 512, unit=256) == 768
    assert len(calls) <= 9


def test_command(capsys, monkeypatch):
    monkeypatch.setattr("liger_kernel.estimate.step.VARIANTS", (REBUILT,))
    options = ["--batch", "2", "--seq", "256", "--gpu-memory", "1G"]
    assert main(["estimate", "llama", *options]) == 0
    out = capsys.readouterr().out
    for part in (
        "small llama: 2 x 256 tokens",
        "patched, rematerialised",
        "peak",
        "largest batch",
    ):
        assert part in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["llama", "--batch", "0"], "must be positive"),
        (["llama", "--gpu-memory", "many"], "--gpu-memory must be"),
        (["no-such-model"], "no model type"),
    ],
)
def test_mistakes(arguments, message, capsys):
    assert main(["estimate", *arguments]) == 2
    assert message in capsys.readouterr().err
