"""Losses whose classes are split over three ranks give one process's values, metrics and gradients: those of two
distributions, preferences, policies (`test_vocab_parallel.py` has the engine's own).
"""

import copy
import functools

import distributed
import pytest
import torch
import torch.distributed as dist
from test_pair_heads import BUDGET, IGNORED, KINDS, T_H, H, N, V, _draw, _targets

from liger_kernel import _env
from liger_kernel.chunked_loss import (
    LigerFusedLinearDPOLoss,
    LigerFusedLinearGRPOLoss,
    LigerFusedLinearJSDLoss,
    LigerFusedLinearKTOLoss,
    LigerFusedLinearORPOLoss,
)
from liger_kernel.chunked_loss.fused_linear_distillation import (
    DistillationOptions,
    LigerFusedLinearDistillationBase,
)
from liger_kernel.ops.fused_linear_jsd import fused_linear_jsd
from liger_kernel.ops.fused_linear_kl_div import fused_linear_kl_div
from liger_kernel.ops.linear_distillation import linear_distillation

pytestmark = pytest.mark.plain
RANKS = 3


def _part(whole):
    return whole.chunk(RANKS)[dist.get_rank()].clone().requires_grad_()


def _mesh(*shapes):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (RANKS,))

    def make(local, like):
        return DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=like.shape, stride=like.stride()
        )

    return make


def _split(name, teacher):
    """A loss over three ranks is one process's: value, parts, gradients."""
    x, w, b, t_x, t_w, t_b, d, u = (
        t.double() for t in _draw((N, H), (V, H), V, (N, T_H), (V, T_H), V, (N, 3), (V, 3))
    )
    y, log_p = _targets(), (t_x @ t_w.t() + t_b).log_softmax(-1)
    common = {"softcap": 6.0, "pre_scale": 0.7, "memory_budget": 4 * BUDGET}

    def loss(x, w, b, d, u, t_w, t_b, **more):
        more |= common
        if name == "fused_linear_jsd":
            return fused_linear_jsd(
                x, w, t_x, t_w, y, 0.3, temperature=1.5, student_bias=b, teacher_bias=t_b, student_low_rank=(d, u),
                reduction="sum", teacher_softcap=5.0, **more,
            )  # fmt: skip
        if name == "fused_linear_kl_div":
            return fused_linear_kl_div(
                x, w, log_p.exp(), y, bias=b, low_rank=(d, u), reduction="mean", **more
            )
        given = {"teacher_hidden": t_x, "teacher_weight": t_w, "teacher_bias": t_b}
        if teacher == "stored":
            given = {"teacher_log_probs": log_p}
        temperature = 1.0 if name == "kl" else 1.5
        out = linear_distillation(
            x,
            w,
            y,
            bias=b,
            kind=name,
            weight_hard=0.4,
            temperature=temperature,
            low_rank=(d, u),
            **given,
            **more,
        )
        return out.loss + 0.0 * (out.soft + out.hard + out.count)

    whole = [t.clone().requires_grad_() for t in (x, d, w, b, u)]
    wanted = loss(*(whole[i] for i in (0, 2, 3, 1, 4)), t_w, t_b)
    mine = [t.clone().requires_grad_() for t in (x, d)] + [_part(t) for t in (w, b, u)]
    h, low, w_, b_, u_ = mine
    group = {"group": dist.group.WORLD}
    theirs = (t_w, t_b) if teacher != "slice" else (_part(t_w), _part(t_b))
    if teacher == "dtensor":
        make, group = _mesh(), {}
        w_, b_ = make(w_, w), make(b_, b)
        theirs = make(_part(t_w), t_w), make(_part(t_b), t_b)
    found = loss(h, w_, b_, low, u_, *theirs, **group)
    torch.testing.assert_close(found, wanted)
    found, wants = torch.autograd.grad(found, mine), torch.autograd.grad(wanted, whole)
    for i, (got, want) in enumerate(zip(found, wants, strict=True)):
        torch.testing.assert_close(got, want if i < 2 else want.chunk(RANKS)[dist.get_rank()])


