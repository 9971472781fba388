"""Rebuilt activations: the same bits, fewer bytes, whoever consumes them and whatever surrounds the forward."""

import copy
import functools
import gc
import inspect
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import batch, step, tiny
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

import liger_kernel
from liger_kernel import _env
from liger_kernel.bench.memory import PeakMemory
from liger_kernel.ops.rms_norm import rms_norm
from liger_kernel.ops.swiglu import swiglu
from liger_kernel.transformers.monkey_patch import (
    _apply_liger_kernel,
    _apply_liger_kernel_to_instance,
    apply_liger_kernel_to_llama,
)
from liger_kernel.transformers.patch import hooks, rematerialise
from liger_kernel.transformers.patch.apply import seam_of
from liger_kernel.transformers.patch.hooks import wrapped_forward
from liger_kernel.transformers.patch.rematerialise import rebuildable
from liger_kernel.transformers.patch.report import Report

pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.skipif(rematerialise.WHY_NOT is not None, reason=str(rematerialise.WHY_NOT)),
    # PEFT 0.21 still asks transformers 5.24 by the old name
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]
plain = (
    pytest.mark.plain
)  # the path without kernels; what is unmarked runs in Triton's interpreter too
WIDTH, INNER = 8, 12


def run(function, *args):
    """(result, bytes not kept) of a function under the hooks."""
    report = Report("test")
    forward = wrapped_forward(lambda self, *a: function(*a), "it", report)
    result = forward(torch.nn.Module(), *args)
    return result, report.rebuilt.get("it")


def counted(function):
    """`function` made rebuildable, and the list of its calls."""
    calls = []

    def call(*args, **options):
        calls.append(args)
        return function(*args, **options)

    return rebuildable(call), calls


def gradients(function, *leaves, **options):
    return torch.autograd.grad(function(*leaves).float().square().sum(), leaves, **options)


def assert_equal(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)


@pytest.fixture
def leaves(device):
    torch.manual_seed(0)
    shapes = [(2, 3, WIDTH), (WIDTH,), (INNER, WIDTH), (INNER, WIDTH), (WIDTH, INNER), (INNER,)]
    return [torch.randn(s, device=device, requires_grad=True) for s in shapes]


def block(x, w, gate, up, down, bias, norm=rms_norm, act=swiglu):
    """A norm and a gated MLP; `x` of any rank."""
    h = x * 2.0
    y = norm(h, w)
    return h + F.linear(act(F.linear(y, gate, bias), F.linear(y, up)), down)


def rebuilt_block(*leaves):
    return block(*leaves, norm=rebuildable(rms_norm), act=rebuildable(swiglu))


# One function


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("shape", [(WIDTH,), (6, WIDTH), (2, 3, WIDTH)])
def test_same_bits_and_fewer_bytes(leaves, shape, autocast):
    x = torch.randn(shape, device=leaves[0].device, requires_grad=True)
    leaves[0] = x
    with torch.autocast(x.device.type, torch.bfloat16, autocast):
        out, saved = run(rebuilt_block, *leaves)
        wanted = gradients(block, *leaves)
    assert_equal(torch.autograd.grad(out.float().square().sum(), leaves), wanted)
    rows = x.numel() // WIDTH
    # autocast: two bf16 copies of the norm's output; the product of bf16 operands is bf16 itself
    assert saved == rows * (2 * WIDTH * 2 + INNER * 2 if autocast else WIDTH * 4 + INNER * 4)


@pytest.mark.parametrize("retain", [False, True])
def test_rebuilt_once_for_all_consumers(leaves, retain):
    norm, calls = counted(rms_norm)
    x, w, gate, up, _, bias = leaves

    def function(x, w, gate, up, bias):
        y = norm(x * 2.0, w)
        return F.linear(y, gate, bias) * F.linear(y, up) + (y * y).sum()

    out, saved = run(function, x, w, gate, up, bias)
    assert saved == x.numel() * 4
    assert len(calls) == 1
    first = torch.autograd.grad(out.sum(), (x, w, gate), retain_graph=retain)
    assert len(calls) == 2
    if retain:
        assert_equal(torch.autograd.grad(out.sum(), (x, w, gate)), first)


