"""The sum of a token's capped logits, where the cap leaves no way around making them: one product, in chunks."""

from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops._op import compute_dtype, named
from liger_kernel.ops.head.engine import Wanted, placed, run
from liger_kernel.ops.head.pair import pair_of
from liger_kernel.ops.head.params import HeadParams
from liger_kernel.ops.head.valid import valid_tokens


def _fake(hidden, weight, bias, down, up, target, *_):
    return hidden.new_empty(target.numel(), dtype=compute_dtype(hidden))


@named(
    "(Tensor hidden, Tensor weight, Tensor? bias, Tensor? down, Tensor? up, Tensor target, int ignore_index,"
    " float pre_scale, float cap, int budget) -> Tensor",
    _fake,
)
def capped_logit_sums(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor | None, up: Tensor | None, target: Tensor,
    ignore_index: int, pre_scale: float, cap: float, budget: int,
) -> Tensor:  # fmt: skip
    """sum_v cap tanh(pre_scale z_v / cap) of every token `[N]` fp32, z = h W^T + b + d U^T; 0 where target is
    ignore_index. Without autograd.
    """
    labels, wide = target.reshape(-1), compute_dtype(hidden)
    keep = valid_tokens(labels, ignore_index, None)

    def per_row(logits: Tensor, *_: Any) -> Tensor:
        return logits.to(wide).mul_(pre_scale / cap).tanh_().sum(-1)  # the buffer is ours

    head = HeadParams(weight, bias, low_rank=pair_of(down, up))
    size = hidden.element_size()
    copy = 0 if hidden.dtype == wide else wide.itemsize
    share = max(budget * size // (size + copy), 1)
    found, _ = run(hidden, head, per_row, Wanted(), keep=keep, budget=share, accum_dtype=None)
    empty = torch.empty(0, dtype=wide, device=hidden.device)
    sums = placed(torch.cat([*found, empty]), keep, labels.numel())
    return torch.where(labels != ignore_index, sums, 0.0) * cap
