"""Megatron-Core; where it is not installed a stand-in with the modules, calls and gradient protocol that matter."""

import contextlib
import importlib
import importlib.util
import sys
import types
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

from liger_kernel.ops.swiglu import reference_packed

REAL = importlib.util.find_spec("megatron") is not None
S, B, V = 3, 2, 16


def _wrapped_torch_norm(config, hidden_size, eps=1e-5, **_):
    return getattr(nn, config.normalization)(hidden_size, eps=eps)


class _WrappedTorchNorm:
    def __new__(cls, *args, **kwargs):
        return _wrapped_torch_norm(*args, **kwargs)


class _LocalSpecProvider:
    def layer_norm(self, rms_norm=False, for_qk=False):
        return _WrappedTorchNorm


class _SwiGLUFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, fp8_input_store, cpu_offload_input):
        return reference_packed(input)


def _bias_swiglu_impl(input, bias, fp8_input_store=False, cpu_offload_input=False):
    rows = input.view(-1, input.shape[-1])
    if bias is not None:
        return reference_packed(input + bias)
    function = sys.modules["megatron.core.fusions.fused_bias_swiglu"].SwiGLUFunction
    return function.apply(rows, fp8_input_store, cpu_offload_input).view(*input.shape[:-1], -1)


class _VocabParallel(torch.autograd.Function):
    """By the definition: log sum exp over all ranks' columns; smoothing over this rank's."""

    @staticmethod
    def forward(ctx, logits, target, group, smoothing):
        own, rank = logits.shape[-1], dist.get_rank(group)
        everyone = [torch.empty_like(logits) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everyone, logits, group)
        log_p = torch.cat(everyone, -1).log_softmax(-1)
        share = smoothing * own / (own - 1)
        columns = slice(rank * own, (rank + 1) * own)
        goal = (1 - share) * nn.functional.one_hot(target, log_p.shape[-1])[..., columns]
        ctx.save_for_backward(log_p[..., columns].exp() - goal - share / own)
        picked = log_p.gather(-1, target[..., None])[..., 0]
        return -(1 - share) * picked - share * log_p[..., columns].mean(-1)

    @staticmethod
    def backward(ctx, dloss):
        return ctx.saved_tensors[0] * dloss[..., None], None, None, None


def _unfused(vocab_parallel_logits, target, label_smoothing=0.0):
    return _VocabParallel.apply(vocab_parallel_logits, target, dist.group.WORLD, label_smoothing)