def test_a_consumer_that_is_never_asked(leaves):
    """The others still get their value, and nothing outlives the graph."""
    x, w, gate, up, *_ = leaves

    def function(x, w, gate, up):
        y = rebuildable(rms_norm)(x * 2.0, w)
        return F.linear(y, gate), F.linear(y, up)

    (one, other), _ = run(function, x, w, gate, up)
    found = torch.autograd.grad(one.sum(), (x, w, gate))
    assert_equal(
        found, torch.autograd.grad(F.linear(rms_norm(x * 2.0, w), gate).sum(), (x, w, gate))
    )
    del other


class _OwnLinear(torch.autograd.Function):
    """A linear layer of another library, which saves its input by itself; a 4-bit one would dequantise in backward."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x.transpose(0, 1), weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        return dy @ weight, torch.einsum("tbi,bto->oi", x, dy).t().t()


def _parts(y, gate, up):
    return (
        F.linear(y[1], gate),
        F.linear(y.view(-1, WIDTH)[2:], up),
        F.linear(y[:, 1:].contiguous(), up),
    )


CONSUMERS = {
    "own function": lambda y, gate, up: (_OwnLinear.apply(y, gate),),
    "views": _parts,
    "cast": lambda y, gate, up: (
        F.linear(y.double(), gate.double()),
        F.linear(y.bfloat16(), up.bfloat16()),
    ),
    "matmul": lambda y, gate, up: (y @ gate.t(), torch.einsum("bti,oi->bto", y, up)),
}


@pytest.mark.parametrize("name", CONSUMERS)
def test_any_consumer(leaves, name):
    x, w, gate, up, *_ = leaves

    def function(x, w, gate, up, norm=rms_norm):
        outs = CONSUMERS[name](norm(x * 2.0, w), gate, up)
        return torch.cat([out.float().flatten() for out in outs])

    out, saved = run(lambda *a: function(*a, norm=rebuildable(rms_norm)), x, w, gate, up)
    used = (x, w, gate) if name == "own function" else (x, w, gate, up)
    wanted = torch.autograd.grad(function(x, w, gate, up).square().sum(), used)
    assert_equal(torch.autograd.grad(out.square().sum(), used), wanted)
    assert saved == x.numel() * (8 + 2 if name == "cast" else 4)


def test_another_autocast_in_backward(leaves):
    """The torch path follows autocast: a rebuild uses the forward's state, not the backward's."""
    x, _, gate, up, *_ = (leaf.detach().bfloat16().requires_grad_() for leaf in leaves)

    calls = []
    act = rebuildable(
        lambda *gates: calls.append(torch.is_autocast_enabled(x.device.type)) or swiglu(*gates)
    )
    out, _ = run(lambda x: (act(F.linear(x, gate), F.linear(x, up)) @ gate).sum(), x)
    with torch.autocast(x.device.type, torch.bfloat16):
        out.backward()
    assert calls == [False, False]


# Autograd's own promises


def _changed(name, leaves):
    """Forward of a block in which one saved tensor is changed afterwards."""
    kept = {}

    def function(x, w, gate, up, down, bias):
        kept["x"] = h = x * 2.0
        y = rebuildable(rms_norm)(h, w)
        kept["gate"], kept["other"] = F.linear(y, gate), F.linear(y, up)
        z = rebuildable(swiglu)(kept["gate"], kept["other"])
        return F.linear(z, down)

    out, _ = run(function, *leaves)
    with torch.no_grad():
        (leaves[4] if name == "weight" else kept[name]).add_(1)
    return out


@pytest.mark.parametrize("name", ["x", "gate", "weight"])
def test_a_changed_source_raises(leaves, name):
    out = _changed(name, leaves)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*is at version 1"):
        out.sum().backward()


def test_a_source_changed_before_it_is_needed(leaves):
    """The norm's input changes before anybody saved the output: then the output is kept."""
    x, _, gate, *_ = leaves

    def function(x, gate, norm):
        h = x * 2.0
        y = norm(h, None)
        with torch.no_grad():
            h.add_(0)
        return F.linear(y, gate).square().sum() + 0 * h.sum()

    _, saved = run(function, x, gate, rebuildable(lambda h, w: rms_norm(h.detach(), w) * h.sum()))
    assert saved == 0