def _fully_sharded():
    """Heads as modules under FSDP2: gathered around the loss, the student's gradient averaged, the teacher at rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    heads = [torch.nn.Linear(width, V) for width in (H, T_H)]
    heads[1].requires_grad_(False)
    x, t_x = _draw((N, H), (N, T_H))
    twins = [copy.deepcopy(head) for head in heads]
    mesh = init_device_mesh("cpu", (RANKS,))
    for head in heads:
        fully_shard(head, mesh=mesh, reshard_after_forward=True)
    for _ in range(2):  # a second step finds everything as the first one did
        losses = []
        for student, teacher in (heads, twins):
            student.zero_grad()
            given = {"teacher_hidden": t_x, "teacher_weight": teacher, "kind": "jsd"}
            losses.append(
                linear_distillation(x, student, _targets(), **given, weight_hard=0.5).loss
            )
            losses[-1].backward()
        torch.testing.assert_close(*losses)
        for found, wanted in zip(heads[0].parameters(), twins[0].parameters(), strict=True):
            torch.testing.assert_close(distributed.full(found.grad), wanted.grad)
        assert all(type(p).__name__ != "Parameter" for p in heads[1].parameters())  # resharded


def _refused():
    x, w, t_x, t_w = _draw((N, H), (V, H), (N, T_H), (V, T_H))
    mine, group = _part(w), dist.group.WORLD
    teacher = {"teacher_hidden": t_x, "teacher_weight": t_w}
    with pytest.raises(NotImplementedError, match="neither 'cosine' nor teacher_ids"):
        linear_distillation(x, mine, **teacher, kind="cosine", group=group)
    with pytest.raises(ValueError, match="split over the ranks as the student's"):
        linear_distillation(
            x, mine, teacher_hidden=t_x, teacher_weight=torch.cat([t_w, t_w]), group=group
        )
    pairs = (t.view(4, 10, -1) for t in (x, t_x))
    with pytest.raises(ValueError, match="with group the reference's head must be this rank's"):
        LigerFusedLinearDPOLoss(group=group)(
            mine, next(pairs), _targets().view(4, 10), None, next(pairs), t_w
        )
    with pytest.raises(ValueError, match="split both alike"):
        linear_distillation(x, w, teacher_hidden=t_x, teacher_weight=_mesh()(_part(t_w), t_w))


def _sequences(name, dtensor):
    """Preferences and policies, with a reference split alike, every metric of theirs, and a budget of many chunks."""
    x, w, b, t_x, t_w = (t.double() for t in _draw((4, 10, H), (V, H), V, (4, 10, T_H), (V, T_H)))
    y, options = _targets().view(4, 10), {"softcap": 6.0, "memory_budget": BUDGET}
    liked, advantages = torch.arange(4) < 2, torch.linspace(-1, 1, 4).double()

    def loss(x, w, b, t_w, **more):
        more |= options
        if name == "DPO":
            return LigerFusedLinearDPOLoss(**more)(w, x, y, b, t_x, t_w)
        if name == "ORPO":
            more["softcap"] = None
            return LigerFusedLinearORPOLoss(**more)(w, x, y, b, nll_target=y)
        if name == "KTO":
            kto = LigerFusedLinearKTOLoss(use_ref_model=True, **more)
            return kto(x, w, y, b, liked, t_x, t_w)
        grpo = LigerFusedLinearGRPOLoss(entropy_coef=0.1, **more)
        return grpo(x, w, y.clamp(min=0), y != IGNORED, advantages, b, None, None, t_x, t_w)

    whole = [t.clone().requires_grad_() for t in (x, w, b)]
    wanted = loss(*whole, t_w)
    mine = [x.clone().requires_grad_(), _part(w), _part(b)]
    slices, group = [*mine[1:], _part(t_w).detach()], {"group": dist.group.WORLD}
    if dtensor:
        make, group = _mesh(), {}
        slices = [make(local, like) for local, like in zip(slices, (w, b, t_w), strict=True)]
    found = loss(mine[0], *slices, **group)
    torch.testing.assert_close(found, wanted)
    pairs = zip(
        torch.autograd.grad(found[0], mine), torch.autograd.grad(wanted[0], whole), strict=True
    )
    for i, (got, want) in enumerate(pairs):
        torch.testing.assert_close(got, want if i < 1 else want.chunk(RANKS)[dist.get_rank()])


def _classes():
    x, w, t_x, t_w = _draw((N, H), (V, H), (N, T_H), (V, T_H))
    y, group = _targets(), dist.group.WORLD
    wanted = LigerFusedLinearJSDLoss(beta=0.3)(x, w, t_x, t_w, y)
    found = LigerFusedLinearJSDLoss(beta=0.3, group=group)(x, _part(w), t_x, t_w, y)
    torch.testing.assert_close(found, wanted)
    with pytest.raises(NotImplementedError, match="needs whole heads"):
        LigerFusedLinearDistillationBase.apply(
            x, _part(w), t_x, t_w, y, head=DistillationOptions(group=group)
        )


def _everything():
    checks = [
        functools.partial(_split, "kl", "whole"),
        functools.partial(_split, "reverse_kl", "slice"),
        functools.partial(_split, "jsd", "stored"),
        functools.partial(_split, "tvd", "whole"),
        functools.partial(_split, "fused_linear_jsd", "dtensor"),
        functools.partial(_split, "fused_linear_kl_div", "stored"),
        functools.partial(_sequences, "DPO", dtensor=False),
        functools.partial(_sequences, "ORPO", dtensor=True),
        functools.partial(_sequences, "KTO", dtensor=True),
        functools.partial(_sequences, "GRPO", dtensor=False),
        _classes,
        _fully_sharded,
        _refused,
    ]
    for check in checks:
        check()
    return len(checks)


def test_three_ranks_agree_with_one():
    assert distributed.run(_everything, RANKS) == [13] * RANKS


def _wide(kind_of_device):
    """Slices of a model's width, in whatever runs there."""
    torch.manual_seed(0)
    device = torch.device(kind_of_device, dist.get_rank() if kind_of_device != "cpu" else None)
    shapes = ((300, 64), (3001, 64), (300, 32), (3001, 32))
    x, w, t_x, t_w = (torch.randn(shape).to(device) for shape in shapes)
    y = torch.randint(3001, (300,)).to(device)
    y[::7] = IGNORED
    options = {"teacher_hidden": t_x, "teacher_weight": t_w, "weight_hard": 0.5, "temperature": 1.5}
    parts = w.chunk(dist.get_world_size())
    for kind in KINDS[:4]:
        whole = [t.clone().requires_grad_() for t in (x, w)]
        mine = [t.clone().requires_grad_() for t in (x, parts[dist.get_rank()])]
        wanted = linear_distillation(*whole, y, kind=kind, **options).loss
        found = linear_distillation(
            *mine, y, kind=kind, group=dist.group.WORLD, memory_budget=1 << 20, **options
        ).loss
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        dx, dw = torch.autograd.grad(found, mine)
        want, want_w = torch.autograd.grad(wanted, whole)
        want_w = want_w.chunk(dist.get_world_size())[dist.get_rank()]
        for got, right in ((dx, want), (dw, want_w)):
            assert (got - right).norm() <= 1e-4 * right.norm(), kind


@pytest.mark.gpu
@pytest.mark.skipif(_env.device_count(_env.infer_device()) < 2, reason="needs two accelerators")
def test_two_accelerators():
    distributed.run(_wide, 2, _env.infer_device(), backend="cpu:gloo,cuda:nccl")
