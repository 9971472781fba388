"""Per-token negative log-probabilities of a linear head, as reinforcement-learning trainers call them.

    nll = lse(z / temperature) - z_y / temperature        z = h W^T        [M] fp32

A thin form of `linear_logprob` under the name, argument order and checks of the contract.
"""

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops._op import require
from liger_kernel.ops.linear_logprob import LogprobOutput, linear_logprob


class LigerFusedLinearScaledCrossEntropyFunction:
    """The function under the name of the contract."""

    @staticmethod
    def apply(
        _input: Tensor, weight: Tensor, target: Tensor, temperature: float = 1.0, ignore_index: int = -100,
        m_tiles_per_cluster: int = 1, return_entropy: bool = False, selected_token_ids: Tensor | None = None,
    ) -> Any:  # fmt: skip
        """Negative log-probabilities of `target`, unreduced and differentiable in _input and weight.

        Args:
            _input: `[M, H]` hidden states. weight: `[V, H]` of the same dtype. target: `[M]` int64, `ignore_index`
                where there is none: 0 everywhere, no gradient.
            temperature: divides the logits; finite and positive.
            m_tiles_per_cluster: checked and ignored: there is nothing to tune here.
            return_entropy: also each token's entropy `[M]`, in _input's dtype, differentiable.
            selected_token_ids: `[K]` int64; also these ids' log-probabilities `[M, K]` fp32, differentiable.
        Returns:
            nll `[M]` fp32 alone, or a tuple nll [, entropy] [, selected].
        Memory:
            Keeps its inputs; the logits are made a chunk at a time and again in backward.
        Raises:
            TypeError: dtypes or kinds of arguments; ValueError: shapes, devices, ranges;
            IndexError: a target out of range, on a CPU (elsewhere that row is NaN).
        """
        _check(
            _input,
            weight,
            target,
            temperature,
            m_tiles_per_cluster,
            return_entropy,
            selected_token_ids,
        )
        found = linear_logprob(
            _input, weight, target, temperature=float(temperature), ignore_index=ignore_index,
            return_entropy=return_entropy, selected_token_ids=selected_token_ids,
        )  # fmt: skip
        return _results(found, _input.dtype)


class LigerFusedLinearScaledCrossEntropyTPFunction:
    """The function for a head whose rows are split over a group, under the name of the contract."""

    @staticmethod
    def apply(
        _input: Tensor, weight: Tensor, target: Tensor, tp_group: Any, temperature: float = 1.0,
        ignore_index: int = -100, tiles_per_reduce: int = 1, return_entropy: bool = False,
    ) -> Any:  # fmt: skip
        """As `LigerFusedLinearScaledCrossEntropyFunction`, the same result on every rank.

        Args:
            _input: `[M, H]`, the same on every rank; its gradient is summed over the group.
            weight: `[V_local, H]`, this rank's rows, in the order of ranks (equal parts, the last ones perhaps
                smaller); its gradient is local. target: `[M]` int64, ids of the whole vocabulary.
            tp_group: the torch.distributed group.
            tiles_per_reduce: 1, 2 or 4; checked and ignored.
        Raises:
            RuntimeError: torch.distributed is not initialised. Otherwise as there.
        """
        name = "LigerFusedLinearScaledCrossEntropyTPFunction"
        ready = torch.distributed.is_available() and torch.distributed.is_initialized()
        require(ready, f"{name}: torch.distributed is not initialised.", RuntimeError)
        _check(_input, weight, target, temperature, tiles_per_reduce, return_entropy, None)
        require(
            tiles_per_reduce in (1, 2, 4),
            f"{name}: tiles_per_reduce must be 1, 2 or 4; got {tiles_per_reduce}.",
        )
        found = linear_logprob(
            _input, weight, target, temperature=float(temperature), ignore_index=ignore_index,
            return_entropy=return_entropy, group=tp_group,
        )  # fmt: skip
        return _results(found, _input.dtype)


def _results(found: LogprobOutput, dtype: torch.dtype) -> Any:
    """nll alone, or nll [, entropy] [, selected]."""
    entropy = () if found.entropy is None else (found.entropy.to(dtype),)
    many = -found.logp, *entropy, *(() if found.selected is None else (found.selected,))
    return many if len(many) > 1 else many[0]


def _check(
    hidden: Tensor, weight: Tensor, target: Tensor, temperature: Any, tiles: Any, return_entropy: Any,
    ids: Tensor | None,
) -> None:  # fmt: skip
    name = "LigerFusedLinearScaledCrossEntropyFunction"
    number = isinstance(temperature, Real) and not isinstance(temperature, bool)
    require(number, f"{name}: temperature must be a number; got {temperature!r}.", TypeError)
    whole = isinstance(tiles, int) and not isinstance(tiles, bool)
    require(whole, f"{name}: m_tiles_per_cluster must be an int; got {tiles!r}.", TypeError)
    flag = isinstance(return_entropy, bool)
    require(flag, f"{name}: return_entropy must be a bool; got {return_entropy!r}.", TypeError)
    require(
        hidden.dtype == weight.dtype,
        f"{name}: _input and weight must have one dtype; got {hidden.dtype} and {weight.dtype}.",
        TypeError,
    )
    require(
        target.dtype == torch.int64 and (ids is None or ids.dtype == torch.int64),
        f"{name}: target and selected_token_ids must be int64.",
        TypeError,
    )
    require(
        math.isfinite(temperature) and float(temperature) > 0,
        f"{name}: temperature must be finite and positive; got {temperature}.",
    )
    require(tiles >= 1, f"{name}: m_tiles_per_cluster must be at least 1; got {tiles}.")
    require(
        hidden.dim() == 2 and hidden.numel() > 0 and target.shape == hidden.shape[:1],
        f"{name}: _input must be [M, H] and target [M], not empty; got {list(hidden.shape)} and {list(target.shape)}.",
    )
    devices = {t.device for t in (hidden, weight, target, ids) if t is not None}
    require(len(devices) == 1, f"{name}: all tensors must be on one device; got {devices}.")
    in_range = (
        ids is None
        or ids.device.type != "cpu"
        or bool(((ids >= 0) & (ids < weight.shape[0])).all())
    )
    require(in_range, f"{name}: selected_token_ids must lie in [0, {weight.shape[0]}).")
