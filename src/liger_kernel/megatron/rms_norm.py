"""RMSNorm with the constructor of Megatron's norms."""

from typing import Any

from torch import Tensor, nn

from liger_kernel.transformers.norm import LigerRMSNorm


class LigerMegatronRMSNorm(LigerRMSNorm):
    """RMSNorm for a Megatron layer spec; fp32 inside with one rounding, as torch's and Transformer Engine's.

    Args:
        config: Megatron's `TransformerConfig`: `normalization`, `layernorm_zero_centered_gamma`, `sequence_parallel`.
        hidden_size: size of the last dimension.
        eps: added to the mean square.
        persist_layer_norm: accepted; it chooses between Apex kernels.
        zero_centered_gamma: the weight is stored as its difference from one, as the config may say too.
        normalization: accepted; the config's counts.
    Raises:
        ValueError: the config asks for another norm.
    """

    weight: nn.Parameter

    def __init__(
        self,
        config: Any,
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool = False,
        zero_centered_gamma: bool = False,
        normalization: str = "RMSNorm",
    ) -> None:
        if config.normalization != "RMSNorm":
            raise ValueError(
                f"LigerMegatronRMSNorm is an RMSNorm; config.normalization is {config.normalization!r}. Leave that "
                "norm to Megatron."
            )
        centered = zero_centered_gamma or getattr(config, "layernorm_zero_centered_gamma", False)
        super().__init__(
            hidden_size, eps, float(centered), "gemma", "zeros" if centered else "ones", in_place=False
        )  # fmt: skip
        # Megatron sums the gradients of such parameters over the tensor-parallel ranks, which hold different tokens.
        self.weight.sequence_parallel = getattr(config, "sequence_parallel", False)  # type: ignore[attr-defined]

    def reset_parameters(self) -> None:
        """The weight as it was made: a norm that multiplies by one."""
        nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, x: Tensor) -> Tensor:
        """`[*, hidden_size]` -> the same shape and dtype."""
        return super().forward(x)
