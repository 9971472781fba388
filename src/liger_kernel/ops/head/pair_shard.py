"""Two distributions of which every rank holds the same slice of classes: the losses, and the gradient of the slice.

    x, y: this rank's columns of student and teacher     lse: of all columns, from an all-gather (`head.shard`)
    log Q = x - lse(x)     log P = y - lse(y)
    soft = sum over ranks of their columns' terms        G = sum over ranks of their columns' g       one all-reduce
    dx = s (g - Q G) + h temperature (softmax(temperature x) - [c])      (formulas: `_head_pair_kernels`)

The logits are read twice for their statistics (three times where the hard loss has a temperature of its own), once for
the sums and once for the gradient.
"""

import torch
from torch import Tensor

from liger_kernel.ops._head_pair import PairLoss, Transform, pair_rows
from liger_kernel.ops._head_pair_torch import pair_rows_torch
from liger_kernel.ops._logp_kernels import LogpStats
from liger_kernel.ops.head.rows import RowMath
from liger_kernel.ops.head.shard import VocabShard


def shard_rows(
    loss: PairLoss, shard: VocabShard, logits: Tensor, teacher: Tensor, index: Tensor | None, target: Tensor | None,
    scale: Tensor | None, out: Tensor | None, *, V: int, kernels: bool,
) -> Tensor:  # fmt: skip
    """Soft and hard loss of every row, `[2, C]`, the same on every rank, and into `out` the gradient of this rank's
    columns.

    Args: as `_head_pair.pair_rows`; target is of the whole vocabulary, `teacher` has this rank's V columns.
    """
    n = logits.shape[0]
    anything = torch.zeros(n, dtype=torch.int64, device=logits.device)
    labels = anything if target is None else target
    warm = loss.want_hard and loss.temperature == 1.0

    def stats(of: Tensor, head: Transform, temperature: float, y: Tensor) -> LogpStats:
        pre, cap, post = head
        math = RowMath(V, loss.ignore_index, kernels, pre, cap, post / temperature, shard)
        return math.stats(of, y)

    x = stats(logits, loss.student_transform, loss.temperature, labels if warm else anything)
    hard, log_h = x, x.log_total
    if loss.want_hard and not warm:
        hard = stats(logits, loss.student_transform, 1.0, labels)
        log_h = hard.top - loss.temperature * x.top + hard.log_total
    x_lse = torch.stack([x.top, x.log_total, log_h])
    if loss.teacher == "logits":
        y = stats(teacher, loss.teacher_transform, loss.temperature, anything)
        y_lse = torch.stack([y.top, y.log_total])
    else:
        y_lse = x_lse.new_zeros(2, n)
    sum_g = torch.empty_like(x.top)
    own = None if target is None else shard.labels(target, V, loss.ignore_index)
    rows = pair_rows if kernels else pair_rows_torch
    given = {"V": V, "saved": (x_lse, y_lse, sum_g), "slice_": True}
    soft = rows(loss, logits, teacher, index, own, None, None, stage="sums", **given)[0]
    sums = torch.stack([soft, sum_g])
    torch.distributed.all_reduce(sums, group=shard.process_group)
    sum_g.copy_(sums[1])
    if out is not None:
        rows(loss, logits, teacher, index, own, scale, out, stage="gradient", **given)
    return torch.stack([sums[0], -hard.logp if loss.want_hard else torch.zeros_like(soft)])
