"""The vocabulary head engine: its plan, what it drops, what it keeps, what it refuses."""

import math

import pytest
import torch
import torch.nn.functional as F

from liger_kernel import _env
from liger_kernel.ops import fused_linear_cross_entropy as fused_linear_cross_entropy_module
from liger_kernel.ops.fused_linear_cross_entropy import (
    fused_linear_cross_entropy,
    fused_linear_cross_entropy_forward,
)
from liger_kernel.ops.fused_linear_jsd import fused_linear_jsd
from liger_kernel.ops.head import exponentials, plan
from liger_kernel.ops.head.engine import form_for
from liger_kernel.ops.head.objective import fused_linear_objective
from liger_kernel.ops.head.plan import MAX_CHUNKS, resolve_budget

MIB = 1 << 20


def _batch(n=24, width=16, vocab=50, masked=0.0, dtype=torch.float32, device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, width, generator=g).to(device, dtype).requires_grad_()
    weight = (torch.randn(vocab, width, generator=g) / 4).to(device, dtype).requires_grad_()
    target = torch.randint(vocab, (n,), generator=g)
    target[torch.rand(n, generator=g) < masked] = -100
    return hidden, weight, target.to(device)


@pytest.mark.parametrize("tokens", [0, 1, 7, 8191, 8192, 100_001])
@pytest.mark.parametrize("vocab", [1, 33, 50257, 128256, 1_000_000])
@pytest.mark.parametrize("budget", [1, 4 * MIB, 32 * MIB, 512 * MIB, 1 << 40])
def test_plan_covers_every_token_once_within_its_budget(tokens, vocab, budget):
    todo = plan(tokens, vocab, 4096, 2, budget)
    covered = [i for start, stop in todo.slices() for i in (start, stop)]
    assert todo.chunks == len(todo.slices())
    if tokens:
        assert covered[0] == 0
        assert covered[-1] == tokens
        assert covered[1:-1:2] == covered[2::2]
    row = 2 * todo.row_stride
    stretched = budget if todo.chunks > MAX_CHUNKS else 2 * budget
    assert todo.buffer_bytes <= max(stretched, 8 * row)
    if todo.chunks > MAX_CHUNKS:
        assert todo.rows * row * 2 >= min(
            budget, 64 * row
        )  # small chunks only when the budget leaves no choice


def test_plan_of_the_published_shape():
    todo = plan(8192, 128256, 4096, 2, 512 * MIB)
    assert (todo.chunks, todo.rows) == (4, 2048)
    assert plan(8192, 128256, 4096, 2, 250 * MIB).chunks == MAX_CHUNKS  # of 10, by a quarter more
    small = plan(8192, 128256, 4096, 2, 32 * MIB)
    assert (small.chunks, small.rows) == (64, 128)
    assert small.buffer_bytes <= 32 * MIB
    assert plan(8192, 128256, 4096, 2, 4 << 30).chunks == 1


