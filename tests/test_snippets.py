"""Calls that guides and lectures about this system show: each of them runs and gives what it promises."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import liger_kernel

pytestmark = pytest.mark.plain


def _tiny_llama(**more):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        **more,
    )
    return LlamaForCausalLM(config)


def test_version():
    assert liger_kernel.__version__.startswith("0.8.4")


def test_both_losses_on():
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    model = _tiny_llama()
    ids = torch.randint(96, (2, 16))
    plain = model(input_ids=ids, labels=ids).loss
    apply_liger_kernel_to_llama(
        rope=True,
        rms_norm=True,
        swiglu=True,
        cross_entropy=True,
        fused_linear_cross_entropy=True,
        model=model,
    )
    out = model(input_ids=ids, labels=ids)
    torch.testing.assert_close(out.loss, plain)
    assert out.logits is None


def test_unknown_flag_suggests_the_right_one():
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    with pytest.raises(TypeError, match="rms_norm"):
        apply_liger_kernel_to_llama(rms_nrom=False)


@pytest.mark.parametrize("hidden_first", [True, False])
def test_linear_loss_takes_either_order(hidden_first):
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    hidden = torch.randn(12, 8, requires_grad=True)
    weight = torch.randn(20, 8, requires_grad=True)
    labels = torch.randint(20, (12,))
    args = (hidden, weight) if hidden_first else (weight, hidden)
    loss = LigerFusedLinearCrossEntropyLoss()(*args, labels)
    torch.testing.assert_close(loss, F.cross_entropy(hidden @ weight.t(), labels))


def test_linear_loss_follows_the_contract_where_both_orders_fit():
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    weight, hidden = torch.randn(12, 8), torch.randn(12, 8)
    labels = torch.randint(12, (12,))
    loss = LigerFusedLinearCrossEntropyLoss()(weight, hidden, labels)
    torch.testing.assert_close(loss, F.cross_entropy(hidden @ weight.t(), labels))


def test_mlp_by_sizes_and_by_config():
    from liger_kernel.transformers import LigerSwiGLUMLP

    by_size = LigerSwiGLUMLP(hidden_size=16, intermediate_size=24)
    config = SimpleNamespace(hidden_size=16, intermediate_size=24, hidden_act="silu")
    by_config = LigerSwiGLUMLP(config)
    by_config.load_state_dict(by_size.state_dict())
    x = torch.randn(2, 3, 16)
    want = by_size.down_proj(F.silu(by_size.gate_proj(x)) * by_size.up_proj(x))
    torch.testing.assert_close(by_size(x), want)
    torch.testing.assert_close(by_config(x), want)


def test_rope_reads_both_halves_of_its_tables():
    from liger_kernel.transformers import liger_rotary_pos_emb

    q, k = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8)
    cos, sin = torch.randn(1, 1, 6, 8), torch.randn(1, 1, 6, 8)

    def turned(x):
        half = torch.cat((-x[..., 4:], x[..., :4]), -1)
        return x * cos + half * sin

    got_q, got_k = liger_rotary_pos_emb(q, k, cos, sin)
    torch.testing.assert_close(got_q, turned(q))
    torch.testing.assert_close(got_k, turned(k))


def test_norm_layer():
    from liger_kernel.transformers import LigerRMSNorm

    x = torch.randn(2, 128, 4096)
    want = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(LigerRMSNorm(hidden_size=4096)(x), want)


def test_logits_of_a_patched_model_stay_within_1e_5():
    model = _tiny_llama().eval()
    ids = torch.randint(96, (2, 16))
    with torch.no_grad():
        plain = model(ids).logits
        with liger_kernel.patched(model):
            logits = model(ids).logits
    torch.testing.assert_close(logits, plain, rtol=0, atol=1e-5)


def test_auto_model_consumes_its_flags(tmp_path):
    from liger_kernel.transformers import AutoLigerKernelForCausalLM

    _tiny_llama().save_pretrained(tmp_path)
    model = AutoLigerKernelForCausalLM.from_pretrained(tmp_path, rope=False, dtype=torch.float32)
    ids = torch.randint(96, (1, 8))
    assert model.train()(input_ids=ids, labels=ids).loss.isfinite()
