"""Experts that lie with the processes of a group.   out[t] = sum over k of w[t, k] mlp(x[t]; id[t, k])

Each process has its own tokens and the experts [r E, (r + 1) E) of rank r. A token travels once to every rank that
has an expert for it, with its ids and weights; there `fused_moe` runs on what has arrived and adds up, weighted, what
that rank's experts say; one row comes back for each row that went, and the rows of a token are added.

    rows that travel, each way   sum over t of the number of ranks among t's experts <= T min(K, ranks)
    collectives                  counts, rows, weights, ids out and rows back; rows and weights back in backward
    kept for backward            the rows that arrived, beside what `fused_moe` keeps of them

Split sizes are numbers on the host: a call waits for the device once for them. Sums over a token's ranks are taken in a
fixed order, in fp32 for half precision; what a rank sends back has been rounded to x's dtype.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from liger_kernel.ops._op import first_order, require
from liger_kernel.ops.fused_moe import fused_moe

__all__ = ["LigerExpertParallelFusedMoe", "moe_fused"]


def moe_fused(
    X: Tensor, expert_indices: Tensor, expert_weights: Tensor, all_B: Tensor, all_C: Tensor, all_A: Tensor,
    num_experts: int, top_k: int, pg: Any = None,
) -> Tensor:  # fmt: skip
    """Gated experts (SiLU) of chosen tokens, weighted and added, over the processes of a group.

    Args:
        X: `[*, H]`, this process's tokens, as many as there are; fp16, bf16, fp32 (fp64 on the torch path).
        expert_indices: `[*, K]` integers in [0, num_experts), of all experts. Any other belongs to nobody.
        expert_weights: `[*, K]`.
        all_B, all_C: gate and up, `[E, I, H]` each, in X's dtype; E = num_experts / ranks, this process's experts. If
            they are the two halves of one `[E, 2I, H]` tensor, nothing is copied; otherwise they are put together.
        all_A: down, `[E, H, I]`.
        num_experts: experts of all processes together. With E = num_experts every process has them all, and nothing
            travels.
        top_k: K.
        pg: the process group; None is the default group, or this process alone if there is none. Every rank must
            call, also one without tokens, and backward must run on every rank or on none.
    Returns:
        `[*, H]` in X's dtype. Gradients: X, weights, and all_B, all_C, all_A summed over the tokens of all ranks.
    Raises:
        ValueError: shapes that do not belong together; experts that are not spread evenly.
    """
    require(
        expert_indices.shape == expert_weights.shape == (*X.shape[:-1], top_k),
        f"moe_fused: expert_indices and expert_weights must be {[*X.shape[:-1], top_k]} for X {list(X.shape)} and "
        f"top_k = {top_k}; got {list(expert_indices.shape)} and {list(expert_weights.shape)}.",
    )
    require(
        all_B.dim() == 3 and all_B.shape == all_C.shape,
        f"moe_fused: all_B and all_C must both be [E, I, H]; got {list(all_B.shape)} and {list(all_C.shape)}.",
    )
    here, group = all_B.shape[0], _group(pg)
    ranks = 1 if group is None else dist.get_world_size(group)
    require(
        num_experts in (here, here * ranks),
        f"moe_fused: {num_experts} experts on {ranks} processes are {num_experts / ranks:g} on each, and all_B has "
        f"{here}: give every process as many, or each of them all.",
    )
    gate_up = _joined(all_B, all_C)
    if here == num_experts:
        return fused_moe(X, gate_up, all_A, expert_indices, expert_weights)
    ids = expert_indices.reshape(-1, top_k)
    plan = _planned(ids, here, ranks, group)
    x, weights = X.reshape(-1, X.shape[-1]), expert_weights.reshape(-1, top_k)
    rows, row_weights = _Dispatch.apply(plan, x, weights)
    first = here * dist.get_rank(group)
    row_ids = _outwards(ids.int(), plan) - first  # those of other ranks belong to nobody here
    y = fused_moe(rows, gate_up, all_A, row_ids, row_weights)
    return _Combine.apply(plan, y).reshape(X.shape)


class LigerExpertParallelFusedMoe(nn.Module):
    """`moe_fused` over a process group, as a layer without parameters.

    Args:
        process_group: as `pg` of `moe_fused`.
    """

    def __init__(self, process_group: Any = None) -> None:
        super().__init__()
        self.process_group = process_group

    def forward(
        self, hidden_states: Tensor, expert_indices: Tensor, expert_weights: Tensor, all_B: Tensor, all_C: Tensor,
        all_A: Tensor, num_experts: int,
    ) -> Tensor:  # fmt: skip
        """As `moe_fused`, with K from the indices."""
        return moe_fused(
            hidden_states, expert_indices, expert_weights, all_B, all_C, all_A, num_experts,
            expert_indices.shape[-1], self.process_group,
        )  # fmt: skip


def _group(pg: Any) -> Any:
    """None for a process alone."""
    if pg is not None or not (dist.is_available() and dist.is_initialized()):
        return pg
    return dist.group.WORLD


def _joined(gate: Tensor, up: Tensor) -> Tensor:
    """`[E, 2I, H]`: the tensor whose halves gate and up are, or a new one."""
    whole, inner = gate._base, gate.shape[1]
    if (
        whole is not None
        and whole is up._base
        and whole.requires_grad == gate.requires_grad == up.requires_grad
        and whole.shape == (gate.shape[0], 2 * inner, gate.shape[2])
        and whole.stride() == gate.stride() == up.stride()
        and gate.storage_offset() == whole.storage_offset()
        and up.storage_offset() - whole.storage_offset() == inner * whole.stride(1)
    ):
        return whole
    return torch.cat([gate, up], dim=1)


# How rows travel


class _Plan(NamedTuple):
    """Row i goes out with token `token[i]`; the rows go by rank. `slots` `[T, K]` are the rows of a token, `len(token)`
    where there are fewer than K. `send` and `receive` are rows for and from each rank."""

    token: Tensor
    slots: Tensor
    send: list[int]
    receive: list[int]
    group: Any


def _planned(ids: Tensor, experts: int, ranks: int, group: Any) -> _Plan:
    """One row for each rank among a token's experts."""
    rank = torch.where((ids >= 0) & (ids < experts * ranks), ids // experts, ranks)
    top_k = ids.shape[1]
    earlier = torch.ones(top_k, top_k, dtype=torch.bool, device=ids.device).tril(-1)
    again = ((rank[:, :, None] == rank[:, None, :]) & earlier).any(-1)
    rank, pair = rank.masked_fill(again, ranks).flatten().sort(stable=True)
    ends = torch.searchsorted(rank, torch.arange(ranks, device=rank.device), right=True)
    sent = ends.diff(prepend=ends.new_zeros(1))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    send, receive = torch.stack([sent, received]).tolist()
    n = sum(send)
    slots = torch.full_like(pair, n)
    slots[pair[:n]] = torch.arange(n, device=ids.device)
    return _Plan(pair[:n] // top_k, slots.view(ids.shape), send, receive, group)


def _outwards(x: Tensor, plan: _Plan) -> Tensor:
    """`[T, D]` -> the rows that arrive here."""
    rows = x.new_empty(sum(plan.receive), x.shape[1])
    dist.all_to_all_single(rows, x[plan.token], plan.receive, plan.send, group=plan.group)
    return rows


def _homewards(rows: Tensor, plan: _Plan) -> Tensor:
    """The transpose: rows as they arrived -> `[T, D]`, for each token the sum of what came back."""
    n = len(plan.token)
    back = rows.new_empty(n + 1, rows.shape[1])  # the last one stands for no row
    dist.all_to_all_single(back[:n], rows.contiguous(), plan.send, plan.receive, group=plan.group)
    return nn.functional.embedding_bag(plan.slots, back, mode="sum", padding_idx=n)


class _Dispatch(torch.autograd.Function):
    """Tokens and weights in one function, so that backward's collectives come in one order on all ranks."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        ctx.plan = plan
        return _outwards(x, plan), _outwards(weights, plan)

    @staticmethod
    @first_order("moe_fused")
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *(_homewards(grad, ctx.plan) for grad in grads)


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: _Plan, rows: Tensor) -> Tensor:
        ctx.plan = plan
        return _homewards(rows, plan)

    @staticmethod
    @first_order("moe_fused")
    def backward(ctx: Any, dy: Tensor) -> Any:
        return None, _outwards(dy, ctx.plan)