@pytest.mark.plain
def test_a_million_classes(device):
    """Cross entropy, an objective, a divergence: three tokens through a head of a million rows."""
    vocab = 1_000_000
    hidden, weight, _ = _batch(n=3, width=2, vocab=vocab, device=device)
    target = torch.tensor([0, vocab - 1, 123_456], device=device)
    log_p = (hidden @ weight.t()).log_softmax(-1)
    truth = log_p.gather(-1, target[:, None])[:, 0]
    loss = fused_linear_cross_entropy(hidden, weight, target, memory_budget=32 * MIB).loss
    policy, _ = fused_linear_objective(
        hidden, weight, target, lambda tokens: (tokens.logp.square().sum(), None)
    )
    skewed = weight.detach().flip(0)
    teacher = (hidden.detach() @ skewed.t()).log_softmax(-1)
    divergence = fused_linear_jsd(hidden, weight, hidden.detach(), skewed, jsd_beta=0.0)
    wants = -truth.mean(), truth.square().sum(), (teacher.exp() * (teacher - log_p)).sum(-1).mean()
    for got, want in zip((loss, policy, divergence), wants, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        both = (
            torch.autograd.grad(some, (hidden, weight), retain_graph=True) for some in (got, want)
        )
        torch.testing.assert_close(*both, rtol=1e-4, atol=1e-6)


def test_plan_is_balanced():
    todo = plan(4500, 128256, 4096, 2, 512 * MIB)
    sizes = [stop - start for start, stop in todo.slices()]
    assert max(sizes) - min(sizes) < 128 * len(sizes)


@pytest.mark.parametrize("asked", [64 * MIB, "64M", "64MiB", "65536K"])
def test_budget_spellings(asked):
    assert resolve_budget(asked, torch.device("cpu")) == 64 * MIB


@pytest.mark.parametrize("asked", [0, -1, "many", True, 1.5])
def test_budget_nonsense_is_refused(asked):
    with pytest.raises(ValueError, match="memory_budget"):
        resolve_budget(asked, torch.device("cpu"))


def test_budget_from_the_environment(monkeypatch):
    monkeypatch.setenv("LIGER_KERNEL_MEMORY_BUDGET", "3M")
    assert resolve_budget(None, torch.device("cpu")) == 3 * MIB


@pytest.mark.parametrize("form", ["same", "float32"])
def test_ignored_tokens_never_reach_a_product(form, path, device, monkeypatch):
    """NaN in hidden states of ignored tokens changes nothing: they are dropped before the first product, or zeros where
    a product adds over tokens.
    """
    monkeypatch.setattr(fused_linear_cross_entropy_module, "form_for", lambda *_: form)
    hidden, weight, target = _batch(masked=0.5, device=device)
    plain = fused_linear_cross_entropy(hidden, weight, target).loss
    want = torch.autograd.grad(plain, (hidden, weight))
    spoiled = hidden.detach().clone()
    spoiled[target == -100] = float("nan")
    spoiled.requires_grad_()
    loss = fused_linear_cross_entropy(spoiled, weight, target).loss
    got = torch.autograd.grad(loss, (spoiled, weight))
    torch.testing.assert_close(loss, plain)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w)
    frozen = fused_linear_cross_entropy(spoiled, weight.detach(), target).loss
    assert torch.equal(frozen, loss)
    torch.testing.assert_close(torch.autograd.grad(frozen, spoiled)[0], want[0])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_loss_alone_of_few_tokens_is_that_of_training(
    weighted, reduction, path, device, monkeypatch
):
    """Bit by bit, in one product with fp32 logits; factors come with the ignored tokens' zeros, or without."""
    monkeypatch.setattr(fused_linear_cross_entropy_module, "form_for", lambda *_: "float32")
    monkeypatch.setattr(exponentials, "run", None)
    hidden, weight, target = _batch(masked=0.3, dtype=torch.bfloat16, device=device)
    classes = torch.rand(weight.shape[0], device=device) if weighted else None
    ways = {"ce_weight": classes, "reduction": reduction}
    loss = fused_linear_cross_entropy(hidden, weight, target, **ways).loss
    with torch.no_grad():
        alone = fused_linear_cross_entropy(hidden, weight, target, **ways).loss
    assert torch.equal(alone, loss)
    truth = F.cross_entropy(
        hidden.double() @ weight.double().t(),
        target,
        None if classes is None else classes.double(),
        reduction=reduction,
    )
    torch.testing.assert_close(loss.double(), truth, rtol=2e-5, atol=2e-6)


def test_few_tokens_lose_nothing_to_rounded_logits(path, device, monkeypatch):
    """As on accelerators whose products can write fp32: the loss of bf16 inputs is that of unrounded logits."""
    hidden, weight, target = _batch(masked=0.3, dtype=torch.bfloat16, device=device)
    truth = F.cross_entropy(hidden.double() @ weight.double().t(), target, reduction="none")

    monkeypatch.setattr(exponentials, "apply_to", lambda *_: False)

    def error(form):
        monkeypatch.setattr(fused_linear_cross_entropy_module, "form_for", lambda *_: form)
        loss = fused_linear_cross_entropy(hidden, weight, target, reduction="none").loss
        return (loss - truth).abs().max().item()

    assert error("float32") < 2e-6
    assert error("same") > 1e-4


