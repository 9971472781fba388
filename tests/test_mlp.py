"""The MLP layers equal Hugging Face's modules with the same weights, in value and in every gradient."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import (
    FalconH1Config,
    Gemma2Config,
    Gemma4TextConfig,
    GemmaConfig,
    Glm4Config,
    HunYuanDenseV1Config,
    LlamaConfig,
    Phi3Config,
    Qwen3MoeConfig,
)
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1MLP
from transformers.models.gemma.modeling_gemma import GemmaMLP
from transformers.models.gemma2.modeling_gemma2 import Gemma2MLP
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextMLP
from transformers.models.glm4.modeling_glm4 import Glm4MLP
from transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense import HunYuanDenseV1MLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeMLP

from liger_kernel import _env
from liger_kernel.ops import geglu, swiglu
from liger_kernel.testing.tolerance import assert_close_to_truth
from liger_kernel.transformers import mlp

SIZES = {"hidden_size": 12, "intermediate_size": 20}
CONFIG = {**SIZES, "num_attention_heads": 2, "num_key_value_heads": 2}
LAYERS = 4
GEMMA4 = {
    **CONFIG,
    "num_hidden_layers": LAYERS,
    "layer_types": ["full_attention"] * LAYERS,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
}

PAIRS = {
    "llama": (LlamaMLP, mlp.LigerSwiGLUMLP, lambda: (LlamaConfig(**CONFIG),)),
    "llama with biases": (
        LlamaMLP,
        mlp.LigerSwiGLUMLP,
        lambda: (LlamaConfig(**CONFIG, mlp_bias=True),),
    ),
    "qwen3_moe": (Qwen3MoeMLP, mlp.LigerQwen3MoeSwiGLUMLP, lambda: (Qwen3MoeConfig(**CONFIG), 7)),
    "hunyuan": (
        HunYuanDenseV1MLP,
        mlp.LigerHunyuanV1SwiGLUMLP,
        lambda: (HunYuanDenseV1Config(**CONFIG), 3),
    ),
    "phi3": (Phi3MLP, mlp.LigerPhi3SwiGLUMLP, lambda: (Phi3Config(**CONFIG, pad_token_id=0),)),
    "glm4": (Glm4MLP, mlp.LigerPhi3SwiGLUMLP, lambda: (Glm4Config(**CONFIG),)),
    "falcon_h1": (
        FalconH1MLP,
        mlp.LigerFalconH1SwiGLUMLP,
        lambda: (FalconH1Config(**CONFIG, mlp_multipliers=[0.7, 1.4]),),
    ),
    "falcon_h1 with biases": (
        FalconH1MLP,
        mlp.LigerFalconH1SwiGLUMLP,
        lambda: (FalconH1Config(**CONFIG, mlp_multipliers=[0.7, 1.4], mlp_bias=True),),
    ),
    "gemma": (GemmaMLP, mlp.LigerGEGLUMLP, lambda: (GemmaConfig(**CONFIG),)),
    "gemma2 exact": (
        Gemma2MLP,
        mlp.LigerGEGLUMLP,
        lambda: (Gemma2Config(**CONFIG, hidden_activation="gelu"),),
    ),
    "gemma4": (Gemma4TextMLP, mlp.LigerGEGLUMLPForGemma4, lambda: (Gemma4TextConfig(**GEMMA4), 0)),
    "gemma4 shared": (
        Gemma4TextMLP,
        mlp.LigerGEGLUMLPForGemma4,
        lambda: (Gemma4TextConfig(**GEMMA4), LAYERS - 1),
    ),
}


def outcome(layer, x):
    """Output and the gradients of the input and of every parameter."""
    x = x.detach().requires_grad_()
    layer.zero_grad()
    y = layer(x)
    y.backward(torch.cos(torch.arange(y.numel(), device=y.device)).view_as(y).to(y.dtype))
    grads = {f"d{name}": p.grad.clone() for name, p in layer.named_parameters()}
    return {"y": y.detach(), "dx": x.grad, **grads}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", PAIRS)
def test_equals_hugging_face(name, dtype, path, device):
    theirs, ours, arguments = PAIRS[name]
    torch.manual_seed(0)
    reference = theirs(*arguments()).to(device, dtype)
    layer = ours(*arguments()).to(device, dtype)
    layer.load_state_dict(reference.state_dict())
    x = torch.randn(2, 5, 12, device=device).to(dtype)
    wide = theirs(*arguments()).to(device, torch.float64)
    wide.load_state_dict(reference.state_dict())
    truth = outcome(wide, x.double())
    assert_close_to_truth(outcome(layer, x), outcome(reference, x), truth)


@pytest.mark.parametrize("name", [n for n in PAIRS if n != "gemma2 exact"])
def test_forward_can_be_borrowed(name, path, device, monkeypatch):
    theirs, ours, arguments = PAIRS[name]
    torch.manual_seed(0)
    foreign = theirs(*arguments()).to(device)
    x = torch.randn(3, 12, device=device)
    before = foreign(x)
    monkeypatch.setattr(theirs, "forward", ours.forward)
    torch.testing.assert_close(foreign(x), before)


def test_operands_of_several_dtypes(path, device):
    """Then the output layer is called as a module, as torch's promotions would have it."""
    torch.manual_seed(0)
    layer = mlp.LigerSwiGLUMLP(hidden_size=12, intermediate_size=20).to(device)
    layer.up_proj = nn.Sequential(layer.up_proj, Cast(torch.float16))
    x = torch.randn(3, 12, device=device)
    gate, up = layer.gate_proj(x), layer.up_proj(x)
    torch.testing.assert_close(layer(x), layer.down_proj(nn.functional.silu(gate) * up))


