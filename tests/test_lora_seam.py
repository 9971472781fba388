"""PEFT's LoRA layers on the kernels of `low_rank_update`: whenever adapters come, whatever becomes of them."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from models import assert_same_step, batch, step, tiny
from torch import nn
from torch.utils.checkpoint import checkpoint

import liger_kernel
from liger_kernel import _env
from liger_kernel.ops import _dropout
from liger_kernel.ops.low_rank_update import reference
from liger_kernel.transformers import monkey_patch
from liger_kernel.transformers.patch import lora
from liger_kernel.transformers.patch.report import LEFT
from liger_kernel.verification.verify import verify

peft = pytest.importorskip("peft")
pytestmark = [
    # PEFT 0.21 still asks transformers 5.24 by the old name
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning"),
]
LAYERS = 7  # linear ones of a block
ONLY = dict.fromkeys(("rope", "rms_norm", "swiglu", "geglu", "rematerialise"), False)


@pytest.fixture(autouse=True)
def calls(monkeypatch, device):
    """One entry for each call that the kernels took."""
    if not _env.triton_runs_on(device.type):
        pytest.skip("kernels need an accelerator or TRITON_INTERPRET=1")
    found, up = [], lora.low_rank_up
    monkeypatch.setattr(lora, "low_rank_up", lambda *given: found.append(given) or up(*given))
    return found


def bound(model):
    return sum("forward" in vars(module) for module in model.modules() if hasattr(module, "lora_A"))


# Models


def small(device, dtype=torch.float32):
    return tiny("llama", num_hidden_layers=1).to(device, dtype)


def adapted(model, name="default", targets="all-linear", **options):
    torch.manual_seed(5)
    config = peft.LoraConfig(
        r=4, init_lora_weights=False, task_type="CAUSAL_LM", target_modules=targets, **options
    )
    model = peft.get_peft_model(model, config, adapter_name=name)
    model.enable_input_require_grads()
    return model


def inputs(device):
    return {name: tensor.to(device) for name, tensor in batch().items()}


@pytest.mark.parametrize("when", ["after", "before", "classes"])
def test_step(when, device, calls):
    expected, wanted = step(adapted(small(device)), **inputs(device))
    if when == "after":
        ours = adapted(small(device))
        report = liger_kernel.patch(ours, **ONLY)
        assert report.count("lora") == LAYERS
    elif when == "before":
        model = small(device)
        report = liger_kernel.patch(model, **ONLY)
        ours = adapted(model)
    else:
        report = monkey_patch.apply_liger_kernel_to_llama(rope=False, rms_norm=False, swiglu=False)
        ours = adapted(small(device))
    try:
        outputs, found = step(ours, **inputs(device))
        torch.testing.assert_close(outputs.loss, expected.loss, rtol=1e-5, atol=0.0)
        for name, gradient in wanted.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)
        assert (len(calls), report.count("lora"), bound(ours)) == (LAYERS, LAYERS, LAYERS)
        again = liger_kernel.patch(ours, **ONLY)
        assert again.count("lora") == 0
    finally:
        report.undo()
    assert bound(ours) == 0
    step(ours, **inputs(device))
    assert len(calls) == LAYERS


def test_switched_off(device, calls):
    model = small(device)
    for report in (
        liger_kernel.patch(model, lora=False),
        monkey_patch._apply_liger_kernel_to_instance(model, lora=False),
    ):
        ours = adapted(copy.deepcopy(model))
        step(ours, **inputs(device))
        report.undo()
    assert not calls


def test_adapters_come_and_go(device, calls):
    """A second adapter, on other layers too, merged ones, and new ones after those."""
    model = small(device)
    liger_kernel.patch(model, **ONLY)
    ours = adapted(model, targets=["q_proj"]).eval()
    ids = inputs(device)["input_ids"]
    with torch.no_grad():
        ours(ids)
        assert len(calls) == 1
        ours.add_adapter("more", peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
        ours.set_adapter("more")
        ours(ids)
        assert len(calls) == 3
        with ours.disable_adapter():
            ours(ids)
        assert len(calls) == 3
        ours.set_adapter("default")
        kept = ours(ids).logits
        merged = ours.merge_and_unload()
        torch.testing.assert_close(merged(ids).logits, kept, rtol=1e-4, atol=1e-5)
        assert len(calls) == 4
        adapted(merged, targets=["o_proj"])(ids)
    assert len(calls) == 5


def test_rebuilt_activations(device):
    """Of a bf16 model with fp32 adapters: the outputs of its norms and activations, in bf16, and no copy of them."""
    kept, rebuilt = (adapted(small(device, torch.bfloat16)) for _ in range(2))
    liger_kernel.patch(kept, rematerialise=False)
    report = liger_kernel.patch(rebuilt)
    (_, wanted), (_, found) = (step(model, **inputs(device)) for model in (kept, rebuilt))
    assert all(torch.equal(found[name], gradient) for name, gradient in wanted.items())
    assert report.rebuilt == {"model": 24 * (2 * 32 + 48) * 2}


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_model(reentrant, device, calls):
    plain, ours = (adapted(small(device), lora_dropout=0.0) for _ in range(2))
    base = ours.get_base_model()
    enable = (
        getattr(base, "activation_checkpointing_enable", None) or base.gradient_checkpointing_enable
    )
    enable({"use_reentrant": reentrant})
    liger_kernel.patch(ours, **ONLY)
    assert_same_step(plain, ours, **inputs(device))
    assert len(calls) == 2 * LAYERS


def test_verified(device):
    ours = adapted(small(device), lora_dropout=0.3)
    found = verify(ours, [inputs(device)], rematerialise=False)
    assert found.ok, found
    assert all(module.training for module in ours.modules())


def test_nothing_is_kept_alive(device):
    report = monkey_patch.apply_liger_kernel_to_llama(rope=False, rms_norm=False, swiglu=False)
    try:
        ours = adapted(small(device))
        step(ours, **inputs(device))
        gone = weakref.ref(ours.get_base_model().model.layers[0].mlp.up_proj.base_layer.weight)
        assert report.count("lora") == LAYERS
        del ours
        gc.collect()
        assert gone() is None
    finally:
        report.undo()


# Layers


def layer_of(device, dtype=torch.float32, adapters=("default",), bias=True, **options):
    """A linear layer with adapters; and the same on our kernels."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(20, 12, bias=bias, dtype=dtype)).requires_grad_(False)
    torch.manual_seed(2)
    for name in adapters:
        config = peft.LoraConfig(r=3, target_modules=["0"], init_lora_weights=False, **options)
        peft.inject_adapter_in_model(config, model, adapter_name=name)
    model[0].set_adapter(adapters[0])
    model.to(device)
    ours = copy.deepcopy(model)
    assert liger_kernel.patch(ours).count("lora") == 1
    return model[0], ours[0]


