"""TRL's ORPO trainer without logits.

    loss = NLL(chosen) - beta * mean over pairs of log sigmoid(log_odds(chosen) - log_odds(rejected))

NLL over the tokens of prompt and answer, log-odds over those of the answer, each as TRL has them.

The model is called as TRL calls it, with labels added: then its own forward hands its logits, of which we make a
promise, to its `loss_function`, which for the length of this call is `LigerFusedLinearORPOLoss`. So the loss is
computed within the forward, where DDP, FSDP and ZeRO-3 have parameters and hooks in place, and with what the model does
to its logits. What cannot be done so (an adapter on the head, an encoder-decoder) takes TRL's path, and that is said.
"""

import contextlib
import functools
import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from liger_kernel import _env
from liger_kernel.chunked_loss import LigerFusedLinearORPOLoss
from liger_kernel.ops._op import is_dtensor
from liger_kernel.transformers.fsdp import _FSDPForwardRedirection  # noqa: F401 - asked for here too
from liger_kernel.transformers.patch import head as heads
from liger_kernel.transformers.patch.apply import Ledger
from liger_kernel.transformers.patch.chain import Transform
from liger_kernel.transformers.patch.model import unwrapped
from liger_kernel.transformers.patch.promise import LogitsPromise
from liger_kernel.transformers.patch.request import Request


class _Loss:
    """A `loss_function` that is ORPO, and what it found: the metrics of `LigerFusedLinearORPOLoss`."""

    def __init__(self, beta: float, ignore_index: int, tokens: Tensor) -> None:
        """tokens `[2n, T]`: input ids, ignore_index where there is padding."""
        self.beta, self.ignore_index, self.tokens = beta, ignore_index, tokens
        self.metrics: tuple[Tensor, ...] | None = None

    def __call__(self, logits: Any, labels: Tensor, *_: Any, **__: Any) -> Tensor:
        found = None
        if isinstance(logits, LogitsPromise) and logits.shape[:-1] == labels.shape:
            found = logits.at_head(functools.partial(self._at_head, labels=labels))
        if not isinstance(found, tuple):
            return torch.zeros((), device=labels.device)
        loss, self.metrics = found
        return loss

    def _at_head(self, rows: Tensor, head: Any, transform: Transform, labels: Tensor) -> Any:
        """(loss, metrics) of hidden states `[2n, T, H]`; None where the head is not all there."""
        weight, bias, shift = head.weight, head.bias, transform.shift
        plain = weight.is_floating_point() and not is_dtensor(weight)
        if not plain or weight.shape[0] != head.out_features or transform.stop is not None:
            return None
        if shift is not None:
            bias = shift if bias is None else bias + shift
        loss = LigerFusedLinearORPOLoss(
            self.ignore_index, self.beta, softcap=transform.softcap, pre_scale=transform.pre_scale
        )
        return loss(weight, rows, self._next(labels), bias, self._next(self.tokens))

    def _next(self, tokens: Tensor) -> Tensor:
        """What each position is to predict."""
        return pad(tokens[:, 1:], (0, 1), value=self.ignore_index)


class _WithoutLogits:
    """What `LigerORPOTrainer` puts in front of TRL's class."""

    beta: float
    accelerator: Any
    padding_value: int
    concatenated_inputs: Any
    aux_loss_enabled: bool
    _plain = False  # this model has turned out to need TRL's path

    def concatenated_forward(self, model: nn.Module, batch: dict[str, Any]) -> tuple[Any, ...]:
        """(log-probabilities of chosen and rejected answers, means of their logits, NLL, router loss if any).

        TRL forms the loss of these; its gradient, all of it, comes with the NLL.
        """
        if not self._plain:
            inner = unwrapped(self.accelerator.unwrap_model(model))
            reason = _why_not(model, inner)
            found = self._fused_forward(model, inner, batch) if reason is None else None
            if found is not None:
                return found
            self._plain = True
            _env.warn_once(
                f"LigerORPOTrainer: {type(inner).__name__} is trained as TRL trains it, with full logits: "
                f"{reason or 'its loss_function is not given them in the usual form'}."
            )
        return super().concatenated_forward(model, batch)  # type: ignore[misc]

    def _fused_forward(self, model: Any, inner: Any, batch: dict[str, Any]) -> Any:
        """What `concatenated_forward` returns; None if the loss was not asked for in the expected form."""
        # a setting of the older releases, -100 since
        spelled = {n: getattr(self, n) for n in ("label_pad_token_id",) if hasattr(self, n)}
        ignore_index = spelled.get("label_pad_token_id", -100)
        joined = self.concatenated_inputs(
            batch, padding_value=self.padding_value, device=self.accelerator.device, **spelled
        )
        ids, mask = joined["concatenated_input_ids"], joined["concatenated_attention_mask"]
        loss = _Loss(self.beta, ignore_index, torch.where(mask == 1, ids, ignore_index))
        with _asked(inner, loss):
            outputs = model(
                ids,
                attention_mask=mask,
                labels=joined["concatenated_labels"],
                use_cache=False,
                **({"output_router_logits": True} if self.aux_loss_enabled else {}),
            )
        if loss.metrics is None:
            return None
        *found, nll = loss.metrics[:5]
        # the router loss is in outputs.loss already, and TRL adds its value
        router = [outputs.aux_loss.detach()] if self.aux_loss_enabled else []
        return *found, nll + (outputs.loss - outputs.loss.detach()), *router


@contextlib.contextmanager
def _asked(model: Any, loss: _Loss) -> Iterator[None]:
    """Within it, a call of the model promises its logits to `loss`."""
    outer, head = heads.find_head(model)
    ledger = Ledger()
    ledger.put(model, "_loss_function", loss, "orpo")  # where the official setter stores it
    head._liger_request = Request(outer, head, False, False, False)
    try:
        yield
    finally:
        head._liger_request = None
        ledger.undo()


def _why_not(model: Any, inner: Any) -> str | None:
    """None if the head of a model, `inner` without its wrappers, can be asked for the loss, else the reason."""
    if isinstance(model, nn.DataParallel):
        return "DataParallel runs copies of it"
    if getattr(inner.config, "is_encoder_decoder", False):
        return "it is an encoder-decoder"
    outer, head = heads.find_head(inner)
    reason = heads.why_not(outer, head)
    if reason is None and not (isinstance(head, nn.Linear) and heads.prepare(head)):
        reason = "its output head is not a plain linear layer"
    return reason


@functools.cache
def _trainer_class() -> type:
    """The class, made on first use: its base is TRL's."""

    class LigerORPOTrainer(_WithoutLogits, _orpo_trainer()):
        """TRL's `ORPOTrainer`, arguments and metrics included, with a loss that builds no logits.

        logits/chosen and logits/rejected are means over the tokens of the answers; TRL's count prompts and padding too.
        """

    LigerORPOTrainer.__module__ = __name__
    LigerORPOTrainer.__qualname__ = "LigerORPOTrainer"
    return LigerORPOTrainer


def _orpo_trainer() -> Any:
    """TRL's class, where its releases have it."""
    try:
        try:
            home = importlib.import_module("trl.experimental.orpo")
        except ModuleNotFoundError:  # the older releases
            home = importlib.import_module("trl")
        return home.ORPOTrainer
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"LigerORPOTrainer needs TRL, in a release with an ORPOTrainer: pip install trl. ({error})"
        ) from error


def __getattr__(name: str) -> Any:
    if name == "LigerORPOTrainer":
        return _trainer_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
