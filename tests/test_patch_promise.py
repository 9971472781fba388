"""What a model may do with promised logits: steps that stay a promise, and everything else, which gets true logits."""

import warnings

import pytest
import torch
from torch import nn

from liger_kernel.transformers import functional
from liger_kernel.transformers.patch import head as heads
from liger_kernel.transformers.patch import promise as promises
from liger_kernel.transformers.patch.chain import fold
from liger_kernel.transformers.patch.promise import LogitsPromise, PromisingHead, Request

pytestmark = pytest.mark.plain

HIDDEN, VOCAB = 8, 21


@pytest.fixture(autouse=True)
def _fresh():
    promises._warned.clear()


class Bench:
    """A head, hidden states, and the same logits promised and real."""

    def __init__(self, bias=False, **asked):
        torch.manual_seed(0)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=bias)
        heads.prepare(self.head)
        assert isinstance(self.head, PromisingHead)
        self.hidden = torch.randn(2, 6, HIDDEN, requires_grad=True)
        self.target = torch.randint(0, VOCAB, (12,))
        options = {"accuracy": False, "predictions": False, "scaling": False, **asked}
        self.request = Request(self.head, self.head, **options)

    def promise(self):
        self.head._liger_request = self.request
        found = self.head(self.hidden)
        self.head._liger_request = None
        return found

    def real(self):
        return nn.functional.linear(self.hidden, self.head.weight, self.head.bias)


