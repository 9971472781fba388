"""The vocabulary head without logits: products with the softmax in their epilogue, against float64."""

import pytest
import torch

from liger_kernel import _env
from liger_kernel.ops import _triton
from liger_kernel.ops.head import exponentials
from liger_kernel.ops.head.engine import Wanted
from liger_kernel.ops.head.params import HeadParams
from liger_kernel.ops.head.valid import Counting
from liger_kernel.ops.linear_logprob import linear_logprob, reference

N, H, V = 150, 40, 301  # more than a tile of rows and of columns, no multiples
IGNORE = -7
# fp32 products are exact enough to see everything else; a GPU takes this way in bf16 alone
EXACT = _env.interpreting()
DTYPE = torch.float32 if EXACT else torch.bfloat16
CLOSE = 2e-6 if EXACT else 4e-3
# what overflows is seen and done again; the interpreter's numpy says so
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture
def device(device):
    if not (_triton.AVAILABLE and (EXACT or (device.type == "cuda" and exponentials.pays(device)))):
        pytest.skip("needs Triton's interpreter or tensor descriptors")
    return device


def _batch(device, dtype=DTYPE, bias=False, vocab=V):
    torch.manual_seed(0)
    hidden = torch.randn(N, H, device=device)
    weight = torch.randn(vocab, H, device=device) * H**-0.5
    targets = torch.randint(0, vocab, (N,), device=device)
    targets[::5] = IGNORE
    bias = torch.randn(vocab, device=device) if bias else None
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    return hidden, weight, targets, None if bias is None else bias.to(dtype)


def _run(
    hidden,
    weight,
    targets,
    bias=None,
    budget=1 << 20,
    keep=None,
    wanted=None,
    upstream=None,
    accum_dtype=torch.float32,
    **head,
):
    a = torch.linspace(-1, 2, N, device=hidden.device) if upstream is None else upstream

    def per_token(known, start, stop, index):
        return known.logp, a[start:stop] if index is None else a[index]

    wanted = Wanted(True, True, bias is not None) if wanted is None else wanted
    found, grads = exponentials.run(
        hidden, HeadParams(weight, bias, **head), per_token, wanted, targets=targets, ignore_index=IGNORE, keep=keep,
        budget=budget, accum_dtype=accum_dtype,
    )  # fmt: skip
    return torch.cat([a[:0], *found]), grads, len(found), a


def _truth(hidden, weight, targets, bias, a, **head):
    leaves = [t.detach().double().requires_grad_() for t in (hidden, weight, bias) if t is not None]
    logp = reference(
        *leaves[:2], targets, bias=(*leaves, None)[2], ignore_index=IGNORE, **head
    ).logp
    grads = torch.autograd.grad((logp * a.double()).sum(), leaves)
    return logp.detach(), grads


def _near(got, want, bound=CLOSE):
    error = (got.double() - want).norm() / want.norm().clamp(min=1e-30)
    assert error <= bound, error


@pytest.mark.parametrize(
    "head", [{}, {"softcap": 3.0}, {"pre_scale": 0.5, "temperature": 0.3}], ids=str
)
@pytest.mark.parametrize("bias", [False, True])
def test_formula(head, bias, device):
    hidden, weight, targets, b = _batch(device, bias=bias)
    logp, grads, _, a = _run(hidden, weight, targets, b, **head)
    want, truth = _truth(hidden, weight, targets, b, a, **head)
    torch.testing.assert_close(logp.double(), want, atol=1e-5, rtol=1e-5)
    for got, true in zip((grads.hidden, grads.weight, grads.bias), truth, strict=False):
        _near(got, true)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("kept", [False, True])
def test_chunks_change_nothing(kept, own, device, monkeypatch):
    """Whatever the budget and whose products, tokens dropped or not; without a gradient for h the sums of E have a
    buffer of their own.
    """
    monkeypatch.setattr(exponentials, "_BUSY", 0 if own else 2)
    hidden, weight, targets, _ = _batch(device)
    a = torch.linspace(-1, 2, N, device=device)
    _, truth = _truth(hidden, weight, targets, None, a)
    keep = (targets != IGNORE).nonzero().view(-1) if kept else None
    for budget, hidden_too in ((1 << 20, True), (40 * 1400, True), (40 * 1400, False)):
        _, grads, chunks, _ = _run(
            hidden,
            weight,
            targets,
            budget=budget,
            keep=keep,
            wanted=Wanted(hidden_too, True),
            upstream=a,
        )
        assert (chunks > 1) == (budget < 1 << 20)
        _near(grads.weight, truth[1])
        if hidden_too:
            _near(grads.hidden, truth[0])


