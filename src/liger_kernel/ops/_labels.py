"""Class labels: of the right type, and each of them a class or the ignored value."""

import torch
from torch import Tensor

from liger_kernel import _env
from liger_kernel.ops._op import observed


def check_labels(op: str, target: Tensor, n_classes: int, ignore_index: int) -> None:
    """Refuse labels that are not int32 or int64 or lie outside [0, n_classes), `ignore_index`
    excepted.

    The range is checked for CPU tensors. On an accelerator looking costs a synchronisation, so it
    is done there only under LIGER_KERNEL_VALIDATE=1; otherwise the kernels answer a bad label with
    NaN. Nothing is looked at while something traces.

    Raises:
        ValueError: another dtype.
        IndexError: names the first label out of range and its position.
    """
    if target.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"{op}: target must hold class indices, int64 or int32; got {target.dtype}."
        )
    looked_at = target.device.type == "cpu" or _env.validate_labels()
    if not looked_at or observed() or _env.capturing(target.device):
        return
    flat = target.reshape(-1)
    bad = ((flat < 0) | (flat >= n_classes)) & (flat != ignore_index)
    if bad.any():
        position = int(bad.nonzero()[0])
        raise IndexError(
            f"{op}: target[{position}] is {int(flat[position])}, not a class in [0, {n_classes}) and not "
            f"ignore_index={ignore_index}. Use ignore_index for positions without a label."
        )
