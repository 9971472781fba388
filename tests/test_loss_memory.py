"""Every loss on the head within what it declares: its gradients, one chunk of logits, a few numbers a token.

At a tiny size allocations are counted one by one; at a model's (marker `gpu`) an accelerator's allocator is asked.
"""

from dataclasses import dataclass

import pytest
import torch

from liger_kernel import _env, chunked_loss
from liger_kernel.bench.memory import PeakMemory
from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction as ScaledCrossEntropy
from liger_kernel.ops.fused_ce_tvd import fused_ce_tvd
from liger_kernel.ops.fused_linear_cross_entropy import fused_linear_cross_entropy
from liger_kernel.ops.fused_linear_jsd import fused_linear_jsd
from liger_kernel.ops.fused_linear_kl_div import fused_linear_kl_div
from liger_kernel.ops.head.plan import plan
from liger_kernel.ops.linear_distillation import linear_distillation
from liger_kernel.ops.linear_logprob import linear_logprob

B, TEACHER = 4, 4  # sequences, width of teacher and reference
A_TOKEN = 256  # bytes of statistics, positions, masks of a token, all losses taken together
TWIN = 10  # copies of a chunk in wide precision, on the path without kernels


@dataclass
class Data:
    """B sequences of T tokens, some of them ignored, a head, and what the losses compare with."""

    device: torch.device
    dtype: torch.dtype
    T: int
    H: int
    V: int
    budget: int

    def __post_init__(self):
        def draw(*shape):
            return torch.randn(shape, device=self.device, dtype=self.dtype)

        self.x, self.w = draw(B, self.T, self.H).requires_grad_(), draw(self.V, self.H).mul_(0.1)
        self.w.requires_grad_()
        self.t_x, self.t_w = draw(B, self.T, TEACHER), draw(self.V, TEACHER)
        self.y = torch.randint(self.V, (B, self.T), device=self.device)
        self.y[:, ::5] = -100
        self.old = torch.full((B, self.T), -9.0, device=self.device)
        self.advantages = torch.linspace(-1, 1, B, device=self.device)
        self.liked = torch.arange(B, device=self.device) % 2 == 0
        self.teacher = {"teacher_hidden": self.t_x, "teacher_weight": self.t_w}
        self.p = torch.full((B, self.T, self.V), 1.0 / self.V, device=self.device).to(self.dtype)
        self.ids = torch.arange(8, device=self.device).expand(B, self.T, 8)


def _class(name, **options):
    return getattr(chunked_loss, f"LigerFusedLinear{name}Loss")(**options)


def _paired(name, **options):
    return lambda d: _class(name, **options)(d.w, d.x, d.y)[0]


def _grpo(**options):
    return lambda d: _class("GRPO", beta=0.0, **options)(
        d.x, d.w, d.y.clamp(min=0), d.y != -100, d.advantages, old_per_token_logps=d.old
    )[0]


def _cross_entropy(**options):
    return lambda d: fused_linear_cross_entropy(d.x, d.w, d.y, **options).loss


def _distillation(kind):
    return lambda d: (
        linear_distillation(d.x, d.w, d.y, **d.teacher, kind=kind, weight_hard=1.0).loss
    )


def _stored(d):
    top = {"teacher_log_probs": d.p[..., :8], "teacher_ids": d.ids}
    return linear_distillation(d.x, d.w, d.y, **top).loss


def _of_teacher(name):
    return lambda d: _class(name)(d.x, d.w, d.t_x, d.t_w, d.y)


