"""What the engine accepts as a head: a weight, perhaps a bias and a low-rank term, and the transforms
between products and logits.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from liger_kernel.ops._labels import check_labels
from liger_kernel.ops._op import autocast_dtype, rows
from liger_kernel.ops.head.shard import VocabShard


@dataclass(frozen=True)
class HeadParams:
    """logits z = post_scale * softcap(pre_scale * (h W^T + b + d U^T)) / temperature,   softcap(u) = cap *
    tanh(u / cap)

    weight: `[V, H]`, perhaps `ops.head.module.Packed`   bias: `[V]` or None   low_rank: d `[*, r]`, U `[V, r]`, or None
    shard: where these rows of W, b and U belong if other processes have more of them
    logits: how chunks of them are kept, see `ops.head.logits`

    Scales on both sides of the cap exist in the wild
    (Cohere, Granite, Falcon-H1 multiply; Gemma 2 caps; MuseGlimmer does both).
    """

    weight: Tensor
    bias: Tensor | None = None
    pre_scale: float = 1.0
    softcap: float | None = None
    post_scale: float = 1.0
    temperature: float = 1.0
    shard: VocabShard | None = None
    logits: str = "same"
    low_rank: tuple[Tensor, Tensor] | None = None

    @property
    def vocab(self) -> int:
        """Classes of the whole head."""
        return self.weight.shape[0] if self.shard is None else self.shard.total

    def here(self, columns: Tensor) -> Tensor:
        """Of `[*, vocab]` what belongs to these rows of the head."""
        if self.shard is None:
            return columns
        return columns.narrow(-1, self.shard.start, self.weight.shape[0])

    def to(self, dtype: torch.dtype) -> "HeadParams":
        """With tensors of this dtype, and the rows of d as a matrix: what the products read."""
        pair, bias = self.low_rank, self.bias
        same = isinstance(self.weight, Tensor) and self.weight.dtype == dtype
        if same and pair is None and (bias is None or bias.dtype == dtype):
            return self
        return replace(
            self,
            weight=self.weight.to(dtype),
            bias=None if bias is None else bias.to(dtype),
            low_rank=None if pair is None else (rows(pair[0]).to(dtype), pair[1].to(dtype)),
        )

    def check(self, hidden: Tensor, op: str) -> None:
        """ValueError if these cannot be the head of `hidden` `[*, H]`: also the last guard against
        a sharded weight.
        """
        reason = self._why_not(hidden)
        if reason is not None:
            raise ValueError(f"{op}: {reason}")

    def _why_not(self, hidden: Tensor) -> str | None:
        b, shape, taken = self.bias, hidden.shape, self.weight.shape
        if len(taken) != 2 or taken[0] == 0:
            return (
                f"the head weight must be [V, H]; got {list(taken)}. An empty or one-dimensional weight is a "
                "shard: call the loss inside the head module's forward, where FSDP and ZeRO-3 have gathered it."
            )
        if not shape or shape[-1] != taken[1]:
            width = shape[-1] if shape else 0
            return (
                f"hidden states have width {width}, the head weight {list(taken)} takes {taken[1]}."
            )
        if b is not None and b.shape != taken[:1]:
            return f"bias must be [{taken[0]}]; got {list(b.shape)}."
        if self.low_rank is not None:
            down, up = self.low_rank
            if down.shape != (*shape[:-1], up.shape[-1]) or up.shape[:-1] != taken[:1]:
                return (
                    f"low_rank must be [*, r] of the same tokens as hidden {list(shape)} and [{taken[0]}, r]; got "
                    f"{list(down.shape)} and {list(up.shape)}."
                )
        for name, value in (("pre_scale", self.pre_scale), ("post_scale", self.post_scale)):
            if not math.isfinite(value):
                return f"{name} must be finite; got {value}."
        if self.softcap is not None and not self.softcap > 0:
            return f"softcap must be positive or None; got {self.softcap}."
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            return f"temperature must be positive; got {self.temperature}."
        return None


def check_head(
    op: str, hidden: Tensor, targets: Tensor | None, head: HeadParams, ignore_index: int, classes: bool = True
) -> Tensor:  # fmt: skip
    """The checks every loss on a head makes; -> hidden, in autocast's dtype where that is on.

    classes: the targets are used as classes, not only to say which tokens count.
    """
    head.check(hidden, op)
    if targets is not None:
        if targets.numel() != hidden.shape[:-1].numel():
            raise ValueError(
                f"{op}: targets must hold one label for each row of hidden {list(hidden.shape)}; got "
                f"{list(targets.shape)}."
            )
        if classes:
            check_labels(op, targets, head.vocab, ignore_index)
    return autocast(hidden)


def autocast(x: Tensor) -> Tensor:
    """x in autocast's dtype where that is on; fp64, which torch leaves alone, as it is."""
    dtype = autocast_dtype(x.device.type)
    return x if dtype is None or x.dtype == torch.float64 else x.to(dtype)
