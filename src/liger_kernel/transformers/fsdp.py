"""Run any method of a module inside the forward of its FSDP1 wrapper."""

from collections.abc import Callable
from typing import Any


class _FSDPForwardRedirection:
    """`_FSDPForwardRedirection()(wrapper, method, *args, **kwargs)` -> `method(*args, **kwargs)`, parameters gathered.

    FSDP1 gathers the flat parameters of a module only around its forward. So for one call the
    wrapped module's forward is the method; it is itself again while the method runs, which may call
    it.
    """

    def __call__(
        self, wrapper_module: Any, method: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """The method's result.

        Raises:
            TypeError: wrapper_module is not a `FullyShardedDataParallel`.
        """
        from torch.distributed.fsdp import FullyShardedDataParallel

        if not isinstance(wrapper_module, FullyShardedDataParallel):
            raise TypeError(
                f"wrapper_module must be a FullyShardedDataParallel; got {type(wrapper_module).__name__}. "
                "With FSDP2 call the module itself."
            )
        inner = wrapper_module._fsdp_wrapped_module
        had = "forward" in vars(inner)
        before = inner.forward

        def restore() -> None:
            if had:
                inner.forward = before
            elif "forward" in vars(inner):
                del inner.forward

        def redirected(*args: Any, **kwargs: Any) -> Any:
            restore()
            return method(*args, **kwargs)

        inner.forward = redirected
        try:
            return wrapper_module(*args, **kwargs)
        finally:
            restore()
