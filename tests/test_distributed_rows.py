"""Ops that work row by row, on DTensors: each rank runs the kernel on its shard, and nothing else moves."""

import importlib
import pkgutil

import pytest
import torch
import torch.distributed as dist
from distributed import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from liger_kernel import _env, ops
from liger_kernel.ops import rms_norm as norms
from liger_kernel.ops.rms_norm import rms_norm
from liger_kernel.ops.swiglu import swiglu_packed
from liger_kernel.transformers.norm import LigerRMSNorm

B, T, D = 2, 6, 24


def _mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def _draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


class _Seen(TorchDispatchMode):
    kernel = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.kernel |= "rms_norm_forward_kernel" in str(func)
        return func(*args, **(kwargs or {}))


def _norm_on(placement, tokens):
    """y, dx, dw of a sharded call against those of a plain one; what was communicated."""
    mesh = _mesh()
    x, w, dy = _draw(B, tokens, D), _draw(D), _draw(B, tokens, D)
    plain = [t.clone().requires_grad_() for t in (x, w)]
    wanted = norms.reference(*plain)
    grads = torch.autograd.grad(wanted, plain, dy)

    shards = distribute_tensor(x, mesh, [placement]).requires_grad_()
    weight = distribute_tensor(w, mesh, [Replicate()]).requires_grad_()
    with CommDebugMode() as forward, _Seen() as seen:
        y = rms_norm(shards, weight)
    assert seen.kernel == _env.interpreting()  # on the shards, not the torch path on DTensors
    assert y.shape == wanted.shape
    assert y.placements == (Replicate() if placement == Shard(2) else placement,)
    upstream = distribute_tensor(dy, mesh, y.placements)
    with CommDebugMode() as backward:
        # Not `backward()`: to accumulate, torch 2.11 copies a leaf's gradient of uneven shards, after gathering it.
        dx, dw = torch.autograd.grad(y, (shards, weight), upstream)
    torch.testing.assert_close(y.full_tensor(), wanted)
    torch.testing.assert_close(dx.full_tensor(), grads[0])
    torch.testing.assert_close(dw.full_tensor(), grads[1])
    assert dw.placements == (Replicate(),)
    assert dx.placements == (placement,)
    return forward.get_total_counts(), backward.get_total_counts()


def _norms(tokens, expected):
    for placement, collectives in expected:
        assert _norm_on(placement, tokens) == collectives, placement


def test_rms_norm():
    """The one collective of backward is the sum of the weight's gradient."""
    one = (0, 1)
    run(_norms, 2, T, [(Shard(0), one), (Shard(1), one), (Replicate(), (0, 0)), (Shard(2), (1, 0))])


def test_uneven_and_empty_shards():
    run(_norms, 3, 5, [(Shard(1), (0, 1))])
    run(_norms, 3, 2, [(Shard(1), (0, 1))])


def _plain_weight():
    x, w = distribute_tensor(_draw(B, T, D), _mesh(), [Shard(1)]), _draw(D).requires_grad_()
    twin = w.detach().clone().requires_grad_()
    y, wanted = rms_norm(x, w), norms.reference(_draw(B, T, D), twin)
    torch.testing.assert_close(y.full_tensor(), wanted)
    y.full_tensor().sum().backward()
    wanted.sum().backward()
    torch.testing.assert_close(w.grad, twin.grad)  # all of it, on every rank
    assert rms_norm(x, None).placements == (Shard(1),)


def test_a_plain_weight_is_the_same_on_every_rank():
    run(_plain_weight, 2)


def _partial():
    """Terms of a sum are no rows: they are added up first, as eager code adds them."""
    x = DTensor.from_local(_draw(B, T, D), _mesh(), [Partial()])
    torch.testing.assert_close(
        rms_norm(x, None).full_tensor(), norms.reference(2 * _draw(B, T, D), None)
    )


def test_partial_sums_are_added_first():
    run(_partial, 2)


def _on_two_axes():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tokens"))
    x, w = _draw(B, T, D).requires_grad_(), _draw(D).requires_grad_()
    shards = distribute_tensor(x.detach(), mesh, [Shard(0), Shard(1)]).requires_grad_()
    weight = distribute_tensor(w.detach(), mesh, [Replicate(), Replicate()]).requires_grad_()
    y, wanted = rms_norm(shards, weight), norms.reference(x, w)
    assert y.placements == (Shard(0), Shard(1))
    y.square().sum().backward()
    wanted.square().sum().backward()
    torch.testing.assert_close(y.full_tensor(), wanted)
    torch.testing.assert_close(shards.grad.full_tensor(), x.grad)
    torch.testing.assert_close(weight.grad.full_tensor(), w.grad)


