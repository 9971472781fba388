"""The names, signatures and import paths that other projects rely on.

`contract.txt` lists one callable a line. Ours must accept every call that theirs accepts: the same
names in the same order with the same defaults; what we add comes after, with a default.
"""

import ast
import importlib
import importlib.util
import inspect
from pathlib import Path

import pytest
import torch
from isolated import run

import liger_kernel
from liger_kernel import _aliases, _env, functional
from liger_kernel.ops import utils as ops_utils
from liger_kernel.transformers import functional as liger_functional
from liger_kernel.transformers import norm

pytestmark = pytest.mark.plain

CONTRACT = (Path(__file__).parent / "contract.txt").read_text().splitlines()

# module: names that released versions of transformers, TRL, axolotl, LLaMA-Factory, verl,
# ms-swift, oumi, nemo-automodel and OpenRLHF import
IMPORTED = {
    "liger_kernel.chunked_loss": (
        "LigerFusedLinearDPOLoss LigerFusedLinearGRPOLoss LigerFusedLinearKTOLoss"
    ),
    "liger_kernel.ops": "LigerFusedLinearScaledCrossEntropyFunction",
    "liger_kernel.ops.backends.registry": "IMPL_REGISTRY",
    "liger_kernel.ops.fused_linear_cross_entropy": (
        "fused_linear_cross_entropy_forward fused_linear_cross_entropy_backward"
    ),
    "liger_kernel.ops.utils": (
        "calculate_settings compare_version ensure_contiguous torch_to_triton_dtype"
    ),
    "liger_kernel.transformers": (
        "AutoLigerKernelForCausalLM _apply_liger_kernel _apply_liger_kernel_to_instance "
        "apply_liger_kernel_to_gemma apply_liger_kernel_to_gemma2 apply_liger_kernel_to_gemma3_text "
        "apply_liger_kernel_to_granite apply_liger_kernel_to_llama apply_liger_kernel_to_mistral "
        "apply_liger_kernel_to_mixtral apply_liger_kernel_to_olmo2 apply_liger_kernel_to_phi3 "
        "apply_liger_kernel_to_qwen2 apply_liger_kernel_to_qwen3"
    ),
    "liger_kernel.transformers.auto_model": (
        "AutoLigerKernelForCausalLM MODEL_TYPE_TO_APPLY_LIGER_FN _apply_liger_kernel"
    ),
    "liger_kernel.transformers.cross_entropy": "LigerCrossEntropyLoss LigerCrossEntropyFunction",
    "liger_kernel.transformers.fsdp": "_FSDPForwardRedirection",
    "liger_kernel.transformers.functional": "liger_cross_entropy liger_fused_linear_cross_entropy",
    "liger_kernel.transformers.fused_linear_cross_entropy": (
        "LigerFusedLinearCrossEntropyLoss LigerFusedLinearCrossEntropyFunction CrossEntropyOutput"
    ),
    "liger_kernel.transformers.geglu": "LigerGEGLUMLP",
    "liger_kernel.transformers.model.loss_utils": "LigerForCausalLMLoss",
    "liger_kernel.transformers.monkey_patch": (
        "MODEL_TYPE_TO_APPLY_LIGER_FN _apply_liger_kernel _apply_liger_kernel_to_instance"
    ),
    "liger_kernel.transformers.rms_norm": (
        "LigerRMSNorm LigerRMSNormForGemma2 LigerRMSNormForGemma4 LigerRMSNormFunction"
    ),
    "liger_kernel.transformers.rope": "liger_rotary_pos_emb",
    "liger_kernel.transformers.swiglu": "LigerSwiGLUMLP LigerSiLUMulFunction",
    "liger_kernel.transformers.trainer_integration": "_apply_liger_kernel",
    "liger_kernel.utils": "PEFT_AVAILABLE is_npu_available infer_device",
}


def _find(path):
    """The object at a dotted path, whose first part is a module of unknown depth."""
    parts = path.split(".")
    found = importlib.import_module(parts[0])
    for n, part in enumerate(parts[1:], start=2):
        if not hasattr(found, part):
            importlib.import_module(".".join(parts[:n]))
        found = getattr(found, part)
    return found


