"""No op takes more memory than it says: outputs, gradients, what it declares to save, and little else.

On a CPU allocations are counted one by one, on an accelerator its allocator is asked.
"""

import pytest
import torch

from liger_kernel import _env
from liger_kernel.bench.memory import PeakMemory
from liger_kernel.ops import (
    cross_entropy,
    fused_linear_cross_entropy,
    geglu,
    rms_norm,
    rope,
    swiglu,
)
from liger_kernel.ops.head.plan import plan

SLACK = 64 << 10  # rounding of the allocator, per-program partial sums of a small problem


def _size(*tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


def _peak(function, device, *inputs):
    """Peak bytes of forward and backward above the inputs, after a first call has compiled what it needs."""
    upstream = torch.ones_like(function())
    for _ in range(2):
        with PeakMemory(device) as meter:
            out = function()
            grads = torch.autograd.grad(out, inputs, upstream)
            del out, grads
    return meter.bytes


def _draw(device, *shapes, dtype=torch.float32):
    return [torch.randn(s, device=device, dtype=dtype).requires_grad_() for s in shapes]


def test_rms_norm(device):
    if not _env.triton_runs_on(device.type):
        pytest.skip("the fallback is eager torch: it keeps what autograd keeps")
    x, w = _draw(device, (256, 512), 512)
    saved = rms_norm.OP.cost(x, w).saved
    peak = _peak(lambda: rms_norm.rms_norm(x, w), device, x, w)
    partials = 4 * 512 * min(256, 8 * _env.device_info(device).sm_count)
    assert peak <= 2 * _size(x) + 3 * _size(w) + saved + partials + SLACK


@pytest.mark.parametrize("op", [swiglu.swiglu, geglu.geglu], ids=["swiglu", "geglu"])
def test_gated_activations_keep_their_inputs_only(op, device):
    if not _env.triton_runs_on(device.type):
        pytest.skip("the fallback is eager torch: it keeps what autograd keeps")
    gate, up = _draw(device, (128, 1024), (128, 1024))
    peak = _peak(lambda: op(gate, up), device, gate, up)
    assert peak <= _size(gate) + 2 * _size(gate) + SLACK  # y, then dgate and dup


def test_rope_keeps_its_tables_only(device):
    if not _env.triton_runs_on(device.type):
        pytest.skip("the fallback is eager torch: it keeps what autograd keeps")
    q, k = _draw(device, (2, 4, 64, 64), (2, 4, 64, 64))
    cos, sin = torch.randn(64, 64, device=device), torch.randn(64, 64, device=device)

    def packed():
        return torch.cat(
            rope.rope(q, k, cos, sin), dim=1
        )  # one more copy of both, and views of its gradient

    assert _peak(packed, device, q, k) <= 3 * _size(q, k) + SLACK


def test_cross_entropy_keeps_one_gradient(path, device):
    (logits,) = _draw(device, (16, 8192))
    target = torch.randint(8192, (16,), device=device)
    peak = _peak(lambda: cross_entropy.cross_entropy(logits, target).loss, device, logits)
    small_copies = (
        2 * 4 * (1 << 21) if path == "torch" else 0
    )  # the fallback works on 2M logits at a time
    assert peak <= _size(logits) + min(small_copies, 3 * _size(logits)) + SLACK


@pytest.mark.parametrize("masked", [0.0, 0.5])
@pytest.mark.parametrize("budget", [1 << 18, 1 << 16])
def test_head_stays_within_its_budget(masked, budget, path, device):
    tokens, width, vocab = 32, 8, 4096
    hidden, weight = _draw(device, (tokens, width), (vocab, width))
    target = torch.randint(vocab, (tokens,), device=device)
    target[torch.rand(tokens, device=device) < masked] = -100
    kept = int((target != -100).sum()) if masked else tokens
    todo = plan(kept, vocab, width, 4, budget, gather=masked > 0, align=64)

    def loss():
        return fused_linear_cross_entropy.fused_linear_cross_entropy(
            hidden, weight, target, memory_budget=budget
        ).loss

    peak = _peak(loss, device, hidden, weight)
    per_row = 64 * tokens  # labels, positions and statistics
    twin = 3 * todo.buffer_bytes if path == "torch" else 0  # copies of at most 2M logits
    product = 4 * width * todo.rows if masked else 0  # dh of a chunk, before it is scattered
    assert peak <= _size(hidden, weight) + todo.buffer_bytes + per_row + twin + product + SLACK
    assert peak < 4 * tokens * vocab or path == "torch"  # less than the logits alone


def test_no_grad_keeps_nothing(path, device):
    hidden, weight = _draw(device, (64, 16), (4096, 16))
    target = torch.randint(4096, (64,), device=device)
    loss = fused_linear_cross_entropy.fused_linear_cross_entropy
    with torch.no_grad():
        loss(hidden, weight, target)  # the product's workspace stays
        with PeakMemory(device) as meter:
            loss(hidden, weight, target, memory_budget=1 << 18)
    assert meter.bytes < _size(weight) + (1 << 20)
