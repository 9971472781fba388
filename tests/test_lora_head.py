"""Heads that are more than a weight: adapters and quantised weights, as factors, as modules and in patched models."""

import copy
import sys
import types
import weakref

import pytest
import torch
import torch.nn.functional as F
from models import assert_same_step, batch, step, tiny
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import liger_kernel
from liger_kernel.chunked_loss import (
    LigerFusedLinearDPOLoss,
    LigerFusedLinearGRPOLoss,
    LigerFusedLinearKTOLoss,
)
from liger_kernel.ops import linear_logprob as lp
from liger_kernel.ops.fused_linear_cross_entropy import fused_linear_cross_entropy
from liger_kernel.ops.head import module as layers
from liger_kernel.ops.head.objective import fused_linear_objective
from liger_kernel.transformers.patch.promise import PromisingHead

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning"),
]
TOKENS, WIDTH, CLASSES, RANK, WORDS = 40, 16, 37, 5, 401
BUDGET = 8 * CLASSES * 4  # chunks of eight tokens


def _labels(device="cpu"):
    y = torch.randint(CLASSES, (TOKENS,), generator=torch.Generator().manual_seed(0))
    y[::3] = -100
    return y.to(device)


def _same(found, wanted, leaves, exact=None, tolerance=2e-5):
    """Equal values, and equal gradients of a weighted sum of them."""
    torch.testing.assert_close(found.to(wanted.dtype), wanted, rtol=tolerance, atol=tolerance)
    g = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1)).to(wanted)
    got = torch.autograd.grad(found, leaves, g.to(found.dtype), retain_graph=True)
    for a, b in zip(got, torch.autograd.grad(wanted, exact or leaves, g), strict=True):
        assert (a.to(b.dtype) - b).norm() <= tolerance * b.norm() + 1e-30


# Factors


