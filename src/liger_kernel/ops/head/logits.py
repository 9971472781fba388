"""The chunk of logits in its buffer, as `logits_dtype` wants them kept.

None             in the inputs' dtype: what a plain linear layer gives
torch.float32    in fp32; their gradient goes to a second buffer in the inputs' dtype
"offset"         in the inputs' dtype, but minus the target's logit (rounded to that dtype, so that adding it again is
                 exact) before they are rounded: what decides a loss lies near the target's logit, and the digits are
                 spent there. Peaked distributions come out about ten times closer, at one more write and read.
"""

from typing import Any

import torch
from torch import Tensor

from liger_kernel import _env
from liger_kernel.ops._op import require

DTYPES = {"same": None, "float32": torch.float32, "offset": "offset"}  # form -> logits_dtype


def form_of(op: str, logits_dtype: Any, dtype: torch.dtype) -> str:
    """A key of `DTYPES` for inputs of `dtype`, which need nothing better if they are fp32 or fp64 themselves.

    Raises:
        ValueError: another logits_dtype.
    """
    known = logits_dtype in (None, torch.float32, "offset")
    require(
        known, f'{op}: logits_dtype must be None, torch.float32 or "offset"; got {logits_dtype!r}.'
    )
    if logits_dtype is None or dtype in (torch.float32, torch.float64):
        return "same"
    return "offset" if logits_dtype == "offset" else "float32"


class Logits:
    """Buffers for chunks of up to `rows` tokens, and the product that fills them.

    weight `[V, H]` and bias have the dtype of the hidden states.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, form: str, rows: int, stride: int, gradient: bool
    ):  # fmt: skip
        self.weight, self.bias, self.form = weight, bias, form
        wide = form == "float32"
        kept = torch.float32 if wide else weight.dtype
        self._buffer = torch.empty((rows, stride), dtype=kept, device=weight.device)
        self._gradient = self._buffer
        if wide and gradient:
            self._gradient = torch.empty((rows, stride), dtype=weight.dtype, device=weight.device)
        self._mixed = not wide or _env.mixed_products(weight.device)
        self._operand = weight.t() if self._mixed else weight.t().float()

    def __call__(self, x: Tensor, target: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """-> logits `[C, V]` of x `[C, H]`, where their gradient may go, and under "offset" what to add to each row.

        target `[C]`: read under "offset" alone; anything outside the classes is taken for the nearest.
        """
        n, vocab = x.shape[0], self.weight.shape[0]
        logits, gradient = self._buffer[:n, :vocab], self._gradient[:n, :vocab]
        if self.form == "same":
            if self.bias is None:
                torch.mm(x, self._operand, out=logits)
            else:
                torch.addmm(self.bias, x, self._operand, out=logits)
            return logits, gradient, None
        if self.form == "float32":
            if self._mixed:
                torch.mm(x, self._operand, out_dtype=torch.float32, out=logits)
            else:
                torch.mm(x.float(), self._operand, out=logits)
            if self.bias is not None:
                logits += self.bias
            return logits, gradient, None
        assert target is not None
        shift = self._target_logit(x, target.clamp(0, vocab - 1).long())
        logits.copy_(-shift[:, None])
        logits.addmm_(x, self._operand)
        if self.bias is not None:
            logits += self.bias
        return logits, gradient, shift.float()

    def _target_logit(self, x: Tensor, y: Tensor) -> Tensor:
        z = (x.float() * self.weight[y].float()).sum(-1)
        if self.bias is not None:
            z = z + self.bias[y]
        return z.to(x.dtype)