def _parameters(text):
    arguments = ast.parse(f"def f({text}): ...").body[0].args
    positional = [a.arg for a in arguments.args]
    defaults = dict(zip(reversed(positional), reversed(arguments.defaults), strict=False))
    defaults |= dict(zip((a.arg for a in arguments.kwonlyargs), arguments.kw_defaults, strict=True))
    values = {name: ast.literal_eval(node) for name, node in defaults.items()}
    return positional, [a.arg for a in arguments.kwonlyargs], values, arguments.kwarg is not None


@pytest.mark.parametrize("line", CONTRACT, ids=lambda line: line.partition("(")[0])
def test_signature(line):
    path, _, rest = line.partition("(")
    positional, keyword, defaults, rest_keywords = _parameters(rest.removesuffix(")"))
    ours = inspect.signature(_find(path)).parameters
    by_kind = [p for p in ours.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if path.endswith(".apply"):  # called by position only, as torch's is: names are ours
        assert len(by_kind) >= len(positional)
        renamed = dict(zip(positional, (p.name for p in by_kind), strict=False))
        positional = list(renamed.values())
        defaults = {renamed[name]: value for name, value in defaults.items()}
    assert [p.name for p in by_kind[: len(positional)]] == positional
    assert all(p.default is not p.empty for p in by_kind[len(positional) :])
    assert set(keyword) <= set(ours)
    assert {name: ours[name].default for name in defaults} == defaults
    if rest_keywords:
        assert any(p.kind is p.VAR_KEYWORD for p in ours.values())


@pytest.mark.parametrize("module", IMPORTED)
def test_imports_of_others(module):
    found = importlib.import_module(module)
    for name in IMPORTED[module].split():
        assert hasattr(found, name), f"{module}.{name}"


# Root -------------------------------------------------------------------------------------------


def test_root():
    assert liger_kernel.__version__.startswith("0.8.4+")
    assert liger_kernel.available_backends is liger_kernel.available_impls
    assert liger_kernel.get_backend is liger_kernel.get_impl
    assert liger_kernel.set_backend is liger_kernel.set_impl
    assert liger_kernel.functional is functional
    assert callable(liger_kernel.patch)
    assert callable(liger_kernel.patched)
    assert set(liger_kernel.__all__) <= set(dir(liger_kernel))
    with pytest.raises(AttributeError, match="no attribute 'pach'"):
        liger_kernel.pach  # noqa: B018


def test_choice_of_implementation(fresh_impl):
    assert liger_kernel.get_impl() is None
    liger_kernel.set_impl("nvidia-triton")
    assert liger_kernel.get_impl() == "triton"
    liger_kernel.set_impl(None)
    assert liger_kernel.get_impl() is None
    with pytest.raises(ValueError, match="got 'tirton'"):
        liger_kernel.set_impl("tirton")
    assert liger_kernel.available_impls("rms_norm", "cpu")[-1] == "torch"
    assert liger_kernel.available_impls("rms_norm", "meta") == ["torch"]
    with pytest.raises(ValueError, match="'rms_nrom'"):
        liger_kernel.available_impls("rms_nrom")


def test_import_is_light():
    code = """
import os, sys, torch
before, modules = dict(os.environ), set(sys.modules)
import liger_kernel
assert not {"triton", "transformers", "liger_kernel.ops"} & (set(sys.modules) - modules)
import liger_kernel.ops, liger_kernel.functional, liger_kernel.transformers
import liger_kernel.transformers.functional
assert "transformers" not in sys.modules
assert dict(os.environ) == before
assert not torch.cuda.is_initialized()
"""
    assert run(code) == ""


def test_torch_alone():
    code = """
import importlib, pkgutil, sys
for name in ("triton", "transformers", "peft", "trl"):
    sys.modules[name] = None
import torch, liger_kernel
from liger_kernel import _aliases
need_more = ("liger_kernel.transformers.monkey_patch", "liger_kernel.transformers.auto_model",
             "liger_kernel.transformers.patch", "liger_kernel.transformers.trainer_integration",
             "liger_kernel.train", "liger_kernel.__main__")
names = [m.name for m in pkgutil.walk_packages(liger_kernel.__path__, "liger_kernel.", onerror=print)]
names += [f"liger_kernel.{path}" for path in _aliases.TABLE]
for name in names:
    if not name.startswith(need_more):
        importlib.import_module(name)
layer = liger_kernel.transformers.LigerRMSNorm(8)
assert layer(torch.ones(2, 8)).shape == (2, 8)
for name in ("apply_liger_kernel_to_llama", "_apply_liger_kernel", "AutoLigerKernelForCausalLM"):
    try:
        getattr(liger_kernel.transformers, name)
    except ImportError as error:
        assert "pip install transformers" in str(error), error
    else:
        raise AssertionError(name)
"""
    assert run(code) == ""


def test_env_report():
    assert "liger_kernel" in run("import liger_kernel.env_report as e; e.print_env_report()")


# Lazy names and alias modules -----------------------------------------------------------------------


def test_transformers_names():
    from liger_kernel import transformers

    for name in transformers.__all__:
        assert getattr(transformers, name) is not None
        assert name in dir(transformers)
    assert transformers.rms_norm.LigerRMSNorm is transformers.LigerRMSNorm
    with pytest.raises(AttributeError, match="LigerRMSNrom"):
        transformers.LigerRMSNrom  # noqa: B018
    with pytest.raises(ImportError):
        from liger_kernel.transformers import LigerRMSNrom  # noqa: F401


@pytest.mark.parametrize("path", _aliases.TABLE)
def test_alias(path, monkeypatch):
    spec = importlib.util.find_spec(f"liger_kernel.{path}")
    assert spec is not None
    module = importlib.import_module(f"liger_kernel.{path}")
    for source, names in _aliases.TABLE[path].items():
        real = importlib.import_module(f"liger_kernel.{source}")
        for name in names.split():
            assert getattr(module, name) is getattr(real, name)
            monkeypatch.setattr(f"liger_kernel.{path}.{name}", None)
            assert getattr(module, name) is None
            monkeypatch.undo()


def test_unknown_paths():
    assert importlib.util.find_spec("liger_kernel.transformers.rms_nrom") is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("liger_kernel.transformers.rms_nrom")
    with pytest.raises(ImportError):
        from liger_kernel.transformers.rms_norm import LigerRMSNrom  # noqa: F401


def test_ops_names():
    from liger_kernel import ops

    for name in ops._HOME:
        assert callable(getattr(ops, name))
    with pytest.raises(AttributeError, match="nothing"):
        ops.nothing  # noqa: B018


# Functions ------------------------------------------------------------------------------------------


def test_functional_front_door(monkeypatch):
    torch.manual_seed(0)
    x, w = torch.randn(2, 3, 8), torch.randn(8)
    y = functional.rms_norm(x, w, offset=1.0, casting_mode="gemma")
    expected = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + w)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(liger_functional.liger_rms_norm(x, w, 1e-6, 1.0, "gemma"), y)
    silu = torch.nn.functional.silu
    torch.testing.assert_close(functional.swiglu(x, x), silu(x) * x)
    torch.testing.assert_close(functional.swiglu(x, x, 2.0, 3.0), 3 * silu(2 * x) * x)
    gelu = torch.nn.functional.gelu(x, approximate="tanh") * x
    torch.testing.assert_close(functional.geglu(x, x), gelu)
    torch.testing.assert_close(liger_functional.liger_geglu(x, x), gelu)
    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 1, 3, 8)
    cos, sin = torch.randn(1, 3, 8), torch.randn(1, 3, 8)
    half = torch.cat([-q[..., 4:], q[..., :4]], -1)
    torch.testing.assert_close(functional.rope(q, k, cos, sin)[0], q * cos + half * sin)
    torch.testing.assert_close(
        liger_functional.liger_rope(q, k, cos, sin, None, 1)[1], functional.rope(q, k, cos, sin)[1]
    )


