"""The plain functions, one per op: `liger_kernel.functional.rms_norm(x, weight)`.

Every function takes `impl="triton"` or `impl="torch"` to choose the path of this one call (None:
the choice of `set_impl`, of `LIGER_KERNEL_IMPL`, or else by the tensors), `backend`, the older
spelling of `impl`, and `mode`, which other implementations use to pick a variant of themselves;
ours have none, so it is accepted with one warning. The options, errors and memory of an op are
documented where it is defined, in `liger_kernel.ops.<name>`.
"""

import torch
from torch import Tensor

from liger_kernel import _env
from liger_kernel.ops import _op, _triton
from liger_kernel.ops import cross_entropy as _cross_entropy
from liger_kernel.ops import fused_add_rms_norm as _fused_add_rms_norm
from liger_kernel.ops import fused_linear_cross_entropy as _fused_linear_cross_entropy
from liger_kernel.ops import fused_linear_jsd as _fused_linear_jsd
from liger_kernel.ops import geglu as _geglu
from liger_kernel.ops import jsd as _jsd
from liger_kernel.ops import kl_div as _kl_div
from liger_kernel.ops import layer_norm as _layer_norm
from liger_kernel.ops import rms_norm as _rms_norm
from liger_kernel.ops import rope as _rope
from liger_kernel.ops import softmax as _softmax
from liger_kernel.ops import swiglu as _swiglu

__all__ = [
    "cross_entropy",
    "fused_add_rms_norm",
    "fused_linear_cross_entropy",
    "fused_linear_jsd",
    "geglu",
    "jsd",
    "kl_div",
    "layer_norm",
    "rms_norm",
    "rope",
    "softmax",
    "swiglu",
]

_Outputs = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]


def available_impls(op_name: str, device: torch.device | str | None = None) -> list[str]:
    """The implementations of an op that run on `device`, the preferred one first.

    Args:
        op_name: one of the functions of this module.
        device: a device or its type; None for the accelerator if there is one, else the CPU.
    Raises:
        ValueError: an op this package does not have.
    """
    _op.choice("available_impls", "op_name", op_name, tuple(__all__))
    kind = _env.infer_device() if device is None else torch.device(device).type
    return ["triton", "torch"] if _triton.AVAILABLE and _env.triton_runs_on(kind) else ["torch"]


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting_mode: str | int = "llama",
    in_place: bool = False,
    row_mode: bool | None = None,
    impl: str | None = None,
    mode: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """RMSNorm over the last dimension: x / rms(x) * (offset + weight), like x.

    `in_place` and `row_mode` are accepted: no tensor of the caller is ever written, and the number
    of rows per program follows from the width.
    """
    chosen = _impl("rms_norm", impl, mode, backend)
    return _rms_norm.rms_norm(x, weight, eps, offset, casting_mode, impl=chosen)


