"""Output layer and loss of a Megatron model in one: the logits `[S, B, V / ranks]` never exist.

    loss = cross_entropy(h W^T + b)     h: [S, B, H]   W: [V / ranks, H]   labels: [B, S]   loss: [B, S] fp32

The output layer returns a promise of its logits. The model's `compute_language_model_loss` redeems it in a second call
of that layer, so that hooks around the layer run as always; whatever else is done to it gets Megatron's own logits.

The mask over tokens comes later, so losses are per token and their gradients are made in backward: four products where
logits take three (`ops.linear_logprob`). That is also when their factor is known, so with Megatron's
`gradient_accumulation_fusion` the product that makes dW adds it straight to the weight's fp32 `main_grad`, chunk by
chunk, in the precision of the product; the flag `grad_added_to_main_grad` says so to Megatron's data parallelism.
Without it, and under Megatron-FSDP, dW is an ordinary `.grad` that Megatron adds itself.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from liger_kernel.ops.fused_linear_cross_entropy import fused_linear_cross_entropy
from liger_kernel.ops.head.module import within

_IGNORED = -100
_OPERATORS = (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "neg", "getitem", "setitem", "len",
)  # fmt: skip


class PromisedLogits:
    """The result of a call of an output layer that has not been made yet.

    make: the layer's own forward   gather: a function from this rank's tokens to those of the group, or None
    """

    def __init__(self, layer: Any, make: Any, gather: Any, hidden: Tensor, weight: Tensor | None):
        self._layer, self._make, self._gather = layer, make, gather
        self._hidden, self._weight = hidden, weight
        self._tensor: Tensor | None = None

    @property
    def made(self) -> bool:
        """Whether somebody has looked at the logits, and may have changed them."""
        return self._tensor is not None

    def loss(self, labels: Tensor) -> Tensor:
        """`[S, B]` fp32 for labels `[S, B]`; 0 where they are negative, as Megatron marks what has none."""
        target = labels.where(labels >= 0, _IGNORED)

        def job(hidden: Tensor) -> Tensor:
            layer = self._layer
            weight = layer.weight if self._weight is None else self._weight
            hidden = hidden if self._gather is None else self._gather(hidden)
            into = _destination(layer, weight)
            loss = fused_linear_cross_entropy(
                hidden, weight, target, layer.bias, ignore_index=_IGNORED, reduction="none", group=layer.tp_group,
                accumulate_into=into,
            ).loss  # fmt: skip
            if into is not None and loss.requires_grad:
                loss.register_hook(functools.partial(_mark, weight))
            return loss

        return within(self._layer, self._layer, job, self._hidden)

    def tensor(self) -> Tensor:
        """Megatron's own logits, made now and kept; with a graph, even if the first look is without one."""
        if self._tensor is None:
            with torch.enable_grad():
                self._tensor = self._make(self._layer, self._hidden, self._weight)[0]
        assert self._tensor is not None
        return self._tensor

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def real(value: Any) -> Any:
            return value.tensor() if isinstance(value, cls) else value

        args, kwargs = tree_map(real, (args, kwargs or {}))
        return func(*args, **kwargs)


def _operator(name: str) -> Any:
    def call(self: PromisedLogits, *args: Any) -> Any:
        return getattr(self.tensor(), name)(*args)

    return call


for _name in _OPERATORS:
    setattr(PromisedLogits, f"__{_name}__", _operator(f"__{_name}__"))


def _destination(layer: Any, weight: Tensor) -> Tensor | None:
    fused = layer.gradient_accumulation_fusion and weight.requires_grad
    # Megatron-FSDP makes main_grad anew for every backward.
    if not fused or hasattr(weight, "__fsdp_param__"):
        return None
    return getattr(weight, "main_grad", None)


def _mark(weight: Any, _: Tensor) -> None:
    if hasattr(weight, "grad_added_to_main_grad"):
        weight.grad_added_to_main_grad = True


# What is rebound


def promising_setup(original: Any) -> Any:
    """`LanguageModule.setup_embeddings_and_output_layer`: it marks the layer of a model with `redeeming_loss`."""

    @functools.wraps(original)
    def setup_embeddings_and_output_layer(self: Any) -> None:
        original(self)
        if self.post_process and hasattr(type(self).compute_language_model_loss, "redeems"):
            self.output_layer.liger_promises = True

    return setup_embeddings_and_output_layer


def promising_forward(original: Any, gather: Any) -> Any:
    """`ColumnParallelLinear.forward`: a promise from marked layers in training, where the engine has the same product.

    gather: Megatron's function that collects the tokens of a sequence-parallel group.
    """

    @functools.wraps(original)
    def forward(
        self: Any, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> Any:  # fmt: skip
        gathered = self.gather_output if runtime_gather_output is None else runtime_gather_output
        ready = getattr(self, "liger_promises", False) and self.training and torch.is_grad_enabled()
        if not ready or gathered or _own_way(self):
            return original(self, input_, weight, runtime_gather_output)
        whole = None
        if self.sequence_parallel:
            # The engine sums dh over the group: of that sum each rank takes its tokens.
            whole = functools.partial(
                gather, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return PromisedLogits(self, original, whole, input_, weight), None

    return forward


def _own_way(layer: Any) -> bool:
    """Whether a call of this layer does more than the product and the sum of its gradient over the group."""
    config = layer.config
    return bool(
        layer.explicit_expert_comm
        or layer.disable_grad_reduce
        or (layer.skip_bias_add and layer.bias is not None)
        or config.defer_embedding_wgrad_compute
        or config._cpu_offloading_context is not None
    )


def redeeming_loss(original: Any) -> Any:
    """`LanguageModule.compute_language_model_loss`, of promised logits too."""

    @functools.wraps(original)
    def compute_language_model_loss(self: Any, labels: Tensor, logits: Any) -> Tensor:
        if not isinstance(logits, PromisedLogits):
            return original(self, labels, logits)
        if logits.made:
            return original(self, labels, logits.tensor())
        return logits.loss(labels.transpose(0, 1)).transpose(0, 1).contiguous()

    compute_language_model_loss.redeems = True  # type: ignore[attr-defined]
    return compute_language_model_loss