def test_losses_return_what_was_asked():
    torch.manual_seed(0)
    h, w, target = torch.randn(5, 8), torch.randn(11, 8), torch.tensor([1, 2, -100, 4, 10])
    logits = h @ w.T
    expected = torch.nn.functional.cross_entropy(logits, target)
    for loss, z_loss, accuracy, predicted in (
        functional.cross_entropy(logits, target),
        functional.fused_linear_cross_entropy(h, w, target),
    ):
        torch.testing.assert_close(loss, expected)
        assert z_loss is accuracy is predicted is None
    everything = functional.fused_linear_cross_entropy(
        h, w, target, lse_square_scale=0.1, return_z_loss=True, return_predicted_tokens=True
    )
    assert everything[1] is not None
    assert everything[2] is None
    assert everything[3].tolist()[2] == -1
    assert isinstance(liger_functional.liger_cross_entropy(logits, target), torch.Tensor)
    out = liger_functional.liger_cross_entropy(logits, target, return_token_accuracy=True)
    assert isinstance(out, liger_functional.CrossEntropyOutput)
    assert out.z_loss is None
    torch.testing.assert_close(
        liger_functional.liger_fused_linear_cross_entropy(h, w, target, temperature=2.0),
        torch.nn.functional.cross_entropy(logits / 2, target),
    )


