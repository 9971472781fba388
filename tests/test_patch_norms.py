"""Recognition of LayerNorms, gated norms and T5's norm: what the probe takes, what it refuses, what calls do."""

import copy

import pytest
import torch
from models import assert_same_step, batch, tiny
from torch import nn

import liger_kernel
from liger_kernel.transformers.patch import seams
from liger_kernel.transformers.patch.apply import seam_of

pytest.importorskip("transformers")
pytestmark = pytest.mark.plain

BY_NAME = {seam.name: seam for seam in seams.SEAMS}
NORM, LAYER, GATED = (BY_NAME[name] for name in ("rms_norm", "layer_norm", "gated_norm"))
WIDTH = 24


def _rows(report, seam):
    return [(row.status, row.detail) for row in report.rows if row.seam == seam]


# LayerNorm


class _Norm(nn.Module):
    def __init__(self, shape=WIDTH):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(shape)), 1e-5


class WrittenOut(_Norm):
    """Cohere's."""

    def forward(self, x):
        y = x.float()
        y = y - y.mean(-1, keepdim=True)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight.float() * y).to(x.dtype)


class MeanFreeRMSNorm(_Norm):
    """A LayerNorm under another name; it rounds before the weight."""

    def forward(self, x):
        y = x.float() - x.float().mean(-1, keepdim=True)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


class NoEps(nn.Module):
    """OLMo's: no parameters, and the eps stands in the code."""

    def __init__(self):
        super().__init__()
        self.normalized_shape = (WIDTH,)

    def forward(self, x):
        return nn.functional.layer_norm(x.float(), self.normalized_shape, eps=1e-5).to(x.dtype)


class PlusOne(nn.LayerNorm):
    """Nemotron's."""

    def forward(self, x):
        return nn.functional.layer_norm(x, self.normalized_shape, self.weight + 1, self.bias)


class PlusTwo(nn.LayerNorm):
    def forward(self, x):
        return nn.functional.layer_norm(x, self.normalized_shape, self.weight + 2, self.bias)


class Oriented(nn.LayerNorm):
    """ConvNeXt's."""

    def __init__(self, width=WIDTH, data_format="channels_last"):
        super().__init__(width)
        self.data_format = data_format

    def forward(self, x):
        if self.data_format == "channels_last":
            return super().forward(x)
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class Unbiased(_Norm):
    def forward(self, x):
        d = x - x.mean(-1, keepdim=True)
        return self.weight * d / (x.std(-1, keepdim=True) + self.eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LayerNorm(WIDTH),
        lambda: nn.LayerNorm(WIDTH, eps=1e-2, bias=False),
        lambda: nn.LayerNorm(WIDTH, elementwise_affine=False),
        WrittenOut,
        MeanFreeRMSNorm,
        NoEps,
        Oriented,
        lambda: PlusOne(WIDTH),
        lambda: PlusOne(WIDTH, bias=False),
    ],
)
def test_layer_norms_that_fit(make, dtype):
    module = make().to(dtype)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(2, 3, WIDTH).to(dtype)
    expected = module(x)
    with liger_kernel.patched(module) as report:
        assert report.count("layer_norm") == 1
        assert not _rows(report, "rms_norm")
        torch.testing.assert_close(module(x), expected)
    assert "forward" not in vars(module)


def test_layer_norms_over_channels():
    module = Oriented(data_format="channels_first")
    nn.init.normal_(module.weight)
    x = torch.randn(2, WIDTH, 3, 5)
    expected = module(x)
    with liger_kernel.patched(module) as report:
        assert _rows(report, "layer_norm") == [("swapped", "weight, bias, channels first")]
        torch.testing.assert_close(module(x), expected)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nn.LayerNorm((3, WIDTH)), "several dimensions"),
        (lambda: PlusTwo(WIDTH), "not those of a LayerNorm"),
    ],
)
def test_layer_norms_that_only_look_alike(make, reason):
    ((status, detail),) = _rows(liger_kernel.patch(make()), "layer_norm")
    assert status == "left"
    assert reason in detail


def test_refused_by_both_seams_is_reported_once():
    report = liger_kernel.patch(Unbiased())
    assert [row.status for row in report.rows if "norm" in row.seam] == ["left"]


def test_layer_norms_of_a_class():
    """What another instance of the class may do differently is refused, or seen in the call."""
    assert "depends on its data_format" in seams.decide(LAYER, Oriented(), general=True)[0]
    detail, recipe = seams.decide(LAYER, WrittenOut(), general=True)
    assert detail == "weight"
    by_head = WrittenOut((3, WIDTH))
    x = torch.randn(2, 3, WIDTH)
    torch.testing.assert_close(LAYER.forward(recipe)(by_head, x), by_head(x))


