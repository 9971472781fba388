"""Gated MLP layers: Hugging Face's projections around one fused activation.

Each class has the attribute names and the state dict of the Hugging Face module it replaces, and its `forward` needs
nothing that such a module lacks, so it can be bound to one (`SomeMLP.forward = LigerSwiGLUMLP.forward`). The linear
layers are called as modules: adapters, quantised and parallel ones keep working; only a plain last one joins the
activation (`ops.gated_linear`), whose result is then not kept.

    LigerSwiGLUMLP            down_proj(silu(gate_proj x) * up_proj x)           Llama, Qwen, Mistral, ...
    LigerQwen3MoeSwiGLUMLP, LigerHunyuanV1SwiGLUMLP, LigerSwiGLUMLPForMuseGlimmer   the same, other constructors
    LigerFalconH1SwiGLUMLP    the same with two multipliers                      Falcon-H1
    LigerPhi3SwiGLUMLP        one packed projection gate_up_proj                 Phi-3, GLM-4
    LigerBlockSparseTop2MLP   projections named w1, w3, w2                       Mixtral's experts before transformers 5
    LigerGEGLUMLP             down_proj(gelu(gate_proj x) * up_proj x)           Gemma
    LigerGEGLUMLPForGemma4    the same, twice as wide where keys and values are shared
    LigerMLP, LigerFalconH1MLP           LigerSwiGLUMLP, LigerFalconH1SwiGLUMLP as one function that keeps a third less
    LigerTiledSwiGLUMLP, LigerTiledGEGLUMLP   the same layers, one part of the sequence at a time
"""

from typing import Any

from torch import Tensor, nn

from liger_kernel.ops.gated_linear import is_plain, through
from liger_kernel.ops.geglu import geglu
from liger_kernel.ops.mlp import LigerMLPFunction, mlp
from liger_kernel.ops.swiglu import swiglu, swiglu_packed
from liger_kernel.ops.tiled_mlp import apply_tiled_mlp

__all__ = [
    "LigerBlockSparseTop2MLP",
    "LigerFalconH1MLP",
    "LigerFalconH1SwiGLUMLP",
    "LigerGEGLUMLP",
    "LigerGEGLUMLPForGemma4",
    "LigerHunyuanV1SwiGLUMLP",
    "LigerMLP",
    "LigerMLPFunction",
    "LigerPhi3SwiGLUMLP",
    "LigerQwen3MoeSwiGLUMLP",
    "LigerSwiGLUMLP",
    "LigerSwiGLUMLPForMuseGlimmer",
    "LigerTiledGEGLUMLP",
    "LigerTiledSwiGLUMLP",
]

_SILU = ("silu", "swish")
# Hugging Face's names for one function each; those that clip or approximate otherwise are not among them.
_APPROXIMATE = {
    **dict.fromkeys(
        ("gelu_pytorch_tanh", "gelu_python_tanh", "gelu_new", "gelu_fast", "gelu_accurate"), "tanh"
    ),
    **dict.fromkeys(("gelu", "gelu_python"), "none"),
}


def _check(layer: nn.Module, field: str, value: Any, accepted: Any) -> None:
    if value not in accepted:
        listed = ", ".join(repr(name) for name in accepted)
        raise ValueError(
            f"{type(layer).__name__}: {field} must be one of {listed}; the config has {value!r}."
        )


def _swiglu(down: nn.Module, gate: Tensor, up: Tensor, gate_multiplier: float = 1.0) -> Tensor:
    """down(silu(gate_multiplier * gate) * up)."""
    return through(
        down, gate, up, "silu", lambda: swiglu(gate, up, gate_multiplier), gate_multiplier
    )


class _GatedMLP(nn.Module):
    """gate_proj, up_proj: hidden -> intermediate, down_proj: back. Biases if the config has a true `mlp_bias`."""

    def __init__(self, config: Any, intermediate_size: int | None, hidden_size: int | None = None):
        super().__init__()
        if config is not None:
            hidden_size = config.hidden_size if hidden_size is None else hidden_size
            intermediate_size = (
                config.intermediate_size if intermediate_size is None else intermediate_size
            )
        if hidden_size is None or intermediate_size is None:
            raise ValueError(
                f"{type(self).__name__} needs a config, or both hidden_size and intermediate_size; got "
                f"hidden_size={hidden_size}, intermediate_size={intermediate_size}."
            )
        self.config = config
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        bias = bool(getattr(config, "mlp_bias", False))
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)


