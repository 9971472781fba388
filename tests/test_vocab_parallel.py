"""A vocabulary split over three ranks (17, 17 and 16 classes) gives one process's losses and gradients."""

import functools
import os
import time

import distributed
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import tiny
from torch.utils._python_dispatch import TorchDispatchMode

import liger_kernel
from liger_kernel.ops import cross_entropy as ce
from liger_kernel.ops import linear_logprob as lp
from liger_kernel.ops.fused_linear_cross_entropy import fused_linear_cross_entropy
from liger_kernel.ops.fused_linear_cross_entropy import reference as whole_cross_entropy
from liger_kernel.ops.head.objective import fused_linear_objective
from liger_kernel.ops.vocab_parallel_cross_entropy import vocab_parallel_cross_entropy

pytestmark = pytest.mark.plain
RANKS, VOCAB, WIDTH, TOKENS = 3, 50, 16, 40
EVEN = 100  # Hugging Face's tensor parallelism does not split an odd vocabulary in every version
TRANSFORMS = {"softcap": 3.0, "pre_scale": 1.5, "post_scale": 0.7, "temperature": 1.3}


def _problem():
    torch.manual_seed(0)
    hidden, weight = torch.randn(TOKENS, WIDTH).double(), torch.randn(VOCAB, WIDTH).double()
    bias, target = torch.randn(VOCAB).double(), torch.randint(VOCAB, (TOKENS,))
    target[::5] = -100
    return hidden, weight, bias, target


def _leaves(*tensors):
    return [t.clone().requires_grad_() for t in tensors]


def _part(whole):
    return whole.chunk(RANKS)[dist.get_rank()]


def _close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


def _same_gradients(loss, leaves, wanted, wanted_leaves, shared=1):
    """The first `shared` leaves are the same on every rank, of the others each has its part."""
    found = torch.autograd.grad(loss, leaves)
    wants = torch.autograd.grad(wanted, wanted_leaves)
    for i, (got, want) in enumerate(zip(found, wants, strict=True)):
        _close(got, want if i < shared else _part(want))


def _logprob(budget):
    hidden, weight, bias, target = _problem()
    ids = torch.tensor([3, 49, 20, 3])
    options = {
        "return_entropy": True, "return_argmax": True, "selected_token_ids": ids, **TRANSFORMS,
    }  # fmt: skip
    down, up = torch.randn(TOKENS, 5).double(), torch.randn(VOCAB, 5).double()
    mine = _leaves(hidden, down, _part(weight), _part(bias), _part(up))
    h, d, *slices = mine
    found = lp.linear_logprob(
        h, slices[0], target, bias=slices[1], low_rank=(d, slices[2]), group=dist.group.WORLD, memory_budget=budget,
        **options,
    )  # fmt: skip
    whole = _leaves(hidden, down, weight, bias, up)
    h, d, w, b, u = whole
    wanted = lp.reference(h, w, target, bias=b, low_rank=(d, u), **options)
    for name in ("logp", "entropy", "argmax", "selected"):
        _close(getattr(found, name), getattr(wanted, name))
    x, y, z = (
        torch.randn(TOKENS).double(),
        torch.randn(TOKENS).double(),
        torch.randn(TOKENS, 4).double(),
    )

    def mixed(of):
        return (of.logp * x).sum() + (of.entropy * y).sum() + (of.selected * z).sum()

    torch.manual_seed(1)
    _same_gradients(mixed(found), mine, mixed(wanted), whole, shared=2)


def _linear_cross_entropy(budget, dtensor, options):
    hidden, weight, bias, target = _problem()
    mine = _leaves(hidden, _part(weight), _part(bias))
    weight_, bias_, group = mine[1], mine[2], dist.group.WORLD
    if dtensor:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        mesh, group = init_device_mesh("cpu", (RANKS,)), None
        shapes = (
            {"shape": weight.shape, "stride": weight.stride()},
            {"shape": bias.shape, "stride": (1,)},
        )
        weight_, bias_ = (
            DTensor.from_local(t, mesh, [Shard(0)], run_check=False, **s)
            for t, s in zip(mine[1:], shapes, strict=True)
        )
    found = fused_linear_cross_entropy(
        mine[0], weight_, target, bias_, group=group, memory_budget=budget, **options, **TRANSFORMS
    )
    whole = _leaves(hidden, weight, bias)
    wanted = whole_cross_entropy(whole[0], whole[1], target, whole[2], **options, **TRANSFORMS)
    for name in ("loss", "z_loss", "token_accuracy", "predicted_tokens"):
        got, want = getattr(found, name), getattr(wanted, name)
        assert (got is None) == (want is None), name
        if got is not None:
            _close(got.double(), want.double())
    _same_gradients(found.loss.sum(), mine, wanted.loss.sum(), whole)


