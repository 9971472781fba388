"""Layers for Hugging Face's `kernels`: bound to modules of other classes, they compute what the classes compute.

The tests that need the package run where it is installed in a version that transformers accepts.
"""

import copy
import inspect
from types import MethodType

import pytest
import torch
from models import assert_same_step, batch, tiny
from torch import nn

import liger_kernel
from liger_kernel import _env
from liger_kernel.transformers import hub
from liger_kernel.transformers.patch.apply import seam_of

pytest.importorskip("transformers")
pytestmark = pytest.mark.plain


@pytest.fixture
def kernels(monkeypatch):
    """The package, with mappings that end with the test."""
    package = pytest.importorskip("kernels", reason="the package kernels is not installed")
    from transformers.utils import is_kernels_available

    if not is_kernels_available():
        pytest.skip(f"transformers does not accept kernels {package.__version__}")
    from transformers.integrations import hub_kernels

    defaults = copy.copy(hub_kernels.get_kernel_mapping_transformers())
    monkeypatch.setattr(
        hub_kernels, "_KERNEL_MAPPING_CACHE", {k: dict(v) for k, v in defaults.items()}
    )
    with package.use_kernel_mapping({}, inherit_mapping=False):
        yield package


def _bound(module, label):
    module.forward = MethodType(hub.Repository(label).load().forward, module)
    return module


def _ours(module):
    return seam_of(module.forward.__func__)


# Without the package


@pytest.mark.parametrize("label", hub.LAYERS)
def test_a_layer_is_what_kernels_accepts(label):
    layer = hub.Repository(label).load()
    assert layer.__init__ is nn.Module.__init__
    assert set(dir(layer)) - set(dir(nn.Module)) == {"can_torch_compile", "has_backward"}
    assert hub.Repository(label) == hub.Repository(label)
    assert hash(hub.Repository(label)) == hash(hub.Repository(label))
    assert str(hub.Repository(label)) == f"liger_kernel, layer {label}"


@pytest.mark.parametrize(
    ("family", "part", "label", "seam"),
    [
        ("llama", "model.norm", "RMSNorm", "rms_norm"),
        ("olmo2", "model.norm", "RMSNorm", "rms_norm"),  # rounds elsewhere
        ("qwen3_next", "model.norm", "RMSNormZeroCentered", "rms_norm"),
        ("llama", "model.layers.0.mlp", "SwiGLUMLP", "gated_mlp"),
        ("gemma2", "model.layers.0.mlp", "GeGLUMLP", "gated_mlp"),
    ],
)
def test_the_class_decides(family, part, label, seam):
    model = tiny(family).bfloat16()
    plain = model.get_submodule(part)
    module = _bound(copy.deepcopy(plain), label)
    x = torch.randn(2, 3, model.config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    assert torch.equal(module(x), plain(x))
    assert _ours(module) == seam  # from now on without a detour
    assert torch.equal(module(x), plain(x))
    (found,), (wanted,) = (torch.autograd.grad(m(x).float().sum(), x) for m in (module, plain))
    torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.05)


def test_gated_norm():
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

    plain = Qwen3NextRMSNormGated(16)
    module = _bound(copy.deepcopy(plain), "RMSNormGated")
    x, gate = torch.randn(2, 5, 16)
    torch.testing.assert_close(module(x, gate), plain(x, gate))
    assert _ours(module) == "gated_norm"


def test_a_class_that_does_not_fit_keeps_its_forward():
    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.variance_epsilon = nn.Parameter(torch.ones(4)), 1e-6

        def forward(self, hidden_states):
            return hidden_states * self.weight * 3

    module = _bound(Norm(), "RMSNorm")
    x = torch.randn(2, 4)
    for _ in range(2):
        assert torch.equal(module(x), x * 3)
    assert module.forward.__func__ is Norm.forward


def test_rotary():
    from transformers.models.llama import modeling_llama

    written = modeling_llama.apply_rotary_pos_emb
    written = written.forward if isinstance(written, nn.Module) else written

    class Function(nn.Module):  # what `kernels` makes of a function
        def forward(self, *args, **named):
            return written(*args, **named)

    signature = inspect.signature(written)
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    Function.forward.__signature__ = signature.replace(
        parameters=[own, *signature.parameters.values()]
    )
    module = _bound(Function(), "rotary_pos_emb")
    q, k = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)
    cos, sin = torch.randn(2, 1, 3, 8)
    wanted = written(q, k, cos, sin)
    torch.testing.assert_close(module(q, k, cos, sin), wanted)
    assert module.forward.__func__ is not hub.LigerRotary.forward
    torch.testing.assert_close(module(q, k, cos, sin), wanted)
    swapped = [t.transpose(1, 2) for t in (q, k)]
    for ours, theirs in zip(module(*swapped, cos, sin, unsqueeze_dim=2), wanted, strict=True):
        torch.testing.assert_close(ours, theirs.transpose(1, 2))


