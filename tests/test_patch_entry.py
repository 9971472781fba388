"""The contract's entry points: signatures, flags, generic entries, classes without a model, the auto class."""

import copy
import inspect
import subprocess
import sys
import warnings

import pytest
import torch
from models import assert_same_step, batch, config_of, step, tiny
from torch import nn

import liger_kernel
import liger_kernel.transformers
from liger_kernel.transformers import functional
from liger_kernel.transformers.model import loss_utils
from liger_kernel.transformers.patch import flags as flag_names
from liger_kernel.transformers.patch import probe
from liger_kernel.transformers.patch.apply import seam_of

pytest.importorskip("transformers")
from liger_kernel.transformers import monkey_patch

pytestmark = pytest.mark.plain

KEYS = [
    "granite",
    "llama",
    "smollm3",
    "llava",
    "llama4_text",
    "llama4",
    "mllama",
    "mllama_text_model",
    "ministral",
    "mistral",
    "nemotron",
    "mixtral",
    "muse_glimmer",
    "pixtral",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gemma3",
    "gemma4_text",
    "gemma4",
    "paligemma",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "gpt_oss",
    "qwen2_vl",
    "qwen2_vl_text",
    "qwen2_5_vl",
    "qwen2_5_vl_text",
    "qwen3_vl",
    "qwen3_vl_text",
    "qwen3_vl_moe",
    "qwen3_vl_moe_text",
    "phi3",
    "olmo2",
    "olmo3",
    "glm4",
    "glm4v",
    "glm4v_moe",
    "internvl",
    "smolvlm",
    "falcon_h1",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_text",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v4",
    "exaone4",
]


def test_table():
    table = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN
    functions = [v for k, v in vars(monkey_patch).items() if k.startswith("apply_liger_kernel_to_")]
    assert sorted(table) == sorted(KEYS)
    assert len(set(table.values())) == 45
    assert set(table.values()) <= set(functions)
    assert all("model" in inspect.signature(f).parameters for f in table.values())


def _defaults(name):
    parameters = inspect.signature(
        getattr(monkey_patch, f"apply_liger_kernel_to_{name}")
    ).parameters
    return {n: p.default for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD}


def test_signatures():
    common = {
        "rope": True,
        "cross_entropy": False,
        "fused_linear_cross_entropy": True,
        "rms_norm": True,
    }
    assert list(_defaults("llama")) == [*common, "swiglu", "model"]
    assert _defaults("llama") == {**common, "swiglu": True, "model": None}
    assert _defaults("gemma2") == {**common, "geglu": True, "model": None}
    assert _defaults("granite")["cross_entropy"]
    assert not _defaults("granite")["fused_linear_cross_entropy"]
    assert list(_defaults("llama4"))[-2:] == ["model", "layer_norm"]
    assert list(_defaults("nemotron")) == [
        "relu_squared",
        "cross_entropy",
        "fused_linear_cross_entropy",
        "model",
    ]
    assert [_defaults(n)["rope"] for n in ("glm4", "qwen3_next", "deepseek_v3", "gemma4")] == [
        False
    ] * 4
    assert [_defaults(n)["swiglu"] for n in ("gpt_oss", "qwen3_vl", "deepseek_v4")] == [False] * 3
    assert list(_defaults("mllama"))[3:] == ["layer_norm", "rms_norm", "swiglu", "model"]


def test_every_family_with_one_loss_has_the_other():
    for name in KEYS:
        parameters = inspect.signature(monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN[name]).parameters
        assert ("fused_linear_cross_entropy" in parameters) == ("cross_entropy" in parameters)


def test_names_of_the_package():
    for name in (
        "apply_liger_kernel_to_llama",
        "_apply_liger_kernel",
        "_apply_liger_kernel_to_instance",
    ):
        assert getattr(liger_kernel.transformers, name) is getattr(monkey_patch, name)
    assert liger_kernel.transformers.apply_liger_kernel_to_starcoder2.__name__.endswith(
        "starcoder2"
    )
    assert liger_kernel.transformers.apply_liger_kernel_to_qwen3_5_text is not None
    with pytest.raises(AttributeError):
        liger_kernel.transformers.apply_liger_kernel_to_nothing  # noqa: B018


