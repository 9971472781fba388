"""What is rebound in Megatron-Core, for the models that are built afterwards.

    rms_norm        LocalSpecProvider.layer_norm, and the final norm of a block (LayerNormImpl, LNImpl) where it is
                    Megatron's wrapper of torch's. LayerNorm, L2Norm and Transformer Engine's norms stay what they are
    cross_entropy   vocab_parallel_cross_entropy and fused_vocab_parallel_cross_entropy
    swiglu          SwiGLUFunction, which bias_swiglu_impl uses without a bias; fp8 and offloaded inputs stay Megatron's
    fused_linear_cross_entropy   output layer and loss of LanguageModule and its kinds, see `head.py`

A name is replaced where it is defined and in every module that has imported it by then, so the order of imports does
not matter. Doing it twice changes nothing. Gradients are ordinary `.grad`s, which Megatron's data parallelism adds to
the fp32 `main_grad` as it does for its own norms; that of a fused head can go there directly.
"""

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from liger_kernel.megatron import head
from liger_kernel.megatron.cross_entropy import LigerMegatronCrossEntropy
from liger_kernel.megatron.rms_norm import LigerMegatronRMSNorm
from liger_kernel.ops.swiglu import swiglu_packed

_MARK = "__liger_patched__"
_FINAL_NORMS = (
    ("transformer.transformer_block", "LayerNormImpl"),
    ("models.gpt.gpt_layer_specs", "LNImpl"),
)


def apply_liger_kernel_to_megatron(
    rms_norm: bool = True, cross_entropy: bool = False, swiglu: bool = False,
    fused_linear_cross_entropy: bool = False,
) -> None:  # fmt: skip
    """Rebind Megatron-Core's norms, losses and activation to the kernels of this package.

    Call it before building the model: specs and modules hold what they found when they were made.

    Args:
        rms_norm: RMSNorm of local (not Transformer Engine) layer specs.
        cross_entropy: the vocabulary-parallel loss of logits, fused or not.
        swiglu: the fused activation of gated MLPs (`bias_activation_fusion`).
        fused_linear_cross_entropy: output layer and loss of training calls with labels in one, without logits; dW goes
            straight to `main_grad` under `gradient_accumulation_fusion`. One product more than with logits.
    Raises:
        ImportError: Megatron-Core is not installed, or has no such name; nothing is changed then.
    """
    jobs: list[_Job] = []
    if rms_norm:
        jobs += _norm_jobs()
    if cross_entropy:
        jobs += [
            _job("tensor_parallel.cross_entropy", "vocab_parallel_cross_entropy", _unfused),
            _job("fusions.fused_cross_entropy", "fused_vocab_parallel_cross_entropy", _fused),
        ]
    if swiglu:
        jobs.append(_job("fusions.fused_bias_swiglu", "SwiGLUFunction", _activation))
    if fused_linear_cross_entropy:
        jobs += _head_jobs()
    for job in jobs:
        _must_have(job.owner, job.name)
    for job in jobs:
        _rebind(job)


class _Job(NamedTuple):
    """Replace `owner.name` by `make(original)`; everywhere: and the original wherever a module holds it."""

    owner: Any
    name: str
    make: Callable[[Any], Any]
    everywhere: bool


def _job(path: str, name: str, make: Callable[[Any], Any]) -> _Job:
    return _Job(_module(path), name, make, everywhere=True)


def _module(path: str, *names: str) -> Any:
    """A module of megatron.core with these names in it; else ImportError."""
    path = f"megatron.core.{path}"
    try:
        module = importlib.import_module(path)
    except ImportError as error:
        raise ImportError(
            f"apply_liger_kernel_to_megatron cannot import {path} ({error}): pip install megatron-core, or switch the "
            "flag off that needs it."
        ) from error
    for name in names:
        _must_have(module, name)
    return module


def _must_have(owner: Any, name: str) -> None:
    if not hasattr(owner, name):
        raise ImportError(
            f"apply_liger_kernel_to_megatron: {owner.__name__} has no {name} in this version of Megatron-Core. Switch "
            "the flag off that needs it."
        )