def _far(weight, hidden, targets):
    """A label 1,000 nats below, one 60 below, a certain one."""
    hidden[0], hidden[1], hidden[2] = (
        weight[3] * 1e3,
        weight[4] * 60 / weight[4].square().sum(),
        weight[5] * 1e3,
    )
    targets[:3] = torch.tensor([9, 9, 5])


def _shifted(weight, hidden, targets):
    """An offset common to all logits of a row."""
    weight[:, 0] = 1.0
    hidden[:, 0] = 1e4
    hidden[7, 0] = -1e4


def _lost(weight, hidden, targets):
    """Classes of probability zero, one of them a label."""
    weight[20] = -1e30
    hidden.abs_()
    targets[1] = 20


@pytest.mark.parametrize("change", [_far, _shifted, _lost])
def test_adversarial(change, device):
    hidden, weight, targets, _ = _batch(device)
    change(weight, hidden, targets)
    a = torch.ones(N, device=device)
    if change is _lost:
        a[1] = 0.0
    logp, grads, _, _ = _run(hidden, weight, targets, upstream=a)
    want, truth = _truth(hidden, weight, targets, None, a)
    if change is _lost:
        assert logp[1] < -1e29
        want[1] = logp[1]
    # products of 1e4 have an fp32 rounding of 1e-3, in any method
    torch.testing.assert_close(
        logp.double(), want, atol=4e-3 if change is _shifted else 1e-5, rtol=1e-5
    )
    bound = 4 * CLOSE if change is not _shifted else 4e-3
    _near(grads.hidden, truth[0], bound)
    _near(grads.weight, truth[1], bound)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("head", [{}, {"softcap": 3.0}], ids=str)
def test_invalid_rows(head, own, device, monkeypatch):
    """NaN in an ignored token goes nowhere, whoever makes dh; a label out of range makes its own row NaN."""
    monkeypatch.setattr(exponentials, "_BUSY", 0 if own else 2)
    hidden, weight, targets, _ = _batch(device)
    clean = _run(hidden, weight, targets, **head)
    hidden[0] = torch.nan
    logp, grads, _, _ = _run(hidden, weight, targets, **head)
    assert logp[0] == 0
    assert torch.equal(logp, clean[0])
    assert (grads.hidden[0] == 0).all()
    assert torch.equal(grads.weight, clean[1].weight)
    targets[3] = V
    logp, grads, _, _ = _run(hidden, weight, targets, **head)
    assert logp.isnan().nonzero().view(-1).tolist() == [3]
    assert grads.hidden.isnan().any(1).nonzero().view(-1).tolist() == [3]


@pytest.mark.parametrize("budget", [1 << 20, 40 * 1400])
def test_strides(budget, device):
    """Of labels, bias and hidden states; these also begin where no descriptor may."""
    hidden, weight, targets, bias = _batch(device, bias=True)
    want, grads, _, _ = _run(hidden, weight, targets, bias, budget=budget)
    wide = torch.zeros(N, H + 3, dtype=hidden.dtype, device=device)
    wide[:, 1 : H + 1] = hidden
    pairs = torch.stack((targets, targets - 1), 1), torch.stack((bias, -bias), 1)
    strided = wide[:, 1 : H + 1], weight, pairs[0][:, 0], pairs[1][:, 0]
    got, found, _, _ = _run(*strided, budget=budget)
    assert torch.equal(got, want)
    assert all(torch.equal(a, b) for a, b in zip(found.all()[:3], grads.all()[:3], strict=True))


def test_without_gradient_nothing_is_written(device):
    hidden, weight, targets, _ = _batch(device)
    logp, grads, chunks, _ = _run(hidden, weight, targets, wanted=Wanted(), budget=1 << 15)
    want, _ = _truth(hidden, weight, targets, None, torch.ones(N, device=device))
    torch.testing.assert_close(logp.double(), want, atol=1e-5, rtol=1e-5)
    assert chunks == 1
    assert grads.all() == (None,) * 5


def test_who_takes_it(device, monkeypatch):
    monkeypatch.setattr(exponentials, "_NARROW", H)
    hidden, weight, _, _ = _batch(device, torch.bfloat16)
    assert exponentials.apply_to(hidden, HeadParams(weight), kernels=True)
    assert not exponentials.apply_to(hidden, HeadParams(weight), kernels=False)
    assert not exponentials.apply_to(hidden.half(), HeadParams(weight), kernels=True)
    assert not exponentials.apply_to(
        hidden, HeadParams(weight.new_empty(V, H + 1)[:, 1:]), kernels=True
    )
    for turned in (weight.t().contiguous().t(), weight.float().t().contiguous().t()):
        assert not exponentials.apply_to(hidden, HeadParams(turned), kernels=True)
    assert exponentials.apply_to(hidden, HeadParams(weight.float()), kernels=True)
    pair = (hidden.new_zeros(N, 4), weight.new_zeros(V, 4))
    assert not exponentials.apply_to(hidden, HeadParams(weight, low_rank=pair), kernels=True)