def test_keywords_that_choose():
    x, w = torch.randn(2, 8), torch.randn(8)
    functional.rms_norm(x, w, impl="torch")
    functional.rms_norm(x, w, backend="torch")
    functional.rms_norm(x, w, impl="torch", backend="torch")
    with pytest.raises(ValueError, match="older spelling"):
        functional.rms_norm(x, w, impl="torch", backend="triton")
    with pytest.warns(UserWarning, match="mode='standard' is ignored"):
        functional.rms_norm(x, w, mode="standard")
    functional.rms_norm(x, w, mode="standard")  # warned once


@pytest.mark.parametrize("value", [0, -1, True, 1.0, "1"])
def test_chunk_mem_const_is_checked(value):
    h, w = torch.randn(2, 8), torch.randn(4, 8)
    with pytest.raises(ValueError, match="chunk_mem_const"):
        liger_functional.liger_fused_linear_cross_entropy(
            h, w, torch.tensor([0, 1]), chunk_mem_const=value
        )


def test_cross_entropy_meets_a_promise():
    class Promise:
        def __liger_cross_entropy__(self, target, weight, **options):
            self.seen = target, weight, options
            return liger_functional.CrossEntropyOutput(torch.tensor(7.0))

    promise, target = Promise(), torch.tensor([1])
    loss = liger_functional.liger_cross_entropy(promise, target, ignore_index=3, reduction="sum")
    assert loss.item() == 7.0
    assert promise.seen[:2] == (target, None)
    assert promise.seen[2]["ignore_index"] == 3
    assert promise.seen[2]["reduction"] == "sum"


