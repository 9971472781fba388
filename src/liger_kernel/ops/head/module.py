"""A head given as a module: the factors of the product that its call would make.

    z = h W^T + b            a linear layer
    z = h Q^T + b            a quantised one: Q becomes dense for the length of a pass, is not kept and not trained
    z = h W^T + b + d U^T    either under LoRA: d = s dropout(h) A^T, ordinary autograd in the layer's own modules, and
                             U = B; adapters that are active together lie side by side in d and U

Weights are read inside a call of the layer that owns them, so that the hooks around it (FSDP, ZeRO-3, offloading)
gather them before and free them after. PEFT, bitsandbytes and torchao are known by what their objects look like.

Layers that also quantise their input (bitsandbytes' 8 bits, torchao's dynamic kinds) are taken at their weight: hidden
states are not rounded here, so results are nearer to the exact ones than those of a call.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from liger_kernel.ops._op import observed, require

F = TypeVar("F", bound=Callable[..., Any])


class Packed:
    """A quantised weight `[V, H]`. `to(dtype)` makes a dense one; nothing here keeps it."""

    requires_grad = False

    def __init__(self, make: Callable[[], Tensor], shape: tuple[int, int], like: Tensor) -> None:
        self._make, self.shape = make, torch.Size(shape)
        self.dtype, self.device = like.dtype, like.device

    def dim(self) -> int:
        return len(self.shape)

    def sum(self, dim: int, dtype: torch.dtype) -> Tensor:
        """Of the dense weight."""
        return self.to(self.dtype).sum(dim, dtype=dtype)

    def to(self, dtype: torch.dtype) -> Tensor:
        dense = self._make().detach()
        require(
            dense.shape == self.shape,
            f"a quantised head of {list(self.shape)} became {list(dense.shape)} when dequantised.",
        )
        return dense.to(dtype)


class Parts(NamedTuple):
    """What `HeadParams` wants to know of a module."""

    weight: Any  # a tensor or `Packed`
    bias: Tensor | None
    low_rank: tuple[Tensor, Tensor] | None = None


# Which layer, and can it be taken apart


def find(module: Any) -> Any:
    """The layer that makes the logits, inside wrappers that only pass on; None if it is not of a kind known here."""
    while (inner := _inside(module)) is not None:
        module = inner
    known = isinstance(module, nn.Linear) or _has_adapters(module) or _recipe(module) is not None
    return module if known else None


def _inside(wrapper: Any) -> Any:
    """The module that a transparent wrapper calls, None if it is not one."""
    saved = getattr(wrapper, "modules_to_save", None)
    if isinstance(saved, nn.ModuleDict):  # PEFT: a trained copy in the place of the original
        active = [] if wrapper.disable_adapters else wrapper.active_adapters
        return saved[active[0]] if active and active[0] in saved else wrapper.original_module
    for name in ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"):
        inner = wrapper._modules.get(name) if isinstance(wrapper, nn.Module) else None
        if inner is not None:
            return inner
    return None


def why_not(layer: Any) -> str | None:
    """None if `parts` says all that a call of the layer would do at this moment, else the reason."""
    cls = getattr(layer, "_liger_class", type(layer))  # a patched head names the class it had
    replaced = vars(layer).get("forward")
    ours = "_old_forward" in vars(layer) or hasattr(replaced, "__liger_seam__")
    if replaced is not None and not ours:
        return f"another library replaced the forward of this {cls.__name__}"
    if _has_adapters(layer):
        return why_not(layer.base_layer) or _why_not_adapters(layer)
    if _recipe(layer) is not None:
        return None
    if not isinstance(layer, nn.Linear) or cls.forward is not nn.Linear.forward:
        return f"{cls.__name__} computes its product in its own way"
    return None


def _has_adapters(layer: Any) -> bool:
    return all(hasattr(layer, name) for name in ("base_layer", "lora_A", "lora_B"))


def _why_not_adapters(layer: Any) -> str | None:
    if layer.merged and layer.disable_adapters:
        return "its merged adapter is off, and the next call will take it out of the weight"
    hooks = layer._forward_pre_hooks.values()
    if any("adapter_names" in getattr(hook, "keywords", ()) for hook in hooks):
        return "each sequence has an adapter of its own"
    variants, dora = getattr(layer, "lora_variant", ()), getattr(layer, "use_dora", {})
    for name in _active(layer):
        plain = type(layer.lora_B[name]).forward is nn.Linear.forward
        if name in variants or dora.get(name) or not plain:
            return f"its adapter {name!r} is more than a low-rank product (DoRA or another variant)"
    return None


def _active(layer: Any) -> list[str]:
    """The adapters that a call would add."""
    if layer.disable_adapters or layer.merged:
        return []
    return [name for name in layer.active_adapters if name in layer.lora_A]


def _recipe(layer: Any) -> Callable[[], Tensor] | None:
    """What makes a quantised layer's weight `[V, H]` dense; None if it is not quantised, or in a way unknown here."""
    if callable(getattr(layer, "dequantize", None)):
        return layer.dequantize
    weight: Any = getattr(layer, "weight", None)
    kind = type(weight)
    if kind.__name__ == "Params4bit":
        return None if _state(layer) is None else lambda: _from_4_bits(layer)
    if kind.__name__ == "Int8Params" and weight.dtype == torch.int8:
        return lambda: _from_8_bits(layer)
    # torchao's tensors; every other tensor inherits a method of that name, which is for another purpose
    if isinstance(weight, Tensor) and kind.dequantize is not Tensor.dequantize:
        return lambda: layer.weight.dequantize()
    return None