def _destination():
    """dW is added to a sum that exists, sharded, and the weight's hooks still run."""
    hidden, weight, bias, target = _problem()
    upstream = torch.linspace(-1, 1, TOKENS).double()
    whole = _leaves(hidden, weight, bias)
    wanted = whole_cross_entropy(*whole[:2], target, whole[2], reduction="none").loss
    wanted.backward(upstream)
    mine, seen = _leaves(hidden, _part(weight), _part(bias)), []
    total = torch.full_like(mine[1], 3.0)
    mine[1].register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    for _ in range(2):
        loss = fused_linear_cross_entropy(
            mine[0], mine[1], target, mine[2], group=dist.group.WORLD, reduction="none", memory_budget=2000,
            accumulate_into=total,
        ).loss  # fmt: skip
        loss.backward(upstream)
    _close(total, 3.0 + 2 * _part(whole[1].grad))
    _close(mine[0].grad, 2 * whole[0].grad)
    _close(mine[2].grad, 2 * _part(whole[2].grad))
    assert [gradient.layout for gradient in seen] == [torch.sparse_coo] * 2
    with pytest.raises(ValueError, match=r"accumulate_into must be .*\[17, 16\]|\[16, 16\]"):
        lp.linear_logprob(*mine[:2], target, group=dist.group.WORLD, accumulate_into=total[1:])
    with pytest.raises(ValueError, match='accumulate_into needs reduction="none"'):
        fused_linear_cross_entropy(*mine[:2], target, group=dist.group.WORLD, accumulate_into=total)


def _two_heads():
    """Of 50 and of 49 classes: some ranks hold as many of either."""
    hidden, weight, _, target = _problem()
    for classes in (VOCAB, VOCAB - 1, VOCAB):
        labels = target.clamp(max=classes - 1)
        found = lp.linear_logprob(
            hidden, _part(weight[:classes]), labels, group=dist.group.WORLD
        ).logp
        _close(found, lp.reference(hidden, weight[:classes], labels).logp)


def _objective():
    hidden, weight, bias, target = _problem()

    def objective(tokens):
        return (tokens.logp * tokens.entropy + tokens.lse.square() - tokens.mean_logp).sum(), None

    mine = _leaves(hidden, _part(weight), _part(bias))
    options = {"entropy": True, "lse": True, "mean_logp": True, "memory_budget": 4000}
    loss, _ = fused_linear_objective(
        mine[0], mine[1], target, objective, bias=mine[2], process_group=dist.group.WORLD, **options
    )
    whole = _leaves(hidden, weight, bias)
    wanted, _ = fused_linear_objective(
        whole[0], whole[1], target, objective, bias=whole[2], **options
    )
    _close(loss, wanted)
    _same_gradients(loss, mine, wanted, whole)


class _NoWaiting(TorchDispatchMode):
    """Nothing may come from the device to the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.nonzero.default,
        )
        return func(*args, **(kwargs or {}))


def _given_logits(smoothing, formula, sizes):
    hidden, weight, _, target = _problem()
    logits = hidden @ weight.t()
    target = target.view(5, 8)
    (mine,), (whole,) = _leaves(logits.split(sizes, -1)[dist.get_rank()]), _leaves(logits)
    kept = mine.detach().clone()
    with _NoWaiting():
        loss = vocab_parallel_cross_entropy(
            mine.view(5, 8, -1), target, dist.group.WORLD, label_smoothing=smoothing,
            label_smoothing_formula=formula,
        )  # fmt: skip
    share = smoothing * VOCAB / (VOCAB - 1) if formula == "megatron" else smoothing
    wanted = F.cross_entropy(whole, target.view(-1), label_smoothing=share, reduction="none")
    _close(loss.view(-1), wanted)
    upstream = torch.linspace(-1, 1, TOKENS).double()
    (got,) = torch.autograd.grad(loss, mine, upstream.view(5, 8))
    (want,) = torch.autograd.grad(wanted, whole, upstream)
    _close(got, want.split(sizes, -1)[dist.get_rank()])
    assert torch.equal(mine, kept)


def _partition():
    """Megatron's own smoothing: over this rank's classes alone."""
    hidden, weight, _, target = _problem()
    logits = hidden @ weight.t()
    mine = logits.chunk(RANKS, -1)[dist.get_rank()].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(
        mine, target, dist.group.WORLD, label_smoothing=0.1, label_smoothing_mode="partition"
    )
    whole = logits.clone().requires_grad_()
    log_p = whole.log_softmax(-1)
    part = log_p.chunk(RANKS, -1)[dist.get_rank()]
    wanted = -0.9 * log_p.gather(-1, target.clamp(min=0)[:, None])[:, 0] - 0.1 * part.mean(-1)
    _close(loss, wanted.where(target >= 0, 0.0))
    assert torch.isfinite(torch.autograd.grad(loss.sum(), mine)[0]).all()


def _strange_labels():
    """A target that is in nobody's part is NaN, alone; nothing to learn gives zeros."""
    logits = torch.randn(3, 17)
    target = torch.tensor([60, 3, -100])
    loss = vocab_parallel_cross_entropy(logits, target, dist.group.WORLD)
    assert loss[0].isnan()
    assert loss[1].isfinite()
    assert loss[2] == 0
    hidden, weight, _, target = _problem()
    mine = _leaves(hidden, _part(weight))
    loss = fused_linear_cross_entropy(
        *mine, torch.full_like(target, -100), group=dist.group.WORLD
    ).loss
    assert loss == 0
    assert all((g == 0).all() for g in torch.autograd.grad(loss, mine))


