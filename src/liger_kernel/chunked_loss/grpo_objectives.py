"""GRPO and its relatives, as functions of log-probabilities.

    A advantage of the sequence    lp log-prob    r = lp - lp_old    rho = exp(r), or exp(mean of r over the sequence)

    grpo bnpo dr_grpo dapo luspo   -min(rho' A, clip(rho, 1 - eps_low, 1 + eps_high) A)    rho' = min(rho, delta)
    cispo                          -sg[min(rho, eps_high)] A lp
    sapo                           -A sigmoid(tau (rho - 1)) 4 / tau        tau by the sign of A
    vespo                          -sg[phi] A lp        phi = exp(lambda + k log w - lambda w), w = exp(sum of r)

times the ratio of trainer to sampler (vespo: inside w), plus beta k3 [times rho], minus entropy_coef entropy. A loss is
the sum over the tokens of these terms times weights that the mask alone decides (`token_weights`). So a loss is local
to tokens, except where one sequence shares one ratio: rho at sequence level, phi.

Every tensor is `[b, T]`, a few whole sequences, or `[C]`, any tokens, if nothing is shared by a sequence.
Papers: GRPO arXiv 2402.03300, Dr. GRPO 2503.20783, DAPO 2503.14476, CISPO 2506.13585, GSPO 2507.18071, SAPO 2511.20347.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from liger_kernel.ops._op import choice, require

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")
BY_ITEMS = ("dapo", "cispo", "vespo")  # divided by the number of tokens of the global batch
_CLIPPED = LOSS_TYPES[:5]
_OP = "GRPO"
_MAX_LOG_RATIO = 80.0  # exp stays finite: where clipping drops rho, its gradient is 0, not 0 * inf
_LOG_W = (math.log(1e-8), 20.0)  # range of log w, and of the log of a sampler ratio, in vespo


@dataclass(frozen=True)
class GRPOOptions:
    """Which loss; the names are those of `LigerFusedLinearGRPOLoss`."""

    beta: float = 0.04
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    loss_type: str = "dapo"
    max_completion_length: int | None = None
    importance_sampling_level: str = "token"
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    delta: float | None = None
    use_bias_correction_kl: bool = False
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    entropy_coef: float = 0.0

    @property
    def by_sequence(self) -> bool:
        """Whether the tokens of a sequence depend on each other."""
        return self.importance_sampling_level == "sequence" or self.loss_type == "vespo"

    def check(self) -> None:
        """ValueError for values out of range, and for options this loss would ignore."""
        choice(_OP, "loss_type", self.loss_type, LOSS_TYPES)
        choice(
            _OP, "importance_sampling_level", self.importance_sampling_level, ("token", "sequence")
        )
        require(
            self.loss_type in _CLIPPED or self.importance_sampling_level == "token",
            f"{_OP}: loss_type={self.loss_type!r} works at token level; importance_sampling_level='sequence' needs one "
            f"of {', '.join(_CLIPPED)}.",
        )
        require(
            self.loss_type in _CLIPPED or self.delta is None,
            f"{_OP}: loss_type={self.loss_type!r} has no use for delta={self.delta}; it bounds the ratio in "
            f"{', '.join(_CLIPPED)}. Pass delta=None.",
        )
        require(
            self.delta is None or self.delta > 0,
            f"{_OP}: delta bounds the ratio from above and must be positive; got {self.delta}.",
        )
        for name in ("sapo_temperature_pos", "sapo_temperature_neg"):
            _positive_temperature(name, getattr(self, name))

    def check_denominator(self) -> None:
        """ValueError if tokens cannot be weighted, which a loss that is not reduced need not do."""
        require(
            self.loss_type != "dr_grpo" or self.max_completion_length is not None,
            f"{_OP}: loss_type='dr_grpo' divides by max_completion_length; pass it (the length completions may have).",
        )


@dataclass(frozen=True)
class Samples:
    """What is known of `[B, T]` sampled tokens before the policy's log-probs are.

    mask       `[B, T]` bool        weight   `[B, T]` from `token_weights`     advantages  `[B, 1]`
    old, ref   `[B, T]` log-probs, None for the policy's own and for no KL
    is_ratio   `[B, 1]` or `[B, T]` probability under the trainer / under the sampler, or None
    phi        `[B, 1]` vespo's weight, None to compute it
    """

    mask: Tensor
    weight: Tensor
    advantages: Tensor
    old: Tensor | None = None
    ref: Tensor | None = None
    is_ratio: Tensor | None = None
    phi: Tensor | None = None

    def sequences(self, start: int, stop: int) -> "Samples":
        """Those of some sequences, `[stop - start, T]`."""
        return self._each(lambda x: x[start:stop])

    def flat(self) -> "Samples":
        """Those of all tokens, `[B T]` each."""
        shape = self.mask.shape
        return self._each(lambda x: x.expand(shape).reshape(-1))

    def tokens(self, index: Tensor) -> "Samples":
        """Of flat ones those at some positions, `[C]`."""
        return self._each(lambda x: x.index_select(0, index))

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Samples":
        fields = (self.mask, self.weight, self.advantages, self.old, self.ref, self.is_ratio, self.phi)  # fmt: skip
        return Samples(*(None if x is None else change(x) for x in fields))  # type: ignore[arg-type]


def k3_loss_fn(log_p: Tensor, log_q: Tensor) -> Tensor:
    """exp(log_p - log_q) - (log_p - log_q) - 1, the k3 estimate of KL(q || p) from samples of q; never negative."""
    gap = log_p - log_q
    return torch.expm1(gap) - gap


def clip_coef_fn(
    coef: Tensor, epsilon_low: float, epsilon_high: float, loss_type: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The clipped ratio, and where it was below and above its bounds.

    Bounds are 1 - epsilon_low and 1 + epsilon_high; in cispo epsilon_high itself is the only one, and the result is
    constant.
    """
    if loss_type == "cispo":
        never = torch.zeros_like(coef, dtype=torch.bool)
        return coef.detach().clamp(max=epsilon_high), never, coef > epsilon_high
    low, high = 1 - epsilon_low, 1 + epsilon_high
    return coef.clamp(low, high), coef < low, coef > high