class Cast(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, x):
        return x.to(self.dtype)


def test_without_memory():
    layer = mlp.LigerSwiGLUMLP(hidden_size=12, intermediate_size=20).to("meta")
    assert layer(torch.randn(3, 12, device="meta")).shape == (3, 12)


def test_a_foreign_forward_of_linear_layers_is_obeyed(path, device, monkeypatch):
    layer, forward = mlp.LigerSwiGLUMLP(hidden_size=12, intermediate_size=20), nn.Linear.forward
    layer, x = layer.to(device), torch.randn(3, 12, device=device)
    before = layer(x)
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: 0.0 * forward(self, x))
    assert before.abs().sum() > 0
    assert layer(x).abs().sum() == 0


def test_block_sparse(path, device):
    torch.manual_seed(0)
    layer = mlp.LigerBlockSparseTop2MLP(LlamaConfig(**CONFIG)).to(device)
    x = torch.randn(3, 12, device=device)
    expected = layer.w2(torch.nn.functional.silu(layer.w1(x)) * layer.w3(x))
    torch.testing.assert_close(layer(x), expected)


def test_sizes_instead_of_a_config(path, device):
    layer = mlp.LigerSwiGLUMLP(hidden_size=12, intermediate_size=20).to(device)
    assert layer(torch.zeros(2, 12, device=device)).shape == (2, 12)
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {
        "gate_proj.weight": (20, 12),
        "up_proj.weight": (20, 12),
        "down_proj.weight": (12, 20),
    }


def test_muse_glimmer_reads_hidden_activation():
    config = SimpleNamespace(**SIZES, hidden_act="gelu", hidden_activation="silu")
    assert mlp.LigerSwiGLUMLPForMuseGlimmer(config).intermediate_size == 20
    with pytest.raises(
        ValueError, match="hidden_act must be one of 'silu', 'swish'; the config has 'gelu'"
    ):
        mlp.LigerSwiGLUMLP(config)


@pytest.mark.parametrize(
    ("layer", "act"),
    [
        (mlp.LigerSwiGLUMLP, "gelu"),
        (mlp.LigerQwen3MoeSwiGLUMLP, "relu"),
        (mlp.LigerHunyuanV1SwiGLUMLP, "gelu"),
        (mlp.LigerPhi3SwiGLUMLP, "gelu_new"),
        (mlp.LigerBlockSparseTop2MLP, "gelu"),
        (mlp.LigerGEGLUMLP, "silu"),
        (mlp.LigerGEGLUMLP, "quick_gelu"),
    ],
)
def test_another_activation_is_an_error(layer, act):
    with pytest.raises(
        ValueError, match=f"{layer.__name__}: hidden_act must be one of .* the config has '{act}'"
    ):
        layer(SimpleNamespace(**SIZES, hidden_act=act))


def test_a_missing_size_is_an_error():
    with pytest.raises(
        ValueError, match="needs a config, or both hidden_size and intermediate_size"
    ):
        mlp.LigerSwiGLUMLP(hidden_size=12)


def test_names_other_libraries_call(device):
    if not _env.triton_runs_on(device.type):
        pytest.skip("kernels need an accelerator or TRITON_INTERPRET=1")
    torch.manual_seed(0)
    y, dc = torch.randn(3, 10, device=device), torch.randn(3, 5, device=device)
    a, b = (half.clone().requires_grad_() for half in y.chunk(2, -1))
    packed = y.clone().requires_grad_()
    with torch.no_grad():
        products = {
            "swiglu": (swiglu.swiglu_forward(a, b)[-1], swiglu.swiglu_backward(a, b, dc)),
            "geglu": (geglu.geglu_forward(a, b)[-1], geglu.geglu_backward(a, b, dc)),
        }
    for name, function in (
        ("swiglu", swiglu.LigerSiLUMulFunction),
        ("geglu", geglu.LigerGELUMulFunction),
    ):
        out = function.apply(a, b)
        torch.testing.assert_close(out, products[name][0], rtol=0, atol=0)
        torch.testing.assert_close(
            torch.autograd.grad(out, (a, b), dc), products[name][1], rtol=0, atol=0
        )
    out = swiglu.LigerFusedGateUpSiLUMulFunction.apply(packed, True)
    torch.testing.assert_close(out, swiglu.swiglu_fused_gate_up_forward(y), rtol=0, atol=0)
    for _ in range(2):  # nothing was overwritten: a second backward gives the same
        (dy,) = torch.autograd.grad(out, packed, dc, retain_graph=True)
        torch.testing.assert_close(dy, torch.cat(products["swiglu"][1], -1), rtol=0, atol=0)
    torch.testing.assert_close(dy, swiglu.swiglu_fused_gate_up_backward(y, dc), rtol=0, atol=0)
    torch.testing.assert_close(packed, y, rtol=0, atol=0)
