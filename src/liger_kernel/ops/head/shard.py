"""A head weight whose rows lie with several processes: each works on its slice of the vocabulary.

Per chunk of tokens every rank sends a few numbers a row (maximum, sum of exponentials, the target's
logit where it has it, ...) to all others in one packed all-gather, and puts them together in the
order of the ranks: the same bits everywhere. dW stays local; dh is the sum over the group.

With t_r the largest logit of rank r's slice and s_r = log sum exp(x - t_r) there,

    t = max t_r     s = log sum_r exp(t_r - t + s_r)     w_r = exp(t_r - t + s_r - s)
    logp = (x_y - t_r) + (t_r - t) - s                        y lies with r
    H = s - sum_r w_r (g_r + t_r - t)                         g_r = s_r - H_r, the mean gap under r's softmax
    sum_v (x_v - t) = sum_r (sum over r of x_v - t_r) + V_r (t_r - t)
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops._logp_kernels import LogpStats
from liger_kernel.ops._op import is_dtensor, require

IGNORED = -100  # in local labels, whatever the caller's ignore_index


@dataclass(frozen=True)
class VocabShard:
    """This process holds rows `start`, `start` + 1, ... of a head weight of `total` rows; the others lie with the other
    ranks of `group` (the name of a process group), in their order. A slice may be empty on none of them.

    start and total are numbers, or 0-dim tensors where only the device needs them (`shard_of_logits`).
    """

    group: str
    start: Any
    total: Any

    @property
    def process_group(self) -> Any:
        """The group itself."""
        from torch.distributed import distributed_c10d

        return distributed_c10d._resolve_process_group(self.group)  # type: ignore

    @property
    def most(self) -> int:
        """The largest slice when the vocabulary is split as torch.chunk does: what every rank plans its chunks for."""
        return -(-self.total // torch.distributed.get_world_size(self.process_group))

    def labels(self, target: Tensor, own: int, ignore_index: int) -> Tensor:
        """Global targets as the kernels of a slice of `own` rows read them: [0, own) here, `own` with another rank, -1
        with nobody, `IGNORED`.
        """
        local = target.long() - self.start
        elsewhere = torch.where((target >= 0) & (target < self.total), own, -1)
        y = local.where((local >= 0) & (local < own), elsewhere)
        return y.where(target != ignore_index, IGNORED)

    def combined(self, mine: LogpStats, labels: Tensor, own: int) -> LogpStats:
        """The whole vocabulary's statistics from every rank's, by one all-gather."""
        n, wide = labels.shape[0], mine.top.dtype
        offset = torch.full_like(mine.top, own) if mine.gaps.numel() else mine.gaps
        first = (mine.argmax + self.start).to(wide)  # exact: fewer than 2^24 classes
        optional = (mine.entropy, mine.gaps, offset, first)
        given = [part for part in optional if part.numel() == n]
        packed = torch.stack([mine.logp + mine.log_total, mine.top, mine.log_total, *given])
        x_y, tops, totals, *rest = self._gathered(packed).unbind(1)
        there = iter(rest)
        entropies, gaps, counts, firsts = (
            next(there) if part.numel() == n else None for part in optional
        )
        top = tops.where(totals > -torch.inf, -torch.inf).amax(0)
        top = top.where(top > -torch.inf, 0.0)
        shift = tops - top
        log_total = (shift + totals).logsumexp(0)
        absent = torch.where(labels == IGNORED, 0.0, torch.nan).to(wide)
        known = labels >= 0
        logp = ((x_y + shift).amax(0) - log_total).where(known, absent)
        entropy, argmax, gap = mine.entropy, mine.argmax, mine.gaps
        if entropies is not None:
            share = (shift + totals - log_total).exp()
            mean_gap = (share * (totals - entropies + shift)).where(share > 0, 0.0).sum(0)
            entropy = (log_total - mean_gap).where(known, absent)
        if gaps is not None and counts is not None:
            gap = (gaps + counts * shift).sum(0).where(known, absent)
        if firsts is not None:
            best = tops.argmax(0)  # the first rank among equals
            argmax = firsts.gather(0, best[None])[0].long().where(known, -1)
        return LogpStats(logp, top, log_total, entropy, argmax, gap, labels)

    def _gathered(self, mine: Tensor) -> Tensor:
        """`[ranks, *mine.shape]`."""
        group = self.process_group
        ranks = torch.distributed.get_world_size(group)
        everyone = mine.new_empty((ranks * mine.shape[0], *mine.shape[1:]))
        _all_gather(everyone, mine, group)
        return everyone.view(ranks, *mine.shape)


def _all_gather(everyone: Tensor, mine: Tensor, group: Any) -> None:
    """Every rank's `mine` into `everyone`, in the order of ranks."""
    dist: Any = torch.distributed
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # until 2.12
    gather(everyone, mine, group=group)