def fused_add_rms_norm(
    X: Tensor,
    R: Tensor,
    W: Tensor | None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str | int = "llama",
    in_place: bool = False,
    *,
    impl: str | None = None,
    mode: str | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """(Y, S): S = X + R in X's dtype, Y = RMSNorm of S. `in_place` is accepted and changes nothing."""
    chosen = _impl("fused_add_rms_norm", impl, mode, backend)
    return _fused_add_rms_norm.fused_add_rms_norm(X, R, W, eps, offset, casting_mode, impl=chosen)


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    *,
    impl: str | None = None,
    mode: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """LayerNorm over the last dimension: (x - mean(x)) / std(x) * weight + bias, like x."""
    chosen = _impl("layer_norm", impl, mode, backend)
    return _layer_norm.layer_norm(x, weight, bias, eps, impl=chosen)


def softmax(
    x: Tensor, *, impl: str | None = None, mode: str | None = None, backend: str | None = None
) -> Tensor:
    """Softmax over the last dimension, like x, for rows of any width."""
    return _softmax.softmax(x, impl=_impl("softmax", impl, mode, backend))


def swiglu(
    a: Tensor,
    b: Tensor,
    gate_multiplier: float = 1.0,
    down_multiplier: float = 1.0,
    *,
    impl: str | None = None,
    mode: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """silu(gate_multiplier * a) * b * down_multiplier, like a."""
    chosen = _impl("swiglu", impl, mode, backend)
    return _swiglu.swiglu(a, b, gate_multiplier, down_multiplier, impl=chosen)


def geglu(
    a: Tensor,
    b: Tensor,
    *,
    impl: str | None = None,
    mode: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """gelu(a) * b with the tanh form of GELU, like a."""
    return _geglu.geglu(a, b, "tanh", impl=_impl("geglu", impl, mode, backend))


def rope(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    unsqueeze_dim: int = 1,
    *,
    impl: str | None = None,
    mode: str | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Rotary position embedding, rotate-half: new q and k (None without a k). `position_ids` is
    accepted, not read: cos and sin already belong to the positions."""
    chosen = _impl("rope", impl, mode, backend)
    return _rope.rope(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim, impl=chosen)


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    *,
    impl: str | None = None,
    mode: str | None = None,
    backend: str | None = None,
) -> _Outputs:
    """Cross entropy of logits: always (loss, z_loss, token_accuracy, predicted_tokens), None for
    what was not asked for."""
    return _outputs(
        _cross_entropy.cross_entropy(
            input,
            target,
            weight,
            ignore_index=ignore_index,
            lse_square_scale=lse_square_scale,
            label_smoothing=label_smoothing,
            reduction=reduction,
            softcap=softcap,
            return_z_loss=return_z_loss,
            return_token_accuracy=return_token_accuracy,
            return_predicted_tokens=return_predicted_tokens,
            impl=_impl("cross_entropy", impl, mode, backend),
        )
    )


def fused_linear_cross_entropy(
    _input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    *,
    impl: str | None = None,
    mode: str | None = None,
    backend: str | None = None,
) -> _Outputs:
    """Cross entropy of `_input @ weight.T + bias` without keeping the logits: always (loss, z_loss,
    token_accuracy, predicted_tokens), None for what was not asked for."""
    return _outputs(
        _fused_linear_cross_entropy.fused_linear_cross_entropy(
            _input,
            weight,
            target,
            bias,
            ce_weight,
            ignore_index=ignore_index,
            lse_square_scale=lse_square_scale,
            label_smoothing=label_smoothing,
            reduction=reduction,
            softcap=softcap,
            return_z_loss=return_z_loss,
            accum_dtype=accum_dtype,
            use_token_scaling=use_token_scaling,
            return_token_accuracy=return_token_accuracy,
            return_predicted_tokens=return_predicted_tokens,
            impl=_impl("fused_linear_cross_entropy", impl, mode, backend),
        )
    )


def jsd(
    _input: Tensor,
    target: Tensor,
    shift_labels: Tensor | None = None,
    beta: float = 0.5,
    ignore_index: int = -100,
    *,
    impl: str | None = None,
    mode: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """Generalised Jensen-Shannon divergence of the student's log-probabilities `_input` and the
    teacher's, a mean over rows in _input's dtype."""
    chosen = _impl("jsd", impl, mode, backend)
    return _jsd.jsd(_input, target, shift_labels, beta, ignore_index, impl=chosen)


def kl_div(
    y_pred: Tensor,
    y_true: Tensor,
    reduction: str = "batchmean",
    log_target: bool = False,
    eps: float = 1e-10,
    *,
    impl: str | None = None,
    mode: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """KL(y_true || y_pred) of log-probabilities y_pred and probabilities y_true, in fp32."""
    chosen = _impl("kl_div", impl, mode, backend)
    return _kl_div.kl_div(y_pred, y_true, reduction, log_target, eps, impl=chosen)


def fused_linear_jsd(
    student_input: Tensor,
    student_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    shift_labels: Tensor | None = None,
    jsd_beta: float = 0.5,
    ignore_index: int = -100,
    temperature: float = 1.0,
    *,
    impl: str | None = None,
    mode: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """Generalised JSD of a student's and a teacher's linear head without the logits, in fp32."""
    return _fused_linear_jsd.fused_linear_jsd(
        student_input,
        student_weight,
        teacher_input,
        teacher_weight,
        shift_labels,
        jsd_beta,
        ignore_index,
        temperature,
        impl=_impl("fused_linear_jsd", impl, mode, backend),
    )


def _outputs(result: "_cross_entropy.CrossEntropyOutput") -> _Outputs:
    return result.loss, result.z_loss, result.token_accuracy, result.predicted_tokens


def _impl(op: str, impl: str | None, mode: str | None, backend: str | None) -> str | None:
    """The implementation asked for, from the three keywords that may ask for one."""
    if mode is not None:
        _env.warn_once(f"{op}: mode={mode!r} is ignored, the implementations have one mode each.")
    if impl is not None and backend is not None and impl != backend:
        raise ValueError(
            f"{op}: backend is the older spelling of impl; got impl={impl!r} and "
            f"backend={backend!r}. Pass impl alone."
        )
    return backend if impl is None else impl