def test_unknown_flags():
    with pytest.raises(
        TypeError, match=r"apply_liger_kernel_to_llama.*'rms_nrom'\. Did you mean 'rms_norm'"
    ):
        monkey_patch.apply_liger_kernel_to_llama(rms_nrom=False)
    with pytest.raises(TypeError, match="Known: rope, "):
        monkey_patch.apply_liger_kernel_to_llama(zzz=True)
    with pytest.raises(TypeError, match="'swiglu'"):
        monkey_patch.apply_liger_kernel_to_gemma(swiglu=True)
    with pytest.raises(TypeError, match=r"patch\(\).*Did you mean 'rope'"):
        liger_kernel.patch(nn.Identity(), ropee=True)


def test_generic_entry_never_raises():
    apply = monkey_patch._apply_liger_kernel_to_instance
    model = tiny("gemma")
    report = apply(model=model, swiglu=True, geglu=None, rope=False)  # not gemma's; off; off
    assert {row.seam for row in report.rows} == {"rms_norm", "head"}
    report.undo()
    flag_names.warn_unknown.cache_clear()
    with pytest.warns(UserWarning, match=r"'rms_nrom' is ignored. Did you mean 'rms_norm'"):
        apply(model=model, rms_nrom=True).undo()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apply(model=model, rms_nrom=True).undo()
        assert apply(model=nn.Linear(2, 2)) is None
        assert monkey_patch._apply_liger_kernel("") is None
        assert monkey_patch._apply_liger_kernel("no such type") is None


def test_generic_entry_survives_a_failure(monkeypatch, caplog):
    model = tiny("llama")
    monkeypatch.setattr(type(model), "get_output_embeddings", lambda _: 1 / 0)
    assert monkey_patch._apply_liger_kernel_to_instance(model=model) is None
    assert "left as it was" in caplog.text
    assert not any("forward" in vars(m) for m in model.modules())


def test_remote_code_is_patched_by_structure():
    """A model type nobody has registered."""
    model = tiny("llama")
    model.config.model_type = "my_llama"
    report = monkey_patch._apply_liger_kernel_to_instance(model=model)
    assert report.count("rms_norm") == 5
    report.undo()


def test_published_snippet():
    """Both losses on: the linear one serves calls with labels."""
    report = monkey_patch.apply_liger_kernel_to_llama(
        rope=True, rms_norm=True, swiglu=True, cross_entropy=True, fused_linear_cross_entropy=True
    )
    model = tiny("llama")
    assert step(model, **batch())[0].logits is None
    report.undo()
    report.undo()
    assert step(model, **batch())[0].logits is not None


def test_without_the_linear_loss_head_and_forward_are_untouched():
    model = tiny("llama")
    with liger_kernel.patched(model, fused_linear_cross_entropy=False):
        assert "forward" not in vars(model)
        assert type(model.lm_head) is nn.Linear
        assert step(model, **batch())[0].logits is not None


def test_granite_defaults_and_its_linear_loss():
    plain, model = tiny("granite"), tiny("granite")
    report = monkey_patch.apply_liger_kernel_to_granite(model=model)
    assert report.count("cross_entropy") == 1
    assert assert_same_step(plain, model, **batch()).logits is not None
    report.undo()
    report = monkey_patch.apply_liger_kernel_to_granite(
        cross_entropy=False, fused_linear_cross_entropy=True, model=model
    )
    assert assert_same_step(plain, model, **batch()).logits is None
    report.undo()


# Classes


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3", "qwen3"])
@pytest.mark.parametrize("before", [True, False])
def test_classes(family, before):
    """Acts on models made before and after, keeps names and state dicts, and can be undone."""
    plain = tiny(family)
    expected, gradients = step(plain, **batch())
    names = {name: type(m).__name__ for name, m in plain.named_modules()}
    state = {name: t.clone() for name, t in plain.state_dict().items()}
    if before:
        report = monkey_patch._apply_liger_kernel(family)
        model = tiny(family)
    else:
        model = copy.deepcopy(plain)
        report = monkey_patch._apply_liger_kernel(family)
    assert seam_of(model.model.norm.forward) == "rms_norm"
    assert seam_of(model.model.layers[0].mlp.forward) == "gated_mlp"
    assert {name: type(m).__name__ for name, m in model.named_modules()} == names
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    outputs, found = step(model, **batch())
    assert outputs.logits is None
    torch.testing.assert_close(outputs.loss, expected.loss, rtol=1e-5, atol=0.0)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-5)
    assert {row.status for row in monkey_patch._apply_liger_kernel(family).rows} == {"already"}
    again = liger_kernel.patch(model, rematerialise=False)
    assert {row.status for row in again.rows} == {"already"}
    report.undo()
    assert seam_of(type(model.model.norm).forward) is None
    assert step(model, **batch())[0].logits is not None


