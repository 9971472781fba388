"""The preference losses as formulas: functions of log-probabilities, one loss a pair or sequence.

    lw, ll    log-probabilities of the chosen and the rejected sequence: the sum over its tokens, or their mean
    rw, rl    the same less the reference model's: log-ratios
    d         beta (rw - rl), or beta (lw - ll) where there is no reference

All arguments called chosen, rejected, logps or ratios are `[n]` tensors, results too. Nothing here
knows of tokens, masks or the head.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from liger_kernel.ops._op import choice, require


def logistic(d: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """-(1 - s) log sigmoid(d) - s log sigmoid(-d): labels are wrong with probability s.

    Conservative DPO (Mitchell, "A note on DPO with noisy preferences", 2023).
    """
    if not label_smoothing:
        return -logsigmoid(d)
    return -(1 - label_smoothing) * logsigmoid(d) - label_smoothing * logsigmoid(-d)


def cpo(chosen: Tensor, rejected: Tensor, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """Contrastive preference optimisation (arXiv 2401.08417)."""
    return logistic(beta * (chosen - rejected), label_smoothing)


def simpo(
    chosen: Tensor, rejected: Tensor, beta: float, gamma: float, label_smoothing: float = 0.0
) -> Tensor:
    """SimPO (arXiv 2405.14734) on length-normalised log-probabilities; gamma is the margin of d."""
    return logistic(beta * (chosen - rejected) - gamma, label_smoothing)


def log_odds(logps: Tensor) -> Tensor:
    """log(p / (1 - p)) of length-normalised log-probabilities.

    A probability that rounds to one counts as 1 - eps, with no gradient: its odds are finite.
    """
    logps = logps.clamp(max=-torch.finfo(logps.dtype).eps)
    return logps - torch.log(-torch.expm1(logps))


def orpo(log_odds_ratio: Tensor, beta: float) -> Tensor:
    """ORPO (arXiv 2403.07691) of the difference of the two sequences' log-odds."""
    return -beta * logsigmoid(log_odds_ratio)


def kto(ratios: Tensor, desirable: Tensor, beta: float, kl: Tensor | float | None = None) -> Tensor:
    """KTO (arXiv 2402.01306): 1 - sigmoid(+-beta (r - kl)), minus for undesirable sequences."""
    d = beta * (ratios if kl is None else ratios - kl)
    return 1 - torch.sigmoid(torch.where(desirable, d, -d))


# DPO and the losses named as its types: each takes win = beta rw, lose = beta rl, beta, s (label smoothing), tau.


def _sigmoid(win: Tensor, lose: Tensor, beta: float, s: float, tau: float) -> Tensor:
    """DPO (arXiv 2305.18290), smoothed as conservative DPO."""
    return logistic(win - lose, s)


def _hinge(win: Tensor, lose: Tensor, beta: float, s: float, tau: float) -> Tensor:
    """RSO / SLiC (arXiv 2309.06657)."""
    return torch.relu(1 - (win - lose))


def _ipo(win: Tensor, lose: Tensor, beta: float, s: float, tau: float) -> Tensor:
    """IPO (arXiv 2310.12036, eq. 17 with tau = beta): (rw - rl - 1/(2 beta))^2.

    The ratios are means over tokens: the paper's authors confirmed it, TRL documents and does so.
    """
    return ((win - lose) / beta - 1 / (2 * beta)) ** 2


def _exo_pair(win: Tensor, lose: Tensor, beta: float, s: float, tau: float) -> Tensor:
    """EXO (arXiv 2402.00856, eq. 16): KL from the model's choice to the smoothed label."""
    d = win - lose
    return d.sigmoid() * (logsigmoid(d) - math.log1p(-s)) + (-d).sigmoid() * (
        logsigmoid(-d) - math.log(s)
    )


def _nca_pair(win: Tensor, lose: Tensor, beta: float, s: float, tau: float) -> Tensor:
    """Noise contrastive alignment (arXiv 2402.05369)."""
    return -logsigmoid(win) - 0.5 * logsigmoid(-win) - 0.5 * logsigmoid(-lose)


