"""Put the kernels under a Hugging Face model, and take them out again.

    report = liger_kernel.patch(model)       # print(report): what was swapped, what was not and why
    report.undo()

    with liger_kernel.patched(model, rope=False):
        ...

seams.py    the walk; norm.py, gated.py, experts.py, activation.py, lora.py, rotary.py, head.py, loss.py: one seam each
adapters.py the walk again when PEFT has changed the model
probe.py    does a candidate compute what the class computes?
rematerialise.py   activations rebuilt instead of kept; hooks.py: in which forwards
promise.py  logits that meet the loss before they exist; chain.py: what may happen to them on the way
apply.py    the ledger of replaced attributes; report.py: the result
registry.py the contract's 45 functions, from a table
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from liger_kernel.transformers.patch.flags import DEFAULTS, checked
from liger_kernel.transformers.patch.report import Report

__all__ = ["DEFAULTS", "Report", "patch", "patched", "probe_model"]


def patch(model: Any, **flags: bool | None) -> Report:
    """Bind our kernels to the modules of one model, wherever a numeric probe finds them equal.

    Args:
        model: a Hugging Face model, or a PEFT, DDP or compile wrapper around one. Weights are neither read nor written;
            state dict, class names and saved checkpoints stay those of the original.
        flags: what to swap; everything but `cross_entropy` by default.
            rope, rms_norm, layer_norm, swiglu, geglu, relu_squared, experts, lora: seams by name (swiglu and geglu are
            one seam: gated MLPs; lora: PEFT's layers, also those that come later). The rotary function of a modelling
            file is shared by its models, see `rotary.py`.
            fused_linear_cross_entropy: head and loss in one; a training call with labels returns `logits=None`
            (`skip_logits=False` brings them back, `skip_logits=True` drops them in evaluation too).
            cross_entropy: the loss of calls whose logits exist.
            rematerialise: outputs of norms and gated activations are rebuilt in backward instead of being kept for it,
            bit for bit; see `rematerialise.py`.
    Returns:
        A `Report`: printable, with `undo()`. Patching twice changes nothing more.
    Raises:
        TypeError: an unknown flag, with the nearest known one.
    """
    from liger_kernel.transformers.patch.model import patch_instance

    return patch_instance(model, {**DEFAULTS, **checked(flags, "patch", DEFAULTS)}, bind=True)


@contextlib.contextmanager
def patched(model: Any, **flags: bool | None) -> Iterator[Report]:
    """`patch(model, **flags)` for the duration of a block."""
    report = patch(model, **flags)
    try:
        yield report
    finally:
        report.undo()


def probe_model(model: Any, **flags: bool | None) -> Report:
    """What `patch` would do, without binding anything.

    Args:
        model: a model, or a Hugging Face config, from which one is built without memory.
        flags: as in `patch`.
    """
    from liger_kernel.transformers.patch.model import empty_model, patch_instance

    if not hasattr(model, "modules"):
        model = empty_model(model)
    return patch_instance(
        model, {**DEFAULTS, **checked(flags, "probe_model", DEFAULTS)}, bind=False
    )
