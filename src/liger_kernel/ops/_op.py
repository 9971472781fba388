"""What every op needs, done once: which path runs, named operators, gradients, layouts.

An op file declares

    @named("(Tensor x, ...) -> (Tensor, Tensor)", fake)    a launcher: allocates and runs kernels, knows no autograd
    def rms_norm_forward(x, ...): ...

    class _RMSNorm(torch.autograd.Function): ...           ties the launchers together
    OP = Op("rms_norm", reference=..., fallback=..., function=_RMSNorm.apply, supports=..., cost=...)

and its public function calls `OP(...)`. The choice between the kernels and plain PyTorch falls per
call, from the tensors.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from liger_kernel import _env
from liger_kernel.ops import _triton
from liger_kernel.ops._dtensor import by_rows, is_dtensor

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_SCALARS = frozenset({bool, int, float, str, type(None)})  # sooner told than by isinstance
_KERNEL_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
_LIBRARY = torch.library.Library("liger_kernel", "FRAGMENT")


@dataclass(frozen=True)
class Cost:
    """What an op must do at least: bytes of device memory moved (every input read once, every
    output written once) and
    floating-point operations of its matrix products; `saved` is what stays alive for backward beyond the inputs."""

    forward_bytes: int
    backward_bytes: int
    saved: int
    flops: int = 0


@dataclass(frozen=True)
class Op:
    """One operator.

    reference   its definition in plain torch, any dtype and device
    fallback    the path without Triton, same arguments as `function`, under plain autograd
    function    the Triton path, usually `SomeAutogradFunction.apply`
    supports    same arguments -> None, or the reason why the Triton path cannot take them
    cost        same arguments -> Cost
    rows        how many leading arguments are `[*, D]` whose rows are treated one by one, the other tensors being
                shared by all rows: a DTensor then runs on its shards (`_dtensor`). 0: it takes the fallback
    elementwise whether a row may be cut too
    """

    name: str
    reference: Callable[..., Any]
    fallback: Callable[..., Any]
    function: Callable[..., Any]
    supports: Callable[..., str | None]
    cost: Callable[..., Cost]
    rows: int = 0
    elementwise: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "function", direct(self.function))

    def __call__(self, *args: Any, impl: str | None = None) -> Any:
        if self.rows and type(args[0]) not in _PLAIN and is_dtensor(args[0]):
            return by_rows(self, args, impl)
        return self.function(*args) if self.uses_kernels(args, impl) else self.fallback(*args)

    def uses_kernels(self, args: Sequence[Any], impl: str | None = None) -> bool:
        """Whether a call with these arguments takes the kernels; RuntimeError if impl="triton" asks in vain."""
        asked = _env.impl(self.name) if impl is None else _env.normalise_impl(impl)
        if asked == "torch":
            return False
        reason = self.why_not(*args)
        if reason is not None and asked == "triton" and impl is not None:
            raise RuntimeError(f"{self.name}: impl='triton' cannot run here: {reason}.")
        return reason is None

    def why_not(self, *args: Any) -> str | None:
        """None if the kernels can take these arguments, else the reason."""
        if not _triton.AVAILABLE:
            return "triton is not installed"
        device = None
        for arg in args:
            if type(arg) not in _SCALARS and isinstance(arg, Tensor):
                if arg.device != device:
                    device = arg.device
                    if not _env.triton_runs_on(device.type):
                        return f"no Triton on {device.type} tensors"
                if arg.dtype not in _KERNEL_DTYPES and (
                    arg.is_floating_point() or arg.is_complex()
                ):
                    return f"no kernel for {arg.dtype}"
                if type(arg) not in _PLAIN and not _is_traced(arg):
                    return f"{type(arg).__name__} is a tensor subclass"
        return self.supports(*args)


def direct(apply: Callable[..., Any]) -> Callable[..., Any]:
    """`SomeAutogradFunction.apply` without what torch does for functorch in Python, a quarter of its time."""
    function = getattr(apply, "__self__", None)
    if not (isinstance(function, type) and issubclass(function, torch.autograd.Function)):
        return apply
    call = super(torch.autograd.Function, function).apply  # type: ignore[misc]

    def run(*args: Any) -> Any:
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return apply(*args)
        return call(*args)

    return run


def _is_traced(tensor: Tensor) -> bool:
    """Fake and functional tensors stand for plain ones while something traces."""
    return torch.compiler.is_compiling() or type(tensor).__name__ in {
        "FakeTensor",
        "FunctionalTensor",
    }


# Named operators


def named(
    schema: str, fake: Callable[..., Any]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a launcher as `torch.ops.liger_kernel.<its name>`; eager mode keeps calling it directly.

    A direct call costs nothing, a registered one ~10 us. So the registered operator runs only where somebody looks:
    under `torch.compile` and `torch.export`, and inside a dispatch mode (selective checkpointing, FLOP counters,
    FakeTensorMode). `fake` has the launcher's signature and returns empty tensors of the right shapes. Outputs must
    not alias inputs.
    """

    def wrap(launcher: Callable[..., Any]) -> Callable[..., Any]:
        name = launcher.__name__
        _LIBRARY.define(name + schema)
        _LIBRARY.impl(name, launcher, "CompositeExplicitAutograd")
        torch.library.register_fake(f"liger_kernel::{name}", fake, lib=_LIBRARY)
        operator = getattr(torch.ops.liger_kernel, name).default

        @functools.wraps(launcher)
        def call(*args: Any) -> Any:
            return operator(*args) if observed() else launcher(*args)

        call.operator = operator  # type: ignore[attr-defined]
        return call

    return wrap