def test_an_output_changed_in_place(leaves):
    """What a linear layer saved after the change is no longer the norm's output."""
    x, w, gate, *_ = leaves

    def function(x, w, gate, norm=rms_norm):
        y = norm(x * 2.0, w)
        y += 1.0
        return F.linear(y, gate)

    out, saved = run(lambda *a: function(*a, norm=rebuildable(rms_norm)), x, w, gate)
    assert saved == 0
    assert_equal(
        torch.autograd.grad(out.sum(), (x, w, gate)),
        torch.autograd.grad(function(x, w, gate).sum(), (x, w, gate)),
    )


@plain
def test_second_derivative(leaves):
    def twice(function):
        first = torch.autograd.grad(function().square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    assert_equal(twice(lambda: run(rebuilt_block, *leaves)[0]), twice(lambda: block(*leaves)))


@plain  # Triton's interpreter leaves cycles of its own
def test_nothing_outlives_the_graph(leaves):
    """Without the garbage collector: no cycles. The output, kept by the caller, keeps no sources."""
    x, w, gate, *_ = leaves
    kept = {}

    def function(x, w, gate):
        h = x * 2.0
        kept["source"] = weakref.ref(h.untyped_storage())
        kept["y"] = y = rebuildable(rms_norm)(h, w)
        return F.linear(y, gate).exp()  # exp saves its own output

    gc.collect()
    gc.disable()
    try:
        out, _ = run(function, x, w, gate)
        result = weakref.ref(out.untyped_storage())
        assert kept["source"]() is not None
        out.sum().backward()
        assert kept["source"]() is None
        del out
        assert result() is None
    finally:
        gc.enable()


@plain
def test_an_output_nobody_saves_keeps_nothing(leaves):
    x, *_ = leaves

    def function(x):
        h = x * 2.0
        return rebuildable(rms_norm)(h, None), weakref.ref(h.untyped_storage())

    (y, source), saved = run(function, x)
    assert saved == 0
    y.sum().backward()
    assert source() is None


# Other people's hooks


def test_within_other_hooks_we_stand_aside(leaves):
    _env.warn_once.cache_clear()
    with pytest.warns(UserWarning, match="save_on_cpu"), torch.autograd.graph.save_on_cpu():
        out, saved = run(rebuilt_block, *leaves)
    assert saved is None
    assert_equal(torch.autograd.grad(out.square().sum(), leaves), gradients(block, *leaves))


def test_other_hooks_within_ours(leaves):
    seen = []

    def pack(tensor):
        seen.append(tensor.shape)
        return tensor.detach()

    def function(*leaves):
        with saved_tensors_hooks(pack, lambda t: t):
            return rebuilt_block(*leaves)

    out, saved = run(function, *leaves)
    assert saved == 0
    assert seen
    assert_equal(torch.autograd.grad(out.square().sum(), leaves), gradients(block, *leaves))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_checkpoint(leaves, reentrant, inside):
    def checkpointed(*leaves):
        return checkpoint(rebuilt_block, *leaves, use_reentrant=reentrant)

    def whole(*leaves):
        return run(rebuilt_block, *leaves)[0]

    if inside:
        out, _ = run(checkpointed, *leaves)
    else:
        out = checkpoint(whole, *leaves, use_reentrant=reentrant)
    out.square().sum().backward()
    assert_equal([leaf.grad for leaf in leaves], gradients(block, *leaves))


# Within a checkpoint the layer hands on to its hooks what it does not keep


def layered(function):
    """`function` as the forward of a layer."""
    forward = wrapped_forward(lambda self, *a: function(*a), None, Report("test"))
    layer = torch.nn.Module()
    return lambda *args: forward(layer, *args)


def three_consumers(*leaves):
    """A block whose norm has three consumers, and the norm of its own result, which leaves it."""
    x, w, gate, up, down, bias = leaves
    norm = rebuildable(rms_norm)
    y = norm(x * 2.0, w)
    product = rebuildable(swiglu)(F.linear(y, gate, bias), F.linear(y, up))
    return norm(y.square() + F.linear(product, down), w)


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("function", [rebuilt_block, three_consumers])
def test_checkpointed_layer(function, early_stop, leaves):
    wanted = gradients(function, *leaves)
    seen = []

    def watched(*leaves):
        seen.append(rematerialise.top_hooks()[0])
        return function(*leaves)

    layer = layered(watched)

    def twice(x, *others):  # an output of the first run, with a recipe, enters the second
        for _ in range(2):
            x = checkpoint(layer, x, *others, use_reentrant=False)
        return x

    with set_checkpoint_early_stop(early_stop):
        found = gradients(lambda *a: checkpoint(layer, *a, use_reentrant=False), *leaves)
        assert_equal(found, wanted)
        assert len(seen) == 2
        assert all(rematerialise.ours(pack) for pack in seen)
        wanted = gradients(lambda x, *o: function(function(x, *o), *o), *leaves)
        assert_equal(gradients(twice, *leaves), wanted)


def test_checkpointed_layer_goes_backward_twice(leaves):
    out = checkpoint(layered(three_consumers), *leaves, use_reentrant=False).square().sum()
    wanted = torch.autograd.grad(three_consumers(*leaves).square().sum(), leaves)
    for retain in (True, True, False):
        assert_equal(torch.autograd.grad(out, leaves, retain_graph=retain), wanted)


def test_checkpointed_layer_asked_for_a_part_first(leaves):
    out = checkpoint(layered(three_consumers), *leaves, use_reentrant=False).square().sum()
    wanted = torch.autograd.grad(three_consumers(*leaves).square().sum(), leaves)
    for some in ([4], [2, 3], [0], [1, 5]):
        found = torch.autograd.grad(out, [leaves[i] for i in some], retain_graph=True)
        assert_equal(found, [wanted[i] for i in some])
    assert_equal(torch.autograd.grad(out, leaves), wanted)


def test_layers_are_found_wherever_their_list_is():
    def listed(n):
        return torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(n))

    model = torch.nn.Module()
    model.language, model.vision = torch.nn.Module(), torch.nn.Module()
    model.language.layers = torch.nn.ModuleList(torch.nn.Module() for _ in range(2))
    for layer in model.language.layers:
        layer.experts = listed(3)  # not what a checkpoint is put around
    model.vision.encoder = torch.nn.Module()
    model.vision.encoder.layers = listed(2)
    wanted = [*model.language.layers, *model.vision.encoder.layers]
    assert list(hooks.layers(model)) == wanted