def test_products_add_their_parts_in_fp32():
    """Within the block alone, and the flag of the operands' dtype alone."""
    flags, card = torch.backends.cuda.matmul, torch.device("cuda", 0)
    before = flags.allow_bf16_reduced_precision_reduction
    try:
        for allowed in (True, False):
            flags.allow_bf16_reduced_precision_reduction = allowed
            with _env.exact_products(card, torch.float16), _env.exact_products(card, torch.float32):
                assert flags.allow_bf16_reduced_precision_reduction == allowed
            with _env.exact_products(card, torch.bfloat16):
                assert not flags.allow_bf16_reduced_precision_reduction
            assert flags.allow_bf16_reduced_precision_reduction == allowed
    finally:
        flags.allow_bf16_reduced_precision_reduction = before


def test_what_few_tokens_are(monkeypatch):
    monkeypatch.setattr(_env, "mixed_products", lambda device: True)
    hidden = torch.empty(2, 64, 8, dtype=torch.bfloat16)
    assert form_for(hidden, 1000, 6 * 1000 * 128) == "float32"
    assert form_for(hidden, 1000, 6 * 1000 * 128 - 1) == "same"  # more than one chunk
    wide = torch.empty(129, 4096, dtype=torch.bfloat16, device="meta")
    assert form_for(wide, 128256, 1 << 30) == "float32"  # 6.8e10 terms
    assert form_for(wide, 512000, 1 << 30) == "same"
    assert form_for(wide[:128], 512000, 1 << 30) == "float32"
    assert form_for(hidden.float(), 10, MIB) == "same"
    assert form_for(hidden[:0], 10, MIB) == "same"
    monkeypatch.setattr(_env, "mixed_products", lambda device: False)
    assert form_for(hidden, 10, MIB) == "same"


def test_hint_gives_the_same(path, device):
    hidden, weight, target = _batch(masked=0.5, device=device)
    count = int((target != -100).sum())
    a = fused_linear_cross_entropy(hidden, weight, target).loss
    b = fused_linear_cross_entropy(hidden, weight, target, num_valid=count).loss
    torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_no_valid_token_is_zero(reduction, path, device):
    hidden, weight, target = _batch(device=device)
    loss = fused_linear_cross_entropy(
        hidden, weight, torch.full_like(target, -100), reduction=reduction
    ).loss
    loss.sum().backward()
    assert loss.abs().max() == 0
    assert hidden.grad.abs().max() == 0
    assert weight.grad.abs().max() == 0


def test_per_token_upstream_gradient(path, device):
    hidden, weight, target = _batch(masked=0.2, device=device)
    target[0] = -100  # a first element of zero once zeroed everything elsewhere
    upstream = torch.randn(target.shape, generator=torch.Generator().manual_seed(3)).to(device)
    each = fused_linear_cross_entropy(
        hidden, weight, target, reduction="none", memory_budget=4096
    ).loss
    got = torch.autograd.grad(each, (hidden, weight), upstream)
    plain = F.cross_entropy(hidden @ weight.t(), target, reduction="none")
    want = torch.autograd.grad(plain, (hidden, weight), upstream)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w)


@pytest.mark.parametrize("factor", [1.0, 0.25])
def test_backward_twice(factor, path, device):
    hidden, weight, target = _batch(masked=0.3, device=device)
    loss = fused_linear_cross_entropy(hidden, weight, target).loss * factor
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    kept = [g.clone() for g in first]
    second = torch.autograd.grad(loss, (hidden, weight))
    for a, b, c in zip(first, second, kept, strict=True):
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(a, c, rtol=0, atol=0)


