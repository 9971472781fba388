"""Experts spread over processes give the values and gradients of one process that has them all."""

import distributed
import pytest
import torch
import torch.distributed as dist

from liger_kernel import _env
from liger_kernel.ops.fused_moe import fused_moe
from liger_kernel.transformers import moe

pytestmark = pytest.mark.plain
DEVICES = _env.device_count(_env.infer_device())
EXPERTS, WIDTH, INNER, TOP_K = 6, 8, 5, 3
CLOSE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05}  # of the largest
TOKENS = {2: (7, 4), 3: (5, 0, 6)}  # a rank without tokens among them


def _problem(tokens):
    """Tokens of all ranks. The last experts are asked for by nobody, so that a rank may get no row."""
    torch.manual_seed(0)
    x, dy = torch.randn(2, tokens, WIDTH).double()
    ids = torch.stack([torch.randperm(EXPERTS - 2)[:TOP_K] for _ in range(tokens)])
    ids[0], ids[1, 1], ids[2] = -1, ids[1, 0], EXPERTS  # nobody; one expert twice; nobody
    weights = torch.rand(tokens, TOP_K).double()
    gate_up = torch.randn(EXPERTS, 2 * INNER, WIDTH).double()
    down = torch.randn(EXPERTS, WIDTH, INNER).double()
    return [t.requires_grad_() for t in (x, weights, gate_up, down)], ids, dy


def _spread(world, halves, dtype, device):
    rank = dist.get_rank()
    device = torch.device(device, rank) if device else None
    tensors, ids, dy = _problem(sum(TOKENS[world]))
    whole = [t.detach().to(device, dtype).double().requires_grad_() for t in tensors]
    ids, dy = ids.to(device), dy.to(device, dtype)
    wanted = fused_moe(whole[0], *whole[2:], ids, whole[1])
    wanted.backward(dy.double())
    here = torch.arange(len(dy)).split(TOKENS[world])[rank]
    own = torch.arange(EXPERTS).chunk(world)[rank]
    parts = (here, here, own, own)
    mine = [
        t.detach().to(dtype)[part].requires_grad_() for t, part in zip(whole, parts, strict=True)
    ]
    my_x, my_weights, my_gate_up, my_down = mine
    gate, up = my_gate_up.chunk(2, dim=1)
    if not halves:
        gate, up = gate.clone(), up.clone()
    assert (moe._joined(gate, up) is my_gate_up) == halves
    layer = moe.LigerExpertParallelFusedMoe()
    out = layer(my_x, ids[here], my_weights, gate, up, my_down, EXPERTS)
    out.backward(dy[here])
    pairs = [
        (out, wanted[here]),
        *((t.grad, w.grad[p]) for t, w, p in zip(mine, whole, parts, strict=True)),
    ]
    for found, expected in pairs:
        largest = float(expected.abs().max()) if expected.numel() else 0.0
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=CLOSE[dtype] * largest)


@pytest.mark.parametrize(("world", "halves"), [(2, True), (3, False)])
def test_the_values_of_one_process(world, halves):
    distributed.run(_spread, world, world, halves, torch.float64, None)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICES < 2, reason="needs two accelerators")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_accelerators(dtype):
    distributed.run(_spread, 2, 2, True, dtype, _env.infer_device(), backend="cpu:gloo,cuda:nccl")


def _whole_and_wrong():
    (x, weights, gate_up, down), ids, _ = _problem(9)
    gate, up = gate_up.chunk(2, dim=1)
    out = moe.moe_fused(x, ids, weights, gate, up, down, EXPERTS, TOP_K)  # each process has all
    torch.testing.assert_close(out, fused_moe(x, gate_up, down, ids, weights))
    with pytest.raises(ValueError, match="8 experts on 2 processes are 4 on each, and all_B has 6"):
        moe.moe_fused(x, ids, weights, gate, up, down, 8, TOP_K)
    shaped = x.view(3, 3, WIDTH), ids.view(3, 3, TOP_K), weights.view(3, 3, TOP_K)
    own = slice(0, 3) if dist.get_rank() == 0 else slice(3, 6)
    found = moe.moe_fused(*shaped, gate[own], up[own], down[own], EXPERTS, TOP_K, dist.group.WORLD)
    torch.testing.assert_close(found, out.view(3, 3, WIDTH))
    half = [t.detach().bfloat16() for t in (x, gate[own], up[own], down[own])]
    found = moe.moe_fused(half[0], ids, weights.float(), *half[1:], EXPERTS, TOP_K)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), out, rtol=0.05, atol=0.05)


def test_whole_experts_shapes_and_dtypes():
    distributed.run(_whole_and_wrong, 2)


def test_one_process():
    (x, weights, gate_up, down), ids, _ = _problem(4)
    gate, up = gate_up.chunk(2, dim=1)
    out = moe.moe_fused(x, ids, weights, gate, up, down, EXPERTS, TOP_K)
    torch.testing.assert_close(out, fused_moe(x, gate_up, down, ids, weights))
    with pytest.raises(ValueError, match=r"must be \[4, 2\] for X \[4, 8\] and top_k = 2"):
        moe.moe_fused(x, ids, weights, gate, up, down, EXPERTS, 2)
    with pytest.raises(ValueError, match="must both be"):
        moe.moe_fused(x, ids, weights, gate, up[1:], down, EXPERTS, TOP_K)