def test_silu_and_mul():
    x = torch.randn(3, 10)
    y = _bound(nn.Identity(), "SiluAndMul")(x)
    torch.testing.assert_close(y, nn.functional.silu(x[:, :5]) * x[:, 5:])


def test_below_a_hook():
    """accelerate keeps a module's forward in `_old_forward` and calls it from its own."""
    plain = tiny("llama").model.norm
    module = _bound(copy.deepcopy(plain), "RMSNorm")
    module._old_forward, calls = module.forward, []

    def hooked(self, x):
        calls.append(x)
        return self._old_forward(x)

    module.forward = MethodType(hooked, module)
    x = torch.randn(3, 32)
    for _ in range(2):
        torch.testing.assert_close(module(x), plain(x))
    assert len(calls) == 2
    assert seam_of(module._old_forward.__func__) == "rms_norm"


def test_mapping(monkeypatch):
    assert hub.mapping("npu")["RMSNorm"] == {"npu": hub.Repository("RMSNorm")}
    monkeypatch.setattr(_env, "infer_device", lambda: "xpu")
    assert list(hub.mapping()["rotary_pos_emb"]) == ["cpu", "xpu"]
    monkeypatch.setattr(_env, "is_hip", lambda: True)
    assert list(hub.mapping()["rotary_pos_emb"]) == ["cpu", "rocm"]
    monkeypatch.setattr(_env, "has_module", lambda name: False)
    with pytest.raises(ImportError, match="pip install kernels"):
        hub.register()


# With the package


@pytest.mark.parametrize("family", ["llama", "olmo2", "qwen3", "mixtral"])
def test_use_kernels(kernels, family):
    """Every labelled norm and the rotary function, in training and, after a switch, in evaluation."""
    hub.register("cpu")
    plain, model = tiny(family).train(), tiny(family).train()
    model.use_kernels = True
    norms = [m for m in model.modules() if getattr(type(m), "kernel_layer_name", "") == "RMSNorm"]
    functions = [f for m in model.modules() for f in getattr(m, "_kernel_funcs", {}).values()]
    assert len(norms) > 2
    assert functions
    for training in (True, False):
        model.train(training)
        plain.train(training)
        assert all(m.forward.__func__ is hub.LigerRMSNorm.forward for m in norms)
        assert all(f.forward.__func__ is hub.LigerRotary.forward for f in functions)
        assert_same_step(plain, model, **batch())
        assert {_ours(m) for m in norms} == {"rms_norm"}
    copied = copy.deepcopy(model)
    torch.testing.assert_close(copied(**batch()).loss, plain(**batch()).loss)


def test_kernelize_with_own_labels(kernels):
    """A label on a class that has none, for the duration of a context."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    plain, model = tiny("llama"), tiny("llama")
    kernels.replace_kernel_forward_from_hub(LlamaMLP, "SwiGLUMLP")
    try:
        with kernels.use_kernel_mapping(hub.mapping("cpu")):
            kernels.kernelize(model, mode=kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE)
    finally:
        del LlamaMLP.kernel_layer_name, LlamaMLP.kernel_condition
    assert_same_step(plain, model, **batch())
    assert _ours(model.model.layers[0].mlp) == "gated_mlp"


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo's, where a graph breaks
def test_compile(kernels):
    """The first calls break the graph; nothing does from then on."""
    hub.register("cpu")
    plain, model = tiny("llama").train(), tiny("llama").train()
    model.use_kernels = True
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(**batch()).loss, plain(**batch()).loss)
    torch._dynamo.reset()
    whole = torch.compile(
        model, backend="eager", fullgraph=True
    )  # modules have had their first call
    torch.testing.assert_close(whole(**batch()).loss, plain(**batch()).loss)


def test_patched_afterwards(kernels):
    hub.register("cpu")
    plain, model = tiny("llama"), tiny("llama")
    model.use_kernels = True
    model(**batch())
    report = liger_kernel.patch(model)
    assert report.count("rms_norm", "already") == 5
    assert report.count("gated_mlp") == 2
    assert_same_step(plain, model, **batch())
    report.undo()
