"""Logits that are not computed until somebody looks at them, because the loss can do without.

Inside a training call of a patched model the output head returns a `LogitsPromise`. The model's own
code casts, scales, caps, slices and reshapes it as it would real logits; the promise writes that
down. When it meets a cross entropy (torch's, through `__torch_function__`, or
`liger_cross_entropy`), it runs the head engine instead: hidden states and head weight go in, the
loss comes out, and `[N, V]` logits never exist. Whatever else is done to it gets true logits,
computed then, so the model's semantics hold by construction.

The engine runs inside a second call of the head module (the first one returned the promise before
any hook), so the hooks of FSDP2, ZeRO-3 and others gather, reshard and reduce around it as around
any other use of that module.
"""

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops import cross_entropy as ce
from liger_kernel.ops._op import autocast_dtype
from liger_kernel.transformers.patch.chain import Step, Transform, fold, replay, split_index
from liger_kernel.transformers.patch.request import HeadLoss, Request

_INTS = (int, torch.SymInt)
_warned: set[str] = set()


class PromisingHead:
    """Mixed in front of the class of an output head; see `head.py`."""

    _liger_request: Request | None = None
    _liger_job: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        request = self._liger_request
        if request is None or self._liger_job is not None:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        return LogitsPromise(request, *args, **kwargs)

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        # A hook may have kept this method beyond `undo`, when `self` is an ordinary layer again.
        if not isinstance(self, PromisingHead):
            return type(self).forward(self, input, *args, **kwargs)
        if self._liger_job is not None:
            return self._liger_job(self, input)
        return super().forward(input, *args, **kwargs)  # type: ignore[misc]

    def logits(self, input: Tensor) -> Tensor:
        """What the head would have returned."""
        return super().forward(input)  # type: ignore[misc]


