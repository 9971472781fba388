"""Routed experts as one layer, with the constructor and the parameters of Hugging Face's `...Experts` modules."""

from typing import Any

import torch
from torch import Tensor, nn

from liger_kernel.ops.fused_moe import fused_moe

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def _first(config: Any, *names: str) -> Any:
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    raise ValueError(f"LigerExperts: the config has none of {', '.join(names)}.")


class LigerExperts(nn.Module):
    """sum over k of weight[t, k] * down(act(gate x) * up x) of expert index[t, k], see `liger_kernel.ops.fused_moe`.

    Parameters are `gate_up_proj` [E, 2I, H] and `down_proj` [E, H, I], drawn with the config's `initializer_range`.

    Args:
        config: anything with `hidden_size`, `hidden_act`, one of `num_experts`, `num_local_experts`, `n_routed_experts`
            and one of `moe_intermediate_size`, `intermediate_size`; the first that is there counts.
    Raises:
        ValueError: a size is missing, or the activation is another than SiLU or GELU.
    """

    def __init__(self, config: Any):
        super().__init__()
        if config.hidden_act not in _ACTIVATIONS:
            listed = ", ".join(repr(name) for name in _ACTIVATIONS)
            raise ValueError(
                f"LigerExperts: hidden_act must be one of {listed}; the config has {config.hidden_act!r}."
            )
        self.config = config
        self.num_experts = _first(config, "num_experts", "num_local_experts", "n_routed_experts")
        self.hidden_dim = config.hidden_size
        self.intermediate_dim = _first(config, "moe_intermediate_size", "intermediate_size")
        self.activation = _ACTIVATIONS[config.hidden_act]
        both = (self.num_experts, 2 * self.intermediate_dim, self.hidden_dim)
        self.gate_up_proj = nn.Parameter(torch.empty(both))
        self.down_proj = nn.Parameter(torch.empty(both[0], self.hidden_dim, self.intermediate_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal values, as Hugging Face draws them."""
        std = getattr(self.config, "initializer_range", 0.02)
        nn.init.normal_(self.gate_up_proj, std=std)
        nn.init.normal_(self.down_proj, std=std)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """`[T, H]`, `[T, K]`, `[T, K]` -> `[T, H]`."""
        return fused_moe(
            hidden_states, self.gate_up_proj, self.down_proj, top_k_index, top_k_weights,
            activation=self.activation,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"experts={self.num_experts}, hidden={self.hidden_dim}, intermediate={self.intermediate_dim}"
