"""Calls of other libraries that do not bear this package's name: Apple's CCE and QuACK, as their documents show them.

`liger-kernel bench --peer cce=FOLDER --peer quack=FOLDER`, each FOLDER filled by `pip install --target`.
"""

import importlib
import logging
from functools import partial
from typing import Any

from torch import Tensor

from liger_kernel.bench.row import Peer


def _cce(library: Any, input: Tensor, weight: Tensor, target: Tensor, **options: Any) -> Tensor:
    return library.linear_cross_entropy(input, weight, target, **options)


def _quack_linear_cross_entropy(
    _: Any, input: Tensor, weight: Tensor, target: Tensor, **options: Any
) -> Tensor:
    """QuACK 0.6.5 names its compiled kernels by all that they depend on. With nvidia-cutlass-dsl 4.7
    a logger is among that, and the import fails unless a logger says what stands for it."""
    logging.Logger.__quack_semantic_key__ = lambda self: self.name  # type: ignore[attr-defined]
    module = importlib.import_module("quack.linear_cross_entropy")
    return module.chunked_linear_cross_entropy(input, weight, target, **options)


def _quack(calls: dict[str, Any]) -> Peer:
    return Peer(module="quack", distribution="quack-kernels", calls=calls)


def _apple(**options: Any) -> Peer:
    calls = {"fused_linear_cross_entropy": partial(_cce, **options)}
    # its gradients are 1.2e-2 of their norm from fp32 at 8,192 x 4,096 x 128,256 in bf16, with eps or without
    return Peer("cut_cross_entropy", "cut-cross-entropy", calls, slack=2.0)


PEERS = {
    "cce": _apple(),
    "cce-exact": _apple(filter_eps=None),  # no gradient is left out for being small
    "quack": _quack(
        {
            "rms_norm": lambda q, x, weight: q.rmsnorm(x, weight, eps=1e-6),
            "fused_add_rms_norm": lambda q, x, residual, weight: q.rmsnorm(
                x, weight, residual=residual, eps=1e-6, prenorm=True
            ),
            "softmax": lambda q, x: q.softmax(x),
            "cross_entropy": lambda q, input, target: q.cross_entropy(input, target),
            "fused_linear_cross_entropy": _quack_linear_cross_entropy,
        }
    ),
    "quack-chunked": _quack(  # without the epilogue that it chooses where it can
        {"fused_linear_cross_entropy": partial(_quack_linear_cross_entropy, use_scaled_exp=False)}
    ),
}