def test_an_operator_that_takes_it(device, monkeypatch):
    """Log-probabilities are those of fp32 logits, although nothing asked for them."""
    monkeypatch.setattr(exponentials, "_NARROW", H)
    hidden, weight, targets, _ = _batch(device, torch.bfloat16)
    hidden = (hidden * 20).requires_grad_()
    got = linear_logprob(hidden, weight, targets, ignore_index=IGNORE).logp
    want = reference(hidden.double(), weight.double(), targets, ignore_index=IGNORE).logp
    torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=2e-6)
    (dh,) = torch.autograd.grad(got.sum(), hidden)
    (true,) = torch.autograd.grad(want.sum(), hidden)
    _near(dh, true.double(), 1.5e-2 if EXACT else 5e-3)  # the interpreter truncates to bf16


@pytest.mark.parametrize("far", [False, True])
def test_hits(far, device):
    """Where the label's logit is the largest, whether or not a chunk was done again."""
    hidden, weight, targets, _ = _batch(device)
    if far:
        _far(weight, hidden, targets)
    best = (hidden.double() @ weight.double().t()).argmax(-1)
    targets[::2] = best[::2]
    targets[::5] = IGNORE
    found, _ = exponentials.run(
        hidden, HeadParams(weight), lambda known, *_: (known.correct, known.logp), Wanted(True, True), targets=targets,
        ignore_index=IGNORE, keep=None, budget=40 * 1400, accum_dtype=None, hits=True,
    )  # fmt: skip
    assert len(found) > 1
    assert torch.equal(torch.cat(found).bool(), targets == best)


def _counted(device, masked, budget, dh=True):
    """Gradients of tokens that are still being counted, and of tokens that are known."""
    hidden, weight, targets, _ = _batch(device)
    targets[:] = torch.where(targets == IGNORE, 1, targets)
    targets[masked] = IGNORE
    hidden[targets == IGNORE] = float("nan")
    a = torch.linspace(-1, 2, N, device=device)
    wanted = Wanted(dh, True)
    keep = (targets != IGNORE).nonzero().view(-1)
    want = _run(hidden, weight, targets, keep=keep, wanted=wanted, upstream=a, budget=budget)
    counting = Counting(targets, IGNORE)
    got = _run(hidden, weight, targets, keep=counting, wanted=wanted, upstream=a, budget=budget)
    kept = counting.kept()
    assert torch.equal(keep, torch.arange(N, device=device) if kept is None else kept)
    return got, want


_EVERY = torch.arange(N)


@pytest.mark.parametrize("budget", [1 << 20, 40 * 1400])
@pytest.mark.parametrize("dh", [True, False])
@pytest.mark.parametrize(
    "masked",
    [_EVERY < 0, _EVERY % 3 == 1, _EVERY % 7 > 0, _EVERY < 100, _EVERY > 5, _EVERY >= 0],
    ids=["none", "a third", "most", "the first", "the last", "all"],
)
def test_tokens_that_are_still_being_counted(masked, dh, budget, device):
    """The first chunk begins before their number is known; what ignored tokens hold (NaN) reaches nothing."""
    (logp, grads, chunks, _), (want, truth, _, _) = _counted(device, masked.to(device), budget, dh)
    torch.testing.assert_close(logp, want, atol=1e-6, rtol=1e-6)
    _near(grads.weight, truth.weight.double())
    if dh:
        _near(grads.hidden, truth.hidden.double())
    if budget > 1 << 19:
        assert chunks == 1


PAGED = 384  # classes, three pages


@pytest.fixture
def homes(monkeypatch):
    """What is found of dW's memory for first chunks, which these sizes would otherwise be too small for."""
    found, find = [], exponentials._home
    monkeypatch.setattr(exponentials, "_GROUP_PAGES", 1)
    monkeypatch.setattr(exponentials, "_BUSY", 0)
    monkeypatch.setattr(exponentials, "_home", lambda *a: found.append(find(*a)) or found[-1])
    return found


def _rows(n, hidden):
    """The budget of n rows of PAGED classes."""
    return n * (PAGED * hidden.element_size() + 8)