def test_cross_entropy_compiles():
    logits, target = torch.randn(4, 7), torch.tensor([0, 1, 2, -100])
    compiled = torch.compile(
        liger_functional.liger_cross_entropy, fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(
        compiled(logits, target), liger_functional.liger_cross_entropy(logits, target)
    )


# Layers -----------------------------------------------------------------------------------------------


def test_rms_norm_layer():
    layer = norm.LigerRMSNorm(hidden_size=8)
    assert layer(torch.randn(2, 5, 8)).shape == (2, 5, 8)
    assert list(layer.state_dict()) == ["weight"]
    assert (layer.variance_epsilon, layer.offset, layer.casting_mode) == (1e-6, 0.0, "llama")
    assert (layer.in_place, layer.row_mode) == (True, None)
    assert repr(layer) == "LigerRMSNorm((8,), eps=1e-06, offset=0.0, casting_mode='llama')"
    assert norm.LigerRMSNorm(8, elementwise_affine=False).weight is None
    with pytest.raises(ValueError, match="init_fn must be one of 'ones', 'zeros'; got 'noughts'"):
        norm.LigerRMSNorm(8, init_fn="noughts")


@pytest.mark.parametrize(
    "name", _aliases.TABLE["transformers.rms_norm"]["transformers.norm"].split()
)
def test_rms_norm_variants(name):
    torch.manual_seed(0)
    layer = getattr(norm, name)(8)
    x = torch.randn(3, 8)
    # Freshly made, every variant scales by one.
    torch.testing.assert_close(layer(x), x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
    assert f"offset={layer.offset}" in repr(layer)


@pytest.mark.parametrize("cls", [norm.LigerRMSNormForGemma4, norm.LigerRMSNormForMuseGlimmer])
def test_norms_without_a_scale(cls):
    layer = cls(None, with_scale=False)
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    assert layer(x).dtype == torch.bfloat16
    assert not layer.state_dict()
    with pytest.raises(ValueError, match="needs its size"):
        cls(None)


# Compatibility modules ----------------------------------------------------------------------------------


def test_ops_utils():
    assert ops_utils.calculate_settings(1000) == (1024, 4)
    assert ops_utils.calculate_settings(2048) == (2048, 8)
    assert ops_utils.calculate_settings(8000) == (8192, 16)
    assert ops_utils.calculate_settings(65536)[0] == 65536
    with pytest.raises(RuntimeError, match="65537"):
        ops_utils.calculate_settings(65537)
    assert ops_utils.compare_version("torch", lambda a, b: a >= b, "2.6.0")
    assert not ops_utils.compare_version("no_such_package", lambda a, b: True, "0")

    @ops_utils.ensure_contiguous
    def strides(ctx, a, *, b):
        return a.stride(), b.stride(), ctx

    x = torch.zeros(2, 3).T
    assert strides(None, x, b=x) == ((2, 1), (2, 1), None)


def test_utils():
    from liger_kernel import utils

    assert utils.infer_comm_backend() in {"nccl", "hccl", "xccl", "mpi", "gloo"}
    assert isinstance(utils.infer_device_arch(), str)
    assert isinstance(utils.get_total_gpu_memory(), int)
    pick = utils.transformers_version_dispatch
    assert pick("0.1", lambda: "old", lambda: "new") == "new"
    assert pick("99", lambda x: x, lambda: "new", before_args=("old",)) == "old"


def test_triton_cache_manager():
    code = """
import os
from liger_kernel.triton import apply_liger_triton_cache_manager
apply_liger_triton_cache_manager()
from triton.runtime.cache import get_cache_manager
manager = get_cache_manager("ab")
assert type(manager).__name__ == "LigerTritonFileCacheManager", manager
assert open(manager.put(b"x", "f"), "rb").read() == b"x"
"""
    assert run(code) == ""


def test_rms_norm_kernel_entry_points():
    code = """
import torch
from liger_kernel import _env
from liger_kernel.ops import LigerRMSNormFunction, rms_norm_backward, rms_norm_forward
torch.set_default_device(_env.default_device())
x, w, dy = torch.randn(3, 10, requires_grad=True), torch.randn(10, requires_grad=True), torch.randn(3, 10)
kept = dy.clone()
y = LigerRMSNormFunction.apply(x, w, 1e-6, 1.0, "gemma", True, None)
y.backward(dy)
found, x_again, rstd, block, warps, mode = rms_norm_forward(x, w, 1e-6, 1.0, 1, None)
assert torch.equal(found, y) and mode == "gemma"
dx, dw = rms_norm_backward(dy, x_again, w, rstd, 1.0, mode, block, warps, True, None)
assert torch.equal(dx, x.grad) and torch.equal(dw, w.grad) and torch.equal(dy, kept)
assert rms_norm_backward(dy, x, w, rstd, 1.0, mode, block, warps, True, None, needs_dw=False)[1] is None
"""
    on_cpu = _env.default_device().type == "cpu"
    assert run(code, **({"TRITON_INTERPRET": "1"} if on_cpu else {})) == ""