def _state(layer: Any) -> Any:
    """bitsandbytes' scales; sharding leaves them on the layer alone."""
    return getattr(layer.weight, "quant_state", None) or getattr(layer, "quant_state", None)


def _from_4_bits(layer: Any) -> Tensor:
    from bitsandbytes.functional import dequantize_4bit  # type: ignore[import-not-found]

    return dequantize_4bit(layer.weight.data, _state(layer))


def _from_8_bits(layer: Any) -> Tensor:
    scale = layer.state.SCB if layer.state.SCB is not None else layer.weight.SCB
    return layer.weight.data * (scale[:, None] / 127.0)


# The factors


def parts(layer: Any, x: Tensor) -> Parts:
    """The factors for hidden states x `[*, H]`, of a layer that `why_not` has nothing against."""
    if not _has_adapters(layer):
        make = _recipe(layer)
        if make is None:
            return Parts(layer.weight, layer.bias)
        packed = Packed(make, (layer.out_features, layer.in_features), x)
        # An operator that somebody watches takes tensors.
        return Parts(packed.to(x.dtype) if observed() else packed, getattr(layer, "bias", None))
    base, downs, ups = parts(layer.base_layer, x), [], []
    bias = base.bias
    for name in _active(layer):
        down, up, scale = layer.lora_A[name], layer.lora_B[name], layer.scaling[name]
        x = layer._cast_input_dtype(x, down.weight.dtype)
        downs.append(down(layer.lora_dropout[name](x)) * scale)
        ups.append(up.weight)
        if up.bias is not None:
            bias = scale * up.bias if bias is None else bias + scale * up.bias
    return Parts(base.weight, bias, (torch.cat(downs, -1), torch.cat(ups, -1)) if ups else None)


def with_parts(layer: Any, job: Callable[[Tensor, Parts], Any], x: Tensor) -> Any:
    """`job(x, parts)` inside calls of the layers under `layer`, itself in a call, whose weights it reads."""

    def work(x: Tensor) -> Any:
        return job(x, parts(layer, x))

    if _has_adapters(layer):
        for below in (layer.base_layer, *(layer.lora_B[name] for name in _active(layer))):
            work = functools.partial(within, below, below, work)
    return work(x)


def within(outer: Any, inner: Any, job: Callable[[Tensor], Any], x: Tensor) -> Any:
    """`job(x)` in the place of `inner`'s forward, in a call of `outer`, which reaches it through what wraps it."""
    if torch.compiler.is_compiling():  # a traced step has no hooks to wait for
        return job(x)
    name = "_old_forward" if "_old_forward" in vars(inner) else "forward"  # accelerate moves it
    before = vars(inner).get(name)

    def restore() -> None:
        if before is not None:
            setattr(inner, name, before)
        else:
            vars(inner).pop(name, None)

    def forward(x: Tensor, *_: Any, **__: Any) -> Any:
        restore()
        return job(x)

    setattr(inner, name, forward)
    try:
        return outer(x)
    finally:
        restore()


@dataclasses.dataclass(frozen=True)
class _Names:
    """What a function calls the arguments of a head, and whether that head is a constant to it."""

    hidden: str
    weight: str
    bias: str
    low_rank: str
    constant: bool


def takes_module(
    hidden: str, weight: str = "weight", bias: str = "bias", low_rank: str = "low_rank", constant: bool = False
) -> Callable[[F], F]:  # fmt: skip
    """Decorates a function of a head's arguments, so named: weight may be a module.

    Nothing is differentiated by a constant one, a teacher: what hooks wait for in backward does not see its call. (So
    fp16, which makes its gradients there, needs a teacher that is not sharded.)
    """
    names = _Names(hidden, weight, bias, low_rank, constant)

    def wrap(function: F) -> F:
        signature = inspect.signature(function)
        position = list(signature.parameters).index(weight)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            head = args[position] if len(args) > position else kwargs.get(weight)
            if not isinstance(head, nn.Module):
                return function(*args, **kwargs)
            given = dict(signature.bind(*args, **kwargs).arguments)
            return _through(function, names, head, given)

        return call  # type: ignore[return-value]

    return wrap


def _through(
    function: Callable[..., Any], names: _Names, head: nn.Module, given: dict[str, Any]
) -> Any:
    name, layer, hidden = function.__name__, find(head), given.get(names.hidden)
    reason = "it is no linear layer" if layer is None else why_not(layer)
    require(
        reason is None,
        f"{name}: this {type(head).__name__} cannot do without its logits: {reason}. Call the module and a loss of "
        "logits instead.",
    )
    require(
        given.get(names.bias) is None and given.get(names.low_rank) is None,
        f"{name}: a head given as a module brings its own bias and adapters; leave {names.bias} and {names.low_rank} "
        "out.",
    )
    if hidden is None:
        raise ValueError(f"{name}: {names.weight} is a module and needs {names.hidden}.")
    kinds: list[Any] = []
    around: list[Any] = []

    def job(x: Tensor, found: Parts) -> Any:
        factors = {
            names.weight: found.weight, names.bias: found.bias, names.low_rank: found.low_rank,
        }  # fmt: skip
        out = function(**{**given, names.hidden: x, **factors})
        if names.constant:
            around.append(out)
            return x
        if not dataclasses.is_dataclass(out):
            return out
        kinds.append(type(out))  # hooks look for tensors in tuples
        return tuple(getattr(out, f.name) for f in dataclasses.fields(out))

    x = hidden.detach() if names.constant else hidden
    out = within(head, layer, functools.partial(with_parts, layer, job), x)
    if names.constant:
        return around[0]
    return kinds[0](*out) if kinds else out