@pytest.mark.parametrize("masked", ["counted", "none counted", "all", "known"])
@pytest.mark.parametrize("accum_dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("head", [{}, {"bias": True, "softcap": 3.0}], ids=str)
def test_a_first_chunk_in_the_memory_of_dw(head, accum_dtype, masked, device, homes):
    """With a budget of a few rows; pages of its exponentials become dW one after the other."""
    head = dict(head)
    hidden, weight, targets, bias = _batch(device, bias=head.pop("bias", False), vocab=PAGED)
    if masked == "all":
        targets[:] = IGNORE
    elif masked == "none counted":
        targets[:] = torch.where(targets == IGNORE, 1, targets)
    hidden[targets == IGNORE] = 0.0 if masked == "known" else float("nan")
    keep = None if masked == "known" else Counting(targets, IGNORE)
    logp, grads, _, a = _run(
        hidden, weight, targets, bias, budget=_rows(8, hidden), keep=keep, accum_dtype=accum_dtype, **head,
        upstream=torch.linspace(-1, 2, N, device=device),
    )  # fmt: skip
    assert len(homes) == 1
    assert homes[0].shape[1] == 16
    assert homes[0].shape[0] == 3
    want, truth = _truth(hidden.nan_to_num(), weight, targets, bias, a, **head)
    want = want if masked == "known" else want[targets != IGNORE]
    torch.testing.assert_close(logp.double(), want, atol=1e-5, rtol=1e-5)
    wide = accum_dtype is not None or EXACT
    for got, true in zip((grads.hidden, grads.weight, grads.bias), truth, strict=False):
        assert got.isfinite().all()
        _near(got, true, CLOSE if wide else 1e-2)


@pytest.mark.parametrize("far", [False, True])
def test_hits_of_a_first_chunk_in_the_memory_of_dw(far, device, homes):
    """And where the chunk is done again; ignored tokens are neither counted nor dropped."""
    hidden, weight, targets, _ = _batch(device, vocab=PAGED)
    if far:
        _far(weight, hidden, targets)
    best = (hidden.double() @ weight.double().t()).argmax(-1)
    targets[1::2] = best[1::2]
    targets[::5] = IGNORE
    a = torch.linspace(-1, 2, N, device=device)
    found, grads = exponentials.run(
        hidden, HeadParams(weight), lambda known, start, stop, _: (known.correct, a[start:stop]), Wanted(True, True),
        targets=targets, ignore_index=IGNORE, keep=None, budget=_rows(8, hidden),
        accum_dtype=torch.float32, hits=True,
    )  # fmt: skip
    assert found[0].shape[0] > found[1].shape[0]
    assert torch.equal(torch.cat(found).bool(), targets == best)
    _, truth = _truth(hidden, weight, targets, None, a)
    _near(grads.hidden, truth[0], 4 * CLOSE)
    _near(grads.weight, truth[1], 4 * CLOSE)


def test_a_first_chunk_whose_products_would_have_few_tiles(device, homes, monkeypatch):
    hidden, weight, targets, _ = _batch(device, vocab=PAGED)
    for busy in (0, 2):
        monkeypatch.setattr(exponentials, "_BUSY", busy)
        _run(hidden, weight, targets, budget=_rows(8, hidden))
    assert [home is None for home in homes] == [False, True]


def test_dw_that_holds_something_lends_no_memory(device, homes):
    hidden, weight, targets, _ = _batch(device, vocab=PAGED)
    into, a = torch.ones_like(weight), torch.ones(N, device=device)
    exponentials.run(
        hidden, HeadParams(weight), lambda known, start, stop, _: (None, a[start:stop]), Wanted(True, True),
        targets=targets, ignore_index=IGNORE, keep=None, budget=_rows(8, hidden), accum_dtype=None, into=into,
    )  # fmt: skip
    _, truth = _truth(hidden, weight, targets, None, a)
    _near(into, truth[1] + 1, 1e-6 if EXACT else 1e-2)


def test_the_first_product_does_not_wait_for_the_count(device, monkeypatch):
    order = []
    original, kept = exponentials.launch, Counting.kept
    monkeypatch.setattr(
        exponentials,
        "launch",
        lambda kernel, *a, **m: order.append(kernel.__name__) or original(kernel, *a, **m),
    )
    monkeypatch.setattr(Counting, "kept", lambda self: order.append("kept") or kept(self))
    _counted(device, (_EVERY % 3 == 1).to(device), 40 * 1400)
    begin = order.index("kept")
    assert "product_kernel" in order[:begin][-7:]
    assert "back_kernel" not in order[begin - 7 : begin]


def test_counting_many_tokens(device):
    """More than the counting program reads at a time; strided labels of another integer type."""
    targets = torch.randint(0, 3, (20000, 2), device=device, dtype=torch.int32)[:, 0]
    counting = Counting(targets, 2)
    want = (targets != 2).nonzero().view(-1)
    assert torch.equal(counting.kept(), want)
    assert torch.equal(counting.labels[: len(want)], targets[want].long())
    assert (counting.labels[len(want) :] == 2).all()
    assert (counting.index[len(want) :] == 0).all()