def test_cross_entropy_of_a_class():
    report = monkey_patch.apply_liger_kernel_to_llama(
        cross_entropy=True, fused_linear_cross_entropy=False
    )
    plain_function = nn.functional.cross_entropy
    model = tiny("llama")
    assert seam_of(model.loss_function) == "cross_entropy"
    model.loss_function = max  # the official setter still works
    assert model.loss_function is max
    assert nn.functional.cross_entropy is plain_function
    report.undo()
    del model._loss_function
    assert model.loss_function.__name__ == "ForCausalLMLoss"


def test_another_activation_of_a_patched_class():
    report = monkey_patch._apply_liger_kernel("llama")
    model = tiny("llama", hidden_act="relu")
    outputs, _ = step(model, **batch())
    report.undo()
    torch.testing.assert_close(outputs.loss, step(model, **batch())[0].loss)


# What a forward accepts


def test_skip_logits():
    model = tiny("llama")
    with liger_kernel.patched(model):
        ids = batch()["input_ids"]
        with pytest.raises(ValueError, match="needs labels"):
            model(input_ids=ids, skip_logits=True)
        assert model(**batch(), skip_logits=False).logits is not None
        assert model(ids, labels=batch()["labels"]).logits is None
        assert model(ids, None, None, None, None, batch()["labels"]).logits is None  # by position
        assert model.eval()(**batch()).logits is not None
        assert model(**batch(), skip_logits=True).logits is None
        as_tuple = model(**batch(), skip_logits=True, return_dict=False)
        assert as_tuple[1] is None
        torch.testing.assert_close(as_tuple[0], model(**batch()).loss)


def test_shift_labels_alone():
    """Pre-shifted labels without labels: what sequence parallel trainers pass."""
    model = tiny("llama")
    inputs = batch()
    labels = inputs["labels"]
    shifted = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], 1)
    with liger_kernel.patched(model):
        alone = model(input_ids=inputs["input_ids"], shift_labels=shifted)
        torch.testing.assert_close(alone.loss, model(**inputs).loss)


@pytest.mark.parametrize("training", [True, False])
def test_extra_fields(training):
    model = tiny("llama").train(training)
    inputs = batch()
    logits = model(input_ids=inputs["input_ids"]).logits[:, :-1]
    target = inputs["labels"][:, 1:]
    valid = target != -100
    accuracy = (logits.argmax(-1) == target)[valid].float().mean()
    with liger_kernel.patched(model):
        outputs = model(**inputs, return_token_accuracy=True, return_predicted_tokens=True)
        assert (outputs.logits is None) == training
        torch.testing.assert_close(outputs.token_accuracy, accuracy)
        assert torch.equal(
            outputs.predicted_tokens.view(2, -1)[:, :-1][valid], logits.argmax(-1)[valid]
        )
        assert "token_accuracy" in outputs
        assert model(**inputs, use_token_scaling=True).loss < outputs.loss
        rebuilt = type(outputs)(**dict(outputs.items()))
        torch.testing.assert_close(rebuilt.token_accuracy, accuracy)


def test_output_class_has_a_name():
    import pickle

    from transformers.modeling_outputs import CausalLMOutputWithPast

    from liger_kernel.transformers.model import output_classes

    cls = output_classes.LigerCausalLMOutputWithPast
    assert issubclass(cls, CausalLMOutputWithPast)
    assert cls is output_classes.extended(CausalLMOutputWithPast)
    assert output_classes.extended(cls) is cls
    again = pickle.loads(pickle.dumps(cls(loss=torch.ones(()), token_accuracy=torch.zeros(()))))
    assert type(again) is cls
    with pytest.raises(AttributeError):
        output_classes.LigerNoSuchOutput  # noqa: B018


def test_signature_stays_visible():
    model = tiny("llama")
    before = inspect.signature(model.forward), inspect.signature(type(model).forward)
    with liger_kernel.patched(model):
        assert (inspect.signature(model.forward), inspect.signature(type(model).forward)) == before


# Other entry points


