"""What the engine accepts as a head: a weight, perhaps a bias and a low-rank term, and the transforms
between products and logits.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from liger_kernel.ops._labels import check_labels
from liger_kernel.ops._op import require, rows
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
        w, b = self.weight, self.bias
        require(
            w.dim() == 2 and w.shape[0] > 0,
            f"{op}: the head weight must be [V, H]; got {list(w.shape)}. An empty or one-dimensional weight is a "
            "shard: call the loss inside the head module's forward, where FSDP and ZeRO-3 have gathered it.",
        )
        require(
            hidden.dim() >= 1 and hidden.shape[-1] == w.shape[1],
            f"{op}: hidden states have width {hidden.shape[-1] if hidden.dim() else 0}, the head weight "
            f"{list(w.shape)} takes {w.shape[1]}.",
        )
        require(
            b is None or b.shape == w.shape[:1],
            f"{op}: bias must be [{w.shape[0]}]; got {None if b is None else list(b.shape)}.",
        )
        if self.low_rank is not None:
            down, up = self.low_rank
            fits = down.shape == (*hidden.shape[:-1], up.shape[-1]) and up.shape[:-1] == w.shape[:1]
            require(
                fits,
                f"{op}: low_rank must be [*, r] of the same tokens as hidden {list(hidden.shape)} and "
                f"[{w.shape[0]}, r]; got {list(down.shape)} and {list(up.shape)}.",
            )
        for name in ("pre_scale", "post_scale"):
            value = getattr(self, name)
            require(math.isfinite(value), f"{op}: {name} must be finite; got {value}.")
        require(
            self.softcap is None or self.softcap > 0,
            f"{op}: softcap must be positive or None; got {self.softcap}.",
        )
        require(
            math.isfinite(self.temperature) and self.temperature > 0,
            f"{op}: temperature must be positive; got {self.temperature}.",
        )


def check_head(
    op: str, hidden: Tensor, targets: Tensor | None, head: HeadParams, ignore_index: int, classes: bool = True
) -> Tensor:  # fmt: skip
    """The checks every loss on a head makes; -> hidden, in autocast's dtype where that is on.

    classes: the targets are used as classes, not only to say which tokens count.
    """
    head.check(hidden, op)
    if targets is not None:
        require(
            targets.numel() == hidden.shape[:-1].numel(),
            f"{op}: targets must hold one label for each row of hidden {list(hidden.shape)}; got "
            f"{list(targets.shape)}.",
        )
        if classes:
            check_labels(op, targets, head.vocab, ignore_index)
    return autocast(hidden)


def autocast(x: Tensor) -> Tensor:
    """x in autocast's dtype where that is on."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x