def _refused():
    hidden, weight, _, target = _problem()
    with pytest.raises(ValueError, match="must hold 17 classes"):
        lp.linear_logprob(
            hidden, weight[: 20 if dist.get_rank() == 0 else 15], target, group=dist.group.WORLD
        )
    tokens = TOKENS - (dist.get_rank() == 1)
    with pytest.raises(ValueError, match=r"the same hidden states .* got \[40, 39, 40\] tokens"):
        lp.linear_logprob(hidden[:tokens], _part(weight), target[:tokens], group=dist.group.WORLD)
    with pytest.raises(ValueError, match="no class weights"):
        fused_linear_cross_entropy(
            hidden, _part(weight), target, None, torch.ones(VOCAB), group=dist.group.WORLD
        )


def _everything():
    smooth = {"label_smoothing": 0.1, "lse_square_scale": 1e-2, "return_z_loss": True}
    counted = {"return_token_accuracy": True, "return_predicted_tokens": True}
    checks = [
        functools.partial(_logprob, None),
        functools.partial(_logprob, 2000),
        functools.partial(_linear_cross_entropy, None, False, {"reduction": "sum", **smooth}),
        functools.partial(_linear_cross_entropy, 2000, True, {**smooth, **counted}),
        functools.partial(_linear_cross_entropy, 2000, True, {"use_token_scaling": True}),
        functools.partial(_linear_cross_entropy, 2000, False, {"reduction": "none", **counted}),
        _destination,
        _two_heads,
        _objective,
        functools.partial(_given_logits, 0.0, "pytorch", [17, 17, 16]),
        functools.partial(_given_logits, 0.1, "pytorch", [1, 30, 19]),
        functools.partial(_given_logits, 0.1, "megatron", [20, 20, 10]),
        _partition,
        _strange_labels,
        _refused,
    ]
    for check in checks:
        check()
    return len(checks)


def test_three_ranks_agree_with_one():
    assert distributed.run(_everything, RANKS) == [15] * RANKS


def _die_in_the_loss():
    hidden, weight, _, target = _problem()
    if dist.get_rank() == 1:
        os._exit(7)
    lp.linear_logprob(hidden, _part(weight), target, group=dist.group.WORLD)


def test_a_rank_that_dies_is_named():
    began = time.monotonic()
    with pytest.raises(distributed.RankFailed, match="rank 1 of 3: died with exit code 7"):
        distributed.run(_die_in_the_loss, RANKS, timeout=30)
    assert time.monotonic() - began < 20


def test_one_rank_needs_no_group():
    logits, target = torch.randn(4, 9, requires_grad=True), torch.tensor([0, 8, -100, 3])
    torch.testing.assert_close(
        vocab_parallel_cross_entropy(logits, target, label_smoothing=0.2),
        ce.reference(logits, target, label_smoothing=0.2, reduction="none").loss,
    )


def _llama_step(model):
    torch.manual_seed(3)
    ids = torch.randint(EVEN, (2, 12))
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    return out


def _tensor_parallel_head(tied, hugging_face, folder):
    """A patched Llama whose head is split over the ranks: the loss is fused, and equal to one process's."""
    if hugging_face:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", dtype=torch.float32)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        model = tiny("llama", vocab_size=EVEN, tie_word_embeddings=tied)
        plan = {"lm_head": ColwiseParallel(output_layouts=Replicate())}
        parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    plain = tiny("llama", vocab_size=EVEN, tie_word_embeddings=tied)
    wanted = _llama_step(plain)
    liger_kernel.patch(model.train())
    rows = []
    head = model.get_output_embeddings()
    logits = type(head).logits
    type(head).logits = lambda self, x: rows.append(x.shape[0]) or logits(self, x)
    found = _llama_step(model)
    assert found.logits is None
    assert set(rows) <= {0}
    torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-5, atol=0)
    grads = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            distributed.full(parameter.grad), grads[name].grad, rtol=1e-4, atol=1e-6
        )
    return True


@pytest.mark.parametrize("hugging_face", [False, True], ids=["parallelize_module", "tp_plan"])
def test_a_patched_model_with_a_split_head(hugging_face, tmp_path):
    if hugging_face:
        tiny("llama", vocab_size=EVEN).save_pretrained(tmp_path)
    assert all(distributed.run(_tensor_parallel_head, 2, False, hugging_face, tmp_path))
