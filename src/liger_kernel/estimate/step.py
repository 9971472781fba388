"""A training step that only counts: the real model, forward and backward, on the meta device.

    weights, optimizer state      known from the parameters
    activations, gradients, head  every storage that an operator creates, from then until it is freed

Nothing is modelled but what has no meta form: attention by `scaled_dot_product_attention` keeps what
the flash kernels keep (q, k, v, the output, one fp32 a row and head), the fused head its chunk of
logits, an optimizer two values a parameter (AdamW) or none (SGD). So a change of the library or of
transformers changes the estimate. Questions about values, which meta tensors cannot answer, are
answered as for a batch without padding; a model whose shapes depend on values is refused.

A caching allocator adds rounding and fragmentation, a CUDA context its few hundred MiB; neither is counted.
"""

import contextlib
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_kernel import _env
from liger_kernel.bench.memory import Storages
from liger_kernel.ops.head.plan import plan

STATES = {"adamw": 2, "sgd": 0}  # values an optimizer keeps for a parameter


@dataclass(frozen=True)
class Estimate:
    """Bytes. `activations`: alive between forward and backward, by the kind of module that made them."""

    weights: int
    gradients: int
    optimizer: int
    activations: dict[str, int]
    peak: int


class Variant:
    """One way to train a model: how it is changed before the step."""

    def __init__(
        self, name: str, patch: dict[str, bool] | None, checkpointing: bool = False
    ) -> None:
        self.name, self.patch, self.checkpointing = name, patch, checkpointing

    @contextlib.contextmanager
    def applied(self, model: Any) -> Iterator[None]:
        """The model in this variant, for the duration of a block."""
        from liger_kernel.transformers.patch import patched

        with contextlib.ExitStack() as stack:
            if self.patch is not None:
                stack.enter_context(patched(model, **self.patch))
            if self.checkpointing:
                stack.enter_context(_checkpointing(model))
            yield


@contextlib.contextmanager
def _checkpointing(model: Any) -> Iterator[None]:
    kind = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    options = {"use_reentrant": False, "preserve_rng_state": False}
    getattr(model, f"{kind}_checkpointing_enable")(options)
    try:
        yield
    finally:
        getattr(model, f"{kind}_checkpointing_disable")()


VARIANTS = (
    Variant("as shipped", None),
    Variant("patched", {"rematerialise": False}),
    Variant("patched, rematerialised", {}),
    Variant("patched, checkpointing", {"rematerialise": False}, checkpointing=True),
)


def empty(config: Any, dtype: torch.dtype, rank: int | None = None) -> Any:
    """The model of a config on the meta device, in training mode; with LoRA of this rank on every linear layer."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
        if rank is not None:
            from peft import LoraConfig, get_peft_model

            lora = LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
            model = get_peft_model(model, lora)
    return model.train()


def estimate(
    model: Any,
    variant: Variant,
    batch: int,
    seq: int,
    optimizer: str = "adamw",
    memory: int | None = None,
) -> Estimate:
    """One step of `batch` sequences of `seq` tokens.

    Args:
        model: on the meta device; changed as `variant` says, and back.
        memory: bytes of the accelerator, which the head's budget follows; None: a CPU, the paths without kernels.
    Raises:
        NotImplementedError, RuntimeError: an operator whose shapes depend on values.
    """
    tensors = {id(t): t for t in itertools.chain(model.parameters(), model.buffers())}
    weights = sum(t.nbytes for t in tensors.values())
    gradients = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    states = STATES[optimizer] * gradients
    base = getattr(model, "get_base_model", lambda: model)()
    ids = torch.zeros(batch, seq, dtype=torch.int64, device="meta")
    model.zero_grad()
    stack = contextlib.ExitStack()
    with stack:
        stack.enter_context(_planning(memory))
        stack.enter_context(variant.applied(model))
        meter = stack.enter_context(_Meter())
        stack.enter_context(_labels(base, meter))
        stack.enter_context(_stand_ins())
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        kinds = {kind: size for kind, size in meter.of_kind.items() if size > 0}
        loss.backward()
        peak = weights + states + max(meter.peak, gradients)
    model.zero_grad()
    return Estimate(weights, gradients, states, kinds, peak)


class _Meter(Storages):
    """Counts storages on the meta device, each under the label of the moment."""

    def __init__(self) -> None:
        super().__init__()
        self.label = "other"
        self.of_kind: Counter[str] = Counter()
        self._labels: dict[weakref.ref, str] = {}

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The operator's result; operators of this package answer with shapes."""
        if func is torch.ops.aten._local_scalar_dense.default:
            return args[0].dtype.is_floating_point or True
        result = func(*args, **kwargs)
        if func.__name__.startswith("head_"):
            made = sum(t.nbytes for t in result)  # gradients, beside the chunk of logits
            self.peak = max(self.peak, self.alive + made + _chunk(func, args))
        return result

    def _count(self, key: weakref.ref, size: int) -> None:
        label = self._labels.setdefault(key, self.label)
        self.of_kind[label] += size - self._sizes.get(key, 0)
        super()._count(key, size)

    def _freed(self, key: weakref.ref) -> None:
        self.of_kind[self._labels.pop(key, "other")] -= self._sizes.get(key, 0)
        super()._freed(key)