class LigerSwiGLUMLP(_GatedMLP):
    """down_proj(silu(gate_proj x) * up_proj x).

    Args:
        config: anything with `hidden_size`, `intermediate_size`, `hidden_act` and, where wanted, `mlp_bias`.
        intermediate_size, hidden_size: instead of the config's, or both instead of a config.
    Raises:
        ValueError: the config's activation is not "silu" or "swish", or a size is missing.
    """

    activation_field = "hidden_act"

    def __init__(
        self,
        config: Any = None,
        intermediate_size: int | None = None,
        hidden_size: int | None = None,
    ):
        super().__init__(config, intermediate_size, hidden_size)
        if config is not None:
            _check(self, self.activation_field, getattr(config, self.activation_field), _SILU)

    def forward(self, x: Tensor) -> Tensor:
        """`[*, hidden_size]` -> the same."""
        return _swiglu(self.down_proj, self.gate_proj(x), self.up_proj(x))


class LigerSwiGLUMLPForMuseGlimmer(LigerSwiGLUMLP):
    """`LigerSwiGLUMLP` of a config that calls its activation `hidden_activation`."""

    activation_field = "hidden_activation"


class LigerQwen3MoeSwiGLUMLP(LigerSwiGLUMLP):
    """`LigerSwiGLUMLP` under the name for Qwen3-MoE, whose experts pass their own `intermediate_size`."""


class LigerHunyuanV1SwiGLUMLP(LigerSwiGLUMLP):
    """`LigerSwiGLUMLP` with Hunyuan's constructor; neither further argument changes the layer."""

    def __init__(self, config: Any, layer_idx: int | None = None, is_shared_mlp: bool = False):
        super().__init__(config)
        self.layer_idx = layer_idx


class LigerFalconH1SwiGLUMLP(LigerSwiGLUMLP):
    """down_proj(silu(m0 * gate_proj x) * up_proj x) * m1 with (m0, m1) = `config.mlp_multipliers`.

    Without a bias m1 commutes with `down_proj` and rides in the activation, one pass over the output less.
    """

    def __init__(self, config: Any):
        super().__init__(config)
        self.gate_multiplier, self.down_multiplier = config.mlp_multipliers

    def forward(self, x: Tensor) -> Tensor:
        """`[*, hidden_size]` -> the same."""
        gate, up = self.gate_proj(x), self.up_proj(x)
        if getattr(self.down_proj, "bias", None) is None:
            return self.down_proj(swiglu(gate, up, self.gate_multiplier, self.down_multiplier))
        return _swiglu(self.down_proj, gate, up, self.gate_multiplier) * self.down_multiplier


