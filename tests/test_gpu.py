"""What only a real accelerator can show: tensors of more than 2^31 elements, a second device, captured graphs."""

import pytest
import torch

from liger_kernel import _env
from liger_kernel.ops._ce_kernels import _GRADIENT, ce_rows
from liger_kernel.ops.cross_entropy import cross_entropy
from liger_kernel.ops.fused_linear_cross_entropy import fused_linear_cross_entropy
from liger_kernel.ops.low_rank_update import low_rank_update
from liger_kernel.ops.rms_norm import rms_norm
from liger_kernel.ops.rope import rope
from liger_kernel.ops.swiglu import swiglu, swiglu_packed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(_env.infer_device() == "cpu", reason="needs an accelerator"),
]
BEYOND = 1 << 31


def _big(device, rows, columns):
    """bf16 noise; drawn in place, so that nothing wider than it ever exists."""
    return torch.empty(rows, columns, dtype=torch.bfloat16, device=device).normal_()


def _last_rows_agree(function, tensors, n=2):
    """The last rows of the whole equal the same rows on their own, values and gradients."""
    whole = [t.requires_grad_() for t in tensors]
    tail = [t.detach()[-n:].clone().requires_grad_() for t in tensors]
    y, y_tail = function(*whole), function(*tail)
    assert torch.equal(y[-n:], y_tail)
    grads = torch.autograd.grad(
        y, whole, torch.ones((), dtype=y.dtype, device=y.device).expand_as(y)
    )
    wants = torch.autograd.grad(y_tail, tail, torch.ones_like(y_tail))
    for g, want in zip(grads, wants, strict=True):
        assert torch.equal(g[-n:], want)