@pytest.mark.parametrize("kept_in", [0, 1])
def test_what_is_saved_does_not_depend_on_who_holds_a_norms_output(kept_in, leaves):
    """In one of the two runs somebody does, while its cast is packed."""
    x, w, gate, *_ = leaves
    kept, runs = [], []

    def function(x, w, gate):
        def norm(x):
            y = rebuildable(rms_norm)(x * 2.0, w)
            if len(runs) == kept_in:
                kept.append(y)
            runs.append(1)
            return y

        z = norm(x).to(torch.float16)
        return F.linear(z, gate.to(torch.float16))

    found = checkpoint(layered(function), x, w, gate, use_reentrant=False).float().sum()
    found = torch.autograd.grad(found, (x, w, gate))
    assert len(runs) == 2
    assert_equal(found, torch.autograd.grad(function(x, w, gate).float().sum(), (x, w, gate)))


class _Parts(torch.nn.Module):
    """Norms and MLPs that are members of lists, and parts of the model, by themselves."""

    def __init__(self):
        super().__init__()
        config = LlamaConfig(hidden_size=8, intermediate_size=12, num_attention_heads=1)
        self.inner = torch.nn.Module()
        self.inner.norms = torch.nn.ModuleList(LlamaRMSNorm(8) for _ in range(2))
        self.inner.mlps = torch.nn.ModuleList(LlamaMLP(config) for _ in range(2))
        self.inner.first = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
        self.mlps, self.mlp = torch.nn.ModuleList([LlamaMLP(config)]), LlamaMLP(config)

    def forward(self, x):
        for part in (self.inner.first, *self.inner.norms, *self.inner.mlps, *self.mlps, self.mlp):
            x = part(x)
        return x


