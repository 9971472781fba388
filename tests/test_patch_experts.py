"""Routed experts: what the probe takes, what it refuses, and models that compute what they computed before."""

import copy

import pytest
import torch
from models import assert_same_step, batch, config_of, tiny
from torch import nn

import liger_kernel
from liger_kernel.transformers import apply_liger_kernel_to_qwen3_moe
from liger_kernel.transformers.patch import seams
from liger_kernel.transformers.patch.apply import seam_of
from liger_kernel.transformers.patch.experts import ExpertsSeam

pytest.importorskip("transformers")
pytestmark = pytest.mark.plain

SEAM = next(seam for seam in seams.SEAMS if isinstance(seam, ExpertsSeam))
ONLY = {"rope": False, "rms_norm": False, "swiglu": False, "geglu": False, "rematerialise": False}


class Experts(nn.Module):
    """The usual ones, as transformers 5 writes them."""

    def __init__(self, act=None):
        super().__init__()
        self.num_experts = 5
        self.gate_up_proj = nn.Parameter(0.2 * torch.randn(5, 2 * 6, 8))
        self.down_proj = nn.Parameter(0.2 * torch.randn(5, 8, 6))
        self.act_fn = act or nn.SiLU()

    def gate(self, both):
        gate, up = both.chunk(2, -1)
        return self.act_fn(gate) * up

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states)
        for e in range(self.num_experts):
            token, slot = torch.where(top_k_index == e)
            y = self.gate(nn.functional.linear(hidden_states[token], self.gate_up_proj[e]))
            y = nn.functional.linear(y, self.down_proj[e]) * top_k_weights[token, slot, None]
            out = out.index_add(0, token, y.to(out.dtype))
        return out


class Interleaved(Experts):
    def gate(self, both):
        return self.act_fn(both[..., ::2]) * both[..., 1::2]


class Clamped(Experts):
    def __init__(self):
        super().__init__()
        self.swiglu_limit = 2.0

    def gate(self, both):
        gate, up = both.chunk(2, -1)
        gate, up = (
            gate.clamp(max=self.swiglu_limit),
            up.clamp(-self.swiglu_limit, self.swiglu_limit),
        )
        return self.act_fn(gate) * up


class UpFirst(Experts):
    def gate(self, both):
        up, gate = both.chunk(2, -1)
        return self.act_fn(gate) * up


class ClampedByANumber(Experts):
    def gate(self, both):
        gate, up = both.chunk(2, -1)
        return self.act_fn(gate.clamp(max=2.0)) * up


class Normed(Experts):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)


class Unweighted(Experts):
    """Right values, another gradient."""

    def forward(self, hidden_states, top_k_index, top_k_weights):
        return super().forward(hidden_states, top_k_index, top_k_weights.detach())


class NoGate(Experts):
    def __init__(self):
        super().__init__()
        self.up_proj, self.gate_up_proj = nn.Parameter(torch.randn(5, 6, 8)), None


def _inputs():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 8, generator=generator)
    return x, torch.randint(5, (7, 2), generator=generator), torch.rand(7, 2, generator=generator)


@pytest.mark.parametrize(
    ("make", "form"),
    [
        (Experts, "silu"),
        (lambda: Experts(nn.GELU()), "gelu"),
        (lambda: Experts(nn.GELU(approximate="tanh")), "gelu_tanh"),
        (Interleaved, "silu, interleaved"),
        (Clamped, "silu, clamped"),
    ],
)
def test_experts_that_fit(make, form):
    module = make()
    x, index, weights = _inputs()
    expected = module(x, index, weights)
    with liger_kernel.patched(module, **ONLY) as report:
        (row,) = [row for row in report.rows if row.seam == "experts"]
        assert (row.status, row.detail) == ("swapped", form)
        torch.testing.assert_close(module(x, top_k_weights=weights, top_k_index=index), expected)
    assert "forward" not in vars(module)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (UpFirst, "values"),
        (ClampedByANumber, "values"),
        (lambda: Experts(nn.ReLU()), "values"),
        (Unweighted, "does not run on rows|values"),
        (Normed, "further layers: norm"),
        (NoGate, "parameters are down_proj, up_proj"),
    ],
)
def test_experts_that_only_look_alike(make, reason):
    report = liger_kernel.patch(make(), **ONLY)
    (row,) = [row for row in report.rows if row.seam == "experts"]
    assert row.status == "left"
    assert any(part in row.detail for part in reason.split("|"))


def test_another_activation_and_other_weights_fall_back():
    module = Experts()
    x, index, weights = _inputs()
    with liger_kernel.patched(module, **ONLY):
        module.act_fn = nn.ReLU()
        torch.testing.assert_close(
            module(x, index, weights), Experts.forward(module, x, index, weights)
        )


