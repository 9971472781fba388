"""Backward writes over saved tensors that nobody else holds, and over no other."""

import contextlib
import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from liger_kernel import _env
from liger_kernel.ops import _gated, _reuse
from liger_kernel.ops import gated_linear as gated_linear_module
from liger_kernel.ops.gated_linear import gated_linear
from liger_kernel.ops.geglu import geglu, geglu_packed
from liger_kernel.ops.mlp import mlp
from liger_kernel.ops.reglu import reglu, reglu_packed
from liger_kernel.ops.relu_squared import relu_squared
from liger_kernel.ops.swiglu import swiglu, swiglu_packed
from liger_kernel.transformers.mlp import LigerSwiGLUMLP
from liger_kernel.transformers.patch.rematerialise import hooks, rebuildable

pytestmark = pytest.mark.skipif(
    not _env.triton_runs_on(_env.default_device().type),
    reason="kernels need an accelerator or TRITON_INTERPRET=1",
)
N, F = 6, 8


@pytest.fixture
def small(monkeypatch):
    """Tensors of any size are worth it."""
    _reuse._free()
    monkeypatch.setattr(_reuse, "_WORTH", 0)
    may_write = _reuse._may_write

    def after_collection():
        gc.collect()  # Triton's interpreter leaves cycles that hold its arguments
        return may_write()

    if _env.interpreting():
        monkeypatch.setattr(_reuse, "_may_write", after_collection)


@pytest.fixture
def written(small, monkeypatch):
    """Of every call of the gated kernel: whether dgate lies over gate, dup over up."""
    calls, gradients = [], _gated.gradients

    def spy(dy, gate, up, act, scale, down, dgate, dup, y=None):
        calls.append(
            tuple(
                p is not None and p.data_ptr() == o.data_ptr()
                for o, p in ((gate, dgate), (up, dup))
            )
        )
        gradients(dy, gate, up, act, scale, down, dgate, dup, y)

    monkeypatch.setattr(_gated, "gradients", spy)
    return calls


@pytest.fixture
def layers(device):
    torch.manual_seed(0)
    gate, up, down = nn.Linear(F, F), nn.Linear(F, F), nn.Linear(F, F)
    return nn.ModuleList([gate, up, down]).to(device)


@pytest.fixture
def x(device):
    return torch.randn(N, F, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()


def plain(layers, x):
    gate, up, down = layers
    return down(swiglu(gate(x), up(x)))


def joined(layers, x):
    gate, up, down = layers
    return gated_linear(gate(x), up(x), down.weight, down.bias)


def gradients_of(y, layers, x, **options):
    found = torch.autograd.grad(y.square().sum(), [x, *layers.parameters()], **options)
    return [g.clone() for g in found]


def expected(function, layers, x):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_reuse, "_WORTH", 1 << 40)
        return gradients_of(function(layers, x), layers, x)


def same(found, truth):
    assert all(torch.equal(a, b) for a, b in zip(found, truth, strict=True))


def test_counts_tell_held_from_free():
    free = _reuse._free()
    assert len({free.saved, free.made, free.kept}) == 3
    assert min(free.saved) > 0


@pytest.mark.parametrize("function", [plain, joined], ids=["swiglu", "gated_linear"])
def test_writes_over_what_nobody_holds(function, layers, x, written):
    truth = expected(function, layers, x)
    written.clear()
    same(gradients_of(function(layers, x), layers, x), truth)
    assert written == [(True, True)]


def held_output(gate, keep):
    keep.append(gate)
    return gate


def held_view(gate, keep):
    keep.append(gate[1:])
    return gate


def held_copy(gate, keep):
    keep.append(gate.detach())
    return gate


def held_storage(gate, keep):
    keep.append(gate.untyped_storage())
    return gate


def held_by_another_node(gate, keep):
    keep.append(gate.square().sum())
    return gate


def held_as_a_result(gate, keep):
    return gate.relu()


def held_array(gate, keep):
    if gate.device.type != "cpu":
        pytest.skip("arrays of device memory do not exist")
    keep.append(gate.detach().numpy())
    return gate


HOLDERS = [
    held_output, held_view, held_copy, held_storage, held_by_another_node, held_as_a_result, held_array,
]  # fmt: skip


@pytest.mark.parametrize("hold", HOLDERS)
@pytest.mark.parametrize("join", [False, True], ids=["swiglu", "gated_linear"])
def test_leaves_what_somebody_holds(hold, join, layers, x, written):
    keep = []

    def function(layers, x):
        gate, up, down = layers
        g, u = hold(gate(x), keep), up(x)
        return gated_linear(g, u, down.weight, down.bias) if join else down(swiglu(g, u))

    truth = expected(function, layers, x)
    keep.clear(), written.clear()
    y = function(layers, x)
    before = [k.clone() for k in keep if isinstance(k, torch.Tensor)]
    same(gradients_of(y, layers, x), truth)
    assert written == [(False, True)]
    assert all(torch.equal(a, b) for a, b in zip(before, keep, strict=False))


