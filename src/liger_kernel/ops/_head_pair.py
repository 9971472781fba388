"""What a pass over student and teacher computes, and the launch of the kernel that does: `pair_rows`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from liger_kernel import _env
from liger_kernel.ops._head_pair_kernels import pair_kernel
from liger_kernel.ops._op import dense
from liger_kernel.ops._triton import cdiv, launch, takes_ptx

FORMS = ("kl", "reverse_kl", "jsd", "tvd", "cosine")
Transform = tuple[float, float | None, float]  # pre_scale, softcap, post_scale


@dataclass(frozen=True)
class PairLoss:
    """Which losses a pass computes; formulas: `_head_pair_kernels`.

    form         one of `FORMS`
    teacher      "logits", "log_probs" or "probs"
    parameter    beta of jsd and cosine, eps of "probs"
    temperature  divides the logits of the soft loss, a teacher's too unless it is given as probabilities
    soft, hard   the weights of the two losses in the gradient
    want_hard    whether to compute the hard loss at all
    student_transform, teacher_transform   without the temperature
    """

    form: str
    teacher: str
    parameter: float
    temperature: float
    soft: float
    hard: float
    want_hard: bool
    ignore_index: int
    student_transform: Transform
    teacher_transform: Transform


def factors(of: Transform, temperature: float = 1.0) -> tuple[str, float, float, float]:
    """FORM, inner, outer of `_ce_lanes.transform`, and the constant part of dx/dz."""
    pre, cap, post = of
    scale = pre * post / temperature
    if cap:
        return "capped", pre / cap, cap * post / temperature, scale
    return ("plain" if scale == 1.0 else "scaled"), 1.0, scale, scale


def readable(rows: Tensor, n: int, own: bool) -> int:
    """How many columns of a row may be touched: up to a multiple of 16 in the padding of a buffer that is ours, so that
    accesses stay wide whatever the vocabulary.
    """
    whole = cdiv(n, 16) * 16
    return whole if own and rows.stride(0) >= whole else n


# bytes of a row -> warps of the program that takes it; wider rows 32 (16 but on Hopper), one at a time on every SM
_WARPS = {2 << 10: 1, 8 << 10: 2, 32 << 10: 4, 112 << 10: 8}


def shape(
    logits: Tensor, width: int, itemsize: int, once: bool = False
) -> tuple[int, dict[str, int]]:
    """Programs, and the pieces and warps of each, for rows of `width` elements of at least `itemsize` bytes.

    once: rows are visited once, so that there is nothing to keep in L2.
    """
    n_rows, info = logits.shape[0], _env.device_info(logits.device)
    warps = next((w for size, w in _WARPS.items() if itemsize * width <= size), 8 if once else 0)
    programs = n_rows if warps else min(n_rows, info.sm_count)
    warps = min(warps or (32 if info.arch == "sm_90" else 16), info.max_warps)
    return programs, {"STEPS": 2, "LANES": 32 * warps, "EACH": 16 // itemsize, "num_warps": warps}


def hard_form(loss: PairLoss, padded: bool) -> str:
    """Whether the hard loss needs sums of its own."""
    if not loss.want_hard:
        return "none"
    return "own" if padded or loss.temperature != 1.0 else "same"


def pair_rows(
    loss: PairLoss, logits: Tensor, teacher: Tensor, index: Tensor | None, target: Tensor | None,
    scale: Tensor | None, out: Tensor | None, *, V: int, own: bool = True,
    upstream: tuple[Tensor, Tensor] | None = None, saved: tuple[Tensor, Tensor, Tensor] | None = None,
    stage: str = "whole", slice_: bool = False,
) -> Tensor:  # fmt: skip
    """Soft and hard loss of every row, `[2, C]` fp32, and into `out` the gradient (formulas: `_head_pair_kernels`).

    Args:
        logits: `[C, >= V]` of the student, the first V columns count. teacher: `[C, W]`, W >= V, of any float dtype;
            `[N, W]` with `index` `[C]`, its rows for these. Adjacent columns, any row stride.
        target: `[C]` int64 or int32, or None: every row counts.
        scale: one fp32 number on the device that multiplies the gradient; upstream: `[C]` of soft and hard loss, any
            strides, that do too. None for 1.
        out: `[C, >= V]`, `logits` itself or another buffer, or None for the losses alone.
        own: logits, out, and a teacher of "logits", are buffers whose padding may be overwritten.
        saved: where to leave `[2, C]` maximum and log-sum-exp over it of student and teacher, and `[C]` G.
        stage: "sums" reads those two and makes soft loss and G; "gradient" reads all three and makes nothing but the
            gradient. Then a hard loss at another temperature than 1 needs a third row of the student's: the log of
            the sum of exp(temperature (x - maximum)).
        slice_: the columns are some of a vocabulary: label V is a class elsewhere (not at stage "whole").
    Memory:
        8 bytes a row. No synchronisation.
    """
    n, n_cols, device = logits.shape[0], teacher.shape[1], logits.device
    done = stage == "gradient"
    stats = torch.empty(2, 0 if done else n, dtype=torch.float32, device=device)
    if not loss.want_hard:
        stats[1] = 0
    s_form, in_x, out_x, slope = factors(loss.student_transform, loss.temperature)
    given = loss.teacher != "logits"
    t_form, in_y, out_y, _ = (
        ("plain", 1.0, 1.0, 1.0) if given else factors(loss.teacher_transform, loss.temperature)
    )
    up = (None, 0, None, 0)
    if upstream is not None:
        up = (upstream[0], upstream[0].stride(0), upstream[1], upstream[1].stride(0))
    programs, meta = shape(logits, n_cols, min(logits.element_size(), teacher.element_size()), done)
    args = (
        stats[0], stats[1], *(saved or (None, None, None)), out, 0 if out is None else out.stride(0), logits,
        logits.stride(0), teacher, teacher.stride(0), index, None if target is None else dense(target), scale, *up, n,
        readable(logits, V, own), readable(teacher, n_cols, own and not given),
        0 if out is None else readable(out, V, own), V, n_cols, loss.ignore_index, loss.parameter,
        1.0 - loss.parameter, loss.temperature, loss.soft, loss.hard, in_x, out_x, slope, in_y, out_y,
    )  # fmt: skip
    flags = {
        "FORM": loss.form, "TEACHER": loss.teacher, "HARD": hard_form(loss, n_cols != V), "S_FORM": s_form,
        "T_FORM": t_form, "PADDED": n_cols != V, "STAGE": stage, "SLICE": slice_,
        "PTX": takes_ptx(device),
    }  # fmt: skip
    launch(pair_kernel, (programs,), device, *args, **flags, **meta)
    return stats