def run(layer, x, call=None, **given):
    """Output and gradients; of a call that uses the layer, if one is given."""
    torch.manual_seed(3)
    x = x.detach().requires_grad_()
    layer.zero_grad()
    y = (layer if call is None else call)(x, **given)
    y.float().square().sum().backward()
    return [y, x.grad, *(p.grad for p in layer.parameters())]


def same(wanted, found):
    return all(a is b is None or torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


def close(wanted, found):
    for a, b in zip(wanted, found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)


def rows(device, dtype=torch.float32):
    return torch.randn(2, 5, 20, generator=torch.Generator().manual_seed(4)).to(device, dtype)


def two(layer):
    layer.set_adapter(["default", "other"])


SPECIAL = {
    "disabled": lambda layer: layer.enable_adapters(False),
    "merged": lambda layer: layer.merge(),
    "two at once": two,
    "none here": lambda layer: layer.set_adapter([]),
    "heard": lambda layer: layer.lora_A["default"].register_forward_hook(lambda *_: None),
    "replaced": lambda layer: setattr(layer.lora_B["default"], "forward", lambda h: 2 * h @ h.new_ones(3, 12)),
    "in fp64": lambda layer: layer.double(),
}  # fmt: skip


@pytest.mark.parametrize("what", SPECIAL)
def test_special_states_are_the_originals(what, device, calls):
    x, pair = rows(device), layer_of(device, adapters=("default", "other"))
    for layer in pair:
        SPECIAL[what](layer)
    x = x.double() if what == "in fp64" else x
    assert same(*(run(layer, x) for layer in pair))
    assert not calls


@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_bias": True}], ids=str)
def test_variants_are_the_originals(options, device, calls):
    assert same(*(run(layer, rows(device)) for layer in layer_of(device, **options)))
    assert not calls


def test_an_adapter_a_sequence_is_the_originals(device, calls):
    given = {"adapter_names": ["default", "__base__"]}
    assert same(*(run(layer, rows(device), **given) for layer in layer_of(device)))
    assert not calls


@pytest.mark.parametrize("options", [{}, {"use_rslora": True, "lora_alpha": 5}], ids=str)
def test_layer(options, device, calls):
    close(*(run(layer, rows(device)) for layer in layer_of(device, **options)))
    assert len(calls) == 1


def test_no_copy_is_kept(device):
    _, ours = layer_of(device, torch.bfloat16)
    saved, x = [], rows(device, torch.bfloat16).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        ours(x)
    kept = {
        (t.dtype, tuple(t.shape), t.data_ptr() == x.data_ptr())
        for t in saved
        if t.numel() >= x.numel()
    }
    assert kept <= {
        (x.dtype, tuple(x.shape), True),
        (x.dtype, (12, 20), False),
        (x.dtype, (20, 12), False),
    }


def test_autocast_changes_only_the_layer(device):
    plain, ours = layer_of(device)
    x = rows(device)
    with torch.autocast(device.type, torch.bfloat16):
        base = plain.base_layer(x)
        A, B = plain.lora_A["default"].weight, plain.lora_B["default"].weight
        wanted = reference(base, x, A, B, plain.scaling["default"])
        found = ours(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)


def test_traced(device):
    plain, ours = layer_of(device)
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    close(run(plain, rows(device)), run(ours, rows(device), compiled))


def test_copies(device, calls):
    _, ours = layer_of(device)
    x = rows(device)
    before = ours(x)
    twin, thawed = copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))
    assert torch.equal(twin(x), before)
    assert len(calls) == 2
    twin.lora_B["default"].weight.data.zero_()
    assert torch.equal(ours(x), before)
    torch.testing.assert_close(thawed(x), before, rtol=1e-5, atol=1e-5)
    assert ours.state_dict().keys() == thawed.state_dict().keys()


