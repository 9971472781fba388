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
from liger_kernel.ops._op import like, require

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
    """Buffers for chunks of up to `rows` tokens, and the products that fill them.

    weight `[V, H]`, bias and up `[V, r]` have the dtype of the hidden states.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, form: str, rows: int, stride: int, gradient: bool,
        up: Tensor | None = None,
    ):  # fmt: skip
        self.weight, self.bias, self.up, self.form = weight, bias, up, form
        wide = form == "float32"
        kept = torch.float32 if wide else weight.dtype
        self._buffer = weight.new_empty((rows, stride), dtype=kept)
        own = wide and gradient
        self._gradient = like(self._buffer, weight.dtype) if own else self._buffer
        direct = not wide or _env.mixed_products(weight.device)
        self._factors = [m.t() if direct else m.t().float() for m in (up, weight) if m is not None]

    def __call__(
        self, x: Tensor, target: Tensor | None, down: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """-> logits `[C, V]` of x `[C, H]`, where their gradient may go, and under "offset" what to add to each row.

        down `[C, r]`: the other side of `up`. target `[C]`: read under "offset" alone; anything outside the classes is
        taken for the nearest.
        """
        n, vocab = x.shape[0], self.weight.shape[0]
        logits, gradient = self._buffer, self._gradient
        if logits.shape != (n, vocab):
            logits, gradient = logits[:n, :vocab], gradient[:n, :vocab]
        # What stands there before the last product is rounded once more: the smaller of what there could be.
        terms = list(zip([x] if down is None else [down, x], self._factors, strict=True))
        shift, first = None, True
        if self.form == "offset":
            assert target is not None
            shift = self._target_logit(x, target.clamp(0, vocab - 1).long(), down)
            logits.copy_(-shift[:, None])
            terms.reverse()
            first = False
        elif self.form == "same" and self.bias is not None:
            torch.addmm(self.bias, *terms.pop(0), out=logits)
            first = False
        for a, b in terms:
            accumulate(logits, a, b, first)
            first = False
        if self.form != "same" and self.bias is not None:
            logits += self.bias
        return logits, gradient, None if shift is None else shift.float()

    def _target_logit(self, x: Tensor, y: Tensor, down: Tensor | None) -> Tensor:
        z = (x.float() * self.weight[y].float()).sum(-1)
        if down is not None and self.up is not None:
            z += (down.float() * self.up[y].float()).sum(-1)
        if self.bias is not None:
            z = z + self.bias[y]
        return z.to(x.dtype)


def product(a: Tensor, b: Tensor, dtype: torch.dtype, room: Tensor | None = None) -> Tensor:
    """a @ b in another dtype, rounded once where the device can, then in `room` if there is some."""
    if dtype != a.dtype and _env.mixed_products(a.device):
        return torch.mm(a, b, out_dtype=dtype, out=room)
    return torch.mm(a, b).to(dtype)


def accumulate(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """total (+)= a @ b, accumulated in the product's fp32 registers and rounded once to total's
    dtype.
    """
    if total.dtype != a.dtype and _env.mixed_products(a.device):
        if first:
            torch.mm(a, b, out_dtype=total.dtype, out=total)
        else:
            torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
        return
    if total.dtype != a.dtype:
        a, b = a.to(total.dtype), b.to(total.dtype)
    if first:
        torch.mm(a, b, out=total)
    else:
        total.addmm_(a, b)
