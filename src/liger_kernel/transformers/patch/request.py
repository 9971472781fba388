"""One call of a model: what was asked of its loss, and the work its head does for it."""

import functools
from typing import Any

from torch import Tensor

from liger_kernel import _env
from liger_kernel.ops._op import is_dtensor
from liger_kernel.ops.fused_linear_cross_entropy import fused_linear_cross_entropy
from liger_kernel.ops.head.module import Parts, with_parts
from liger_kernel.transformers import functional
from liger_kernel.transformers.patch.chain import Transform

_DEFAULTS = {
    "ignore_index": -100,
    "reduction": "mean",
    "label_smoothing": 0.0,
    "lse_square_scale": 0.0,
    "softcap": None,
}


class Request:
    """What the caller of a model asked of the loss, and what the loss found.

    outer: the module that `get_output_embeddings()` returned; calling it reaches the head through
        whatever wraps it.
    head: the layer itself, a `PromisingHead`.
    """

    def __init__(
        self, outer: Any, head: Any, accuracy: bool, predictions: bool, scaling: bool
    ) -> None:
        self.outer = outer
        self.head = head
        self.options = {
            "return_token_accuracy": accuracy,
            "return_predicted_tokens": predictions,
            "use_token_scaling": scaling,
        }
        self.token_accuracy: Tensor | None = None
        self.predicted_tokens: Tensor | None = None

    def run(self, job: Any, rows: Tensor) -> Any:
        """`job(head, rows)` inside the head's forward, hooks and wrappers around it.

        Hugging Face's tensor parallelism replaces the forward of a head and leaves its weight, a DTensor, in place at
        all times: there the job runs on its own.
        """
        if tensor_parallel_forward(self.head):
            if not isinstance(job, HeadLoss):
                return self.head.forward(rows)
            return job.loss(self.head, rows, Parts(self.head.weight, self.head.bias))
        self.head._liger_job = job
        try:
            out = self.outer(rows)
        finally:
            self.head._liger_job = None
        found = getattr(job, "found", None)
        return out if found is None else found


def tensor_parallel_forward(head: Any) -> bool:
    """Whether Hugging Face's tensor parallelism has replaced this head's forward."""
    name = getattr(vars(head).get("forward"), "__qualname__", "")
    return name.endswith("install_forward.<locals>.tp_forward") and is_dtensor(head.weight)


class HeadLoss:
    """A job: the loss of hidden states, from the weight that the hooks around the head have gathered."""

    def __init__(
        self, transform: Transform, target: Tensor, weight: Tensor | None, options: dict[str, Any]
    ) -> None:
        self.transform, self.target = transform, target
        self.found: Any = None  # the result, where what the head returns goes through other hands
        # Only what is not at its default: a framework's replacement may not know every argument.
        self.options = {k: v for k, v in options.items() if v != _DEFAULTS.get(k, False)}
        if weight is not None:
            self.options["ce_weight"] = weight

    def __call__(self, head: Any, rows: Tensor) -> Any:
        """(loss, z_loss, token_accuracy, predicted_tokens); the logits if the weight is sharded in another way than the
        engine knows.
        """
        found = with_parts(head, functools.partial(self.loss, head), rows)
        if found is None:
            return head.logits(rows)
        if not is_dtensor(getattr(head, "weight", None)):
            return found
        self.found = found
        return head.logits(rows[:0])  # the hooks of tensor parallelism expect logits to gather

    def loss(self, head: Any, rows: Any, parts: Parts) -> tuple[Any, ...] | None:
        """(loss, z_loss, token_accuracy, predicted_tokens), None where only logits will do."""
        weight: Any = parts.weight
        bias, low_rank, t = parts.bias, parts.low_rank, self.transform
        packed = not isinstance(weight, Tensor)
        own = packed or low_rank is not None
        if is_dtensor(weight):
            cut = t.stop is not None or t.shift is not None
            if own or cut or not _splits_vocabulary(weight, bias):
                return None
        elif 0 < weight.shape[0] != head.out_features:
            return None
        if is_dtensor(rows):
            rows = rows.to_local()
        if t.stop is not None:
            if packed:
                return None
            weight = weight[t.start : t.stop]
            bias = None if bias is None else bias[t.start : t.stop]
            if low_rank is not None:
                low_rank = low_rank[0], low_rank[1][t.start : t.stop]
        if t.shift is not None:
            bias = t.shift if bias is None else bias + t.shift
        extra = dict(self.options)
        if bias is not None:
            extra["bias"] = bias
        if t.softcap is not None:
            extra["softcap"] = t.softcap
        if t.pre_scale != 1.0:
            extra["pre_scale"] = t.pre_scale
        if own:
            return self._own(rows, weight, low_rank, extra)
        # Looked up at call time: frameworks replace it.
        result = functional.liger_fused_linear_cross_entropy(rows, weight, self.target, **extra)
        if isinstance(result, Tensor):
            return result, None, None, None
        return result.loss, result.z_loss, result.token_accuracy, result.predicted_tokens

    def _own(
        self, rows: Tensor, weight: Any, low_rank: tuple[Tensor, Tensor] | None, options: dict[str, Any]
    ) -> tuple[Any, ...] | None:  # fmt: skip
        """The loss of a quantised head or one with adapters, which no framework's replacement knows."""
        more = {"label_smoothing", "lse_square_scale", "use_token_scaling"} & options.keys()
        each = more and options.get("reduction") == "none"
        if each or "ce_weight" in options or _env.capturing(rows.device):
            return None
        try:
            found = fused_linear_cross_entropy(
                rows, weight, self.target, low_rank=low_rank, **options
            )
        except NotImplementedError:  # label smoothing or z-loss in fp16 or a traced step
            return None
        return found.loss, found.z_loss, found.token_accuracy, found.predicted_tokens


def _splits_vocabulary(weight: Any, bias: Any) -> bool:
    """Whether a DTensor head is split along its rows alone, over one mesh dimension."""
    placements = weight.placements
    same = bias is None or (is_dtensor(bias) and bias.placements == placements)
    return same and weight.device_mesh.ndim == 1 and placements[0].is_shard(0)