def _same(bench, loss, monkeypatch, engine=True):
    """loss(logits) from a promise equals loss(real logits), with gradients, and (not) through the engine."""
    calls = []
    original = functional.liger_fused_linear_cross_entropy
    monkeypatch.setattr(
        functional,
        "liger_fused_linear_cross_entropy",
        lambda *a, **k: calls.append(k) or original(*a, **k),
    )
    variables = [bench.hidden, *bench.head.parameters()]
    expected = loss(bench.real())
    wanted = torch.autograd.grad(expected, variables)
    found = loss(bench.promise())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for got, want in zip(torch.autograd.grad(found, variables), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
    assert bool(calls) == engine
    return calls[0] if calls else {}


CE = nn.functional.cross_entropy
FUSED = {
    "flat": lambda z, y: CE(z.view(-1, VOCAB), y),
    "minus one": lambda z, y: CE(z.float().reshape(-1, z.size(-1)), y, ignore_index=3),
    "inferred width": lambda z, y: CE(z.view(2 * 6, -1), y),
    "scaled": lambda z, y: CE((z * 0.5 / 3.0).view(-1, VOCAB), y),
    "softcap": lambda z, y: CE((torch.tanh(z / 7.0) * 7.0).view(-1, VOCAB), y),
    "scaled softcap": lambda z, y: CE(7.0 * (2.0 * z / 7.0).tanh().float().view(-1, VOCAB), y),
    "shifted": lambda z, y: CE(
        z[..., :-1, :].contiguous().view(-1, VOCAB), y[:10], label_smoothing=0.1
    ),
    "row": lambda z, y: CE(z[0], y[:6]),
    "mask": lambda z, y: CE(z[(y.view(2, 6) % 2 == 0)], y[y % 2 == 0], reduction="sum"),
    "vocabulary": lambda z, y: CE(z[..., :15].view(-1, 15), y % 15),
    "vector": lambda z, y: CE((z / 2.0 + torch.linspace(-1, 1, VOCAB)).view(-1, VOCAB), y),
    "module": lambda z, y: (
        nn.CrossEntropyLoss(reduction="none")(z.view(-1, VOCAB), y).square().sum()
    ),
    "class weights": lambda z, y: CE(z.view(-1, VOCAB), y, weight=torch.linspace(0.5, 2, VOCAB)),
    "replaced cross entropy": lambda z, y: functional.liger_cross_entropy(
        z.view(-1, VOCAB), y, reduction="sum"
    ),
    "keyword": lambda z, y: CE(input=z.view(-1, VOCAB), target=y),
}
MATERIALISED = {
    "log softmax": lambda z, y: nn.functional.nll_loss(z.view(-1, VOCAB).log_softmax(-1), y),
    "assignment": lambda z, y: (z.__setitem__((..., slice(0, 2)), -5.0), CE(z.view(-1, VOCAB), y))[
        1
    ],
    "square": lambda z, y: CE((z * z).view(-1, VOCAB), y),
    "transposed": lambda z, y: CE(z.transpose(1, 2), y.view(2, 6)),
    "clamp": lambda z, y: CE(torch.clamp(z, -0.5, 0.5).view(-1, VOCAB), y),
    "tanh twice": lambda z, y: CE(torch.tanh(torch.tanh(z)).view(-1, VOCAB), y),
    "probabilities": lambda z, y: CE(z.view(-1, VOCAB), torch.full((12, VOCAB), 1 / VOCAB)),
    "gather": lambda z, y: -torch.gather(z.float(), 2, y.view(2, 6, 1)).sum(),
    "learned scale": lambda z, y: CE((z * torch.tensor(2.0)).view(-1, VOCAB), y),
    "difference": lambda z, y: CE((1.0 - z).view(-1, VOCAB), y),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", FUSED)
def test_stays_a_promise(name, bias, monkeypatch):
    bench = Bench(bias)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _same(bench, lambda z: FUSED[name](z, bench.target), monkeypatch)


@pytest.mark.parametrize("name", MATERIALISED)
@pytest.mark.filterwarnings("ignore:liger_kernel. this model's loss is not fused")
def test_becomes_true_logits(name, monkeypatch):
    bench = Bench()
    _same(bench, lambda z: MATERIALISED[name](z, bench.target), monkeypatch, engine=False)


def test_unknown_use_warns_once():
    bench = Bench()
    with pytest.warns(UserWarning, match="log_softmax"):
        bench.promise().log_softmax(-1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bench.promise().log_softmax(-1)


def test_softcap_folds_without_rounding():
    steps = (("div", 30.0), ("tanh", None), ("mul", 30.0))
    transform = fold(steps)
    assert (transform.pre_scale, transform.softcap) == (1.0, 30.0)
    scaled = fold((("mul", 0.25), *steps))
    assert (scaled.pre_scale, scaled.softcap) == (0.25, 30.0)
    assert fold((*steps, ("tanh", None))) is None
    assert fold((("tanh", None), ("mul", -2.0))) is None


def test_plain_arguments_only():
    """What is at its default is not passed: a framework's replacement may not know it."""
    bench = Bench()
    seen = []
    original = functional.liger_fused_linear_cross_entropy

    def replacement(input, weight, target, **kwargs):
        seen.append(kwargs)
        return original(input, weight, target, **kwargs)

    functional.liger_fused_linear_cross_entropy = replacement
    try:
        CE(
            bench.promise().float().view(-1, VOCAB),
            bench.target,
            ignore_index=-100,
            reduction="mean",
        )
    finally:
        functional.liger_fused_linear_cross_entropy = original
    assert seen == [{}]


def test_extra_results(monkeypatch):
    bench = Bench(accuracy=True, predictions=True)
    CE(bench.promise().view(-1, VOCAB), bench.target)
    expected = bench.real().argmax(-1).view(-1)
    assert torch.equal(bench.request.predicted_tokens.view(-1), expected)
    torch.testing.assert_close(
        bench.request.token_accuracy, (expected == bench.target).float().mean()
    )


def test_facts():
    promise = Bench().promise()
    assert isinstance(promise, LogitsPromise)
    assert promise.shape == (2, 6, VOCAB) == promise.size()
    assert (promise.dim(), promise.ndim, promise.size(-1), len(promise), promise.numel()) == (
        3,
        3,
        VOCAB,
        2,
        252,
    )
    assert promise.dtype == torch.float32
    assert promise.to(torch.bfloat16).dtype == torch.bfloat16
    assert promise.to(torch.float32) is promise
    assert promise.device.type == "cpu"
    assert "shape=[2, 6, 21]" in repr(promise / 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert promise.dtype == torch.bfloat16


def test_engine_runs_inside_the_hooks_of_the_head():
    """FSDP2 and ZeRO-3 gather in a pre-hook: the promise is made outside of it, the loss inside."""
    bench = Bench()
    order = []
    bench.head.register_forward_pre_hook(lambda *_: order.append("gather"))
    bench.head.register_forward_hook(lambda *_: order.append("reshard"))
    promise = bench.promise()
    assert order == []
    CE(promise.view(-1, VOCAB), bench.target)
    assert order == ["gather", "reshard"]


def test_sharded_weight_is_an_error():
    bench = Bench()
    promise = bench.promise()
    bench.head.weight = nn.Parameter(torch.empty(0))
    with pytest.raises((ValueError, RuntimeError), match="is a shard"):
        CE(promise.view(-1, VOCAB), bench.target)
