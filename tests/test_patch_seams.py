"""Recognition: what the probe takes, what it refuses, what a report says, and the way back."""

import copy
import gc
import inspect
import io
import pickle
import types

import pytest
import torch
from models import assert_same_step, batch, config_of, tiny
from torch import nn

import liger_kernel
from liger_kernel.transformers.patch import probe_model, seams
from liger_kernel.transformers.patch.apply import Ledger, original_of, seam_of
from liger_kernel.transformers.patch.probe import Refused

pytest.importorskip("transformers")
pytestmark = pytest.mark.plain

NORM, GATED = seams.SEAMS[:2]
WIDTH = 24


# Norms


class _Norm(nn.Module):
    def __init__(self, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.eps = eps

    def unit(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class Llama(_Norm):
    def forward(self, x):
        return self.weight * self.unit(x.float()).to(x.dtype)


class Late(_Norm):
    def forward(self, hidden):
        return (self.weight.float() * self.unit(hidden.float())).to(hidden.dtype)


class Gemma(_Norm):
    def forward(self, x):
        return (self.unit(x.float()) * (1.0 + self.weight.float())).type_as(x)


class Power(_Norm):
    def forward(self, x):
        y = x.float()
        y = y * torch.pow(y.pow(2).mean(-1, keepdim=True) + self.eps, -0.5)
        return (y * self.weight.float()).type_as(x)


class Weightless(_Norm):
    def __init__(self):
        super().__init__()
        self.weight = None

    def forward(self, x):
        return self.unit(x.float()).type_as(x)


class FactorRMSNorm(_Norm):
    def forward(self, x):
        return self.weight * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps).to(
            x.dtype
        )


class ScaledInputRMSNorm(_Norm):
    def forward(self, x):
        return self.unit(x.float() * (1.0 + self.weight)).to(x.dtype)


class NarrowRMSNorm(_Norm):
    def forward(self, x):
        return self.weight * self.unit(x)


class EpsOutsideRMSNorm(_Norm):
    def forward(self, x):
        y = x.float()
        return self.weight * (y / (y.pow(2).mean(-1, keepdim=True).sqrt() + self.eps)).to(x.dtype)


class ClampedRMSNorm(_Norm):
    def forward(self, x):
        return self.weight * self.unit(x.float().clamp(-20, 20)).to(x.dtype)


@pytest.mark.parametrize(
    ("cls", "row"),
    [
        (Llama, (0.0, "llama")),
        (Late, (0.0, "gemma")),
        (Gemma, (1.0, "gemma")),
        (Power, (0.0, "gemma")),
        (Weightless, (0.0, "llama")),
    ],
)
def test_norms_that_fit(cls, row):
    module = cls()
    assert NORM.match(module)
    assert NORM.probe(module)[1][2:] == row
    module = module.to(torch.bfloat16)
    if module.weight is not None:
        nn.init.normal_(module.weight)
    x = torch.randn(3, 5, WIDTH).to(torch.bfloat16)
    expected = module(x)
    liger_kernel.patch(module)
    assert seam_of(module.forward) == "rms_norm"
    assert torch.equal(module(x), expected)


@pytest.mark.parametrize(
    "cls",
    [
        FactorRMSNorm,
        ScaledInputRMSNorm,
        NarrowRMSNorm,
        EpsOutsideRMSNorm,
        ClampedRMSNorm,
    ],
)
def test_norms_that_only_look_alike(cls):
    report = liger_kernel.patch(cls())
    (row,) = [row for row in report.rows if row.seam == "rms_norm"]
    assert (row.status, row.count) == ("left", 1)
    assert "not those of an RMSNorm" in row.detail


def test_argument_by_name():
    module = Late()
    with liger_kernel.patched(module):
        assert module(hidden=torch.ones(2, WIDTH)).shape == (2, WIDTH)


def test_weights_are_never_read():
    """A norm on the meta device, or with a shard for a weight, is probed like any other."""
    module = Llama().to("meta")
    assert liger_kernel.patch(module).count("rms_norm") == 1
    module = Llama()
    module.weight = nn.Parameter(torch.empty(0))
    assert liger_kernel.patch(module).count("rms_norm") == 1


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_probe_ignores_the_callers_modes(device):
    seams._decided.clear()
    with torch.device(device), torch.autocast("cpu", torch.bfloat16):
        model = tiny("llama") if device == "cpu" else Llama()
        assert liger_kernel.patch(model).count("rms_norm") > 0


# MLPs


class _MLP(nn.Module):
    def __init__(self, act=None):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, 20), nn.Linear(8, 20)
        self.down_proj = nn.Linear(20, 8)
        self.act_fn = act or nn.SiLU()


