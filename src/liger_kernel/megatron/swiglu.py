"""SwiGLU with the arguments of Megatron's `bias_swiglu_impl`."""

from collections.abc import Callable

from torch import Tensor, nn

from liger_kernel.ops.swiglu import swiglu_packed


class LigerMegatronSwiGLU(nn.Module):
    """silu(gate) * up of the two halves of one projection.

    Args:
        fallback_impl: called with (input, bias, fp8_input_store, cpu_offload_input) for what the kernel has no form
            for: a bias, an input stored in fp8 or marked for offloading.
        in_place: accepted; no tensor of the caller is ever written.
    """

    def __init__(self, fallback_impl: Callable[..., Tensor] | None = None, in_place: bool = False):
        super().__init__()
        self.fallback_impl = fallback_impl
        self.in_place = in_place

    def forward(
        self,
        input: Tensor,
        bias: Tensor | None = None,
        fp8_input_store: bool = False,
        cpu_offload_input: bool = False,
    ) -> Tensor:
        """`[S, B, 2F]` or `[N, 2F]` -> `[S, B, F]` or `[N, F]`.

        Raises:
            RuntimeError: one of the other arguments is in use and there is no fallback.
            ValueError: input of another rank, or of odd width.
        """
        if bias is not None or fp8_input_store or cpu_offload_input:
            if self.fallback_impl is None:
                raise RuntimeError(
                    "LigerMegatronSwiGLU has no form for bias, fp8_input_store or cpu_offload_input: pass "
                    "fallback_impl=megatron.core.fusions.fused_bias_swiglu.bias_swiglu_impl."
                )
            return self.fallback_impl(input, bias, fp8_input_store, cpu_offload_input)
        if input.dim() not in (2, 3):
            raise ValueError(
                f"LigerMegatronSwiGLU: input must be [N, 2F] or [S, B, 2F]; got {list(input.shape)}."
            )
        return swiglu_packed(input)