class LogitsPromise:
    """Logits `[*, V]` of `input` `[*, H]`, to be computed if need be."""

    def __init__(
        self,
        request: Request,
        input: Tensor,
        steps: tuple[Step, ...] = (),
        vocab: int | None = None,
    ) -> None:
        self._request = request
        self._rows = input
        self._steps = steps
        self._vocab = request.head.out_features if vocab is None else vocab
        self._tensor: Tensor | None = None

    # The facts that code asks for

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self._rows.shape[:-1], self._vocab))

    @property
    def dtype(self) -> torch.dtype:
        for name, argument in reversed(self._steps):
            if name == "to":
                return argument
        return autocast_dtype(self._rows.device.type) or self._rows.dtype

    @property
    def device(self) -> torch.device:
        return self._rows.device

    @property
    def ndim(self) -> int:
        return self._rows.dim()

    def dim(self) -> int:
        return self._rows.dim()

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return self.shape.numel()

    def __len__(self) -> int:
        return self.shape[0]

    # Steps that are written down

    def _then(self, name: str, argument: Any = None, vocab: int | None = None) -> Any:
        steps = (*self._steps, (name, argument))
        if self._tensor is not None:
            return replay(steps[-1:], self._tensor)
        return LogitsPromise(self._request, self._rows, steps, vocab or self._vocab)

    def _moved(self, rows: Tensor) -> "LogitsPromise":
        return LogitsPromise(self._request, rows, self._steps, self._vocab)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        dtype = kwargs.get("dtype")
        device = kwargs.get("device")
        for arg in args:
            if isinstance(arg, torch.dtype):
                dtype = arg
            elif isinstance(arg, (torch.device, str)):
                device = arg
            elif not isinstance(arg, bool):  # to(other_tensor)
                dtype, device = arg.dtype, arg.device
        if self._tensor is not None or not _is_at(self.device, device):
            return self.tensor().to(*args, **kwargs)
        return self if dtype is None or dtype == self.dtype else self._then("to", dtype)

    def float(self) -> Any:
        return self.to(torch.float32)

    def bfloat16(self) -> Any:
        return self.to(torch.bfloat16)

    def half(self) -> Any:
        return self.to(torch.float16)

    def type(self, dtype: torch.dtype) -> Any:
        return self.to(dtype)

    def contiguous(self) -> Any:
        return self if self._tensor is None else self._tensor.contiguous()

    def tanh(self) -> Any:
        return self._then("tanh")

    def __mul__(self, other: Any) -> Any:
        if _is_number(other):
            return self._then("mul", other)
        return self.tensor("logits * tensor") * _real(other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        if _is_number(other) and other:
            return self._then("div", other)
        return self.tensor("logits / tensor") / _real(other)

    def __add__(self, other: Any) -> Any:
        vector = isinstance(other, Tensor) and other.numel() == self._vocab == other.shape[-1]
        if vector and other.dim() <= self.dim():
            return self._then("add", other.reshape(-1))
        return self.tensor("logits + x") + _real(other)

    __radd__ = __add__

    def view(self, *shape: Any) -> Any:
        if len(shape) == 1 and isinstance(shape[0], (tuple, list)):
            shape = tuple(shape[0])
        if self._tensor is not None or not all(isinstance(n, _INTS) for n in shape):
            return self.tensor().reshape(*shape)
        if shape[-1] == -1 and math.prod(shape[:-1]) * self._vocab == self.numel():
            shape = (*shape[:-1], self._vocab)
        if shape[-1] != self._vocab:
            return self.tensor("a view across the vocabulary").reshape(*shape)
        return self._moved(self._rows.reshape(*shape[:-1], self._rows.shape[-1]))

    reshape = view

    def __getitem__(self, index: Any) -> Any:
        found = None if self._tensor is not None else split_index(index, self.dim())
        if found is None:
            return self.tensor()[index]
        rows, cut = found
        out = self if rows is None else self._moved(self._rows[rows])
        if cut is None:
            return out
        start, stop, _ = cut.indices(self._vocab)
        if stop <= start:
            return out.tensor()[..., cut]
        return out._then("cut", (start, stop), vocab=stop - start)

    # True logits

    def tensor(self, why: str | None = None) -> Tensor:
        """The logits, computed now and kept. `why`: a use the engine has no form for, warned of once."""
        if self._tensor is None:
            if why is not None:
                _warn_once(why)
            job = type(self._request.head).logits
            self._tensor = replay(self._steps, self._request.run(job, self._rows))
        return self._tensor

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tensor("an assignment into the logits")[index] = _real(value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.tensor(f"logits.{name}"), name)

    def __neg__(self) -> Tensor:
        return -self.tensor("-logits")

    def __sub__(self, other: Any) -> Tensor:
        return self.tensor("logits - x") - _real(other)

    def __rsub__(self, other: Any) -> Tensor:
        return _real(other) - self.tensor("x - logits")

    def __repr__(self) -> str:
        steps = "".join(f" {name}" for name, _ in self._steps)
        return f"LogitsPromise(shape={list(self.shape)}, dtype={self.dtype}{', steps:' + steps if steps else ''})"

    # The meeting with the loss

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.__name__
        if args and isinstance(args[0], cls):
            if name == "cross_entropy":
                return args[0]._torch_cross_entropy(*args[1:], **kwargs)
            if name == "tanh":
                return args[0].tanh()
        if len(args) == 2 and not kwargs:
            promise, other = args if isinstance(args[0], cls) else (args[1], args[0])
            if name in ("mul", "multiply", "__mul__", "__rmul__"):
                return promise * other
            if name in ("add", "__add__", "__radd__"):
                return promise + other
            if name in ("div", "divide", "true_divide") and isinstance(args[0], cls):
                return promise / other
        real = [_real(a, f"torch function {name}") for a in args]
        return func(*real, **{k: _real(v, f"torch function {name}") for k, v in kwargs.items()})

    def _torch_cross_entropy(
        self, target: Tensor, weight: Tensor | None = None, size_average: Any = None, ignore_index: int = -100,
        reduce: Any = None, reduction: str = "mean", label_smoothing: Any = 0.0,
    ) -> Tensor:  # fmt: skip
        options = {
            "ignore_index": ignore_index,
            "reduction": reduction,
            "label_smoothing": label_smoothing,
        }
        if size_average is None and reduce is None:
            found = self._fused(target, weight, options)
            if found is not None:
                return found[0]
        real = self.tensor("a cross entropy of this form")
        return torch.nn.functional.cross_entropy(
            real, target, weight, size_average, reduce=reduce, **options
        )

    def __liger_cross_entropy__(
        self, target: Tensor, weight: Tensor | None = None, **options: Any
    ) -> Any:
        """What `liger_cross_entropy` asks its input for: the `CrossEntropyOutput` of the logits promised."""
        found = self._fused(target, weight, options)
        if found is None:
            real = self.tensor("a cross entropy of this form")
            return ce.cross_entropy(real, target, weight, **options)
        names = ("loss", "z_loss", "token_accuracy", "predicted_tokens")
        return ce.CrossEntropyOutput(**dict(zip(names, found, strict=True)))

    def at_head(self, loss: Callable[[Tensor, Any, Transform], Any]) -> Any:
        """`loss(rows, head, transform)` within the head's forward, None if its logits are more than a transform away.

        rows: the hidden states. Where the head works in another way than by its weight, logits come out.
        """
        transform = fold(self._steps)
        if transform is None or self._tensor is not None:
            return None
        return self._request.run(lambda head, rows: loss(rows, head, transform), self._rows)

    def _fused(
        self, target: Tensor, weight: Tensor | None, options: dict[str, Any]
    ) -> tuple[Any, ...] | None:
        """(loss, z_loss, token_accuracy, predicted_tokens) from the engine, None where only logits will do."""
        transform = fold(self._steps)
        known = (
            transform is not None and self._tensor is None and target.dim() == 1 and self.dim() == 2
        )
        if transform is None or not known or target.is_floating_point():
            return None
        if options.get("softcap") is not None and transform.softcap is not None:
            return None
        request = self._request
        asked = {name: True for name, wanted in request.options.items() if wanted}
        job = HeadLoss(transform, target, weight, {**options, **asked})
        found = request.run(job, self._rows)
        if found is None:  # a head that is sharded in some other way
            return None
        if isinstance(found, Tensor):  # likewise, and it has returned logits
            self._tensor = replay(self._steps, found)
            return None
        if request.token_accuracy is None:
            request.token_accuracy, request.predicted_tokens = found[2:]
        return found


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def _is_at(here: torch.device, device: Any) -> bool:
    if device is None:
        return True
    there = torch.device(device)
    return there.type == here.type and there.index in (None, here.index)


def _real(x: Any, why: str | None = None) -> Any:
    if isinstance(x, LogitsPromise):
        return x.tensor(why)
    if isinstance(x, (tuple, list)):
        return type(x)(_real(item, why) for item in x)
    return x


def _warn_once(why: str) -> None:
    if torch.compiler.is_compiling() or why in _warned:
        return
    _warned.add(why)
    warnings.warn(
        f"liger_kernel: this model's loss is not fused: {why} needs the full logits, which are computed now.",
        stacklevel=3,
    )