# Dropout


def test_dropout(device, calls):
    """The mask of forward is that of both gradients, and evaluation has none."""
    plain, ours = layer_of(device, lora_dropout=0.4)
    x = rows(device)
    torch.manual_seed(3)
    seed = _dropout.drawn(x)

    def definition(x):
        A, B = plain.lora_A["default"].weight, plain.lora_B["default"].weight
        return reference(plain.base_layer(x), x, A, B, plain.scaling["default"], 0.4, seed)

    close(run(plain, x, definition), run(ours, x))
    for layer in (plain, ours):
        layer.eval()
    torch.testing.assert_close(ours(x), plain(x), rtol=1e-5, atol=1e-5)
    assert len(calls) == 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_draws_the_same_mask(reentrant, device):
    _, ours = layer_of(device, lora_dropout=0.4)

    def again(x):
        return checkpoint(ours, x, use_reentrant=reentrant)

    assert same(run(ours, rows(device)), run(ours, rows(device), again))


def test_share(device):
    x = torch.zeros(1, device=device)
    first, second = (_dropout.mask(_dropout.drawn(x), 512, 777, _dropout.steps(0.05)) for _ in "ab")
    n = first.numel()
    for dropped in (~first, ~second):
        assert abs(dropped.sum() - 0.05 * n) < 5 * (0.05 * 0.95 * n) ** 0.5
        assert dropped.float().mean(0).max() < 0.12  # of a column
        assert dropped.float().mean(1).max() < 0.12  # of a row
    both = (~first & ~second).sum()
    assert abs(both - 0.0025 * n) < 5 * (0.0025 * n) ** 0.5
    assert _dropout.steps(0.0) == 0
    assert _dropout.factor(_dropout.steps(0.5)) == 2.0


# Classes


def _embedding(config):
    return peft.tuners.lora.Embedding(nn.Embedding(9, 20), "default", config=config, r=3)


def _other(config):
    class Other(peft.tuners.lora.Linear):
        def forward(self, x):
            return super().forward(x) + 0.1 * x.mean()

    return Other(nn.Linear(20, 12), "default", config=config, r=3)


def _quantised(module, name):
    def make(config):
        cls = getattr(pytest.importorskip(f"peft.tuners.lora.{module}"), name)
        return cls(nn.Linear(20, 12), "default", config=config, r=3)

    return make


@pytest.mark.parametrize(
    ("make", "count"),
    [
        pytest.param(_quantised("gptq", "GPTQLoraLinear"), 1, id="gptq"),
        pytest.param(_quantised("awq", "AwqLoraLinear"), 1, id="awq"),
        pytest.param(_quantised("te", "TeLinear"), 1, id="te"),
        pytest.param(_embedding, None, id="embedding"),
        pytest.param(_other, 0, id="other"),
    ],
)
def test_classes(make, count, device, calls):
    layer = make(peft.LoraConfig(init_lora_weights=False)).to(device)
    model = nn.Sequential(copy.deepcopy(layer))
    report = liger_kernel.patch(model)
    assert report.count("lora") == (count or 0)
    assert report.count("lora", LEFT) == (count == 0)
    x = torch.arange(5, device=device) if count is None else rows(device)
    torch.testing.assert_close(model(x), layer(x), rtol=1e-5, atol=1e-5)
    assert len(calls) == (count or 0)
