"""The base class of paired preference losses: bring a formula, get the engine."""

from typing import Any

from torch import Tensor

from liger_kernel.chunked_loss.preference import (
    HeadOptions,
    check_chunk_size,
    paired_loss,
    reference_of,
)


class LigerFusedLinearPreferenceBase:
    """A loss of pairs. Subclass it, define `preference_loss_fn`, call `apply`.

        class Margin(LigerFusedLinearPreferenceBase):
            @staticmethod
            def preference_loss_fn(chosen_logps, rejected_logps, full_target, beta=0.1):
                losses = -beta * (chosen_logps - rejected_logps)
                return losses.sum() / (full_target.shape[0] // 2)

        loss, metrics = Margin.apply(hidden, weight, target)

    Autograd is the engine's: there is no backward to write. A subclass may give `apply` other arguments by overriding
    `forward` as a classmethod `forward(cls, ctx, ...)` that ends in `super().forward(cls=cls, ctx=ctx, ...)`.
    """

    @staticmethod
    def preference_loss_fn(*args: Any, **kwargs: Any) -> Any:
        """(chosen_logps, rejected_logps, full_target, beta=..., **loss_kwargs) -> loss or (loss, *metrics).

        Gets the pairs of one chunk: `[k]` log-probabilities; full_target is the whole batch's `[2n, T]`. With a
        reference also ref_chosen_logps and ref_rejected_logps `[k]`. The loss is the chunk's share of the mean over
        n pairs: shares are added, and so are metrics that are scalars; vectors are joined.
        """
        raise NotImplementedError("A preference loss must define preference_loss_fn.")

    @staticmethod
    def forward(
        cls: Any,  # pyright: ignore[reportSelfClsParameterName]
        ctx: Any, _input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None,
        chunk_size: int = 1, ignore_index: int = -100, alpha: float = 1.0, beta: float = 0.1,
        compute_nll_loss: bool = True, nll_target: Tensor | None = None, compiled: bool = True,
        use_ref_model: bool = False, ref_input: Tensor | None = None, ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None, average_log_prob: bool = True, head: HeadOptions | None = None,
        **loss_kwargs: Any,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
        """alpha * NLL + the preference loss of `[2n, T, H]` hidden states, chosen half first.

        Args:
            cls: the class whose `preference_loss_fn` is the formula. ctx: unused.
            _input: `[2n, T, H]`. weight: `[V, H]`. target: `[2n, T]`, already shifted. bias: `[V]` or None.
            chunk_size, compiled: accepted; chunks follow from head.memory_budget, and nothing needs compiling.
            alpha, compute_nll_loss, nll_target: the NLL over chosen tokens; nll_target instead of target if given.
            use_ref_model: compare with a reference: ref_input `[2n, T, H']`, ref_weight `[V, H']`, ref_bias.
            average_log_prob: a sequence counts with the mean of its tokens instead of their sum.
            head: transforms of the logits, memory budget.
            loss_kwargs: handed to `preference_loss_fn`, with beta.
        Returns:
            loss, (chosen_logps `[n]`, rejected_logps `[n]`, chosen_logits_mean, rejected_logits_mean, nll_loss,
            *metrics of the formula). fp32; the loss is differentiable in _input, weight and bias.
        Raises:
            ValueError: shapes that do not fit, an odd batch, a missing reference, options out of range.
        """
        op = cls.__name__
        check_chunk_size(op, chunk_size)
        return paired_loss(
            op, cls.preference_loss_fn, _input, weight, target, bias,
            reference_of(op, use_ref_model, ref_input, ref_weight, ref_bias), ignore_index=ignore_index, alpha=alpha,
            compute_nll_loss=compute_nll_loss, nll_target=nll_target, average=average_log_prob,
            options=head or HeadOptions(), loss_kwargs={"beta": beta, **loss_kwargs},
        )  # fmt: skip

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        """`forward` without cls and ctx, by position or keyword."""
        if cls.forward is LigerFusedLinearPreferenceBase.forward:
            return cls.forward(cls, None, *args, **kwargs)
        return cls.forward(None, *args, **kwargs)