def sapo_loss_fn(importance_ratio: Tensor, temperature: float) -> Tensor:
    """The soft gate sigmoid(temperature * (rho - 1)) * 4 / temperature; its slope at rho = 1 is 1."""
    _positive_temperature("sapo temperature", temperature)
    return torch.sigmoid(temperature * (importance_ratio - 1)) * (4 / temperature)


def get_gamma_weights(
    advantages: Tensor, log_ratio_per_token: Tensor, mask: Tensor, importance_sampling_ratio: Tensor | None = None,
    k_pos: float = 2.0, lambda_pos: float = 3.0, k_neg: float = 3.0, lambda_neg: float = 2.0,
) -> Tensor:  # fmt: skip
    """phi `[B, 1]` of vespo, constant: exp(lambda + k log w - lambda w), 1 at w = 1.

    log w is the masked sum of the log-ratios `[B, T]` (each within +-20), plus the log of the sampler ratio: `[B, T]`,
    summed likewise, or `[B]` or `[B, 1]`, one a sequence. k and lambda go by the sign of advantages `[B]` or `[B, 1]`.
    """
    positive = advantages.reshape(-1, 1) >= 0
    each = log_ratio_per_token.detach().clamp(-20.0, 20.0)
    log_w = torch.where(mask != 0, each, 0.0).sum(-1, keepdim=True)
    if importance_sampling_ratio is not None:
        ratio = importance_sampling_ratio.detach()
        ratio = (ratio[:, None] if ratio.dim() == 1 else ratio).log().clamp(*_LOG_W)
        shared = ratio.shape[-1] == 1
        log_w = log_w + (ratio if shared else torch.where(mask != 0, ratio, 0.0).sum(-1, True))
    log_w = log_w.clamp(*_LOG_W)
    k = torch.where(positive, log_w.new_full((), k_pos), log_w.new_full((), k_neg))
    scale = torch.where(positive, log_w.new_full((), lambda_pos), log_w.new_full((), lambda_neg))
    return torch.exp(scale + k * log_w - scale * log_w.exp())