@pytest.mark.parametrize("function", [plain, joined], ids=["swiglu", "gated_linear"])
def test_a_kept_graph_can_be_walked_again(function, layers, x, written):
    truth = expected(function, layers, x)
    written.clear()
    y = function(layers, x)
    for _ in range(2):
        same(gradients_of(y, layers, x, retain_graph=True), truth)
    same(gradients_of(y, layers, x), truth)
    assert written == [(False, False), (False, False), (True, True)]


def test_hooks_keep_what_they_hold(layers, x, written):
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t) or len(kept) - 1, kept.__getitem__
    ):
        y = plain(layers, x)
    before = [t.clone() for t in kept]
    same(gradients_of(y, layers, x), expected(plain, layers, x))
    assert written[0] == (False, False)
    assert all(torch.equal(a, b) for a, b in zip(before, kept, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("function", [plain, joined], ids=["swiglu", "gated_linear"])
def test_checkpoints_recompute_for_nobody_else(function, reentrant, layers, x, written):
    truth = expected(function, layers, x)
    written.clear()
    x.grad = None
    layers.zero_grad()
    checkpoint(function, layers, x, use_reentrant=reentrant).square().sum().backward()
    same([x.grad, *(p.grad for p in layers.parameters())], truth)
    assert written == [(True, True)]


def test_a_checkpoint_computes_no_output_again(layers, x, small, monkeypatch):
    """Its second forward ends where gate and up have been saved."""
    filled, fill = [], gated_linear_module._fill
    monkeypatch.setattr(gated_linear_module, "_fill", lambda *a: filled.append(1) or fill(*a))
    y = checkpoint(joined, layers, x, use_reentrant=False)
    assert len(filled) == 1
    y.square().sum().backward()
    assert len(filled) == 1


def test_rematerialised_products_share_their_sources_no_longer(layers, x, written):
    def function(layers, x):
        gate, up, down = layers
        return down(rebuildable(swiglu)(gate(x), up(x)))

    truth = expected(function, layers, x)
    written.clear()
    with hooks() as run:
        y = function(layers, x)
        assert run.bytes > 0
    same(gradients_of(y, layers, x), truth)
    assert written == [(True, True)]


def test_a_leaf_under_our_hooks_belongs_to_its_owner(device, written):
    gate, up = (torch.randn(N, F, device=device, requires_grad=True) for _ in range(2))
    before = gate.detach().clone()
    with hooks():
        y = swiglu(gate, up * 1)
    y.sum().backward()
    assert written == [(False, True)]
    assert torch.equal(gate, before)


@pytest.mark.skipif(not _env.interpreting(), reason="an array's memory is a CPU's")
def test_memory_of_others(written):
    """numpy's, here: what else reads it torch does not know."""
    store = torch.randn(N, F).numpy()

    class Borrow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return torch.from_numpy(store)

        @staticmethod
        def backward(ctx, dy):
            return dy * torch.from_numpy(store)

    x, before = torch.randn(N, F, requires_grad=True), store.copy()
    swiglu(Borrow.apply(x), x * 1).sum().backward()
    assert written == [(False, True)]
    assert (store == before).all()


def test_a_backward_that_failed_is_not_tried_again(layers, x, small, monkeypatch):
    y, real = joined(layers, x), gated_linear_module._gated.gradients

    def fail(*args):
        real(*args)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(gated_linear_module._gated, "gradients", fail)
    upstream = torch.ones_like(y)
    with pytest.raises(torch.OutOfMemoryError):
        y.backward(upstream)
    monkeypatch.setattr(gated_linear_module._gated, "gradients", real)
    with pytest.raises(RuntimeError, match="run forward again"):
        y.backward(upstream)


@pytest.mark.parametrize("context", ["hooks", "no hooks allowed", "inference"])
def test_counts_are_taken_where_nobody_else_is(context):
    wanted = _reuse._measured()
    with contextlib.ExitStack() as stack:
        if context == "hooks":
            stack.enter_context(torch.autograd.graph.save_on_cpu())
        elif context == "inference":
            stack.enter_context(torch.inference_mode())
        else:
            stack.enter_context(torch.autograd.graph.disable_saved_tensors_hooks("none here"))
        assert _reuse._apart() == wanted


def test_one_operand_twice(layers, x, written):
    def function(layers, x):
        gate, _, down = layers
        g = gate(x)
        return down(swiglu(g, g))

    truth = torch.autograd.grad(function(layers, x).square().sum(), [x], retain_graph=True)
    written.clear()
    same(torch.autograd.grad(function(layers, x).square().sum(), [x]), truth)
    assert written == [(False, False)]


def test_a_leaf_belongs_to_its_owner(device, written):
    gate, up = (torch.randn(N, F, device=device, requires_grad=True) for _ in range(2))
    before = gate.detach().clone(), up.detach().clone()
    swiglu(gate, up).sum().backward()
    assert written == [(False, False)]
    same((gate, up), before)


def test_create_graph_keeps_it(layers, x, written):
    truth = expected(plain, layers, x)
    written.clear()
    same(gradients_of(plain(layers, x), layers, x, create_graph=True), truth)
    assert written == [(False, False)]


def test_under_a_tracer_nothing_is_reused(layers, x, written):
    class Watching(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    truth = expected(plain, layers, x)
    written.clear()
    y = plain(layers, x)
    with Watching():
        same(gradients_of(y, layers, x), truth)
    assert written in ([], [(False, False)])


OPS = {
    "swiglu": lambda a, b: swiglu(a, b, 0.5, 2.0),
    "swiglu_packed": lambda a, b: swiglu_packed(torch.cat([a, b], -1)),
    "geglu": geglu,
    "geglu_packed": lambda a, b: geglu_packed(torch.cat([a, b], -1), "none"),
    "reglu": reglu,
    "reglu_packed": lambda a, b: reglu_packed(torch.cat([a, b], -1)),
    "relu_squared": lambda a, b: relu_squared(a + b),
    "gated_linear": lambda a, b: gated_linear(a, b, torch.ones(3, F).to(a), None, "gelu"),
    "gated_linear, packed": lambda a, b: gated_linear(
        torch.cat([a, b], -1), None, torch.ones(3, F).to(a)
    ),
    "mlp": lambda a, b: mlp(a + b, *(torch.eye(F).to(a) for _ in range(3))),
}


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_same_bits_and_no_new_memory(name, dtype, device, small, monkeypatch):
    """In the memory of the operands come the gradients that fresh memory gets."""
    generator = torch.Generator().manual_seed(2)
    a, b = (torch.randn(N, F, generator=generator).to(device, dtype) for _ in range(2))

    def run(worth):
        monkeypatch.setattr(_reuse, "_WORTH", worth)
        leaves = [t.clone().requires_grad_() for t in (a, b)]
        y = OPS[name](*(t * 1 for t in leaves))
        return torch.autograd.grad(y.float().square().sum(), leaves)

    rooms, found = [], _reuse.saved

    def spy(ctx):
        tensors, free = found(ctx)
        rooms.append([r is not None for r in free])
        return tensors, free

    for module in ("swiglu", "geglu", "reglu", "relu_squared", "gated_linear", "mlp"):
        monkeypatch.setattr(f"liger_kernel.ops.{module}.saved", spy)
    truth = run(1 << 40)
    rooms.clear()
    same(run(0), truth)
    assert any(rooms[-1])


@pytest.mark.gpu
@pytest.mark.skipif(_env.infer_device() == "cpu", reason="needs an accelerator")
def test_peak_of_a_gated_mlp(device):
    """16 MiB each: gate, up, the product's gradient; the separate layers keep the product as well."""
    n, h, f = 4096, 512, 2048
    layers = nn.ModuleList(
        [nn.Linear(h, f, bias=False), nn.Linear(h, f, bias=False), nn.Linear(f, h, bias=False)]
    ).to(device, torch.bfloat16)
    x = torch.randn(n, h, device=device, dtype=torch.bfloat16, requires_grad=True)
    unit, memory = n * f * 2, torch.get_device_module(device)

    def peak(function):
        for _ in range(2):
            layers.zero_grad()
            x.grad = None
            gc.collect()
            start = memory.memory_allocated()
            memory.reset_peak_memory_stats()
            function(layers, x).sum().backward()
        grads = sum(p.numel() for p in layers.parameters()) * 2
        return (memory.max_memory_allocated() - start - grads) / unit

    assert peak(joined_without_bias) < 3.9
    assert peak(lambda layers, x: layers[2](swiglu(layers[0](x), layers[1](x)))) < 4.9


def joined_without_bias(layers, x):
    gate, up, down = layers
    return gated_linear(gate(x), up(x), down.weight)


def test_a_checkpoint_under_a_mode_of_the_forward_alone(x, small):
    """What is saved must not depend on who watches: the second time nobody does."""
    torch.manual_seed(0)
    layer = LigerSwiGLUMLP(hidden_size=F, intermediate_size=F).to(x.device)

    def gradients(*modes):
        x.grad = None
        layer.zero_grad()
        with contextlib.ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            y = checkpoint(layer, x, use_reentrant=False)
        y.square().sum().backward()
        return [x.grad, *(p.grad for p in layer.parameters())]

    truth = gradients()
    same(gradients(FlopCounterMode(display=False), torch.device("cpu")), truth)


def test_the_operator_records_nothing(layers, x):
    """As an exported graph calls it."""
    gate, up, down = layers
    y = gated_linear_module.gated_linear_forward_kernel.operator(
        gate(x), up(x), down.weight, down.bias, "silu", 1.0
    )
    assert torch.equal(y, joined(layers, x))
