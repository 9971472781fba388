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
        """`job(head, rows)` inside the head's forward, hooks and wrappers around it."""
        self.head._liger_job = job
        try:
            return self.outer(rows)
        finally:
            self.head._liger_job = None


class HeadLoss:
    """A job: the loss of hidden states, from the weight that the hooks around the head have gathered."""

    def __init__(
        self, transform: Transform, target: Tensor, weight: Tensor | None, options: dict[str, Any]
    ) -> None:
        self.transform, self.target = transform, target
        # Only what is not at its default: a framework's replacement may not know every argument.
        self.options = {k: v for k, v in options.items() if v != _DEFAULTS.get(k, False)}
        if weight is not None:
            self.options["ce_weight"] = weight

    def __call__(self, head: Any, rows: Tensor) -> Any:
        """(loss, z_loss, token_accuracy, predicted_tokens); the logits if the weight is still sharded."""
        weight, bias = head.weight, head.bias
        if is_dtensor(weight) or 0 < weight.shape[0] != head.out_features:
            return head.logits(rows)  # tensor parallel: the head's hooks gather its output
        t = self.transform
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