def token_weights(
    mask: Tensor, full_mask: Tensor, options: GRPOOptions, normalizer: Tensor | None, dtype: torch.dtype
) -> Tensor:  # fmt: skip
    """The weight of each token of some sequences in the loss, `[b, T]`; 0 where masked.

    grpo, sapo           1 / (B length)     mean over sequences of the mean over their tokens
    bnpo                 1 / tokens
    dr_grpo              1 / (B max_completion_length)
    dapo, cispo, vespo   1 / normalizer     tokens of the global batch / number of ranks
    luspo                length / (B T)

    mask `[b, T]`, a part of full_mask `[B, T]`.
    """
    count, (batch, width) = mask.to(dtype), full_mask.shape
    length = count.sum(-1, keepdim=True).clamp(min=1)
    kind = options.loss_type
    if kind in ("grpo", "sapo"):
        return count / (batch * length)
    if kind == "bnpo":
        return count / full_mask.sum().clamp(min=1)
    if kind == "luspo":
        return count * length / (batch * width)
    if kind in BY_ITEMS:
        if normalizer is None:
            raise ValueError(f"{_OP}: loss_type={kind!r} needs a normalizer.")
        return count / normalizer
    options.check_denominator()
    return count / (batch * (options.max_completion_length or 1))


def token_terms(
    logp: Tensor, entropy: Tensor | None, given: Samples, options: GRPOOptions
) -> tuple[Tensor, Tensor | None, Tensor]:
    """-> loss term, KL (None if beta is 0) and whether the ratio was clipped, of each token; anything where masked."""
    mask = given.mask
    # What the caller holds at masked places may be NaN or -inf: neither may meet a product.
    logp = torch.where(mask, logp, 0.0)
    old = logp.detach() if given.old is None else torch.where(mask, given.old, 0.0)
    log_ratio = logp - old
    shared = log_ratio
    if options.importance_sampling_level == "sequence":
        shared = log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    rho = torch.exp(shared.clamp(max=_MAX_LOG_RATIO))
    loss, clipped = _surrogate(rho, log_ratio, logp, given, options)
    if given.is_ratio is not None and options.loss_type != "vespo":
        loss = loss * torch.where(mask, given.is_ratio, 0.0)
    kl = None
    if options.beta != 0 and given.ref is not None:
        kl = k3_loss_fn(torch.where(mask, given.ref, 0.0), logp)
        kl = kl * rho if options.use_bias_correction_kl else kl
        loss = loss + options.beta * kl
    if entropy is not None:
        loss = loss - options.entropy_coef * entropy
    return loss, kl, clipped & mask


def _surrogate(
    rho: Tensor, log_ratio: Tensor, logp: Tensor, given: Samples, o: GRPOOptions
) -> tuple[Tensor, Tensor]:
    """The term of the policy gradient, and where clipping acts."""
    a = given.advantages
    if o.loss_type == "sapo":
        gate = torch.where(
            a > 0,
            sapo_loss_fn(rho, o.sapo_temperature_pos),
            sapo_loss_fn(rho, o.sapo_temperature_neg),
        )
        return -a * gate, torch.zeros_like(rho, dtype=torch.bool)
    if o.loss_type == "vespo":
        shape = (o.vespo_k_pos, o.vespo_lambda_pos, o.vespo_k_neg, o.vespo_lambda_neg)
        phi = given.phi
        if phi is None:
            phi = get_gamma_weights(a, log_ratio, given.mask, given.is_ratio, *shape)
        return -phi * a * logp, torch.zeros_like(rho, dtype=torch.bool)
    clipped, below, above = clip_coef_fn(rho, o.epsilon_low, o.epsilon_high, o.loss_type)
    acts = (below & (a < 0)) | (above & (a > 0))
    if o.loss_type == "cispo":
        return -clipped * a * logp, acts
    free = rho if o.delta is None else rho.clamp(max=o.delta)
    return -torch.minimum(free * a, clipped * a), acts


def share(
    logp: Tensor, entropy: Tensor | None, given: Samples, options: GRPOOptions
) -> tuple[Tensor, Tensor]:
    """These tokens' share of the loss, and `[2]`: sum of their KL, number of clipped ones (constants)."""
    loss, kl, clipped = token_terms(logp, entropy, given, options)
    drift = logp.new_zeros(()) if kl is None else torch.where(given.mask, kl.detach(), 0.0).sum()
    return (loss * given.weight).sum(), torch.stack([drift, clipped.sum().to(logp.dtype)])


def _positive_temperature(name: str, value: float) -> None:
    require(value > 0, f"{_OP}: {name} must be positive; got {value}.")