def test_rms_norm_beyond_32_bits(device):
    width = 4096
    weight = torch.randn(width, dtype=torch.bfloat16, device=device)
    _last_rows_agree(lambda x: rms_norm(x, weight), [_big(device, BEYOND // width + 3, width)])


def test_narrow_rms_norm_beyond_32_bits(device):
    weight = torch.randn(256, dtype=torch.bfloat16, device=device)
    _last_rows_agree(lambda x: rms_norm(x, weight), [_big(device, BEYOND // 256 + 16, 256)], n=16)


def test_swiglu_beyond_32_bits(device):
    rows, width = BEYOND // 8192 + 3, 8192
    _last_rows_agree(swiglu, [_big(device, rows, width), _big(device, rows, width)])
    _last_rows_agree(swiglu_packed, [_big(device, BEYOND // 8192 + 3, 16384)])


def test_low_rank_update_beyond_32_bits(device):
    """Few rows share their columns among more programs than many: close, not equal."""
    x = _big(device, BEYOND // 4096 + 3, 4096).requires_grad_()
    A, B = (torch.randn(8, 4096, device=device) / 64 for _ in range(2))
    tail = x.detach()[-2:].clone().requires_grad_()
    y, y_tail = (low_rank_update(t, t, A, B.t()) for t in (x, tail))
    torch.testing.assert_close(y[-2:], y_tail)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    (dx_tail,) = torch.autograd.grad(y_tail, tail, torch.ones_like(y_tail))
    torch.testing.assert_close(dx[-2:], dx_tail)


def test_rope_beyond_32_bits(device):
    tokens, heads, dim = BEYOND // (32 * 128) + 5, 32, 128
    x = _big(device, tokens, heads * dim).view(tokens, heads, dim)
    cos, sin = _big(device, tokens, dim), _big(device, tokens, dim)
    y, _ = rope(x, None, cos, sin)
    tail, _ = rope(x[-4:].clone(), None, cos[-4:], sin[-4:])
    assert torch.equal(y[-4:], tail)


def test_cross_entropy_beyond_32_bits(device):
    vocab = 128256
    logits = _big(device, BEYOND // vocab + 5, vocab).requires_grad_()
    target = torch.randint(vocab, (logits.shape[0],), device=device)
    loss = cross_entropy(logits, target, reduction="none").loss
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    tail = logits.detach()[-3:].clone().requires_grad_()
    alone = cross_entropy(tail, target[-3:], reduction="none").loss
    assert torch.equal(loss[-3:], alone)
    assert torch.equal(grad[-3:], torch.autograd.grad(alone.sum(), tail)[0])


@pytest.mark.parametrize("vocab", [131_072, 131_085])
@pytest.mark.parametrize("parts", [2, 4, 8])
def test_programs_share_a_row(parts, vocab, device):
    """As one program finds it, with the same bits every time; a part may hold nothing, the label alone, or NaN."""
    logits = torch.randn(1500, vocab, device=device).mul_(3).bfloat16()
    target = torch.randint(vocab, (1500,), device=device)
    target[:6] = torch.tensor([0, vocab - 1, -100, vocab, 7, vocab // 2], device=device)
    logits[4] = float("-inf")
    logits[4, 7] = 0.0
    logits[5, : vocab // 2] = float("-inf")
    logits[6, vocab - 2] = float("nan")
    logits[7] = float("-inf")
    logits[7, :9] = -200.0
    target[7] = vocab - 3
    weight = torch.rand(vocab, device=device)
    scales = torch.full((2,), 0.25, device=device)

    def found(schedule, inplace):
        given = logits.clone() if inplace else logits
        out = given if inplace else torch.full_like(logits, 7.0)
        options = {"V": vocab, "lse_square_scale": 1e-3}
        with _GRADIENT.using(schedule):
            stats = ce_rows(given, target, weight, scales, None, out, **options)
        return stats.numbers, out

    alone, shared = found((16, 4, 2, 1), False), found((8, 4, 4, parts), False)
    for got, want in zip(shared, alone, strict=True):
        torch.testing.assert_close(got, want, rtol=2**-7, atol=0, equal_nan=True)
    torch.testing.assert_close(shared[0], alone[0], rtol=1e-5, atol=1e-6, equal_nan=True)
    for inplace in (False, True):
        again = found((8, 4, 4, parts), inplace)
        for got, want in zip(again, shared, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_head_beyond_32_bits(device):
    """A vocabulary of a million: weight and chunk both pass 2^31 elements."""
    vocab, width, tokens = 1_050_000, 2048, 2100
    hidden = _big(device, tokens, width).requires_grad_()
    weight = _big(device, vocab, width).mul_(0.02).requires_grad_()
    target = torch.randint(vocab, (tokens,), device=device)
    target[-1] = vocab - 1
    one = fused_linear_cross_entropy(hidden, weight, target, memory_budget="8G").loss
    many = fused_linear_cross_entropy(hidden, weight, target, memory_budget="1G").loss
    torch.testing.assert_close(one, many, rtol=1e-5, atol=0)
    (dh,) = torch.autograd.grad(one, hidden)
    logits = hidden.detach()[-1:].float() @ weight.detach().float().t()
    p = logits.softmax(-1)
    p[0, vocab - 1] -= 1
    want = (p @ weight.detach().float()) / tokens
    assert (dh[-1:].float() - want).norm() <= 2e-2 * want.norm()


def test_captured_graph_replays(device):
    """Nothing in forward or backward waits for the host when a graph is being captured."""
    hidden = torch.randn(256, 512, dtype=torch.bfloat16, device=device).requires_grad_()
    weight = torch.randn(1000, 512, dtype=torch.bfloat16, device=device).mul_(0.05).requires_grad_()
    norm = torch.ones(512, dtype=torch.bfloat16, device=device)
    target = torch.randint(1000, (256,), device=device)
    target[::3] = -100

    def step():
        loss = fused_linear_cross_entropy(rms_norm(hidden, norm), weight, target).loss
        return loss, *torch.autograd.grad(loss, (hidden, weight))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what is made on first use must not be made while capturing
        fused_linear_cross_entropy(rms_norm(hidden, norm), weight, torch.zeros_like(target))
        plain = [t.detach().clone() for t in step()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        captured = step()
    graph.replay()
    _env.synchronize(device)
    for got, want in zip(captured, plain, strict=True):
        assert (got.float() - want.float()).norm() <= 1e-2 * want.float().norm()


@pytest.mark.skipif(_env.device_count(_env.infer_device()) < 2, reason="needs a second device")
def test_second_device(device):
    """Launches follow their tensors, whatever device is current."""
    other = torch.device(device.type, 1)
    x, w = torch.randn(5, 64), torch.randn(64)
    here, there = (rms_norm(x.to(d), w.to(d)).cpu() for d in (device, other))
    assert torch.equal(here, there)
    assert _env.current_device(device.type) == device


def test_cpu_and_accelerator_tensors_in_one_process(device):
    """The path is chosen per call: the same function serves both, whichever came first."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(40, 64), torch.randn(500, 64)
    target = torch.randint(500, (40,))
    losses = []
    for place in ("cpu", device, "cpu", device):
        h, w = (t.to(place).requires_grad_() for t in (hidden, weight))
        loss = fused_linear_cross_entropy(rms_norm(h, None), w, target.to(place)).loss
        losses.append([t.cpu() for t in (loss.detach(), *torch.autograd.grad(loss, (h, w)))])
    for other in losses[1:]:
        for a, b in zip(losses[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-5)


def test_repeated_launches(device):
    """The second call of a size skips Triton's own launch: same bits, on another stream and after other tensors too."""
    torch.manual_seed(0)
    x, weight = torch.randn(33, 256, device=device), torch.randn(256, device=device)
    odd = torch.empty(x.numel() + 1, device=device)[1:].view_as(x).copy_(x)
    first, module = rms_norm(x, weight), _env.memory_module(device)
    found = [rms_norm(x, weight)]
    side = module.Stream()
    side.wait_stream(module.current_stream())
    with module.stream(side):
        found.append(rms_norm(x, weight))
    module.current_stream().wait_stream(side)
    for _ in range(2):
        torch.testing.assert_close(rms_norm(odd, weight), first)
        assert rms_norm(x.half(), weight).dtype == torch.float16
        found.append(rms_norm(x, weight))
    assert all(torch.equal(y, first) for y in found)


def test_token_counts_do_not_multiply_kernels(device):
    """Fifty batch lengths share a handful of compiled kernels."""
    from liger_kernel.ops import _triton

    weight = torch.ones(256, dtype=torch.bfloat16, device=device)
    head = torch.randn(999, 256, dtype=torch.bfloat16, device=device).requires_grad_()
    before = len(_triton._compiled)
    for length in torch.randint(
        2, 4000, (50,), generator=torch.Generator().manual_seed(0)
    ).tolist():
        x = torch.randn(length, 256, dtype=torch.bfloat16, device=device).requires_grad_()
        target = torch.randint(999, (length,), device=device)
        loss = fused_linear_cross_entropy(rms_norm(x, weight), head, target).loss
        torch.autograd.grad(loss, (x, head))
    assert len(_triton._compiled) - before <= 24


@pytest.mark.skipif(_env.device_count(_env.infer_device()) < 2, reason="needs a second device")
def test_tokens_are_counted_on_a_device_that_is_not_current(device):
    """While it is busy, so that nothing but waiting for it gives the number of tokens."""
    other = torch.device(device.type, (device.index or 0) + 1)
    hidden = torch.randn(4096, 1024, dtype=torch.bfloat16, device=other).requires_grad_()
    weight = (0.02 * torch.randn(50304, 1024, device=other)).bfloat16().requires_grad_()
    busy = torch.randn(8192, 8192, device=other)
    for share in (3, 2, 5):  # a number that is left over would be another batch's
        target = torch.randint(50304, (4096,), device=other)
        target[::share] = -100
        for _ in range(4):
            busy = busy @ busy * 1e-4
        loss = fused_linear_cross_entropy(hidden, weight, target).loss
        grads = torch.autograd.grad(loss, (hidden, weight))
        logits = hidden.detach().float() @ weight.detach().float().t()
        torch.testing.assert_close(
            loss.detach(), torch.nn.functional.cross_entropy(logits, target), atol=1e-4, rtol=1e-4
        )
        assert not grads[0][target == -100].any()
        assert grads[0][target != -100].any(1).all()
