"""The row functions under every loss but plain cross entropy, with what stays the same from chunk to chunk."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops import _logp_kernels, _logp_torch
from liger_kernel.ops._logp_kernels import LogpStats
from liger_kernel.ops.head.params import HeadParams
from liger_kernel.ops.head.shard import IGNORED, VocabShard


@dataclass(frozen=True)
class RowMath:
    """Statistics of chunks of logits `[C, V]`, and gradients back into them (formulas: `ops._logp_kernels`).

    Targets and results are those of the whole vocabulary, also where the logits are a `shard` of it.
    """

    V: int
    ignore_index: int
    kernels: bool
    pre_scale: float = 1.0
    softcap: float | None = None
    post_scale: float = 1.0
    shard: VocabShard | None = None

    @classmethod
    def of(cls, head: HeadParams, ignore_index: int, kernels: bool) -> "RowMath":
        """For the logits of a head."""
        post = head.post_scale / head.temperature
        own = head.weight.shape[0]
        return cls(own, ignore_index, kernels, head.pre_scale, head.softcap, post, head.shard)

    def stats(
        self, logits: Tensor, target: Tensor, shift: Tensor | None = None, *, entropy: bool = False,
        argmax: bool = False, gaps: bool = False,
    ) -> LogpStats:  # fmt: skip
        """Of every row; target `[C]`; shift `[C]` is to be added to the logits."""
        rows = _logp_kernels.logp_rows if self.kernels else _logp_torch.logp_rows_torch
        shard = self.shard
        y = target if shard is None else shard.labels(target, self.V, self.ignore_index)
        want = {"want_entropy": entropy, "want_argmax": argmax, "want_gaps": gaps}
        found = rows(logits, y, **self._options(), **want, shift=shift)
        return found if shard is None else shard.combined(found, y, self.V)

    def gradient(
        self, out: Tensor, logits: Tensor, target: Tensor, stats: LogpStats, a: Tensor, c: Tensor,
        b: Tensor | None = None, d: Tensor | None = None, shift: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Write the gradient of the logits to out, which may be the logits; a, c, b, d `[C]`; stats: what was found."""
        write = _logp_kernels.logp_gradient if self.kernels else _logp_torch.logp_gradient_torch
        y = target if stats.labels is None else stats.labels
        write(out, logits, y, stats, a, c, b, d, **self._options(), shift=shift)

    def columns(
        self, logits: Tensor, ids: Tensor, shift: Tensor | None = None
    ) -> tuple[Tensor, Tensor | float]:
        """Transformed logits of a few ids, `[C, K]`, and their slopes."""
        local, here = self._ids(ids)
        transforms = self.pre_scale, self.softcap, self.post_scale
        x, slope = _logp_torch.wide(logits.index_select(1, local), *transforms, shift)
        if self.shard is None or here is None:
            return x, slope
        x = x.where(here, 0.0)
        torch.distributed.all_reduce(x, group=self.shard.process_group)
        return x, slope * here

    def add_columns(self, logits: Tensor, ids: Tensor, values: Tensor) -> None:
        """logits[:, ids] += values, which are 0 for ids of other ranks."""
        logits.index_add_(1, self._ids(ids)[0], values.to(logits.dtype))

    def _ids(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """ids as columns here, and which of them are; any column for the others."""
        if self.shard is None:
            return ids, None
        local = ids - self.shard.start
        return local.clamp(0, self.V - 1), (local >= 0) & (local < self.V)

    def _options(self) -> dict[str, Any]:
        sharded = self.shard is not None
        return {
            "V": self.V, "ignore_index": IGNORED if sharded else self.ignore_index, "sharded": sharded,
            "pre_scale": self.pre_scale, "softcap": self.softcap, "post_scale": self.post_scale,
        }  # fmt: skip