class Plain(_MLP):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Swapped(_MLP):
    def forward(self, x):
        return self.down_proj(self.up_proj(x) * nn.functional.silu(self.gate_proj(x)))


class Multiplied(_MLP):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x) * 0.5) * self.up_proj(x))


class Clamped(_MLP):
    def forward(self, x):
        up = self.up_proj(x).clamp(-10, 10)
        return self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=10)) * up)


class Dropped(_MLP):
    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return self.down_proj(self.dropout(self.act_fn(self.gate_proj(x)) * self.up_proj(x)))


class DroppedLate(_MLP):
    """Seed-OSS's, whose dropout is no module."""

    def forward(self, x):
        y = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return nn.functional.dropout(y, 0.1, self.training)


class NormedFirst(_MLP):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        x = self.norm(x)
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class NormedBetween(_MLP):
    """BitNet's."""

    def __init__(self):
        super().__init__()
        self.ffn_sub_norm = nn.LayerNorm(20)

    def forward(self, x):
        y = self.ffn_sub_norm(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return self.down_proj(y)


class Coarse(nn.Module):
    """GPT-2's way of writing gelu: exact in fp32, rounded at every step in bf16."""

    def forward(self, x):
        inner = (2 / torch.pi) ** 0.5 * (x + 0.044715 * torch.pow(x, 3.0))
        return 0.5 * x * (1.0 + torch.tanh(inner))


class Product32(_MLP):
    def forward(self, x):
        y = self.act_fn(self.gate_proj(x).float()) * self.up_proj(x).float()
        return self.down_proj(y.to(x.dtype))


class WrongWay(_MLP):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


class Factors(_MLP):
    """Falcon-H1's."""

    gate_multiplier, down_multiplier = 0.7, 1.5

    def forward(self, x):
        y = self.up_proj(x) * self.act_fn(self.gate_proj(x) * self.gate_multiplier)
        return self.down_proj(y) * self.down_multiplier


class Optional(_MLP):
    """What a default config hides: no dropout, a factor of one."""

    def __init__(self):
        super().__init__()
        self.dropout, self.factor = 0.0, 1.0

    def forward(self, x):
        y = self.act_fn(self.gate_proj(x)) * self.up_proj(x) * self.factor
        return self.down_proj(nn.functional.dropout(y, self.dropout, self.training))


class _Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(8, 40), nn.Linear(20, 8)
        self.act_fn = nn.SiLU()
        self.intermediate_size = 20


class Halves(_Packed):
    def forward(self, x):
        gate, up = self.gate_up_proj(x).split(self.intermediate_size, dim=-1)
        return self.down_proj(self.act_fn(gate) * up)


class OtherHalves(_Packed):
    """Moonshine's order."""

    def forward(self, x):
        up, gate = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(self.act_fn(gate) * up)


@pytest.mark.parametrize(
    ("make", "form"),
    [
        (Plain, "silu"),
        (lambda: Plain(nn.GELU()), "gelu"),
        (lambda: Plain(nn.GELU(approximate="tanh")), "gelu, tanh"),
        (Swapped, "silu"),
        (lambda: Plain(nn.ReLU()), "relu"),
        (lambda: Plain(Coarse()), "gelu, tanh"),
        (Halves, "silu, packed"),
        (OtherHalves, "silu, packed, up first"),
        (Dropped, "silu, then dropout"),
        (NormedBetween, "silu, then ffn_sub_norm"),
        (Factors, "silu, factors"),
        (Optional, "silu"),
    ],
)
def test_mlps_that_fit(make, form):
    module = make()
    assert GATED.match(module)
    assert GATED.probe(module)[0] == form
    x = torch.randn(2, 3, 8)
    torch.manual_seed(0)
    expected = module(x)
    with liger_kernel.patched(module) as report:
        assert report.count("gated_mlp") == 1
        torch.manual_seed(0)
        torch.testing.assert_close(module(x), expected)
    assert "forward" not in vars(module)


@pytest.mark.parametrize(
    "make",
    [
        Multiplied,
        Clamped,
        DroppedLate,
        NormedFirst,
        Product32,
        lambda: Product32(Coarse()),
        WrongWay,
        lambda: Plain(nn.Identity()),
    ],
)
def test_mlps_that_only_look_alike(make):
    report = liger_kernel.patch(make())
    assert [row.status for row in report.rows if row.seam == "gated_mlp"] == ["left"]


def test_a_class_is_refused_for_what_its_default_config_hides():
    assert seams.decide(GATED, Optional())[1] is not None
    assert seams.decide(GATED, Optional(), general=True)[1] is None
    assert seams.decide(GATED, Factors(), general=True)[1] is not None


def test_linear_layers_stay_modules():
    """Adapters and hooks on gate, up and down keep acting."""
    module, called = Plain(), []
    for name, layer in module.named_children():
        layer.register_forward_hook(lambda *_, name=name: called.append(name))
    with liger_kernel.patched(module):
        module(torch.randn(2, 8))
    assert called == ["gate_proj", "up_proj", "down_proj"]


def test_another_activation_falls_back():
    module = Plain()
    x = torch.randn(2, 8)
    with liger_kernel.patched(module):
        module.act_fn = nn.ReLU()
        torch.testing.assert_close(module(x), Plain.forward(module, x))


# Rotary functions


def _rotate_half(x):
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def _wrong_sign(x):
    a, b = x.chunk(2, -1)
    return torch.cat((b, -a), -1)


def _pairs(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def _function(rotate, before=lambda table: table):
    def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
        cos, sin = (before(t).unsqueeze(unsqueeze_dim) for t in (cos, sin))
        width = cos.shape[-1]

        def turn(x):
            head, tail = x[..., :width], x[..., width:]
            return torch.cat((head * cos + rotate(head) * sin, tail), -1)

        return turn(q), turn(k)

    return apply_rotary_pos_emb


def _glm(table):
    return table[..., : table.shape[-1] // 2].repeat_interleave(2, -1)


@pytest.mark.parametrize(
    ("function", "form"),
    [
        (_function(_rotate_half), "rotate-half, partial"),
        (_function(_pairs), "interleaved, partial"),
        (_function(_pairs, _glm), "interleaved, first half of the tables, partial"),
        (
            _function(_rotate_half, lambda t: torch.cat((t, t), -1)),
            "rotate-half, one value a pair, partial",
        ),
    ],
)
def test_rotary_functions_that_fit(function, form):
    assert seams.ROPE.probe(function)[0] == form


def test_rotary_functions_that_only_look_alike():
    with pytest.raises(Refused, match="usual sense"):
        seams.ROPE.probe(_function(_wrong_sign))
    with pytest.raises(Refused, match="looked up by position_ids"):
        seams.ROPE.probe(lambda q, k, cos, sin, position_ids, unsqueeze_dim=1: (q, k))
    with pytest.raises(Refused, match="its arguments are"):
        seams.ROPE.probe(lambda q, k, freqs: (q, k))


def test_rotary_function_that_is_a_module():
    """What the `kernels` package makes of a decorated function."""
    from transformers.models.llama import modeling_llama

    gc.collect()
    function = original_of(modeling_llama.apply_rotary_pos_emb)

    class Func(nn.Module):
        def forward(self, *args, **kwargs):
            return function(*args, **kwargs)

    parameters = list(inspect.signature(function).parameters.values())
    myself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    Func.forward.__signature__ = inspect.Signature([myself, *parameters])
    modeling_llama.apply_rotary_pos_emb = module = Func()
    try:
        plain, patched = tiny("llama"), tiny("llama")
        report = liger_kernel.patch(patched)
        assert report.count("rope") == 1
        assert_same_step(plain, patched, **batch())
        report.undo()
        assert modeling_llama.apply_rotary_pos_emb is module
    finally:
        modeling_llama.apply_rotary_pos_emb = function


def test_rotary_function_of_one_tensor():
    both = _function(_rotate_half)

    def apply_rotary_pos_emb(x, cos, sin, unsqueeze_dim=1):
        return both(x, x, cos, sin, unsqueeze_dim)[0]

    form, replacement = seams.ROPE.probe(apply_rotary_pos_emb)
    assert form == "rotate-half, partial"
    x, cos, sin = torch.randn(2, 5, 3, 16), torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    torch.testing.assert_close(replacement(x, cos, sin, 2), apply_rotary_pos_emb(x, cos, sin, 2))


def test_rotary_calls_of_another_form_go_to_the_original():
    """cos and sin that already have a head axis: not what was probed."""
    function = _function(_rotate_half)
    replaced = seams.ROPE.probe(function)[1]
    q, k = torch.randn(2, 3, 5, 8), torch.randn(2, 1, 5, 8)
    tables = torch.randn(2, 2, 1, 5, 8)
    identity = types.SimpleNamespace(
        unsqueeze=lambda _: tables[0], shape=tables[0].shape, dim=lambda: 4
    )
    original = function(q, k, identity, identity)
    assert torch.equal(replaced(q, k, identity, identity)[0], original[0])


# Two models, and the way back


def test_two_models_in_one_process():
    from transformers.models.llama import modeling_llama

    gc.collect()  # models of other tests count as users until they are gone
    before = original_of(modeling_llama.apply_rotary_pos_emb)
    one, two, plain = tiny("llama"), tiny("llama", seed=1), tiny("llama", seed=2)
    reports = liger_kernel.patch(one), liger_kernel.patch(two)
    expected = plain.train()(**batch())
    assert expected.logits is not None
    assert "forward" not in vars(plain.model.norm)
    reports[0].undo()
    assert seam_of(modeling_llama.apply_rotary_pos_emb) == "rope"  # the other model still uses it
    reports[1].undo()
    assert modeling_llama.apply_rotary_pos_emb is before
    torch.testing.assert_close(plain(**batch()).loss, expected.loss)


def test_undo_restores_every_object():
    model = tiny("qwen3")
    before = {id(m): (type(m), dict(vars(m))) for m in model.modules()}
    report = liger_kernel.patch(model)
    model(**batch())
    report.undo()
    report.undo()
    for module in model.modules():
        cls, attributes = before[id(module)]
        assert type(module) is cls
        assert vars(module).keys() == attributes.keys()
    assert model(**batch()).logits is not None


def test_undo_leaves_what_others_replaced():
    model = tiny("llama")
    report = liger_kernel.patch(model)
    wrapped = model.forward
    model.forward = lambda *args, **kwargs: wrapped(*args, **kwargs)
    with pytest.warns(UserWarning, match=r"LlamaForCausalLM\.forward"):
        report.undo()
    assert model(**batch()).loss is not None


def test_patching_twice_changes_nothing():
    model = tiny("gemma2")
    first = liger_kernel.patch(model)
    state = {id(m): dict(vars(m)) for m in model.modules()}
    second = liger_kernel.patch(model)
    assert all(vars(m) == state[id(m)] for m in model.modules())
    assert {row.status for row in second.rows} == {"already"}
    second.undo()
    assert model(**batch()).logits is None
    first.undo()
    assert model(**batch()).logits is not None


def test_two_claims_on_one_attribute():
    ledger, module = Ledger(), nn.Identity()
    ledger.bind(module, "forward", lambda self, x: x, "one")
    with pytest.raises(RuntimeError, match=r"'one' and 'two'"):
        ledger.bind(module, "forward", lambda self, x: x, "two")


def test_a_failure_puts_everything_back(monkeypatch):
    model = tiny("llama")
    monkeypatch.setattr(seams, "patch_rope", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        liger_kernel.patch(model)
    assert not any("forward" in vars(m) for m in model.modules())


# Copies and checkpoints


def test_deepcopy_is_a_patched_model_of_its_own():
    model = tiny("llama")
    report = liger_kernel.patch(model)
    twin = copy.deepcopy(model)
    assert twin.model.norm.forward.__self__ is twin.model.norm
    assert twin.forward.__self__ is twin
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert twin(**batch()).logits is None
    assert not torch.isclose(twin(**batch()).loss, model(**batch()).loss)
    report.undo()
    assert twin(**batch()).logits is None


def test_pickle_is_a_plain_model():
    plain = tiny("llama")
    model = copy.deepcopy(plain)
    with liger_kernel.patched(model):
        for protocol in (2, pickle.HIGHEST_PROTOCOL):
            loaded = pickle.loads(pickle.dumps(model, protocol=protocol))
            assert type(loaded.lm_head) is nn.Linear
            assert loaded(**batch()).logits is not None
        file = io.BytesIO()
        torch.save(model, file)
        assert b"liger" not in file.getvalue()
    assert_same_step(plain, loaded, **batch())


def test_checkpoint_is_a_plain_one(tmp_path):
    from transformers import AutoModelForCausalLM

    model = tiny("gemma2")
    names = list(model.state_dict())
    with liger_kernel.patched(model):
        assert list(model.state_dict()) == names
        model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").train()
    assert_same_step(model, loaded, **batch())
    assert b"iger" not in (tmp_path / "config.json").read_bytes()


# Reports


def test_report():
    report = liger_kernel.patch(tiny("mixtral"))
    text = str(report)
    assert report.count("rms_norm") == 5
    for part in ("MixtralForCausalLM", "MixtralRMSNorm", "offset 0, llama casts", "swapped"):
        assert part in text
    rows = report.as_dict()["rows"]
    assert {"seam", "target", "status", "detail", "count"} == set(rows[0])
    assert repr(report).startswith("<Report: MixtralForCausalLM, ")
    report.undo()


@pytest.mark.parametrize("subject", [config_of, tiny])
def test_probe_binds_nothing(subject):
    subject = subject("llama")
    report = probe_model(subject)
    assert {row.status for row in report.rows} == {"fits"}
    assert report.count("rms_norm", "fits") == 5
    assert report.count("head", "fits") == 1
    if isinstance(subject, nn.Module):
        assert not any("forward" in vars(m) for m in subject.modules())


def test_reasons_for_what_is_left():
    class Adapter(nn.Linear):
        def forward(self, input):
            return super().forward(input) + 1

    model = tiny("llama")
    model.lm_head = Adapter(32, 99, bias=False)
    report = liger_kernel.patch(model)
    (row,) = [row for row in report.rows if row.seam == "head"]
    assert (row.status, "its own way" in row.detail) == ("left", True)
    assert model(**batch()).logits is not None
    report.undo()
    report = liger_kernel.patch(tiny("llama").model)
    assert [row.detail for row in report.rows if row.seam == "head"] == ["it has no output head"]
    report.undo()