def test_a_mesh_of_two_axes():
    run(_on_two_axes, 4)


def _sequence_parallel():
    """The engine's own way: parameters become DTensors, plain inputs are this rank's tokens."""
    mesh, rank = _mesh(), dist.get_rank()
    whole, norm = _draw(B, T, D), LigerRMSNorm(D)
    nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(0))
    twin = norm.weight.detach().clone().requires_grad_()
    parallelize_module(norm, mesh, SequenceParallel(use_local_output=True))
    y = norm(whole.chunk(2, dim=1)[rank])
    wanted = norms.reference(whole, twin)
    torch.testing.assert_close(y, wanted.chunk(2, dim=1)[rank])
    y.sum().backward()
    wanted.sum().backward()
    torch.testing.assert_close(norm.weight.grad.full_tensor(), twin.grad)


def test_sequence_parallel():
    run(_sequence_parallel, 2)


# Every op that says it works by rows: (rows, vectors they share), as its arguments begin

_OPS = {
    "dyt": (1, [(1,), (D,), (D,)]),
    "fused_add_rms_norm": (2, [(D,)]),
    "gated_rms_norm": (2, [(D,)]),
    "geglu": (2, []),
    "layer_norm": (1, [(D,), (D,)]),
    "poly_norm": (1, [(3,), (1,)]),
    "reglu": (2, []),
    "relu_squared": (1, []),
    "softmax": (1, []),
    "sparsemax": (1, []),
    "swiglu": (2, []),
}


def _outputs(y):
    return y if isinstance(y, tuple) else (y,)


def _every_op(placement):
    mesh = _mesh()
    for name, (rows, vectors) in _OPS.items():
        module = importlib.import_module(f"liger_kernel.ops.{name}")
        function = getattr(module, name)
        shapes = [(B, T, D)] * rows + vectors
        plain = [_draw(i + 1, *shape)[i].requires_grad_() for i, shape in enumerate(shapes)]
        layout = [placement] * rows + [Replicate()] * len(vectors)
        shards = [
            distribute_tensor(t.detach(), mesh, [p]).requires_grad_()
            for t, p in zip(plain, layout, strict=True)
        ]
        found, wanted = _outputs(function(*shards)), _outputs(module.reference(*plain))
        kept = placement.dim != 2 or module.OP.elementwise
        for y, expected in zip(found, wanted, strict=True):
            assert y.placements == ((placement,) if kept else (Replicate(),)), name
            torch.testing.assert_close(y.full_tensor(), expected, msg=name)
        sum(y.square().sum() for y in found).backward()
        sum(y.square().sum() for y in wanted).backward()
        for shard, whole in zip(shards, plain, strict=True):
            torch.testing.assert_close(
                shard.grad.full_tensor(), whole.grad, rtol=1e-4, atol=1e-5, msg=name
            )


@pytest.mark.parametrize("placement", [Shard(1), Shard(2)], ids=str)
def test_every_op_that_works_by_rows(placement):
    """Elementwise ones take a cut row too: the columns of a column-parallel projection stay apart."""
    run(_every_op, 2, placement)


def test_the_table_is_complete():
    paths = pkgutil.iter_modules(ops.__path__)
    modules = [importlib.import_module(f"liger_kernel.ops.{path.name}") for path in paths]
    found = {m.OP.name for m in modules if getattr(getattr(m, "OP", None), "rows", 0)}
    assert found == {*_OPS, "rms_norm"}


def _packed():
    """Packed halves cannot be cut: the row is made whole."""
    x = _draw(B, T, 2 * D).requires_grad_()
    for placement, kept in ((Shard(1), Shard(1)), (Shard(2), Replicate())):
        x.grad = None
        shards = distribute_tensor(x.detach(), _mesh(), [placement]).requires_grad_()
        y, wanted = swiglu_packed(shards), swiglu_packed(x)
        assert y.placements == (kept,)
        torch.testing.assert_close(y.full_tensor(), wanted)
        y.square().sum().backward()
        wanted.square().sum().backward()
        torch.testing.assert_close(shards.grad.full_tensor(), x.grad)


def test_packed_activation():
    run(_packed, 2)