def test_frozen_inputs_still_train_the_weight(path, device):
    hidden, weight, target = _batch(device=device)
    loss = fused_linear_cross_entropy(hidden.detach(), weight, target).loss
    (got,) = torch.autograd.grad(loss, weight)
    (want,) = torch.autograd.grad(F.cross_entropy(hidden.detach() @ weight.t(), target), weight)
    torch.testing.assert_close(got, want)


def test_frozen_head_makes_no_weight_gradient(path, device, monkeypatch):
    hidden, weight, target = _batch(device=device)
    made = []
    from liger_kernel.ops.head import engine

    def seen(total, *args, **kwargs):
        made.append(total.shape)
        accumulate(total, *args, **kwargs)

    accumulate = engine.accumulate
    monkeypatch.setattr(engine, "accumulate", seen)
    loss = fused_linear_cross_entropy(hidden, weight.detach(), target).loss
    (got,) = torch.autograd.grad(loss, hidden)
    (want,) = torch.autograd.grad(F.cross_entropy(hidden @ weight.detach().t(), target), hidden)
    torch.testing.assert_close(got, want)
    assert weight.shape not in made


def test_no_grad_makes_no_gradient(path, device, monkeypatch):
    hidden, weight, target = _batch(device=device)
    from liger_kernel.ops.head import engine

    monkeypatch.setattr(engine.Sums, "add", None)
    with torch.no_grad():
        loss = fused_linear_cross_entropy(hidden, weight, target).loss
    torch.testing.assert_close(loss, F.cross_entropy(hidden @ weight.t(), target).detach())