def _rebind(job: _Job) -> None:
    original = getattr(job.owner, job.name)
    if getattr(original, _MARK, False):
        return
    new = job.make(original)
    setattr(new, _MARK, True)
    setattr(job.owner, job.name, new)
    for module in list(sys.modules.values()) if job.everywhere else ():
        space = getattr(module, "__dict__", {})
        for alias in [key for key, value in space.items() if value is original]:
            space[alias] = new


# Norms


def _norm_jobs() -> list[_Job]:
    provider = _module("models.backends", "LocalSpecProvider").LocalSpecProvider
    wrapper = _module("transformer.torch_norm", "WrappedTorchNorm").WrappedTorchNorm
    final = [(_module(path), name) for path, name in _FINAL_NORMS]
    return [
        _Job(provider, "layer_norm", _chooser, everywhere=False),
        *(
            _Job(module, name, _final_norm, everywhere=False)
            for module, name in final
            if getattr(module, name, None) is wrapper
        ),
    ]


def _chooser(original: Any) -> Any:
    @functools.wraps(original)
    def layer_norm(self: Any, rms_norm: bool = False, *args: Any, **kwargs: Any) -> type:
        return LigerMegatronRMSNorm if rms_norm else original(self, rms_norm, *args, **kwargs)

    return layer_norm


def _final_norm(original: Any) -> type:
    class LigerNormImpl:
        """Ours for RMSNorm, Megatron's wrapper for every other norm."""

        def __new__(cls, config: Any, hidden_size: int, *args: Any, **kwargs: Any) -> Any:
            ours = config.normalization == "RMSNorm"
            return (LigerMegatronRMSNorm if ours else original)(
                config, hidden_size, *args, **kwargs
            )

    return LigerNormImpl


# Output layer and loss in one


def _head_jobs() -> list[_Job]:
    model = _module("models.common.language_module.language_module", "LanguageModule")
    layer = _module("tensor_parallel.layers", "ColumnParallelLinear").ColumnParallelLinear
    gather = _module("tensor_parallel.mappings", "gather_from_sequence_parallel_region")
    forward = functools.partial(
        head.promising_forward, gather=gather.gather_from_sequence_parallel_region
    )
    owners = (
        (model.LanguageModule, "compute_language_model_loss", head.redeeming_loss),
        (model.LanguageModule, "setup_embeddings_and_output_layer", head.promising_setup),
        (layer, "forward", forward),
    )
    return [_Job(*owner, everywhere=False) for owner in owners]


# Losses


def _fused(original: Any) -> Any:
    @functools.wraps(original)
    def fused_vocab_parallel_cross_entropy(
        vocab_parallel_logits: Any, target: Any, tp_group: Any = None
    ) -> Any:
        return _loss(0.0)(vocab_parallel_logits, target, _or_megatrons(tp_group))

    return fused_vocab_parallel_cross_entropy


def _unfused(original: Any) -> Any:
    @functools.wraps(original)
    def vocab_parallel_cross_entropy(
        vocab_parallel_logits: Any, target: Any, label_smoothing: float = 0.0, tp_group: Any = None
    ) -> Any:
        return _loss(label_smoothing)(vocab_parallel_logits, target, _or_megatrons(tp_group))

    return vocab_parallel_cross_entropy


@functools.cache
def _loss(label_smoothing: float) -> LigerMegatronCrossEntropy:
    return LigerMegatronCrossEntropy(label_smoothing=label_smoothing)


def _or_megatrons(group: Any) -> Any:
    """The group, or the tensor-parallel one of Megatron's own state; never the whole world."""
    if group is not None:
        return group
    return _module("parallel_state").get_tensor_model_parallel_group()


# Activation


def _activation(original: Any) -> type:
    class SwiGLUFunction:
        """Called as Megatron calls its own: `apply(input, fp8_input_store, cpu_offload_input)`."""

        @staticmethod
        def apply(input: Any, *stores: bool) -> Any:
            return original.apply(input, *stores) if any(stores) else swiglu_packed(input)

    return SwiGLUFunction