def local_head(
    op: str, weight: Tensor, bias: Tensor | None, group: Any, tokens: int = 0
) -> tuple[Tensor, Tensor | None, VocabShard | None]:
    """A head as its local tensors and where they belong.

    A DTensor split along its rows on one mesh dimension says itself where; its local part is differentiable. For a
    plain tensor with `group`, every rank's `V_local` is asked for at every call (one small collective and one wait;
    slices in the order of the ranks, none of them empty), and its number of `tokens`. The answer is not remembered: it
    depends on all sizes, and a rank knows its own. Of 50 and of 49 classes on three ranks two hold 17 each time; those
    would find an answer where the third asks, and it would wait forever. A DTensor needs no question.

    Raises:
        ValueError: a DTensor of another layout, or one together with group; a slice that is empty or larger than
            torch.chunk's; ranks with different numbers of tokens.
    """
    if is_dtensor(weight):
        require(group is None, f"{op}: a DTensor weight brings its own group; leave group=None.")
        return _of_dtensor(op, weight, bias)
    if _alone(group):
        return weight, bias, None
    told = _told((weight.shape[0], tokens), weight.device, group).tolist()
    counts, everyones = [classes for classes, _ in told], [n for _, n in told]
    require(
        min(everyones) == max(everyones),
        f"{op}: every rank must give the same hidden states and targets; got {everyones} tokens, rank by rank.",
    )
    before = counts[: torch.distributed.get_rank(group)]
    shard = VocabShard(group.group_name, sum(before), sum(counts))
    require(
        0 < min(counts) and max(counts) <= shard.most,
        f"{op}: every rank must hold {shard.most} classes of the vocabulary, the last ones perhaps fewer but some; got "
        f"{counts}, rank by rank.",
    )
    return weight, bias, shard


def shard_of_logits(logits: Tensor, group: Any) -> VocabShard | None:
    """Where this rank's columns of logits `[N, V_local]` belong; None if it has all of them.

    The host does not wait: one small collective, whose answer stays on the device.
    """
    if _alone(group):
        return None
    own = logits.shape[1]
    ends = _told((own,), logits.device, group)[:, 0].cumsum(0)
    return VocabShard(group.group_name, ends[torch.distributed.get_rank(group)] - own, ends[-1])


def _alone(group: Any) -> bool:
    return group is None or torch.distributed.get_world_size(group) == 1


def _told(mine: tuple[int, ...], device: torch.device, group: Any) -> Tensor:
    """Every rank's numbers, `[ranks, len(mine)]` int64."""
    ranks, n = torch.distributed.get_world_size(group), len(mine)
    everyones = torch.empty(ranks * n, dtype=torch.int64, device=device)
    # Filled on the device: a copy would make the host wait.
    given = torch.cat([torch.full((1,), value, device=device) for value in mine])
    _all_gather(everyones, given, group)
    return everyones.view(ranks, n)


def _of_dtensor(op: str, weight: Any, bias: Any) -> tuple[Tensor, Any, VocabShard | None]:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    def local(t: Any) -> Tensor:
        return t.to_local() if is_dtensor(t) else t

    mesh, placements = weight.device_mesh, weight.placements
    split = [i for i, p in enumerate(placements) if not isinstance(p, Replicate)]
    if not split:
        return local(weight), local(bias), None
    plain = (
        len(split) == 1
        and isinstance(placements[split[0]], Shard)
        and placements[split[0]].dim == 0
    )
    require(
        plain and (bias is None or (is_dtensor(bias) and bias.placements == placements)),
        f"{op}: a sharded head must be split along its rows on one mesh dimension, its bias likewise; got "
        f"{placements} and {getattr(bias, 'placements', type(bias).__name__)}. Call the loss inside the head module's "
        "forward, where FSDP has gathered its part.",
    )  # fmt: skip
    _, offset = compute_local_shape_and_global_offset(weight.shape, mesh, placements)
    shard = VocabShard(mesh.get_group(split[0]).group_name, offset[0], weight.shape[0])
    return local(weight), local(bias), shard