def test_auto_class(tmp_path):
    from transformers import AutoModelForCausalLM

    from liger_kernel.transformers import AutoLigerKernelForCausalLM
    from liger_kernel.transformers.auto_model import MODEL_TYPE_TO_APPLY_LIGER_FN

    assert issubclass(AutoLigerKernelForCausalLM, AutoModelForCausalLM)
    assert MODEL_TYPE_TO_APPLY_LIGER_FN is monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN
    tiny("llama").save_pretrained(tmp_path)
    model = AutoLigerKernelForCausalLM.from_pretrained(tmp_path, rope=False, dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert seam_of(model.forward) == "head"
    made = AutoLigerKernelForCausalLM.from_config(
        config_of("llama"), fused_linear_cross_entropy=False
    )
    assert seam_of(made.forward) is None
    assert seam_of(made.model.norm.forward) == "rms_norm"


def test_loss_utils():
    torch.manual_seed(0)
    hidden = torch.randn(4, 2, 8).transpose(0, 1)  # not contiguous
    weight, labels = torch.randn(13, 8), torch.randint(0, 13, (2, 4))
    logits = (hidden @ weight.T)[:, :-1].reshape(-1, 13)
    target = labels[:, 1:].reshape(-1)
    call = {"hidden_states": hidden, "lm_head_weight": weight, "labels": labels, "hidden_size": 8}
    loss = loss_utils.LigerForCausalLMLoss(**call, cu_seq_lens_q=None, max_length_q=3)
    torch.testing.assert_close(loss, nn.functional.cross_entropy(logits, target))
    summed = loss_utils.LigerForCausalLMLoss(**call, num_items_in_batch=torch.tensor(5))
    torch.testing.assert_close(
        summed, nn.functional.cross_entropy(logits, target, reduction="sum") / 5
    )
    everything = loss_utils.LigerForCausalLMLoss(**call, return_token_accuracy=True)
    unpacked = loss_utils.unpack_cross_entropy_result(everything)
    torch.testing.assert_close(unpacked[0], loss)
    torch.testing.assert_close(unpacked[2], (logits.argmax(-1) == target).float().mean())
    assert loss_utils.unpack_cross_entropy_result(loss) == (loss, None, None, None)
    shifted = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    torch.testing.assert_close(
        loss_utils.LigerForCausalLMLoss(**{**call, "labels": None}, shift_labels=shifted), loss
    )
    with pytest.raises(ValueError, match="labels or shift_labels"):
        loss_utils.LigerForCausalLMLoss(**{**call, "labels": None})


def test_a_framework_may_replace_the_functional_entry():
    """As axolotl does to switch token scaling on."""
    model, seen = tiny("llama"), []
    original = functional.liger_fused_linear_cross_entropy

    def replacement(*args, **kwargs):
        seen.append(True)
        return original(*args, use_token_scaling=True, **kwargs)

    with liger_kernel.patched(model):
        plain = model(**batch()).loss
        functional.liger_fused_linear_cross_entropy = replacement
        try:
            scaled = model(**batch()).loss
        finally:
            functional.liger_fused_linear_cross_entropy = original
    assert seen
    assert scaled < plain


def test_a_framework_may_replace_torchs_cross_entropy():
    """As axolotl does, for the whole process."""
    plain, model = tiny("llama"), tiny("llama")
    original = nn.functional.cross_entropy
    with liger_kernel.patched(model):
        expected, _ = step(plain, **batch())
        nn.functional.cross_entropy = functional.liger_cross_entropy
        try:
            outputs, _ = step(model, **batch())
        finally:
            nn.functional.cross_entropy = original
    torch.testing.assert_close(outputs.loss, expected.loss)
    assert outputs.logits is None


def test_importing_patches_nothing():
    code = """
import sys
import liger_kernel.transformers.patch, liger_kernel.transformers.monkey_patch, liger_kernel.transformers.auto_model
import liger_kernel.transformers.fsdp, liger_kernel.transformers.model.loss_utils
bad = {"transformers", "peft", "trl", "accelerate"} & set(sys.modules)
assert not bad, bad
import torch
assert not torch.cuda.is_initialized()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_patching_leaves_the_random_state_alone(family, monkeypatch):
    """A probe builds modules, which draw weights: the order of the caller's data must not hang on that."""
    monkeypatch.setattr(probe, "fingerprint", lambda module: object())  # nothing is known yet
    model = tiny(family)
    before = torch.get_rng_state()
    report = liger_kernel.patch(model)
    after = torch.get_rng_state()
    report.undo()
    assert report.count("rms_norm")
    assert torch.equal(after, before)