def test_autocast_runs_the_products_in_its_dtype(path, device):
    hidden, weight, target = _batch(masked=0.2, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        loss = fused_linear_cross_entropy(hidden, weight, target).loss
    got = torch.autograd.grad(loss, (hidden, weight))
    with torch.autocast(device.type, torch.bfloat16):
        plain = F.cross_entropy(F.linear(hidden, weight).float(), target)
    want = torch.autograd.grad(plain, (hidden, weight))
    assert [g.dtype for g in got] == [torch.float32, torch.float32]
    torch.testing.assert_close(loss, plain, rtol=2e-2, atol=0)
    for g, w in zip(got, want, strict=True):
        assert (g - w).norm() <= 2e-2 * w.norm()


def test_mixed_dtypes(path, device):
    hidden, weight, target = _batch(device=device)
    low = hidden.detach().bfloat16().requires_grad_()
    loss = fused_linear_cross_entropy(low, weight, target).loss
    dh, dw = torch.autograd.grad(loss, (low, weight))
    assert (dh.dtype, dw.dtype) == (torch.bfloat16, torch.float32)
    (want,) = torch.autograd.grad(F.cross_entropy(hidden @ weight.t(), target), weight)
    assert (dw - want).norm() <= 2e-2 * want.norm()


def test_accuracy_and_predictions(path, device):
    hidden, weight, target = _batch(masked=0.3, device=device)
    out = fused_linear_cross_entropy(
        hidden,
        weight,
        target,
        return_token_accuracy=True,
        return_predicted_tokens=True,
        memory_budget=4096,
    )
    valid = target != -100
    best = (hidden @ weight.t()).argmax(-1)
    assert torch.equal(out.predicted_tokens, torch.where(valid, best, -1))
    torch.testing.assert_close(out.token_accuracy, (best == target)[valid].float().mean())


def test_labels_out_of_range(path, device):
    hidden, weight, target = _batch(device=device)
    target[3] = 50
    if device.type == "cpu":
        with pytest.raises(IndexError, match=r"target\[3\] is 50"):
            fused_linear_cross_entropy(hidden, weight, target)
    else:
        assert fused_linear_cross_entropy(hidden, weight, target).loss.isnan()


@pytest.mark.parametrize("chunks", [1, 8, 64])
def test_error_of_weight_gradient_grows_slowly_with_chunks(chunks, path, device):
    """bf16 accumulation of dW stays near a single rounding up to 8 chunks; fp32 stays there for any number."""
    hidden, weight, target = _batch(n=128, width=32, vocab=64, dtype=torch.bfloat16, device=device)
    truth = torch.autograd.grad(
        F.cross_entropy(hidden.double() @ weight.double().t(), target), weight
    )[0].double()
    budget = 2 * 64 * 128 // chunks

    def error(accum_dtype):
        loss = fused_linear_cross_entropy(
            hidden, weight, target, accum_dtype=accum_dtype, memory_budget=budget
        ).loss
        return (
            (torch.autograd.grad(loss, weight)[0].double() - truth).norm() / truth.norm()
        ).item()

    rounding = 2.0**-8
    assert error(torch.float32) <= 2 * rounding
    assert error(None) <= 3 * rounding * (1 if chunks <= MAX_CHUNKS else 4)


def test_compiles_without_a_break(path, device):
    hidden, weight, target = _batch(masked=0.3, device=device)

    def step(h, w):
        return fused_linear_cross_entropy(h * 2, w, target).loss * 3

    torch._dynamo.reset()
    plain = torch.autograd.grad(step(hidden, weight), (hidden, weight))
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    traced = torch.autograd.grad(compiled(hidden, weight), (hidden, weight))
    for a, b in zip(plain, traced, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("tokens", "labels"), [((2, 3), (6,)), ((6,), (2, 3))], ids=str)
def test_compiled_losses_have_the_labels_shape(path, device, tokens, labels):
    """Hidden states may have another one; a traced loss that took theirs would be cut elsewhere."""
    torch.manual_seed(0)
    hidden = torch.randn(*tokens, 16, device=device, requires_grad=True)
    weight = torch.randn(37, 16, device=device)
    target = torch.randint(0, 37, labels, device=device)

    def step(h):
        loss = fused_linear_cross_entropy(h, weight, target, reduction="none").loss
        return loss.flatten(0, -1)[:2].sum() if loss.shape == labels else loss * torch.nan

    torch._dynamo.reset()
    (plain,) = torch.autograd.grad(step(hidden), hidden)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    (traced,) = torch.autograd.grad(compiled(hidden), hidden)
    torch.testing.assert_close(traced, plain)
    assert plain.view(6, 16)[:2].abs().min() > 0


def test_a_pass_records_nothing(path, device):
    hidden, weight, target = _batch(device=device)
    loss, *_, dh, dw, db = fused_linear_cross_entropy_forward(hidden, weight, target)
    wanted = torch.autograd.grad(
        fused_linear_cross_entropy(hidden, weight, target).loss, (hidden, weight)
    )
    assert not loss.requires_grad
    assert db is None
    torch.testing.assert_close((dh, dw), wanted)


def test_states_without_features(path, device):
    hidden, weight = (torch.zeros(n, 0, device=device, dtype=torch.bfloat16) for n in (3, 5))
    target = torch.tensor([1, 2, 3], device=device)
    loss = fused_linear_cross_entropy(hidden, weight, target).loss
    torch.testing.assert_close(loss.item(), math.log(5), rtol=1e-4, atol=0)


def test_fp64_is_left_alone_by_autocast():
    hidden, weight = (torch.randn(n, 8, dtype=torch.float64) for n in (6, 11))
    target = torch.randint(0, 11, (6,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = fused_linear_cross_entropy(hidden, weight, target).loss
    assert loss.dtype == torch.float64
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(hidden @ weight.t(), target))


def test_one_class(path, device):
    """V = 1: the probability is 1, so only the z-loss lse^2 = z^2 is left."""
    hidden, weight, target = _batch(n=5, vocab=1, device=device)
    loss = fused_linear_cross_entropy(
        hidden, weight, target, lse_square_scale=0.5, reduction="sum"
    ).loss
    want = 0.5 * (hidden @ weight.t()).square().sum()
    torch.testing.assert_close(loss, want)
    (got,) = torch.autograd.grad(loss, hidden)
    torch.testing.assert_close(got, torch.autograd.grad(want, hidden)[0], rtol=1e-4, atol=1e-6)
