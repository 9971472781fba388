"""Losses of two distributions whose heads are modules (adapters, quantised weights) or of which each rank has a
slice of classes (`test_loss_shards.py`).
"""

import pytest
import torch

from liger_kernel.chunked_loss import (
    LigerFusedLinearCosineSimilarityLoss,
    LigerFusedLinearJSDLoss,
)
from liger_kernel.chunked_loss.fused_linear_distillation import LigerFusedLinearDistillationBase
from liger_kernel.ops._head_pair import PairLoss, pair_rows
from liger_kernel.ops._head_pair_torch import pair_rows_torch
from liger_kernel.ops.fused_linear_jsd import fused_linear_jsd
from liger_kernel.ops.fused_linear_kl_div import fused_linear_kl_div
from liger_kernel.ops.head.rows import RowMath
from liger_kernel.ops.linear_distillation import linear_distillation

N, H, T_H, V, IGNORED = 40, 16, 6, 37, -100
BUDGET = 16 * 2 * 4 * V  # chunks of 16 tokens
KINDS = ["kl", "reverse_kl", "jsd", "tvd", "cosine"]


def _targets(device="cpu"):
    y = torch.randint(V, (N,), generator=torch.Generator().manual_seed(0))
    y[::3] = IGNORED
    return y.to(device)


def _draw(*shapes, seed=3):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g) for shape in shapes]


# Modules


class _MSE(LigerFusedLinearDistillationBase):
    @staticmethod
    def distillation_loss_fn(
        student_logits, teacher_logits, target=None, ignore_index=None, beta=0.5
    ):
        return (student_logits - teacher_logits).square().mean(-1).sum()


def _of_kind(kind):
    def loss(x, head, y, t_x, teacher, t_bias, p):
        out = linear_distillation(
            x, head, y, teacher_hidden=t_x, teacher_weight=teacher, teacher_bias=t_bias, kind=kind, weight_hard=0.5,
            temperature=1.5, memory_budget=BUDGET,
        )  # fmt: skip
        assert out.count == (y != IGNORED).sum()
        return out.loss

    return loss


LOSSES = {
    **{kind: _of_kind(kind) for kind in KINDS},
    "fused_linear_jsd": lambda x, head, y, t_x, teacher, t_bias, p: fused_linear_jsd(
        x, head, t_x, teacher, y, 0.3, teacher_bias=t_bias
    ),
    "fused_linear_kl_div": lambda x, head, y, t_x, teacher, t_bias, p: fused_linear_kl_div(
        student_input=x, student_weight=head, target=p, shift_labels=y
    ),
    "stored": lambda x, head, y, t_x, teacher, t_bias, p: (
        linear_distillation(x, head, y, teacher_log_probs=p.log()).loss
    ),
    "JSD": lambda x, head, y, t_x, teacher, t_bias, p: LigerFusedLinearJSDLoss()(
        x, head, t_x, teacher, y, None, t_bias
    ),
    "cosine class": lambda x, head, y, t_x, teacher, t_bias, p: (
        LigerFusedLinearCosineSimilarityLoss()(x, head, t_x, teacher, y, None, t_bias)
    ),
    "formula": lambda x, head, y, t_x, teacher, t_bias, p: _MSE.apply(
        x, head, t_x, teacher, y, teacher_bias=t_bias
    ),
}


class _Teacher(torch.nn.Module):
    def __init__(self, quantised):
        super().__init__()
        torch.manual_seed(5)
        self.head = quantised(torch.nn.Linear(T_H, V).requires_grad_(False))


@pytest.mark.plain  # which kernels run is the rows' concern
@pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning")
@pytest.mark.parametrize("name", LOSSES)
def test_heads_as_modules(name, device):
    """A student with LoRA over a quantised head, a teacher likewise: as with everything multiplied out."""
    pytest.importorskip("peft")
    from test_lora_head import Model, Quantised, _dense, _lora

    head, teacher = _lora(Model(quantised=True)), _lora(_Teacher(Quantised)).to(device)
    head, y = head.to(device), _targets(device)
    x, t_x = (t.to(device) for t in _draw((N, H), (N, T_H)))
    x.requires_grad_()
    leaves = [x, *(p for p in head.parameters() if p.requires_grad)]
    t_weight, t_bias = _dense(teacher).detach(), teacher.base_layer.bias
    p = (t_x @ t_weight.t() + t_bias).softmax(-1)
    loss = LOSSES[name]
    found = loss(x, head, y, t_x, teacher, None, p)
    again = loss(x, head, y, t_x, t_weight, t_bias, p)  # a module beside a tensor
    wanted = loss(x, _dense(head), y, t_x, t_weight, t_bias, p)
    for got in (found, again):
        torch.testing.assert_close(got, wanted)
    wants = torch.autograd.grad(wanted, leaves)
    for _ in range(2):  # the second one makes the gradients anew
        for g, w in zip(torch.autograd.grad(found, leaves, retain_graph=True), wants, strict=True):
            torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-6)
    assert all(p.grad is None for p in teacher.parameters())