def test_torchs_own_class_is_left_to_instances():
    from liger_kernel.transformers import monkey_patch

    report = monkey_patch.apply_liger_kernel_to_smolvlm()
    try:
        details = [d for s, d in _rows(report, "layer_norm") if s == "left"]
        assert any("patch an instance" in detail for detail in details)
        assert nn.LayerNorm.forward.__module__ == "torch.nn.modules.normalization"
    finally:
        report.undo()


# RMSNorm with a gate


class Gated(nn.Module):
    """norm(x) * weight * act(gate) or norm(x * act(gate)) * weight, as the attributes say."""

    act, first, narrow, groups = staticmethod(torch.nn.functional.silu), True, True, 1

    def __init__(self):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(WIDTH)), 1e-5

    def forward(self, hidden_states, gate=None):
        x, a = hidden_states.float(), self.act(gate.float())
        x = (x if self.first else x * a).unflatten(-1, (self.groups, -1))
        x = (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)).flatten(-2)
        x = self.weight * (x.to(hidden_states.dtype) if self.narrow else x)
        return (x * a if self.first else x).to(hidden_states.dtype)


class GateFirst(Gated):
    """Mamba 2's."""

    first = False

    def __init__(self):
        super().__init__()
        self.group_size = 8

    @property
    def groups(self):
        return self.weight.shape[0] // self.group_size


class Settable(Gated):
    """Falcon-H1's: groups and order from the config."""

    narrow = False
    first = property(lambda self: self.norm_before_gate)
    groups = property(lambda self: self.n_groups)

    def __init__(self, norm_before_gate=True, n_groups=2):
        super().__init__()
        self.norm_before_gate, self.n_groups = norm_before_gate, n_groups


class Sigmoid(Gated):
    """Kimi's."""

    act, narrow = staticmethod(torch.sigmoid), False


class Doubled(Gated):
    act = staticmethod(lambda z: 2 * torch.sigmoid(z))


@pytest.mark.parametrize(
    ("make", "form"),
    [
        (Gated, "silu, norm first, llama casts"),
        (GateFirst, "silu, gate first, llama casts"),
        (Settable, "silu, norm first, gemma casts"),
        (lambda: Settable(False), "silu, gate first, gemma casts"),
        (Sigmoid, "sigmoid, norm first, gemma casts"),
    ],
)
def test_gated_norms_that_fit(make, form):
    module = make().to(torch.bfloat16)
    nn.init.normal_(module.weight)
    assert GATED.probe(module)[0] == form
    x, gate = torch.randn(2, 2, 3, WIDTH).to(torch.bfloat16)
    expected = module(x, gate)
    with liger_kernel.patched(module):
        assert seam_of(module.forward) == "gated_norm"
        assert torch.equal(module(x, gate), expected)
        assert torch.equal(module(gate=gate, hidden_states=x), expected)
        with pytest.raises(AttributeError):  # without a gate it is the original's call
            module(x)


def test_gated_norms_of_a_class():
    recipe = GATED.probe(Settable(), general=True)[1]
    other = Settable(norm_before_gate=False, n_groups=3)
    x, gate = torch.randn(2, 5, WIDTH)
    torch.testing.assert_close(GATED.forward(recipe)(other, x, gate), other(x, gate))


def test_gated_norms_that_only_look_alike():
    for module, reason in ((Doubled(), "not those of a gated RMSNorm"), (Gated(), "'relu'")):
        if reason == "'relu'":
            module.activation = "relu"
        ((status, detail),) = _rows(liger_kernel.patch(module), "gated_norm")
        assert status == "left"
        assert reason in detail


# T5


class T5(_Norm):
    def forward(self, x):
        y = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        if self.weight.dtype in (torch.float16, torch.bfloat16):
            y = y.to(self.weight.dtype)
        return self.weight * y


@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.float16), (torch.bfloat16, torch.bfloat16)]
)
def test_t5_returns_the_dtype_of_its_weight(dtypes):
    module = T5().to(dtypes[1])
    x = torch.randn(3, WIDTH).to(dtypes[0])
    expected = module(x)
    assert expected.dtype == dtypes[1]
    with liger_kernel.patched(module) as report:
        assert _rows(report, "rms_norm") == [("swapped", "offset 0, t5 casts")]
        assert torch.equal(module(x), expected)


# Models


@pytest.mark.parametrize(
    ("family", "seam", "count"), [("cohere", "layer_norm", 3), ("qwen3_next", "gated_norm", 1)]
)
def test_models(family, seam, count):
    plain = tiny(family)
    patched = copy.deepcopy(plain)
    with liger_kernel.patched(patched) as report:
        assert report.count(seam) == count
        assert_same_step(plain, patched, **batch())
