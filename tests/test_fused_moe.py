"""What the properties cannot say of mixtures of experts: routing, tensor descriptors, odd weights, the layer."""

import types

import pytest
import torch
from cases import CASES
from torch.utils.checkpoint import checkpoint

from liger_kernel import _env
from liger_kernel.ops import fused_moe
from liger_kernel.testing.properties import Maker, run
from liger_kernel.transformers.experts import LigerExperts

CASE = next(case for case in CASES if case.name == "fused_moe")


def _draw(device, shape=(9, 2, 3, 40, 24), dtype=torch.float32):
    return CASE.inputs(shape, Maker(dtype, device, 3))


@pytest.fixture
def kernels(device):
    if not _env.triton_runs_on(device.type):
        pytest.skip("kernels need an accelerator or TRITON_INTERPRET=1")
    return device


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, over slots that hold nothing
@pytest.mark.parametrize("transposed", [False, True])
def test_tensor_descriptors_bring_what_pointers_bring(kernels, transposed, monkeypatch):
    tensors = _draw(kernels)
    tensors["top_k_index"] %= 2  # the last expert has no rows, and its gradients are zero
    if transposed:
        for name in ("gate_up_proj", "down_proj"):
            tensors[name] = tensors[name].transpose(1, 2).contiguous().transpose(1, 2)
    plan, options = fused_moe.plan_of(tensors["x"]), {"interleaved": transposed}
    found = []
    for tma in (False, True):
        monkeypatch.setattr(fused_moe, "plan_of", lambda _, tma=tma: plan._replace(tma=tma))
        found.append(run(fused_moe.fused_moe, tensors, options, CASE.grads))
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-5, atol=1e-5)


def test_weights_without_adjacent_elements(kernels):
    tensors = _draw(kernels, (5, 2, 2, 8, 6))
    plain = run(fused_moe.fused_moe, tensors, {}, CASE.grads)
    for name in ("gate_up_proj", "down_proj"):
        wide = tensors[name].repeat_interleave(2, dim=2)
        tensors[name] = wide[..., ::2]
    for name, value in run(fused_moe.fused_moe, tensors, {}, CASE.grads).items():
        torch.testing.assert_close(value, plain[name])


def test_tanh_gelu(kernels):
    """The row has the other activations. Forward and backward write each of them in a form of its own."""
    tensors, options = _draw(kernels, (5, 2, 2, 8, 6)), {"activation": "gelu_tanh"}
    expected = run(CASE.reference, tensors, options, CASE.grads)
    for name, value in run(fused_moe.fused_moe, tensors, options, CASE.grads).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-5)


def test_a_nan_stays_with_its_token_and_its_experts(kernels):
    tensors = _draw(kernels, (5, 1, 3, 8, 6))
    tensors["top_k_index"] = torch.tensor([[0], [2], [0], [1], [2]], device=kernels)
    tensors["x"][3] = float("nan")
    found = run(fused_moe.fused_moe, tensors, {}, CASE.grads)
    for name in ("out", "dx", "dtop_k_weights"):
        assert found[name].isnan().any(1).tolist() == [False, False, False, True, False], name
    for name in ("dgate_up_proj", "ddown_proj"):
        assert found[name].isnan().any(2).any(1).tolist() == [False, True, False], name


@pytest.mark.parametrize(("tokens", "top_k", "n_experts"), [(300, 2, 5), (40, 3, 130), (0, 2, 3)])
def test_routing(kernels, tokens, top_k, n_experts):
    index = Maker(torch.float32, kernels).ids(n_experts, tokens, top_k)
    index[5:9] = n_experts  # nobody's
    routing = fused_moe.compute_routing_metadata(index, n_experts, 16)
    assert len(routing) == 7
    flat = index.flatten()
    rows = int((flat < n_experts).sum())
    pair = flat.sort(stable=True).indices[:rows]
    assert torch.equal(routing.pair[:rows].long(), pair)
    assert torch.equal(routing.token[:rows].long(), pair // top_k)
    assert torch.equal(routing.position[pair].long(), torch.arange(rows, device=kernels))
    assert (routing.position[flat == n_experts] == -1).all()
    assert torch.equal(routing.totals.long(), flat.bincount(minlength=n_experts + 1)[:n_experts])
    ends = routing.offsets.tolist()
    tiles = [
        [e, row, ends[e + 1]] for e in range(n_experts) for row in range(ends[e], ends[e + 1], 16)
    ]
    assert routing.tiles[: int(routing.n_tiles)].tolist() == tiles


def test_autocast(device):
    tensors = _draw(device, (5, 2, 2, 8, 6))
    with torch.autocast(device.type, torch.bfloat16):
        y = fused_moe.fused_moe(**tensors, impl="torch")
    narrow = {k: t.bfloat16() if t.dim() == 3 or k == "x" else t for k, t in tensors.items()}
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, fused_moe.fused_moe(**narrow, impl="torch").float())


def test_the_fallback_differentiates_twice():
    tensors = {k: t.double() if t.is_floating_point() else t for k, t in _draw("cpu").items()}
    leaves = [tensors[k].requires_grad_() for k in CASE.grads]

    def second(function):
        (dx,) = torch.autograd.grad(function(**tensors).pow(2).sum(), leaves[:1], create_graph=True)
        return torch.autograd.grad(dx.pow(2).sum(), leaves)

    for a, b in zip(second(fused_moe.fused_moe), second(CASE.reference), strict=True):
        torch.testing.assert_close(a, b)


def _config(**changes):
    sizes = {"hidden_size": 8, "hidden_act": "silu", "intermediate_size": 12, "num_experts": 3}
    return types.SimpleNamespace(**{**sizes, **changes})


def test_layer(device):
    layer = LigerExperts(_config(moe_intermediate_size=6)).to(device)
    assert [tuple(p.shape) for p in layer.parameters()] == [(3, 12, 8), (3, 8, 6)]
    assert layer.gate_up_proj.std() < 0.05
    make = Maker(torch.float32, device)
    x, index, weights = make(4, 8), make.ids(3, 4, 2), make(4, 2)
    experts = (layer.gate_up_proj, layer.down_proj)
    expected = fused_moe.reference(x, *experts, index, weights)
    torch.testing.assert_close(layer(x, index, weights), expected)
    function = fused_moe.LigerFusedMoEFunction
    torch.testing.assert_close(function.apply(x, *experts, index, weights), expected)
    assert LigerExperts(_config(n_routed_experts=5, num_experts=None)).num_experts == 5
    assert LigerExperts(_config()).intermediate_dim == 12
    with pytest.raises(ValueError, match="hidden_act must be one of"):
        LigerExperts(_config(hidden_act="relu"))
    with pytest.raises(ValueError, match="none of num_experts"):
        LigerExperts(_config(num_experts=None))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_it(reentrant, device):
    torch.manual_seed(0)
    shapes = (3, 8), (2, 8, 8), (2, 8, 4), (3, 2)
    leaves = [torch.randn(shape, device=device, requires_grad=True) for shape in shapes]
    index = torch.tensor([[0, 1]] * 3, device=device)

    def call(x, gate_up, down, weights):
        return fused_moe.fused_moe(x, gate_up, down, index, weights)

    wanted = torch.autograd.grad(call(*leaves).square().sum(), leaves)
    checkpoint(call, *leaves, use_reentrant=reentrant).square().sum().backward()
    for leaf, want in zip(leaves, wanted, strict=True):
        assert torch.equal(leaf.grad, want)