def _factors(device, dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    shapes = ((TOKENS, WIDTH), (CLASSES, WIDTH), (CLASSES,), (TOKENS, RANK), (CLASSES, RANK))
    return [torch.randn(s, generator=g).to(device, dtype).requires_grad_() for s in shapes]


@pytest.mark.parametrize(
    ("dtype", "logits_dtype", "biased"),
    [
        (torch.float32, None, False),
        (torch.float32, None, True),
        (torch.bfloat16, None, True),
        (torch.bfloat16, torch.float32, True),
        (torch.bfloat16, "offset", False),
    ],
)
def test_low_rank_term(dtype, logits_dtype, biased, path, device):
    given, y = _factors(device, dtype), _labels(device)
    exact = [t.detach().double().requires_grad_() for t in given]
    options = {"return_entropy": True, "softcap": 8.0, "temperature": 1.5}

    def stacked(of):
        return torch.stack([of.logp, of.entropy])

    def leaves(of):
        return of if biased else of[:2] + of[3:]

    h, w, b, d, u = given
    found = lp.linear_logprob(
        h, w, y, bias=b if biased else None, low_rank=(d, u), logits_dtype=logits_dtype, memory_budget=BUDGET,
        **options,
    )  # fmt: skip
    h, w, b, d, u = exact
    wanted = lp.reference(h, w, y, bias=b if biased else None, low_rank=(d, u), **options)
    coarse = {None: 0.15, "offset": 0.15, torch.float32: 5e-3}[logits_dtype]  # of 8-bit mantissas
    tolerance = 2e-5 if dtype == torch.float32 else coarse
    _same(stacked(found), stacked(wanted), leaves(given), leaves(exact), tolerance)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy(reduction, path, device):
    given, y = _factors(device), _labels(device)
    h, w, b, d, u = given
    options = {} if reduction == "none" else {"label_smoothing": 0.1, "lse_square_scale": 1e-2}
    found = fused_linear_cross_entropy(
        h, w, y, b, low_rank=(d, u), reduction=reduction, memory_budget=BUDGET, **options
    )
    z = h @ w.t() + b + d @ u.t()
    wanted = F.cross_entropy(
        z, y, reduction=reduction, label_smoothing=options.get("label_smoothing", 0)
    )
    if options:
        squares = z.logsumexp(-1).square()[y != -100]
        wanted = wanted + 1e-2 * (squares.mean() if reduction == "mean" else squares.sum())
    _same(found.loss, wanted, given)


def test_gradients_of_the_term_alone(path, device):
    """Frozen weight and hidden states: neither is differentiated; fp32 factors under bf16 hidden states stay fp32."""
    h, w, _, d, u = _factors(device)
    frozen = [t.detach().bfloat16() for t in (h, w)]
    loss, _ = fused_linear_objective(
        *frozen, _labels(device), lambda t: (-t.logp.sum(), None), low_rank=(d, u), accum_dtype=torch.float32,
        logits_dtype=torch.float32, memory_budget=BUDGET,
    )  # fmt: skip
    got = torch.autograd.grad(loss, (d, u), retain_graph=True)
    again = torch.autograd.grad(loss, (d, u))
    z = frozen[0].float() @ frozen[1].float().t() + d @ u.t()
    want = torch.autograd.grad(F.cross_entropy(z, _labels(device), reduction="sum"), (d, u))
    for a, b, c in zip(got, want, again, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() <= 1e-2 * b.norm()
        torch.testing.assert_close(a, c)


def test_ignored_tokens_never_reach_the_term(path, device):
    h, w, b, d, u = _factors(device)
    y = _labels(device)
    spoiled = d.detach().masked_fill((y == -100)[:, None], torch.nan).requires_grad_()
    loss = fused_linear_cross_entropy(h, w, y, b, low_rank=(spoiled, u)).loss
    dd, du = torch.autograd.grad(loss, (spoiled, u))
    wanted = F.cross_entropy(h @ w.t() + b + d @ u.t(), y)
    for got, want in zip((dd, du), torch.autograd.grad(wanted, (d, u)), strict=True):
        torch.testing.assert_close(got, want)


def test_factors_that_do_not_fit(device):
    h, w, b, d, u = _factors(device)
    y = _labels(device)
    for pair in ((d[:-1], u), (d, u[:-1]), (d[:, 1:], u)):
        with pytest.raises(ValueError, match="low_rank must be"):
            lp.linear_logprob(h, w, y, low_rank=pair)
    with pytest.raises(ValueError, match="take no class weights"):
        fused_linear_cross_entropy(h, w, y, b, torch.ones(CLASSES), low_rank=(d, u))


# Modules


class Quantised(nn.Linear):
    """A stand-in: 8-bit integers and a scale a row, a forward of its own, `dequantize`."""

    def __init__(self, layer):
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
        codes = (layer.weight.detach() / scale).round().to(torch.int8)
        self.register_buffer("scale", scale)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.bias, self.made = layer.bias, []

    def dequantize(self):
        dense = self.weight * self.scale
        self.made.append(weakref.ref(dense))
        return dense

    def forward(self, x):
        return F.linear(x, self.weight * self.scale, self.bias)


class Model(nn.Module):
    def __init__(self, bias=False, quantised=False):
        super().__init__()
        torch.manual_seed(0)
        head = nn.Linear(WIDTH, CLASSES, bias=bias).requires_grad_(False)
        self.head = Quantised(head) if quantised else head


def _lora(model, adapters=("default",), **options):
    torch.manual_seed(2)
    for name in adapters:
        config = peft.LoraConfig(
            r=RANK, target_modules=["head"], init_lora_weights=False, **options
        )
        peft.inject_adapter_in_model(config, model, adapter_name=name)
    return model.head


def _several():
    head = _lora(Model(), ("a", "b"), use_rslora=True)
    head.set_adapter(["a", "b"])
    return head


def _merged():
    head = _lora(Model())
    head.merge()
    return head


def _disabled():
    head = _lora(Model())
    head.enable_adapters(False)
    return head


def _trained_copy():
    model = Model()
    config = peft.LoraConfig(target_modules=[], modules_to_save=["head"])
    return peft.get_peft_model(nn.Sequential(model), config).base_model.model[0].head


MODULES = {
    "linear": lambda: nn.Linear(WIDTH, CLASSES),
    "lora": lambda: _lora(Model(bias=True)),
    "dropout": lambda: _lora(Model(), lora_dropout=0.4),
    "bias": lambda: _lora(Model(bias=True), lora_bias=True),
    "several": _several,
    "merged": _merged,
    "disabled": _disabled,
    "quantised": lambda: Model(bias=True, quantised=True).head,
    "lora over quantised": lambda: _lora(Model(quantised=True)),
}


def _hidden():
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(3)).requires_grad_()


def _seeded(function, *args, **kwargs):
    torch.manual_seed(4)
    return function(*args, **kwargs)


@pytest.mark.plain
@pytest.mark.parametrize("name", MODULES)
def test_modules(name):
    head, hidden, y = MODULES[name](), _hidden(), _labels()
    leaves = [hidden, *(p for p in head.parameters() if p.requires_grad)]
    if name in ("merged", "disabled"):  # PEFT leaves them trainable
        leaves = [hidden]
    log_p = _seeded(head, hidden).log_softmax(-1)
    logp = -F.nll_loss(log_p, y, reduction="none")
    entropy = torch.where(y == -100, 0.0, -(log_p.exp() * log_p).sum(-1))

    found = _seeded(lp.linear_logprob, hidden, head, y, return_entropy=True, memory_budget=BUDGET)
    assert isinstance(found, lp.LogprobOutput)
    _same(torch.stack([found.logp, found.entropy]), torch.stack([logp, entropy]), leaves)

    log_p = _seeded(head, hidden).log_softmax(-1)  # a graph of its own
    found = _seeded(fused_linear_cross_entropy, input=hidden, weight=head, target=y)
    _same(found.loss, F.nll_loss(log_p, y), leaves)

    def policy(tokens):
        return -(tokens.logp - tokens.logp.detach()).exp().sum(), None

    log_p = _seeded(head, hidden).log_softmax(-1)
    logp = -F.nll_loss(log_p, y, reduction="none")
    found, _ = _seeded(fused_linear_objective, hidden, head, y, policy, memory_budget=BUDGET)
    _same(found, -(logp - logp.detach()).exp()[y != -100].sum(), leaves)


@pytest.mark.plain
def test_group_relative_policy():
    """GRPO through a module, its reference too."""
    head, hidden = _lora(Model(quantised=True)), _hidden()
    ids, mask = _labels().clamp(min=0).view(4, 10), (_labels() != -100).view(4, 10)
    reference, advantages = nn.Linear(WIDTH, CLASSES), torch.tensor([1.0, -1.0, 0.5, -0.5])
    arguments = {"ref_input": hidden.detach().view(4, 10, -1), "ref_weight": reference}
    results = []
    for weight in (head, nn.Linear(WIDTH, CLASSES)):
        if weight is not head:  # what the head is when everything is multiplied out
            dense = head.base_layer.dequantize() + head.get_delta_weight("default")
            weight, arguments["ref_weight"] = dense, reference.weight
            arguments["ref_bias"] = reference.bias
        loss, (kl, _) = LigerFusedLinearGRPOLoss(beta=0.1)(
            hidden.view(4, 10, -1), weight, ids, mask, advantages, **arguments
        )
        leaves = [hidden, *(p for p in head.parameters() if p.requires_grad)]
        results.append([loss, kl, *torch.autograd.grad(loss, leaves)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.plain
def test_a_dense_weight_lives_for_one_pass():
    head, hidden, y = Model(quantised=True).head, _hidden(), _labels()

    def alive():
        return [made() for made in head.made if made() is not None]

    logp = lp.linear_logprob(hidden, head, y).logp
    assert (len(head.made), alive()) == (1, [])
    logp.sum().backward()
    assert (len(head.made), alive()) == (2, [])
    loss = fused_linear_cross_entropy(hidden, head, y).loss
    assert (len(head.made), alive()) == (3, [])
    loss.backward()
    assert len(head.made) == 3


class Params4bit(nn.Parameter):
    quant_state = "scales"


class Int8Params(nn.Parameter):
    pass


class Subclass(torch.Tensor):
    def dequantize(self):
        return self.as_subclass(torch.Tensor) * 2


@pytest.mark.plain
def test_quantised_weights_of_libraries(monkeypatch):
    """bitsandbytes and torchao, by what their objects look like."""
    dense, x = torch.randn(CLASSES, WIDTH), torch.randn(3, WIDTH)
    functional: dict = {"dequantize_4bit": lambda data, state: dense if state == "scales" else None}
    fake = types.ModuleType("bitsandbytes.functional")
    fake.__dict__.update(functional)
    monkeypatch.setitem(sys.modules, "bitsandbytes", types.ModuleType("bitsandbytes"))
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", fake)

    def weight_of(weight, **attributes):
        layer = nn.Linear(WIDTH, CLASSES, bias=False)
        vars(layer).update(attributes)
        layer._parameters["weight"] = weight
        assert layers.find(layer) is layer
        assert layers.why_not(layer) is None
        return layers.parts(layer, x).weight.to(torch.float32)

    packed = torch.zeros(CLASSES * WIDTH // 2, 1, dtype=torch.uint8)
    assert torch.equal(weight_of(Params4bit(packed, requires_grad=False)), dense)
    scale = dense.abs().amax(1)
    codes = (dense / scale[:, None] * 127).round().to(torch.int8)
    state = types.SimpleNamespace(SCB=scale)
    found = weight_of(Int8Params(codes, requires_grad=False), state=state)
    assert (found - dense).abs().max() <= scale.max() / 127
    found = weight_of(nn.Parameter(dense.as_subclass(Subclass), requires_grad=False))
    assert torch.equal(found, dense * 2)


class _Own(nn.Linear):
    def forward(self, x):
        return F.normalize(super().forward(x))


@pytest.mark.plain
def test_modules_that_are_more_are_refused():
    hidden, y = _hidden(), _labels()
    for head, reason in (
        (_lora(Model(), use_dora=True), "more than a low-rank product"),
        (_Own(WIDTH, CLASSES), "in its own way"),
        (nn.Sequential(nn.Linear(WIDTH, CLASSES)), "no linear layer"),
    ):
        with pytest.raises(ValueError, match=f"cannot do without its logits: .*{reason}"):
            lp.linear_logprob(hidden, head, y)
    with pytest.raises(ValueError, match="brings its own bias"):
        lp.linear_logprob(hidden, _lora(Model()), y, bias=torch.zeros(CLASSES))


class _Sharded:
    """ZeRO-3: a module's own parameters exist around its forward and its backward alone."""

    def __init__(self, model):
        self.full = {p: p.detach().clone() for p in model.parameters()}
        for module in model.modules():
            if any(True for _ in module.parameters(recurse=False)):
                module.register_forward_pre_hook(self.gather)
                module.register_forward_hook(self.release)
                module.register_full_backward_pre_hook(self.gather)
                self.release(module)

    def gather(self, module, *_):
        for parameter in module.parameters(recurse=False):
            parameter.data = self.full[parameter].clone()

    def release(self, module, *_):
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.new_empty(0)


@pytest.mark.plain
@pytest.mark.parametrize("name", ["linear", "lora"])
def test_weights_that_exist_inside_calls_only(name):
    head, hidden, y = MODULES[name](), _hidden(), _labels()
    leaves = [p for p in head.parameters() if p.requires_grad]
    want = torch.autograd.grad(F.cross_entropy(head(hidden), y), [hidden, *leaves])
    engine = _Sharded(head)
    fused_linear_cross_entropy(hidden, head, y).loss.backward()
    for got, expected in zip((hidden, *leaves), want, strict=True):
        torch.testing.assert_close(got.grad, expected)
    assert all(engine.full[p].numel() for p in leaves)
    assert "forward" not in vars(head)


@pytest.mark.plain
@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
def test_a_patched_model_of_weights_that_exist_inside_calls_only():
    plain, patched = _pair()
    _, wanted = step(plain, **batch())
    liger_kernel.patch(patched)
    _Sharded(patched)
    outputs = patched(**batch())
    assert outputs.logits is None
    outputs.loss.backward()
    for name, parameter in patched.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-4, atol=1e-6)


@pytest.mark.plain
def test_compiles_without_a_break():
    h, w, _, d, u = _factors("cpu")

    def function(h, w, d, u):
        return lp.linear_logprob(h, w, _Y, low_rank=(d, u), return_entropy=True).logp.sum()

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    _same(compiled(h, w, d, u), function(h, w, d, u), [h, w, d, u])


_Y = _labels()


# Patched models


class _Largest(TorchDispatchMode):
    """Counts the elements of the largest tensor that any operator returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        found = [
            t.numel() for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor)
        ]
        self.elements = max(self.elements, *found, 0)
        return out


def _pair(quantised=False, **options):
    plain = tiny("llama", num_hidden_layers=1, vocab_size=WORDS)
    if quantised:
        plain.lm_head = Quantised(plain.lm_head)
    torch.manual_seed(5)
    config = peft.LoraConfig(
        r=RANK, init_lora_weights=False, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM", **options
    )  # fmt: skip
    plain = peft.get_peft_model(plain, config)
    return plain, copy.deepcopy(plain)


def _seeded_step(plain, patched, **inputs):
    torch.manual_seed(6)
    expected, wanted = step(plain, **inputs)
    state = torch.get_rng_state()
    torch.manual_seed(6)
    outputs, found = step(patched, **inputs)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(outputs.loss, expected.loss, rtol=1e-5, atol=0.0)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert (found[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-8, name
    return outputs


@pytest.mark.plain
@pytest.mark.parametrize("quantised", [False, True], ids=["plain", "quantised"])
def test_patched_model(quantised, monkeypatch):
    """Dropout draws the same numbers, the logits are never built."""
    plain, patched = _pair(quantised, lora_dropout=0.3)
    liger_kernel.patch(patched)
    assert isinstance(patched.base_model.model.lm_head, PromisingHead)
    inputs = batch(rows=8, tokens=40)
    monkeypatch.setenv("LIGER_KERNEL_MEMORY_BUDGET", str(32 * WORDS * 4))
    assert _seeded_step(plain, patched, **inputs).logits is None
    with _Largest() as seen:
        patched(**inputs).loss.backward()
    assert seen.elements < 320 * WORDS
    assert patched(**inputs, skip_logits=False).logits.shape == (8, 40, WORDS)


@pytest.mark.plain
def test_adapters_come_and_go():
    """What the head is is asked at every call."""
    plain, patched = _pair()
    liger_kernel.patch(patched)
    inputs = batch()
    for change in (
        lambda model: model.merge_adapter(),
        lambda model: model.unmerge_adapter(),
        lambda model: model.base_model.disable_adapter_layers(),
        lambda model: model.base_model.enable_adapter_layers(),
        lambda model: model.base_model.model.lm_head.set_scale("default", 0.5),
    ):
        change(plain)
        change(patched)
        with torch.no_grad():
            expected, outputs = plain(**inputs), patched(**inputs)
        assert outputs.logits is None
        torch.testing.assert_close(outputs.loss, expected.loss)
    assert _seeded_step(plain, patched, **inputs).logits is None


@pytest.mark.plain
def test_variants_of_lora_get_their_logits():
    plain, patched = _pair(use_dora=True)
    report = liger_kernel.patch(patched)
    assert "more than a low-rank product" in str(report)
    assert assert_same_step(plain, patched, **batch()).logits is not None


@pytest.mark.plain
def test_class_weights_get_their_logits():
    """What the engine has no form for is done on logits."""
    plain, patched = _pair()
    weight = torch.linspace(0.5, 2, WORDS)

    def loss(logits, labels, vocab_size, **_):
        return F.cross_entropy(logits.view(-1, vocab_size), labels.view(-1), weight=weight)

    liger_kernel.patch(patched)
    for model in (plain, patched):
        model.base_model.model.loss_function = loss
    assert_same_step(plain, patched, **batch())


@pytest.mark.plain
def test_a_patched_head_copies_and_comes_back():
    plain, patched = _pair(quantised=True)
    report = liger_kernel.patch(patched)
    twin = copy.deepcopy(patched)
    assert _seeded_step(plain, twin, **batch()).logits is None
    report.undo()
    head = patched.base_model.model.lm_head
    assert type(head) is type(plain.base_model.model.lm_head)
    assert patched(**batch()).logits is not None


def _dense(head):
    """What a head is when everything is multiplied out."""
    return head.base_layer.dequantize() + head.get_delta_weight("default")


@pytest.mark.plain
@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_preferences(loss, softcap):
    """Paired and unpaired losses through a module, with every metric."""
    head, hidden, y = _lora(Model(quantised=True)), _hidden(), _labels().view(4, 10)
    reference = nn.Linear(WIDTH, CLASSES)
    leaves = [hidden, *(p for p in head.parameters() if p.requires_grad)]
    results = []
    for weight in (head, _dense(head)):
        x, whole = hidden.view(4, 10, -1), weight is not head
        ref = {
            "ref_input": x.detach(),
            "ref_weight": reference.weight if whole else reference,
            "ref_bias": reference.bias if whole else None,
        }
        if loss == "dpo":
            made = LigerFusedLinearDPOLoss(
                softcap=softcap, use_ref_model=True, compute_nll_loss=True
            )
            found, metrics = made(weight, x, y, **ref)
        else:
            made = LigerFusedLinearKTOLoss(softcap=softcap, use_ref_model=True)
            labels = torch.tensor([True, False, True, False])
            found, metrics = made(
                x, weight, y, preference_labels=labels, kl=torch.tensor(0.1), **ref
            )
        results.append([found, *metrics, *torch.autograd.grad(found, leaves)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
