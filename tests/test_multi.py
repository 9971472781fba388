"""On several accelerators of one host: their own collectives, the Triton path on every rank, one device's results."""

import copy

import distributed
import pytest
import torch
import torch.distributed as dist
from models import batch, step, tiny
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import liger_kernel
from liger_kernel import _env
from liger_kernel.ops import linear_logprob as lp
from liger_kernel.ops.fused_linear_cross_entropy import fused_linear_cross_entropy
from liger_kernel.ops.fused_linear_cross_entropy import reference as whole_cross_entropy
from liger_kernel.ops.rms_norm import rms_norm
from liger_kernel.ops.vocab_parallel_cross_entropy import vocab_parallel_cross_entropy

DEVICES = _env.device_count(_env.infer_device())
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICES < 2, reason="needs two accelerators"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]
RANKS = 2


def run(check, *args):
    return distributed.run(check, RANKS, *args, timeout=150, backend="cpu:gloo,cuda:nccl")


def _device():
    return torch.device(_env.infer_device(), dist.get_rank())


def _near(found, wanted, dtype):
    error = (found.double() - wanted).norm() / wanted.norm()
    assert error <= (1e-5 if dtype == torch.float32 else 1e-2), float(error)


def _split_head(dtype):
    """Log-probabilities, linear cross entropy and cross entropy of given logits over a split vocabulary."""
    device, vocab = _device(), 3001
    torch.manual_seed(0)
    hidden, weight = (
        torch.randn(300, 128, device=device),
        torch.randn(vocab, 128, device=device) * 0.1,
    )
    target = torch.randint(vocab, (300,), device=device)
    target[::7] = -100
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    exact = [t.double().requires_grad_() for t in (hidden, weight)]
    part = weight.chunk(RANKS)[dist.get_rank()]
    for name in ("logp", "loss"):
        mine = [t.clone().requires_grad_() for t in (hidden, part)]
        if name == "logp":
            found = lp.linear_logprob(
                *mine, target, group=dist.group.WORLD, memory_budget=1 << 18
            ).logp
            wanted = lp.reference(*exact, target).logp
        else:
            found = fused_linear_cross_entropy(
                *mine, target, group=dist.group.WORLD, memory_budget=1 << 18, label_smoothing=0.1
            ).loss
            wanted = whole_cross_entropy(*exact, target, label_smoothing=0.1).loss
        _near(found, wanted.detach(), dtype)
        dh, dw = torch.autograd.grad(found.sum(), mine)
        want_dh, want_dw = torch.autograd.grad(wanted.sum(), exact)
        _near(dh, want_dh, dtype)
        _near(dw, want_dw.chunk(RANKS)[dist.get_rank()], dtype)
    logits = (hidden @ weight.t()).detach()
    whole = logits.double().requires_grad_()
    mine = logits.chunk(RANKS, -1)[dist.get_rank()].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(mine, target, dist.group.WORLD, label_smoothing=0.1)
    wanted = nn.functional.cross_entropy(whole, target, label_smoothing=0.1, reduction="none")
    _near(loss, wanted.detach(), torch.float32)
    (got,), (want,) = (
        torch.autograd.grad(loss.sum(), mine),
        torch.autograd.grad(wanted.sum(), whole),
    )
    _near(got, want.chunk(RANKS, -1)[dist.get_rank()], dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_split_head(dtype):
    run(_split_head, dtype)


def _sharded_rows():
    mesh = init_device_mesh(_env.infer_device(), (RANKS,))
    x, w = torch.randn(2, 64, 256, device=_device()), torch.randn(256, device=_device())
    dist.broadcast(x, 0), dist.broadcast(w, 0)
    plain = [t.clone().requires_grad_() for t in (x, w)]
    wanted = rms_norm(*plain)
    wanted.sum().backward()
    shards = distribute_tensor(x, mesh, [Shard(1)]).requires_grad_()
    weight = distribute_tensor(w, mesh, [Replicate()]).requires_grad_()
    y = rms_norm(shards, weight)
    assert isinstance(y, DTensor)
    y.sum().backward()
    torch.testing.assert_close(y.full_tensor(), wanted)
    torch.testing.assert_close(shards.grad.full_tensor(), plain[0].grad)
    torch.testing.assert_close(weight.grad.full_tensor(), plain[1].grad)


def test_norm_of_a_split_sequence():
    run(_sharded_rows)


def _split_tokens():
    """Context parallel: labels shifted before the sequence is split, so that none is lost at a border, and one
    denominator for all ranks."""
    device, rank = _device(), dist.get_rank()
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 64, 128, device=device), torch.randn(503, 128, device=device)
    ids = torch.randint(503, (2, 64), device=device)
    ids[0, 5:40] = -100
    labels = nn.functional.pad(ids, (0, 1), value=-100)[:, 1:]
    exact = [t.double().requires_grad_() for t in (hidden, weight)]
    wanted = whole_cross_entropy(*exact, labels).loss
    grads = torch.autograd.grad(wanted, exact)
    count = (labels != -100).sum()
    mine = [hidden.chunk(RANKS, 1)[rank].clone().requires_grad_(), weight.requires_grad_()]
    part = labels.chunk(RANKS, 1)[rank]
    loss = fused_linear_cross_entropy(*mine, part, reduction="sum").loss / count
    dh, dw = torch.autograd.grad(loss, mine)
    for value in (loss := loss.detach(), dw):
        dist.all_reduce(value)
    _near(loss, wanted.detach(), torch.float32)
    _near(dh, grads[0].chunk(RANKS, 1)[rank], torch.float32)
    _near(dw, grads[1], torch.float32)


