"""Fill every uninitialised buffer with NaN, so that an output nobody wrote cannot look right by
luck.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor


def _poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def empty(*args: Any, **kwargs: Any) -> Tensor:
        tensor = make(*args, **kwargs)
        if tensor.is_floating_point():
            return tensor.fill_(float("nan"))
        return tensor.fill_(torch.iinfo(tensor.dtype).min) if tensor.dtype != torch.bool else tensor

    return empty


@contextlib.contextmanager
def poisoned_empty() -> Iterator[None]:
    """Within the block `torch.empty`, `empty_like`, `new_empty` and `empty_strided` return NaN
    (integers: the minimum).
    """
    with contextlib.ExitStack() as stack:
        for owner, name in (
            (torch, "empty"),
            (torch, "empty_like"),
            (torch, "empty_strided"),
            (torch.Tensor, "new_empty"),
        ):
            stack.enter_context(mock.patch.object(owner, name, _poisoned(getattr(owner, name))))
        yield