def _robust(win: Tensor, lose: Tensor, beta: float, s: float, tau: float) -> Tensor:
    """Robust DPO (arXiv 2403.00409): unbiased under labels flipped with probability s."""
    d = win - lose
    return (-(1 - s) * logsigmoid(d) + s * logsigmoid(-d)) / (1 - 2 * s)


def _bco_pair(win: Tensor, lose: Tensor, beta: float, s: float, tau: float) -> Tensor:
    """Binary classifier optimisation (arXiv 2404.04656) without the running reward shift."""
    return -logsigmoid(win) - logsigmoid(-lose)


def _sppo_hard(win: Tensor, lose: Tensor, beta: float, s: float, tau: float) -> Tensor:
    """SPPO with hard labels (arXiv 2405.00675)."""
    return (win / beta - 0.5 / beta) ** 2 + (lose / beta + 0.5 / beta) ** 2


def _apo_zero(win: Tensor, lose: Tensor, beta: float, s: float, tau: float) -> Tensor:
    """APO-zero (arXiv 2408.06266, eq. 7): chosen up, rejected down."""
    return 1 - win.sigmoid() + lose.sigmoid()


def _apo_down(win: Tensor, lose: Tensor, beta: float, s: float, tau: float) -> Tensor:
    """APO-down (arXiv 2408.06266, eq. 8): chosen down, rejected down more."""
    return win.sigmoid() + 1 - (win - lose).sigmoid()


def _discopop(win: Tensor, lose: Tensor, beta: float, s: float, tau: float) -> Tensor:
    """DiscoPOP (arXiv 2406.08414, eq. 5): logistic and exponential loss, blended by sigmoid(d / tau)."""
    d = win - lose
    # exp(-d) alone overflows where its weight vanishes
    return -logsigmoid(d) * (-d / tau).sigmoid() + torch.exp(logsigmoid(d / tau) - d)


DPO_LOSSES: dict[str, Callable[[Tensor, Tensor, float, float, float], Tensor]] = {
    "sigmoid": _sigmoid,
    "hinge": _hinge,
    "ipo": _ipo,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "robust": _robust,
    "bco_pair": _bco_pair,
    "sppo_hard": _sppo_hard,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "discopop": _discopop,
}


def dpo(
    chosen_ratios: Tensor,
    rejected_ratios: Tensor,
    beta: float,
    loss_type: str = "sigmoid",
    label_smoothing: float = 0.0,
    discopop_tau: float = 0.05,
) -> Tensor:
    """The DPO family: `DPO_LOSSES[loss_type]` of two log-ratios."""
    win, lose = beta * chosen_ratios, beta * rejected_ratios
    return DPO_LOSSES[loss_type](win, lose, beta, label_smoothing, discopop_tau)


# Options


def check_smoothing(op: str, label_smoothing: float) -> None:
    """ValueError unless label_smoothing is a probability."""
    require(
        0 <= label_smoothing <= 1,
        f"{op}: label_smoothing must lie in [0, 1]; got {label_smoothing}.",
    )


def check_dpo(
    op: str, loss_type: str, beta: float, label_smoothing: float, discopop_tau: float
) -> None:
    """ValueError for a loss type nobody knows, or options it cannot take."""
    choice(op, "loss_type", loss_type, tuple(DPO_LOSSES))
    require(beta > 0, f"{op}: beta must be positive; got {beta}.")
    require(discopop_tau > 0, f"{op}: discopop_tau must be positive; got {discopop_tau}.")
    if loss_type == "sigmoid":
        check_smoothing(op, label_smoothing)
    elif loss_type == "exo_pair":
        require(
            0 < label_smoothing < 1,
            f"{op}: loss_type='exo_pair' takes the logarithm of label_smoothing, which must lie in (0, 1); "
            f"got {label_smoothing}. 1e-3 is usual.",
        )
    elif loss_type == "robust":
        require(
            0 <= label_smoothing < 0.5,
            f"{op}: loss_type='robust' needs label_smoothing in [0, 0.5); got {label_smoothing}.",
        )
    else:
        require(
            label_smoothing == 0,
            f"{op}: label_smoothing={label_smoothing} has no meaning for loss_type={loss_type!r}; "
            "leave it 0, or use 'sigmoid', 'robust' or 'exo_pair'.",
        )