def test_parts_that_are_claimed_already():
    torch.manual_seed(0)
    model, x = _Parts(), torch.randn(2, 3, 8)
    wanted = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    report = liger_kernel.patch(model)
    found = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)
    report.undo()
    assert not [name for name, part in model.named_modules() if "forward" in vars(part)]


def test_checkpoint_within_a_checkpoint(leaves):
    inner = layered(rebuilt_block)

    def outer(x, *others):
        y = rebuildable(rms_norm)(x, others[0])
        return checkpoint(inner, y, *others, use_reentrant=False) + y

    whole = layered(outer)
    found = gradients(lambda *a: checkpoint(whole, *a, use_reentrant=False), *leaves)
    assert_equal(found, gradients(outer, *leaves))


def test_selective_checkpoint(leaves):
    def policy(ctx, op, *args, **kwargs):
        kept = op == torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    layer = layered(three_consumers)
    found = gradients(
        lambda *a: checkpoint(layer, *a, use_reentrant=False, context_fn=contexts), *leaves
    )
    assert_equal(found, gradients(three_consumers, *leaves))


def test_a_layer_computed_again_keeps_no_norm(leaves):
    """When the layer's last product goes backward, the second run's norm is gone, if a recipe stands for it."""
    alive, outputs = [], []

    class Last(torch.autograd.Function):
        @staticmethod
        def forward(ctx, z):
            ctx.save_for_backward(z)
            return z * 1.0

        @staticmethod
        def backward(ctx, dz):
            _ = ctx.saved_tensors  # computes the layer again
            gc.collect()
            alive.append(outputs[-1]() is not None)
            return dz

    def function(x, w, gate, up, down, bias):
        y = rebuildable(rms_norm)(x * 2.0, w)
        outputs.append(weakref.ref(y.untyped_storage()))
        return Last.apply(F.linear(y, gate, bias) * F.linear(y, up))

    for layer in (function, layered(function)):
        checkpoint(layer, *leaves, use_reentrant=False).sum().backward()
    assert len(outputs) == 4
    assert alive == [True, False]


def test_where_hooks_are_forbidden(leaves):
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        assert run(rebuilt_block, *leaves)[1] is None


def test_without_gradients(leaves):
    with torch.no_grad():
        assert run(rebuilt_block, *leaves)[1] is None


# Models


def pair(family, **changes):
    """The same model patched without and with rebuilding, and the report of the second."""
    kept = tiny(family, **changes)
    rebuilt = copy.deepcopy(kept)
    liger_kernel.patch(kept, rematerialise=False)
    return kept, rebuilt, liger_kernel.patch(rebuilt)


def assert_same_bits(kept, rebuilt, **inputs):
    expected, wanted = step(kept, **inputs)
    outputs, found = step(rebuilt, **inputs)
    assert torch.equal(outputs.loss, expected.loss)
    assert found.keys() == wanted.keys()
    assert_equal(found.values(), wanted.values())


def bytes_of(model, tokens=24, width=32, inner=48, size=4):
    layers = len(model.model.layers)
    return layers * tokens * (2 * width + inner) * size


@plain
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3", "phi3", "granite"])
def test_families(family):
    kept, rebuilt, report = pair(family)
    assert_same_bits(kept, rebuilt, **batch())
    assert report.rebuilt == {"model": bytes_of(rebuilt)}
    report.undo()
    assert seam_of(rebuilt.model.forward) is None


@plain
@pytest.mark.parametrize("family", ["mixtral", "olmo2", "nemotron", "qwen3_next", "cohere"])
def test_families_with_other_shares(family):
    """Experts gather what they save, some norms come after the linear layer, some are not ours."""
    kept, rebuilt, report = pair(family)
    assert_same_bits(kept, rebuilt, **batch())
    assert report.rebuilt["model"] > 0


@plain
def test_autocast_and_accumulation():
    kept, rebuilt, report = pair("llama")
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            assert_same_bits(kept, rebuilt, **batch())
    copies = 3 + 2  # q, k, v; gate, up
    assert report.rebuilt["model"] == 2 * 24 * (copies * 32 + 48) * 2