LOSSES = {
    "cross entropy": _cross_entropy(),
    "cross entropy, each token's": _cross_entropy(reduction="none"),
    "cross entropy, fp32 logits": _cross_entropy(label_smoothing=0.1, logits_dtype=torch.float32),
    "log-probabilities": lambda d: linear_logprob(d.x, d.w, d.y, return_entropy=True).entropy,
    "scaled cross entropy": lambda d: ScaledCrossEntropy.apply(
        d.x.flatten(0, 1), d.w, d.y.flatten(), 0.7
    ),
    "CPO": _paired("CPO"),
    "SimPO": _paired("SimPO"),
    "ORPO": _paired("ORPO"),
    "ORPO, other labels": lambda d: _class("ORPO")(d.w, d.x, d.y, nll_target=d.y)[0],
    "DPO": lambda d: _class("DPO")(d.w, d.x, d.y, None, d.t_x, d.t_w)[0],
    "DPO, capped": lambda d: _class("DPO", softcap=9.0)(d.w, d.x, d.y, None, d.t_x, d.t_w)[0],
    "KTO": lambda d: _class("KTO")(d.x, d.w, d.y, preference_labels=d.liked)[0],
    "GRPO": _grpo(loss_type="dapo", entropy_coef=0.1),
    "GRPO by sequence": _grpo(loss_type="grpo", importance_sampling_level="sequence"),
    **{kind: _distillation(kind) for kind in ("kl", "reverse_kl", "jsd", "tvd", "cosine")},
    "a stored teacher": _stored,
    "fused_linear_jsd": lambda d: fused_linear_jsd(d.x, d.w, d.t_x, d.t_w, d.y),
    "fused_linear_kl_div": lambda d: fused_linear_kl_div(d.x, d.w, d.p, d.y),
    "JSD": _of_teacher("JSD"),
    "cosine class": _of_teacher("CosineSimilarity"),
}
TWO_GRADIENTS = {"ORPO, other labels"}  # the likelihood's pass is its own


def _peak(call, leaves, device):
    """Bytes of forward and backward above the inputs."""

    def step():
        loss = call()
        return torch.autograd.grad(loss, leaves, torch.ones_like(loss))

    if device.type != "cpu":
        step()  # compiles, and makes the workspace of the products
    with PeakMemory(device) as meter:
        step()
    return meter.bytes


def _size(*tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


def _check(name, d, path):
    times, loss = 1 + (name in TWO_GRADIENTS), LOSSES[name]
    tokens, itemsize = B * d.T, d.x.element_size()
    kept = int((d.y != -100).sum())
    align = 1 if d.device.type == "cpu" else 64
    chunk = plan(kept, d.V, d.H, itemsize, d.budget, gather=True, align=align).buffer_bytes
    assert chunk < itemsize * kept * d.V / 1.8  # or it would prove nothing
    product = chunk * d.H // d.V  # dh of a chunk, before it is scattered
    sums = 4 * d.H * B  # of hidden states, for the metrics
    limit = times * _size(d.x, d.w) + d.budget + product + A_TOKEN * tokens + sums
    if path == "torch":
        limit += TWIN * min(chunk, 4 << 20)
    limit += 8 << 10 if d.device.type == "cpu" else 32 << 20  # of an allocator and its workspace
    peak = _peak(lambda: loss(d), (d.x, d.w), d.device)
    assert peak <= limit, f"{name}: {peak:,} bytes, declared {limit:,}"


@pytest.fixture
def data(device, monkeypatch):
    """-> Data of given sizes, whose budget every loss takes."""

    def make(dtype, *sizes):
        found = Data(device, dtype, *sizes)
        monkeypatch.setenv("LIGER_KERNEL_MEMORY_BUDGET", str(found.budget))
        return found

    return make


@pytest.mark.parametrize("name", LOSSES)
def test_tiny(name, path, data):
    if path == "triton" and _env.interpreting() and name != "log-probabilities":
        pytest.skip("the interpreter takes its time; the buffers are those of the other path")
    _check(name, data(torch.float32, 16, 8, 4096, 400 << 10), path)


@pytest.mark.gpu
@pytest.mark.skipif(_env.infer_device() == "cpu", reason="needs an accelerator")
@pytest.mark.parametrize("name", LOSSES)
def test_size_of_a_model(name, data):
    _check(name, data(torch.bfloat16, 1024, 1024, 32000, 112 << 20), "triton")


def test_of_given_logits(device):
    """Five numbers a row until backward, and the gradient."""
    if not _env.triton_runs_on(device.type):
        pytest.skip("the fallback is eager torch: it keeps what autograd keeps")
    rows = 64  # so that numbers a row are more than what an allocator rounds them up to
    x, y = torch.randn(2, rows, 1024, device=device)
    target = torch.arange(rows, device=device)
    x.requires_grad_()
    peak = _peak(lambda: torch.stack(fused_ce_tvd(x, y, target)), (x,), device)
    assert peak <= _size(x) + rows * A_TOKEN