@pytest.mark.plain
def test_both_heads_are_read_while_their_owners_hold_them():
    """As under ZeRO-3: a parameter exists around its own module's forward and backward alone."""
    pytest.importorskip("peft")
    from test_lora_head import _Sharded

    torch.manual_seed(0)
    heads = [torch.nn.Linear(width, V) for width in (H, T_H)]
    heads[1].requires_grad_(False)
    x, t_x = _draw((N, H), (N, T_H))
    x.requires_grad_()
    given = {"teacher_hidden": t_x, "teacher_weight": heads[1]}
    wanted = linear_distillation(x, heads[0], _targets(), **given).loss
    wants = torch.autograd.grad(wanted, [x, *heads[0].parameters()])
    sharded = [_Sharded(head) for head in heads]
    assert all(p.numel() == 0 for head in heads for p in head.parameters())
    found = linear_distillation(x, heads[0], _targets(), **given).loss
    found.backward()
    torch.testing.assert_close(found, wanted)
    for got, want in zip((x.grad, *(p.grad for p in sharded[0].full)), wants, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.plain
def test_a_teacher_that_is_gone_is_missed_only_when_needed():
    """Its parameter is not kept alive between forward and backward; a second backward says what it lacks."""
    x, w, t_x, t_w = _draw((N, H), (V, H), (N, T_H), (V, T_H))
    x.requires_grad_()
    teacher = torch.nn.Parameter(t_w, requires_grad=False)
    loss = linear_distillation(x, w, teacher_hidden=t_x, teacher_weight=teacher).loss
    teacher.untyped_storage().resize_(0)
    assert torch.autograd.grad(loss, x, retain_graph=True)[0].isfinite().all()
    with pytest.raises(RuntimeError, match="freed after forward"):
        torch.autograd.grad(loss, x)


@pytest.mark.plain
def test_what_a_module_brings_itself():
    x, t_x = _draw((N, H), (N, T_H))
    head, teacher = torch.nn.Linear(H, V), torch.nn.Linear(T_H, V)
    with pytest.raises(ValueError, match="leave teacher_bias and teacher_low_rank out"):
        fused_linear_jsd(x, head, t_x, teacher, teacher_bias=torch.zeros(V))
    with pytest.raises(ValueError, match="needs teacher_hidden"):
        linear_distillation(x, head, teacher_weight=teacher)


# Slices of the vocabulary


@pytest.mark.parametrize("teacher", ["logits", "log_probs"])
@pytest.mark.parametrize("form", KINDS[:4])
def test_two_slices_make_one_row(form, teacher, path, device):
    """Sums and gradients of two slices, by the statistics of the whole, are the whole's."""
    x, y = (3 * t.to(device) for t in _draw((5, V), (5, V)))
    y = y if teacher == "logits" else y.log_softmax(-1)
    target = torch.tensor([0, 20, IGNORED, V - 1, 3], device=device)
    scale = torch.tensor(0.5, device=device)
    loss = PairLoss(
        form, teacher, 0.3, 1.5, 0.7, 0.4, True, IGNORED, (1.0, 4.0, 1.0), (1.0, None, 1.0)
    )  # fmt: skip
    out = torch.empty_like(x)
    wanted = pair_rows_torch(loss, x, y, None, target, scale, out, V=V)
    rows = pair_rows if path == "triton" else pair_rows_torch

    def lse(of, cap, temperature):
        found = RowMath(V, -1, False, 1.0, cap, 1.0 / temperature).stats(of, target.clamp(min=0))
        return found.top, found.log_total

    (top, log_total), (top_h, log_h) = lse(x, 4.0, 1.5), lse(x, 4.0, 1.0)
    x_lse = torch.stack([top, log_total, top_h - 1.5 * top + log_h])
    y_lse = torch.stack(lse(y, None, 1.5)) if teacher == "logits" else torch.zeros_like(x_lse[:2])
    cuts, sums = (slice(0, 21), slice(21, V)), []
    for cut in cuts:
        own, g = cut.stop - cut.start, torch.empty_like(top)
        here = (target >= cut.start) & (target < cut.stop)
        labels = torch.where(here, target - cut.start, own).where(target != IGNORED, IGNORED)
        args = (loss, x[:, cut].contiguous(), y[:, cut].contiguous(), None, labels)
        given = {"V": own, "saved": (x_lse, y_lse, g), "slice_": True}
        sums.append((args, given, rows(*args, None, None, stage="sums", **given)[0]))
    torch.testing.assert_close(sums[0][2] + sums[1][2], wanted[0])
    total = sums[0][1]["saved"][2] + sums[1][1]["saved"][2]
    for cut, (args, given, _) in zip(cuts, sums, strict=True):
        got = torch.empty_like(args[1])
        given["saved"] = (x_lse, y_lse, total)
        rows(*args, scale, got, stage="gradient", **given)
        torch.testing.assert_close(got, out[:, cut], rtol=1e-4, atol=1e-6)
