"""A sum that outlives the pass, `[V, H]`, to which the product that makes dW adds it: no second tensor of that size.

Megatron calls it `main_grad`: fp32, over the micro-batches of a step, beside a 16-bit weight.
"""

from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops._op import is_dtensor, require


def check_destination(op: str, into: Tensor | None, weight: Any) -> None:
    """ValueError if dW cannot be added there; NotImplementedError while a graph is traced."""
    if into is None:
        return
    require(
        not is_dtensor(weight),
        f"{op}: accumulate_into does not take a DTensor weight; give this rank's rows of it and the group.",
    )
    require(
        into.shape == weight.shape and into.is_floating_point() and into.device == weight.device,
        f"{op}: accumulate_into must be a floating-point {list(weight.shape)} on {weight.device}, as the weight; got "
        f"{list(into.shape)} of {into.dtype} on {into.device}.",
    )
    require(
        not torch.compiler.is_compiling(),
        f"{op}: accumulate_into cannot be part of a graph; call the loss outside torch.compile.",
        NotImplementedError,
    )


def nothing_like(weight: Tensor) -> Tensor:
    """A gradient of zeros without memory, for the hooks that wait for one."""
    shape: Any = {"dtype": weight.dtype, "device": weight.device, "layout": torch.sparse_coo}
    return torch.zeros(weight.shape, **shape)