def _chunk(func: Any, args: Any) -> int:
    """Bytes of logits that the fused head holds at a time, beside its results."""
    named = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)}
    hidden, (vocab, width) = named["hidden"], named["weight"].shape
    tokens = hidden.numel() // width
    return plan(tokens, vocab, width, hidden.element_size(), named["budget"]).buffer_bytes


# What a module is, for the table


def _kind(module: nn.Module) -> str | None:
    name = type(module).__name__.lower()
    if hasattr(module, "in_features"):
        return "linear layers"
    found = (
        (("norm",), "norms"),
        (("mlp", "expert", "moe", "feedforward"), "gated activations"),
        (("attention", "attn"), "attention"),
        (("embed",), "embeddings"),
        (("layer", "block"), "residual stream"),
    )
    return next((kind for words, kind in found if any(word in name for word in words)), None)


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """A module and all below it, down to linear layers: adapters are part of theirs, and would be heard by a hook."""
    yield module
    if not hasattr(module, "in_features"):
        for child in module.children():
            yield from _parts(child)


@contextlib.contextmanager
def _labels(model: Any, meter: _Meter) -> Iterator[None]:
    """Within the block the meter's label is the kind of the innermost module that runs."""
    head = model.get_output_embeddings()
    handles, outer = [], ["head and loss"]
    meter.label = outer[0]

    def enter(kind: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            outer.append(meter.label)
            meter.label = kind

        return hook

    def leave(*_: Any) -> None:
        meter.label = outer.pop()

    for module in dict.fromkeys(_parts(model)):
        kind = "head and loss" if module is head else _kind(module)
        if kind is not None:
            handles.append(module.register_forward_pre_hook(enter(kind)))
            handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# What has no meta form


@contextlib.contextmanager
def _planning(memory: int | None) -> Iterator[None]:
    """Within the block meta tensors go the ways of an accelerator with `memory` bytes, None: of a CPU."""
    before, _env.planned_memory = _env.planned_memory, memory
    try:
        yield
    finally:
        _env.planned_memory = before


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
    """Within the block attention has the memory of a flash kernel, and autocast is off for meta tensors (torch
    refuses to say so). Attributes are replaced, because a function mode would not see what backward recomputes.
    """
    attention, autocast = F.scaled_dot_product_attention, torch.is_autocast_enabled

    def flash(query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any) -> Any:
        return _Flash.apply(query, key, value)

    F.scaled_dot_product_attention = flash
    torch.is_autocast_enabled = lambda *kind: kind != ("meta",) and autocast(*kind)  # type: ignore[assignment]
    try:
        yield
    finally:
        F.scaled_dot_product_attention, torch.is_autocast_enabled = attention, autocast


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, heads, tokens, _ = q.shape
        # heads within tokens in memory, as the kernels write it
        out = q.new_empty(batch, tokens, heads, v.shape[-1]).transpose(1, 2)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        q, k, v, *_ = ctx.saved_tensors
        wide = torch.empty_like(q, dtype=torch.float32)  # dq is summed in fp32
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        del wide
        return grads
