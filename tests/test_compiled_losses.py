"""Losses on the head under torch.compile: one graph, no shape that depends on labels, eager's values and gradients."""

import pytest
import torch

from liger_kernel import chunked_loss
from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase
from liger_kernel.ops.fused_linear_cross_entropy import fused_linear_cross_entropy
from liger_kernel.ops.fused_linear_jsd import fused_linear_jsd

pytestmark = pytest.mark.plain
B, T, H, V, T_H = 4, 6, 8, 23, 5


class _Reinforce(LigerFusedLinearPPOBase):
    @staticmethod
    def ppo_loss_fn(per_token_logps, attention_mask, advantages, full_attention_mask, **options):
        each = -advantages[:, None] * per_token_logps * attention_mask
        return each.sum() / full_attention_mask.sum(), (each.sum(),)


def _data():
    g = torch.Generator().manual_seed(0)
    shapes = ((B, T, H), (V, H), (V,), (B, T, T_H), (V, T_H), (V,), (B, T))
    *tensors, old = (torch.randn(s, generator=g) for s in shapes)
    y = torch.randint(V, (B, T), generator=g)
    y[:, 0] = y[2] = -100
    return tensors, old, y


def _preferences(x, w, b, *ref, old, y):
    paired = {"compute_nll_loss": True, "softcap": 3.0, "return_count": True}
    labels = torch.tensor([True, False, True, False])
    return (
        chunked_loss.LigerFusedLinearDPOLoss(**paired)(w, x, y, b, *ref),
        chunked_loss.LigerFusedLinearKTOLoss(use_ref_model=True)(x, w, y, b, labels, *ref),
    )


def _policies(x, w, b, *ref, old, y):
    ids, mask, advantages = y.clamp(min=0), y != -100, old[:, 0]
    entropy = chunked_loss.LigerFusedLinearGRPOLoss(beta=0.1, entropy_coef=0.1)
    sequence = {"beta": 0.0, "loss_type": "luspo", "importance_sampling_level": "sequence"}
    return (
        entropy(x, w, ids, mask, advantages, b, None, old, *ref),
        chunked_loss.LigerFusedLinearGRPOLoss(**sequence)(
            x, w, ids, mask, advantages, old_per_token_logps=old
        ),
        _Reinforce.apply(x, w, ids, mask, advantages, b),
    )


def _teachers(x, w, b, *ref, old, y):
    low = x.detach().bfloat16().float()
    return (
        (chunked_loss.LigerFusedLinearJSDLoss()(x, w, *ref[:2], y, b),),
        (chunked_loss.LigerFusedLinearCosineSimilarityLoss()(x, w, *ref[:2], y, b, ref[2]),),
        (fused_linear_jsd(x, w, *ref[:2], y, 0.3, temperature=2.0),),
        # an objective of the engine, like every sharded, quantised or low-rank head
        (fused_linear_cross_entropy(x, w, y, b, low_rank=(low[..., :2], w[:, :2])).loss,),
    )


@pytest.mark.parametrize("losses", [_preferences, _policies, _teachers])
def test_one_graph_of_known_sizes(losses):
    tensors, old, y = _data()
    leaves = [t.requires_grad_() for t in tensors[:2]]
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    def everything(*tensors):
        return losses(*tensors, old=old, y=y)

    wanted = everything(*tensors)
    found = torch.compile(everything, fullgraph=True, backend=backend)(*tensors)
    torch.testing.assert_close(found, wanted)
    for got, want in zip(found, wanted, strict=True):
        pair = (torch.autograd.grad(some[0], leaves, retain_graph=True) for some in (got, want))
        torch.testing.assert_close(*pair)
    (graph,) = graphs
    parts = [part.graph.nodes for part in graph.modules() if hasattr(part, "graph")]
    called = {str(node.target) for nodes in parts for node in nodes}
    assert "index_add" in called or losses is not _preferences  # so are methods called
    assert not called & {"nonzero", "item", "masked_select"}