@plain
def test_peak_memory():
    """The report's figure is what the step did not need."""
    peaks = []
    kept, rebuilt, report = pair("llama", num_hidden_layers=6)
    inputs = batch(rows=4, tokens=64)
    for model in (kept, rebuilt):
        with PeakMemory(torch.device("cpu")) as meter:
            step(model, **inputs)
        peaks.append(meter.bytes)
    saved = report.rebuilt["model"]
    assert saved == bytes_of(rebuilt, tokens=256)
    assert peaks[0] - peaks[1] == pytest.approx(saved, rel=0.1)


@plain
def test_report():
    _, rebuilt, report = pair("llama")
    assert "rebuilt instead" not in str(report)
    step(rebuilt, **batch())
    assert "rematerialise: 0.02 MiB of activations a step rebuilt instead of kept" in str(report)
    assert report.as_dict()["rebuilt_bytes"] == bytes_of(rebuilt)
    assert liger_kernel.patch(rebuilt).count("rematerialise", "already") == 1


@plain
def test_off():
    model = tiny("llama")
    with liger_kernel.patched(model, rematerialise=False) as report:
        assert report.count("rematerialise") == 0
        assert seam_of(model.model.forward) is None
    apply_liger_kernel_to_llama(model=model)
    assert seam_of(model.model.forward) is None


@plain
@pytest.mark.parametrize("function", [_apply_liger_kernel_to_instance, apply_liger_kernel_to_llama])
def test_through_the_contracts_functions(function):
    """Off unless asked for, and not in the signatures, where frameworks look for what to switch on."""
    kept, rebuilt = tiny("llama"), tiny("llama")
    liger_kernel.patch(kept, rematerialise=False)
    assert "rematerialise" not in inspect.signature(function).parameters
    report = function(model=rebuilt, rematerialise=True)
    assert report.count("rematerialise") == 1
    assert_same_bits(kept, rebuilt, **batch())
    assert report.rebuilt == {"model": bytes_of(rebuilt)}
    assert function(model=tiny("llama"), rematerialise=None).count("rematerialise") == 0


@plain
def test_classes_cannot_be_asked_for_it():
    report = _apply_liger_kernel("llama", rematerialise=True)
    assert report.count("rematerialise", "left") == 1
    report.undo()


@plain
def test_nothing_to_rebuild():
    with liger_kernel.patched(tiny("llama"), rms_norm=False, swiglu=False, geglu=False) as report:
        assert report.count("rematerialise", "left") == 1


@plain
def test_a_model_without_a_head():
    """Its layers get the hooks, one by one."""
    kept, rebuilt = (tiny("llama").model for _ in range(2))
    liger_kernel.patch(kept, rematerialise=False)
    report = liger_kernel.patch(rebuilt)
    ids = batch()["input_ids"]
    grads = []
    for model in (kept, rebuilt):
        model(input_ids=ids).last_hidden_state.square().sum().backward()
        grads.append([p.grad for p in model.parameters()])
    assert_equal(*grads)
    assert report.rebuilt == {
        "layers.0": bytes_of(tiny("llama")) // 2,
        "layers.1": bytes_of(tiny("llama")) // 2,
    }


@plain
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    kept, rebuilt, report = pair("llama")
    for model in (kept, rebuilt):
        enable = getattr(
            model, "activation_checkpointing_enable", model.gradient_checkpointing_enable
        )
        enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    assert_same_bits(kept, rebuilt, **batch(), use_cache=False)
    assert report.rebuilt == {"model": 0}