def test_loss_of_a_split_sequence():
    run(_split_tokens)


def _ddp(model):
    return nn.parallel.DistributedDataParallel(model, device_ids=[dist.get_rank()])


def _fsdp2(own_head):
    def wrap(model):
        mesh = init_device_mesh(_env.infer_device(), (RANKS,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        if own_head:
            fully_shard(model.lm_head, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    return wrap


def _tensor_parallel(model):
    mesh = init_device_mesh(_env.infer_device(), (RANKS,))
    plan = {"lm_head": ColwiseParallel(output_layouts=Replicate())}
    return parallelize_module(model, mesh, plan)


_ENGINES = {
    "ddp": _ddp,
    "fsdp2": _fsdp2(False),
    "fsdp2, own head": _fsdp2(True),
    "tensor parallel head": _tensor_parallel,
}


def _one_step(name):
    device = _device()
    plain = tiny("llama").to(device)
    model = copy.deepcopy(plain)
    whole = {k: v.to(device) for k, v in batch(rows=2 * RANKS).items()}
    split = name != "tensor parallel head"
    expected, wanted = step(plain, **whole)
    liger_kernel.patch(model)
    parallel = _ENGINES[name](model)
    with _env.using_impl("triton"):
        outputs = parallel(**(distributed.mine(whole) if split else whole))
        assert outputs.logits is None
        outputs.loss.backward()
    loss = distributed.mean(outputs.loss) if split else outputs.loss.detach()
    torch.testing.assert_close(loss, expected.loss.detach())
    found = {
        n.removeprefix("module."): distributed.full(p.grad) for n, p in parallel.named_parameters()
    }
    distributed.assert_same(found, wanted, 1e-4)


@pytest.mark.parametrize("name", _ENGINES)
def test_engine(name):
    run(_one_step, name)


def test_a_model_on_two_devices():
    """As `device_map` splits it: half of the layers and the head on the second device."""
    accelerate = pytest.importorskip("accelerate")
    kind = _env.infer_device()
    plain = tiny("llama").to(kind)
    inputs = {k: v.to(kind) for k, v in batch().items()}
    expected, wanted = step(plain, **inputs)
    places = {
        "model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers.0": 0, "model.layers.1": 1, "model.norm": 1,
        "lm_head": 1,
    }  # fmt: skip
    model = accelerate.dispatch_model(tiny("llama"), places, main_device=0)
    liger_kernel.patch(model)
    outputs, found = step(model, **inputs)
    assert outputs.logits is None
    torch.testing.assert_close(outputs.loss.to(kind), expected.loss)
    first = torch.device(kind, 0)
    distributed.assert_same({n: g.to(first) for n, g in found.items()}, wanted, 1e-4)