def observed() -> bool:
    """Whether a tracer or a dispatch mode wants to see operators by name."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def watched() -> bool:
    """Whether somebody but an estimate is to see every operator by name, and no result over an operand."""
    return observed() and _env.planned_memory is None


# Gradients


class _NoSecondDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, grad: Tensor) -> Tensor:
        ctx.name = name
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(
            f"{ctx.name}: the fused kernel has no second derivative. Set LIGER_KERNEL_IMPL_{ctx.name.upper()}=torch to "
            "differentiate twice."
        )


def first_order(name: str) -> Callable[[F], F]:
    """Decorates `backward` of an autograd.Function: runs without recording; differentiating the
    result says why not.
    """

    def wrap(backward: F) -> F:
        @functools.wraps(backward)
        def run(ctx: Any, *grads: Tensor | None) -> Any:
            if not torch.is_grad_enabled():
                return backward(ctx, *grads)
            with torch.no_grad():
                results = backward(ctx, *grads)
            many = results if isinstance(results, tuple) else (results,)
            guarded = tuple(_guard(name, r) for r in many)
            return guarded if isinstance(results, tuple) else guarded[0]

        return run  # type: ignore[return-value]

    return wrap


def _guard(name: str, grad: Tensor | None) -> Tensor | None:
    if grad is None or torch.compiler.is_compiling():
        return grad
    return _NoSecondDerivative.apply(name, grad.detach().requires_grad_())


# Dtypes and layouts


def autocast_dtype(kind: str) -> torch.dtype | None:
    """What autocast casts the operands of products to on devices of this type, None if it is off."""
    on = kind != "meta" and torch.is_autocast_enabled(
        kind
    )  # of which torch refuses to say anything
    return torch.get_autocast_dtype(kind) if on else None


def no_autocast(kind: str) -> Any:
    """A context in which products of tensors on devices of this type keep their dtypes; torch's own takes 20 us."""
    if autocast_dtype(kind) is None:
        return contextlib.nullcontext()
    return torch.autocast(kind, enabled=False)


def once(make: Callable[[], T]) -> Callable[[], T]:
    """What `make` returns, made at the first call: `functools.cache` takes 12 us, and torch.compile cannot trace."""
    made: list[T] = []

    def get() -> T:
        if not made:
            made.append(make())
        return made[0]

    return get


def rows(x: Tensor) -> Tensor:
    """x as `[R, D]` with adjacent columns: a view where the layout allows one, else a copy. Rows
    may have any stride.
    """
    if x.dim() == 2 and x.stride(1) == 1:
        return x
    flat = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return flat if flat.stride(1) == 1 or flat.shape[1] == 1 else flat.contiguous()


def spaced(x: Tensor) -> tuple[Tensor, int]:
    """x, or a copy, whose rows follow each other at one distance in memory, and that distance."""
    if x.is_contiguous():  # no view of it has to be made
        return x, x.shape[-1]
    x = rows(x)
    return x, x.stride(0)


def like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Contiguous memory of x's shape. `torch.empty` would take twice the time, most of it to read the shape."""
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def place(given: Tensor | None, x: Tensor) -> Tensor:
    """The memory that is given for a result like x, else new memory."""
    return like(x) if given is None else given


def dense(x: Tensor) -> Tensor:
    """x in contiguous memory: itself if it already is."""
    return x if x.is_contiguous() else x.contiguous()


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype references compute in: fp32, or fp64 for fp64 inputs."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


# Messages


def require(condition: bool, message: str, error: type[Exception] = ValueError) -> None:
    """Raise `error(message)` unless `condition`."""
    if not condition:
        raise error(message)


def choice(op: str, name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """ValueError unless `value` is one of `allowed`."""
    if value not in allowed:
        listed = ", ".join(repr(a) for a in allowed)
        raise ValueError(f"{op}: {name} must be one of {listed}; got {value!r}.")