def _fused(vocab_parallel_logits, target, tp_group):
    return _VocabParallel.apply(vocab_parallel_logits, target, tp_group, 0.0)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens, group):
        parts = [torch.empty_like(tokens) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, tokens.contiguous(), group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        return grad.chunk(dist.get_world_size())[dist.get_rank()], None


def _gather(tokens, tensor_parallel_output_grad=True, group=None):
    assert not tensor_parallel_output_grad
    return _Gather.apply(tokens, group)


class _ColumnParallelLinear(nn.Module):
    gather_output = explicit_expert_comm = disable_grad_reduce = skip_bias_add = False
    gradient_accumulation_fusion = False
    config = SimpleNamespace(defer_embedding_wgrad_compute=False, _cpu_offloading_context=None)
    bias = None

    def __init__(self, width, classes, sequence_parallel):
        super().__init__()
        self.tp_group, self.sequence_parallel = dist.group.WORLD, sequence_parallel
        self.weight = nn.Parameter(torch.randn(classes // dist.get_world_size(), width) * 0.1)

    def forward(self, input_, weight=None, runtime_gather_output=None):
        whole = _Gather.apply(input_, self.tp_group) if self.sequence_parallel else input_
        return whole @ (self.weight if weight is None else weight).t(), None


class _LanguageModule(nn.Module):
    post_process = True

    def __init__(self, width, classes, sequence_parallel):
        super().__init__()
        self.output_layer = _ColumnParallelLinear(width, classes, sequence_parallel)
        self.setup_embeddings_and_output_layer()

    def setup_embeddings_and_output_layer(self):
        pass

    def compute_language_model_loss(self, labels, logits):
        return _fused(logits, labels.t(), dist.group.WORLD).t()


def _data_parallel(model):
    """Megatron's: gradients go to `main_grad`, unless the product has put them there."""

    def hook(parameter):
        if not parameter.grad_added_to_main_grad:
            parameter.main_grad += parameter.grad
        parameter.grad = None

    for parameter in model.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
        parameter.grad_added_to_main_grad = False
        parameter.register_post_accumulate_grad_hook(hook)
    return model


def _pretend():
    names = {
        "models.backends": {"LocalSpecProvider": _LocalSpecProvider, "LNImpl": _WrappedTorchNorm},
        "models.gpt.gpt_layer_specs": {"LNImpl": _WrappedTorchNorm},
        "models.common.language_module.language_module": {
            "fused_vocab_parallel_cross_entropy": _fused, "LanguageModule": _LanguageModule,
        },
        "tensor_parallel.layers": {"ColumnParallelLinear": _ColumnParallelLinear},
        "tensor_parallel.mappings": {"gather_from_sequence_parallel_region": _gather},
        "transformer.torch_norm": {"WrappedTorchNorm": _WrappedTorchNorm},
        "transformer.transformer_block": {"LayerNormImpl": _WrappedTorchNorm},
        "tensor_parallel": {"vocab_parallel_cross_entropy": _unfused},
        "tensor_parallel.cross_entropy": {"vocab_parallel_cross_entropy": _unfused},
        "fusions.fused_cross_entropy": {"fused_vocab_parallel_cross_entropy": _fused},
        "fusions.fused_bias_swiglu": {
            "SwiGLUFunction": _SwiGLUFunction, "bias_swiglu_impl": _bias_swiglu_impl,
        },
        "parallel_state": {"get_tensor_model_parallel_group": lambda: dist.group.WORLD},
    }  # fmt: skip
    for path, contents in names.items():
        parts = ["megatron", "core", *path.split(".")]
        for n in range(1, len(parts) + 1):
            name = ".".join(parts[:n])
            module = sys.modules.setdefault(name, types.ModuleType(name))
            module.__path__ = []
        vars(module).update(contents)


def megatron(path):
    return importlib.import_module(f"megatron.core.{path}")


def start():
    """Megatron on these ranks, all of them one tensor-parallel group."""
    if not REAL:
        _pretend()
        return
    megatron("parallel_state").initialize_model_parallel(dist.get_world_size())
    megatron("models.gpt")  # call sites that have imported the names already
    # Megatron asks for a GPU in a few places where a CPU would do.
    torch.cuda.current_device = lambda: torch.device("cpu")
    megatron("tensor_parallel.random").get_cuda_rng_tracker().fork = contextlib.nullcontext


def gpt(width=32, classes=2 * V, tied=False, **config):
    """Megatron's own GPT of two layers, tensor parallel, without Transformer Engine."""
    config = megatron("transformer").TransformerConfig(
        num_layers=2, hidden_size=width, num_attention_heads=4, ffn_hidden_size=48, use_cpu_initialization=True,
        normalization="RMSNorm", gated_linear_unit=True, activation_func=nn.functional.silu, add_bias_linear=False,
        bias_activation_fusion=True, tensor_model_parallel_size=dist.get_world_size(), attention_dropout=0.0,
        hidden_dropout=0.0, masked_softmax_fusion=False, **config,
    )  # fmt: skip
    specs = megatron("models.gpt.gpt_layer_specs")
    layer = specs.get_gpt_layer_local_spec(
        normalization="RMSNorm", qk_layernorm=config.qk_layernorm
    )
    torch.manual_seed(0)
    return megatron("models.gpt").GPTModel(
        config, layer, classes, 8, position_embedding_type="rope", share_embeddings_and_output_weights=tied
    )  # fmt: skip


def data_parallel(model):
    """In Megatron's own wrapper or the stand-in's; the sums of gradients are zero."""
    if not REAL:
        return _data_parallel(model)
    distributed = megatron("distributed")
    config = distributed.DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    wrapped = distributed.DistributedDataParallel(model.config, config, model)
    wrapped.zero_grad_buffer()
    vars(model)["keeps_its_hooks"] = wrapped
    return model


def head_model(width, classes, sequence_parallel):
    """A model with an output layer whose gradients go to `main_grad`."""
    if REAL:
        return data_parallel(gpt(width, classes, sequence_parallel=sequence_parallel))
    torch.manual_seed(dist.get_rank())
    return data_parallel(_LanguageModule(width, classes, sequence_parallel))