class LigerPhi3SwiGLUMLP(nn.Module):
    """down_proj(silu(gate) * up), gate and up the halves of gate_up_proj x: read in place, one gradient for both.

    Args:
        config: anything with `hidden_size`, `intermediate_size` and `hidden_act`.
    Raises:
        ValueError: `hidden_act` is not "silu" or "swish".
    """

    def __init__(self, config: Any):
        super().__init__()
        _check(self, "hidden_act", config.hidden_act, _SILU)
        self.config = config
        self.hidden_size = config.hidden_size
        self.intermediate_size = config.intermediate_size
        self.gate_up_proj = nn.Linear(self.hidden_size, 2 * self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[*, hidden_size]` -> the same."""
        gate_up, down = self.gate_up_proj(x), self.down_proj
        return through(down, gate_up, None, "silu", lambda: swiglu_packed(gate_up))


class LigerBlockSparseTop2MLP(nn.Module):
    """w2(silu(w1 x) * w3 x), one expert of Mixtral.

    Args:
        config: anything with `hidden_size`, `intermediate_size` and `hidden_act`.
    Raises:
        ValueError: `hidden_act` is not "silu" or "swish".
    """

    def __init__(self, config: Any):
        super().__init__()
        _check(self, "hidden_act", config.hidden_act, _SILU)
        self.ffn_dim = config.intermediate_size
        self.hidden_dim = config.hidden_size
        self.w1 = nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)
        self.w2 = nn.Linear(self.ffn_dim, self.hidden_dim, bias=False)
        self.w3 = nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[*, hidden_size]` -> the same."""
        return _swiglu(self.w2, self.w1(x), self.w3(x))


class LigerGEGLUMLP(_GatedMLP):
    """down_proj(gelu(gate_proj x) * up_proj x).

    The GELU is the one that `hidden_activation`, or else `hidden_act`, names: the tanh approximation or the exact
    function ("gelu"). Without a name, and in a foreign module that borrows `forward`, it is the approximation.

    Args:
        config: anything with `hidden_size`, `intermediate_size` and one of the two fields.
    Raises:
        ValueError: the config names another activation.
    """

    def __init__(self, config: Any, intermediate_size: int | None = None):
        super().__init__(config, intermediate_size)
        field = "hidden_activation" if getattr(config, "hidden_activation", None) else "hidden_act"
        name = getattr(config, field, None) or "gelu_pytorch_tanh"
        _check(self, field, name, _APPROXIMATE)
        self.approximate = _APPROXIMATE[name]

    def forward(self, x: Tensor) -> Tensor:
        """`[*, hidden_size]` -> the same."""
        approximate = getattr(self, "approximate", "tanh")
        activation = "gelu_tanh" if approximate == "tanh" else "gelu"
        gate, up = self.gate_proj(x), self.up_proj(x)
        return through(self.down_proj, gate, up, activation, lambda: geglu(gate, up, approximate))


class LigerGEGLUMLPForGemma4(LigerGEGLUMLP):
    """`LigerGEGLUMLP`, twice as wide in the layers that reuse an earlier layer's keys and values.

    Those are the last `config.num_kv_shared_layers`; they double if `config.use_double_wide_mlp` says so.
    """

    def __init__(self, config: Any, layer_idx: int | None = None):
        first_shared = config.num_hidden_layers - config.num_kv_shared_layers
        shared = layer_idx is not None and layer_idx >= first_shared
        width = config.intermediate_size * (2 if shared and config.use_double_wide_mlp else 1)
        super().__init__(config, width)


# One function


def _bare(projection: Any) -> bool:
    return is_plain(projection) and projection.bias is None


class LigerMLP(LigerSwiGLUMLP):
    """`LigerSwiGLUMLP` as one function of three weights, which keeps gate and up for backward, but not their product.

    Projections that are more than a weight (adapters, quantised, hooks) are called as modules, as in `LigerSwiGLUMLP`.

    Args:
        config: as for `LigerSwiGLUMLP`, without a true `mlp_bias`.
    Raises:
        ValueError: the config wants biases, or an activation other than "silu" or "swish".
    """

    def __init__(self, config: Any):
        super().__init__(config)
        _check(self, "mlp_bias", getattr(config, "mlp_bias", False), (False, None))

    def forward(self, x: Tensor) -> Tensor:
        """`[*, hidden_size]` -> the same."""
        projections = (self.gate_proj, self.up_proj, self.down_proj)
        if all(_bare(p) for p in projections):
            gate, up, down = (p.weight for p in projections)
            return mlp(x, gate, up, down)
        return LigerSwiGLUMLP.forward(self, x)


class LigerFalconH1MLP(LigerFalconH1SwiGLUMLP):
    """`LigerFalconH1SwiGLUMLP` as one function, see `LigerMLP`.

    Raises:
        ValueError: as `LigerMLP`.
    """

    def __init__(self, config: Any):
        super().__init__(config)
        _check(self, "mlp_bias", getattr(config, "mlp_bias", False), (False, None))

    def forward(self, x: Tensor) -> Tensor:
        """`[*, hidden_size]` -> the same."""
        projections = (self.gate_proj, self.up_proj, self.down_proj)
        if all(_bare(p) for p in projections):
            gate, up, down = (p.weight for p in projections)
            return mlp(x, gate, up, down, self.gate_multiplier, self.down_multiplier)
        return LigerFalconH1SwiGLUMLP.forward(self, x)


# One part of the sequence at a time


class LigerTiledSwiGLUMLP(LigerSwiGLUMLP):
    """`LigerSwiGLUMLP` whose inner tensors exist for one part of the sequence at a time, see `ops.tiled_mlp`.

    Args:
        config: as for `LigerSwiGLUMLP`.
        num_shards: number of parts; None: tokens / hidden size, rounded up.
    """

    def __init__(self, config: Any, num_shards: int | None = None):
        super().__init__(config)
        self.num_shards = num_shards

    def forward(self, x: Tensor) -> Tensor:
        """`[*, S, hidden_size]` -> the same."""
        return apply_tiled_mlp(LigerSwiGLUMLP.forward, self, x, getattr(self, "num_shards", None))


class LigerTiledGEGLUMLP(LigerGEGLUMLP):
    """`LigerGEGLUMLP`, one part of the sequence at a time; arguments as `LigerTiledSwiGLUMLP`."""

    def __init__(self, config: Any, num_shards: int | None = None):
        super().__init__(config)
        self.num_shards = num_shards

    def forward(self, x: Tensor) -> Tensor:
        """`[*, S, hidden_size]` -> the same."""
        return apply_tiled_mlp(LigerGEGLUMLP.forward, self, x, getattr(self, "num_shards", None))