@plain
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at the inputs of a layer
def test_compiled_layers_in_an_eager_model():
    """Compiled code is left alone, and what it saves passes through."""
    torch._dynamo.reset()
    kept, rebuilt, report = pair("llama")
    for model in (kept, rebuilt):
        model.model.layers[0].compile(backend="aot_eager")
    assert_same_bits(kept, rebuilt, **batch())
    assert report.rebuilt == {"model": bytes_of(rebuilt) // 2}
    torch._dynamo.reset()


# PEFT


def _adapted(model, dtype, **options):
    peft = pytest.importorskip("peft")
    torch.manual_seed(5)
    config = peft.LoraConfig(
        r=4, init_lora_weights=False, task_type="CAUSAL_LM", target_modules="all-linear", **options
    )
    return peft.get_peft_model(model.to(dtype), config)


@plain
@pytest.mark.parametrize("after", [True, False], ids=["patched after", "patched before"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lora(dtype, after):
    """fp32 adapters on a bf16 model: every cast of an input is rebuilt, that of the attention's output too."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    gc.collect()
    in_use = seam_of(BaseTunerLayer._cast_input_dtype)  # by models of other tests
    kept, rebuilt = tiny("llama").to(dtype), tiny("llama").to(dtype)
    if not after:
        liger_kernel.patch(kept, rematerialise=False)
        report = liger_kernel.patch(rebuilt)
    kept, rebuilt = _adapted(kept, dtype), _adapted(rebuilt, dtype)
    if after:
        liger_kernel.patch(kept, rematerialise=False)
        report = liger_kernel.patch(rebuilt)
    for model in (kept, rebuilt):
        model.enable_input_require_grads()
    assert_same_bits(kept, rebuilt, **batch())
    if dtype == torch.float32:
        assert report.rebuilt["model"] == bytes_of(rebuilt.get_base_model())
    else:
        assert report.rebuilt["model"] == 2 * 24 * (6 * 32 + 48) * 4
    assert seam_of(BaseTunerLayer._cast_input_dtype) == "rematerialise"
    report.undo()
    assert in_use or seam_of(BaseTunerLayer._cast_input_dtype) is None


# Several processes (one here: the hooks are the same)


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@plain
@pytest.mark.parametrize("norms_apart", [False, True])
def test_fsdp2(group, norms_apart):
    """A norm's weight may be resharded when the layers after the norm run backward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    kept, rebuilt, report = pair("llama")
    for model in (kept, rebuilt):
        for layer in model.model.layers:
            if norms_apart:
                fully_shard(layer.input_layernorm, mesh=mesh)
                fully_shard(layer.post_attention_layernorm, mesh=mesh)
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    (_, wanted), (_, found) = step(kept, **batch()), step(rebuilt, **batch())
    for name, gradient in wanted.items():
        assert torch.equal(found[name].to_local(), gradient.to_local()), name
    assert report.rebuilt["model"] == bytes_of(rebuilt)


@plain
def test_tensor_parallel(group):
    """A DTensor that a linear layer makes of its input."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    kept, rebuilt, report = pair("llama")
    plan = dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), ColwiseParallel())
    plan |= dict.fromkeys((f"self_attn.{n}_proj" for n in "qkv"), ColwiseParallel())
    plan |= dict.fromkeys(("mlp.down_proj", "self_attn.o_proj"), RowwiseParallel())
    for layer in rebuilt.model.layers:
        parallelize_module(layer, init_device_mesh("cpu", (1,)), plan)
    _, wanted = step(kept, **batch())
    _, found = step(rebuilt, **batch())
    for name, gradient in wanted.items():
        whole = getattr(found[name], "full_tensor", lambda name=name: found[name])()
        assert torch.equal(whole, gradient), name
    assert report.rebuilt["model"] == bytes_of(rebuilt)


@plain
def test_data_parallel(group):
    kept, rebuilt, report = pair("llama")
    parallel = nn.parallel.DistributedDataParallel(rebuilt)
    _, wanted = step(kept, **batch())
    _, found = step(parallel, **batch())
    assert_equal(found.values(), wanted.values())
    assert report.rebuilt["model"] == bytes_of(rebuilt)


@plain
def test_pickle_and_copy():
    """A copy has hooks of its own, bound to itself; what was pickled is plain."""
    import pickle

    _, rebuilt, report = pair("llama", num_hidden_layers=1)
    twin = copy.deepcopy(rebuilt)
    assert twin.model.forward.__self__ is twin.model
    assert_same_bits(rebuilt, twin, **batch())
    assert seam_of(pickle.loads(pickle.dumps(rebuilt)).model.forward) is None
    report.undo()
