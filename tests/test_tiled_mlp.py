"""Tiled MLPs and the MLP of one function: against the plain layers, under hooks, dropout, autocast and compile."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from liger_kernel.ops.mlp import LigerMLPFunction, mlp
from liger_kernel.ops.tiled_mlp import LigerTiledMLPFunction, apply_tiled_mlp
from liger_kernel.transformers import mlp as layers

HIDDEN, INNER = 8, 12


def _config(**extra):
    return SimpleNamespace(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        hidden_act=extra.pop("hidden_act", "silu"),
        **extra,
    )


SWIGLU, GEGLU = _config(), _config(hidden_act="gelu_pytorch_tanh")
FALCON = _config(mlp_multipliers=(0.7, 1.3))
# layer, the plain layer it equals, config
PAIRS = {
    "tiled swiglu": (lambda c: layers.LigerTiledSwiGLUMLP(c, 3), layers.LigerSwiGLUMLP, SWIGLU),
    "tiled geglu": (layers.LigerTiledGEGLUMLP, layers.LigerGEGLUMLP, GEGLU),
    "tiled, one part": (lambda c: layers.LigerTiledSwiGLUMLP(c, 1), layers.LigerSwiGLUMLP, SWIGLU),
    "one function": (layers.LigerMLP, layers.LigerSwiGLUMLP, SWIGLU),
    "falcon_h1": (layers.LigerFalconH1MLP, layers.LigerFalconH1SwiGLUMLP, FALCON),
}


def _pair(name):
    """(the layer, the plain one), with the same weights."""
    torch.manual_seed(0)
    make, plain, config = PAIRS[name]
    layer, like = make(config), plain(config)
    like.load_state_dict(layer.state_dict())
    return layer, like


def _step(layer, x):
    """Output and gradients of x and of every parameter."""
    x = x.detach().requires_grad_()
    y = layer(x)
    y.backward(torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape).to(y.dtype))
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


def _close(found, expected, tolerance=1e-5):
    for f, e in zip(found, expected, strict=True):
        torch.testing.assert_close(f, e, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", [(2, 17, HIDDEN), (5, HIDDEN), (1, 2, 3, HIDDEN), (2, 0, HIDDEN)])
@pytest.mark.parametrize("name", PAIRS)
def test_equals_the_plain_layer(name, shape, device):
    layer, like = (m.to(device) for m in _pair(name))
    x = torch.randn(shape, device=device)
    _close(_step(layer, x), _step(like, x))
    with torch.no_grad():
        _close([layer(x)], [like(x)])


@pytest.mark.parametrize("name", ["tiled swiglu", "one function", "falcon_h1"])
def test_frozen_parts(name, device):
    layer, like = (m.to(device) for m in _pair(name))
    x = torch.randn(2, 9, HIDDEN, device=device)
    for frozen in ("gate_proj", "down_proj", "up_proj"):
        for m in (layer, like):
            m.zero_grad()
            m.requires_grad_(True)
            getattr(m, frozen).requires_grad_(False)
        for a, b in zip(_step(layer, x), _step(like, x), strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b)
        y = layer(x)  # x needs no gradient
        y.sum().backward()


@pytest.mark.parametrize("name", ["tiled swiglu", "one function", "falcon_h1"])
def test_adapters_count(name, device):
    """A projection that is more than its weight is called, and what it hides gets gradients."""

    class Adapted(nn.Linear):
        def __init__(self, base):
            super().__init__(base.in_features, base.out_features, bias=False)
            self.weight = nn.Parameter(base.weight.detach().clone(), requires_grad=False)
            self.lora = nn.Linear(base.in_features, base.out_features)

        def forward(self, x):
            return super().forward(x) + self.lora(x)

    layer, like = _pair(name)
    layer.up_proj = Adapted(layer.up_proj)
    like.up_proj = copy.deepcopy(layer.up_proj)
    layer, like = layer.to(device), like.to(device)
    x = torch.randn(2, 9, HIDDEN, device=device)
    for a, b in zip(_step(layer, x), _step(like, x), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_gradients_are_summed_in_fp32(device):
    """Sixteen equal parts in bf16: the sum is exact up to one rounding."""
    linear = nn.Linear(HIDDEN, HIDDEN, bias=False, dtype=torch.bfloat16, device=device)
    x = torch.randn(1, 1, HIDDEN, device=device).to(torch.bfloat16).expand(1, 16, HIDDEN)
    dy = torch.randn(1, 1, HIDDEN, device=device).to(torch.bfloat16).expand(1, 16, HIDDEN)
    y = apply_tiled_mlp(lambda m, part: m(part), linear, x, 16)
    (grad,) = torch.autograd.grad(y, linear.weight, dy)
    one = dy[0, 0, :, None] * x[0, 0, None]  # of one part, rounded as its product is
    assert torch.equal(grad, (16 * one.float()).to(torch.bfloat16))


def test_default_number_of_parts(device):
    seen = []

    def fn(module, part):
        seen.append(tuple(part.shape))
        return module(part)

    linear = nn.Linear(4, 4).to(device)
    LigerTiledMLPFunction.apply(fn, linear, torch.randn(1, 9, 4, device=device), None)
    assert seen == [(1, 3, 4)] * 3
    seen.clear()
    LigerTiledMLPFunction.apply(fn, linear, torch.randn(2, 4, device=device), 5)
    assert seen == [(1, 4), (1, 4)]


def test_dropout_and_autocast_are_those_of_forward(device):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(HIDDEN, 64), nn.Dropout(0.5), nn.Linear(64, 3)).to(device)
    x = torch.randn(2, 8, HIDDEN, device=device)
    kind = torch.device(device).type
    results = []
    for tiled in (False, True):
        module.zero_grad()
        torch.manual_seed(1)
        with torch.autocast(kind, torch.bfloat16):
            parts = [module(p) for p in x.split(2, 1)] if not tiled else []
            y = apply_tiled_mlp(lambda m, p: m(p), module, x, 4) if tiled else torch.cat(parts, 1)
        assert y.dtype == torch.bfloat16
        torch.manual_seed(2)
        before = torch.rand(1)
        torch.manual_seed(2)
        y.float().square().sum().backward()
        assert torch.equal(torch.rand(1), before)  # the caller's generator is where it was
        results.append([y.detach(), *(p.grad for p in module.parameters())])
    for f, e in zip(*results, strict=True):
        torch.testing.assert_close(f, e, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", ["tiled swiglu", "one function"])
def test_one_graph(name, device):
    torch._dynamo.reset()
    layer, like = (m.to(device) for m in _pair(name))
    x = torch.randn(1, 6, HIDDEN, device=device)
    like(x).sum().backward()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    compiled(x).sum().backward()
    for f, e in zip(layer.parameters(), like.parameters(), strict=True):
        torch.testing.assert_close(f.grad, e.grad)


def test_errors(device):
    linear = nn.Linear(4, 4).to(device)
    x = torch.randn(2, 4, device=device, requires_grad=True)
    with pytest.raises(ValueError, match="x must be"):
        apply_tiled_mlp(lambda m, p: p, linear, x[0])
    with pytest.raises(ValueError, match="num_shards must be"):
        apply_tiled_mlp(lambda m, p: p, linear, x, 0)
    with pytest.raises(RuntimeError, match="no parameter of Linear took part"):
        apply_tiled_mlp(lambda m, p: 2 * p, linear, x).sum().backward()
    y = apply_tiled_mlp(lambda m, p: m(p).square(), linear, x)
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        dx.sum().backward()
    weights = [torch.randn(4, 4, device=device) for _ in range(3)]
    with pytest.raises(TypeError, match="must have one dtype"):
        LigerMLPFunction.apply(x.half(), *weights)
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        assert mlp(x, *weights).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="mlp_bias must be one of"):
        layers.LigerMLP(_config(mlp_bias=True))
    with pytest.raises(ValueError, match="hidden_act must be one of"):
        layers.LigerTiledSwiGLUMLP(GEGLU)


# Several processes (one here: the hooks are the same)


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class _Block(nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(HIDDEN), mlp

    def forward(self, x):
        return x + self.mlp(self.norm(x))


@pytest.mark.plain
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("own_unit", [True, False])
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp1", "fsdp1 views", "fsdp2"])
@pytest.mark.parametrize("name", ["tiled swiglu", "one function"])
def test_under_hooks(name, wrapper, own_unit, group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    layer, like = (_Block(m) for m in _pair(name))
    expected = _step(like, x := torch.randn(2, 9, HIDDEN))
    if wrapper == "fsdp2":
        for unit in (layer.mlp, layer) if own_unit else (layer,):
            fully_shard(unit, mesh=init_device_mesh("cpu", (1,)))
        whole = layer
    elif wrapper == "ddp":
        whole = nn.parallel.DistributedDataParallel(layer)
    else:
        options = {"device_id": torch.device("cpu"), "use_orig_params": wrapper == "fsdp1"}
        if own_unit:
            layer.mlp = FullyShardedDataParallel(layer.mlp, **options)
        whole = FullyShardedDataParallel(layer, **options)
    found = _step(whole, x)
    _close(found[:2], expected[:2])
    grads = [g.full_tensor() if wrapper == "fsdp2" else g for g in found[2:]]
    total = sum(float(g.square().sum()) for g in grads)
    assert total == pytest.approx(sum(float(g.square().sum()) for g in expected[2:]), rel=1e-5)
