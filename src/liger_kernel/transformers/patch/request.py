"""One call of a model: what was asked of its loss, and the work its head does for it."""

from typing import Any

from torch import Tensor

from liger_kernel.ops._op import is_dtensor
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
    head: the linear layer itself, a `PromisingHead`.
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
            return (
                job.loss(self.head, rows) if isinstance(job, HeadLoss) else self.head.forward(rows)
            )
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
        found = self.loss(head, rows)
        if found is None:
            return head.logits(rows)
        if not is_dtensor(head.weight):
            return found
        self.found = found
        return head.logits(rows[:0])  # the hooks of tensor parallelism expect logits to gather

    def loss(self, head: Any, rows: Any) -> tuple[Any, ...] | None:
        """(loss, z_loss, token_accuracy, predicted_tokens), None where only logits will do."""
        weight, bias, t = head.weight, head.bias, self.transform
        if is_dtensor(weight):
            if not _splits_vocabulary(weight, bias) or t.stop is not None or t.shift is not None:
                return None
        elif 0 < weight.shape[0] != head.out_features:
            return None
        if is_dtensor(rows):
            rows = rows.to_local()
        if t.stop is not None:
            weight = weight[t.start : t.stop]
            bias = None if bias is None else bias[t.start : t.stop]
        if t.shift is not None:
            bias = t.shift if bias is None else bias + t.shift
        extra = dict(self.options)
        if bias is not None:
            extra["bias"] = bias
        if t.softcap is not None:
            extra["softcap"] = t.softcap
        if t.pre_scale != 1.0:
            extra["pre_scale"] = t.pre_scale
        # Looked up at call time: frameworks replace it.
        result = functional.liger_fused_linear_cross_entropy(rows, weight, self.target, **extra)
        if isinstance(result, Tensor):
            return result, None, None, None
        return result.loss, result.z_loss, result.token_accuracy, result.predicted_tokens


def _splits_vocabulary(weight: Any, bias: Any) -> bool:
    """Whether a DTensor head is split along its rows alone, over one mesh dimension."""
    placements = weight.placements
    same = bias is None or (is_dtensor(bias) and bias.placements == placements)
    return same and weight.device_mesh.ndim == 1 and placements[0].is_shard(0)