def test_weights_are_never_read():
    assert liger_kernel.patch(Experts().to("meta"), **ONLY).count("experts") == 1


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("mixtral", "silu"),
        ("qwen3_moe", "silu"),
        ("qwen3_next", "silu"),
        ("deepseek_v3", "silu"),
        ("gpt_oss", "silu, clamped, interleaved, transposed, biases"),
    ],
)
def test_models(family, form):
    plain = tiny(family)
    patched = copy.deepcopy(plain)
    layers = 1 if family == "deepseek_v3" else 2  # its first layer is dense
    with liger_kernel.patched(patched) as report:
        assert report.count("experts") == layers
        assert {row.detail for row in report.rows if row.seam == "experts"} == {form}
        assert_same_step(plain, patched, **batch())
        patched.set_experts_implementation("grouped_mm")  # transformers' choice, out of play now
        assert_same_step(plain, patched, **batch())


def test_experts_can_be_left():
    model = tiny("mixtral")
    report = liger_kernel.patch(model, experts=False)
    assert report.count("experts", "swapped", "left", "fits") == 0
    report.undo()


class Batched(Experts):
    """Llama 4's: tokens sorted by expert, as many for each."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(0.2 * torch.randn(5, 8, 2 * 6))
        self.down_proj = nn.Parameter(0.2 * torch.randn(5, 6, 8))

    def forward(self, hidden_states):
        x = hidden_states.view(self.num_experts, -1, hidden_states.shape[-1])
        y = torch.bmm(self.gate(torch.bmm(x, self.gate_up_proj)), self.down_proj)
        return y.view_as(hidden_states)


class BatchedUpFirst(Batched):
    gate = UpFirst.gate


def test_batched_experts():
    module, x = Batched(), torch.randn(15, 8)
    expected = module(x)
    with liger_kernel.patched(module, **ONLY) as report:
        assert [row.detail for row in report.rows if row.seam == "experts"] == ["silu, batched"]
        torch.testing.assert_close(module(x), expected)
    report = liger_kernel.patch(BatchedUpFirst(), **ONLY)
    assert [row.status for row in report.rows if row.seam == "experts"] == ["left"]
    plain = tiny("llama4_text")
    patched = copy.deepcopy(plain)
    with liger_kernel.patched(patched) as report:
        assert report.count("experts") == 2
        assert_same_step(plain, patched, **batch())


class WithIdentities(Experts):
    """LongCat's: experts from the fifth on return what they get, and have rows in one of the weights."""

    total = 7

    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(0.2 * torch.randn(self.total, 2 * 6, 8))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = super().forward(hidden_states, top_k_index, top_k_weights)
        idle = top_k_weights.where(top_k_index >= self.num_experts, 0.0).sum(-1, keepdim=True)
        return out + hidden_states * idle


class WithIdlers(WithIdentities):
    """The others return nothing."""

    forward = Experts.forward


def test_experts_without_weights():
    module = WithIdentities()
    x, _, weights = _inputs()
    index = torch.randint(7, weights.shape, generator=torch.Generator().manual_seed(1))
    expected = module(x, index, weights)
    with liger_kernel.patched(module, **ONLY) as report:
        assert report.count("experts") == 1
        torch.testing.assert_close(module(x, index, weights), expected)
    assert liger_kernel.patch(WithIdlers(), **ONLY).count("experts") == 0


def test_classes():
    """Without an instance the class is changed; its flag is that of the MLP."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    plain = tiny("qwen3_moe")
    report = apply_liger_kernel_to_qwen3_moe()
    try:
        assert report.count("experts") == 1
        assert seam_of(Qwen3MoeExperts.forward) == "experts"
        patched = tiny("qwen3_moe")
        outputs = patched(**batch())
    finally:
        report.undo()
    assert seam_of(Qwen3MoeExperts.forward) is None
    torch.testing.assert_close(outputs.loss, plain(**batch()).loss, rtol=1e-5, atol=0.0)
    report = apply_liger_kernel_to_qwen3_moe(swiglu=False, model=plain)
    assert report.count("experts") == 0
    report.undo()


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's call
def test_adapters_on_experts():
    """PEFT adds its product to the weights themselves: they stay ordinary tensors with gradients."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=2, target_modules=[], target_parameters=["experts.gate_up_proj", "experts.down_proj"]
    )
    torch.manual_seed(0)
    plain = peft.get_peft_model(tiny("mixtral"), config)
    for name, parameter in plain.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    patched = copy.deepcopy(plain)
    with liger_kernel.patched(patched):
        assert_same_step(plain, patched, **batch())


def test_probe_of_a_config():
    report = liger_kernel.transformers.patch.probe_model(config_of("mixtral"))
    assert report.count("experts", "fits") == 2
