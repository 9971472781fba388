"""Embedding beyond the generic properties: runs over many cuts, padding, bad ids, the layer."""

import pytest
import torch
from torch import nn

from liger_kernel import _env
from liger_kernel.ops import embedding as ops
from liger_kernel.ops.embedding import LigerEmbeddingFunction, embedding
from liger_kernel.transformers.embedding import LigerEmbedding


@pytest.mark.parametrize("ids", [[1] * 61, [0] * 3 + [2] * 50 + [3] * 8, [3, 1, 2] * 20], ids=len)
def test_runs_over_many_cuts(ids, device, monkeypatch):
    if not _env.triton_runs_on(device.type):
        pytest.skip("a matter of the kernels")
    monkeypatch.setattr(ops, "_PIECE", 4)  # 61 places: 16 pieces, two rounds of the second kernel
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
    ids = torch.tensor(ids)[order].to(device)
    weight = torch.zeros(5, 3, device=device, requires_grad=True)
    dy = torch.randn(len(ids), 3, device=device)
    (found,) = torch.autograd.grad(embedding(ids, weight, impl="triton"), weight, dy)
    expected = torch.zeros(5, 3, dtype=torch.float64, device=device).index_add(0, ids, dy.double())
    torch.testing.assert_close(found, expected.float())


def test_a_bad_id_is_never_silent(path, device, monkeypatch):
    weight = torch.ones(4, 2, device=device, requires_grad=True)
    for bad in (-1, 4):
        ids = torch.tensor([0, bad], device=device)
        monkeypatch.setenv("LIGER_KERNEL_VALIDATE", "1")
        with pytest.raises(IndexError, match=rf"ids.flatten\(\)\[1\] is {bad}; weight has 4 rows"):
            embedding(ids, weight)
        if path == "triton":
            y = ops.OP(ids, weight, None)
            assert torch.isnan(y[1]).all()
            (grad,) = torch.autograd.grad(y, weight, torch.ones_like(y))
            assert grad.tolist() == [[1, 1], [0, 0], [0, 0], [0, 0]]


def test_layer(path, device):
    torch.manual_seed(0)
    layer = LigerEmbedding(6, 4, padding_idx=-2).to(device)
    like = nn.Embedding(6, 4, padding_idx=-2).to(device)
    assert layer.state_dict().keys() == like.state_dict().keys()
    assert layer.padding_idx == like.padding_idx == 4
    assert not layer.weight[4].any()
    like.load_state_dict(layer.state_dict())
    ids = torch.tensor([[0, 4, 5], [5, 5, 1]], device=device)
    for a, b in ((layer(ids), like(ids)), (layer(ids.int()), like(ids))):
        assert torch.equal(a, b)
    layer(ids).square().sum().backward()
    like(ids).square().sum().backward()
    torch.testing.assert_close(layer.weight.grad, like.weight.grad)
    assert repr(layer) == "LigerEmbedding(6, 4, padding_idx=4)"
    with torch.no_grad():
        layer.weight.fill_(1.0)
    assert layer(ids)[0].tolist() == [[1] * 4, [0] * 4, [1] * 4]
    with pytest.raises(ValueError, match="padding_idx must lie within"):
        LigerEmbedding(6, 4, padding_idx=6)


def test_contract_names(path, device):
    weight = torch.randn(6, 4, device=device)
    ids = torch.tensor([3, 0], device=device)
    assert torch.equal(LigerEmbeddingFunction.apply(weight, ids), weight[ids])
