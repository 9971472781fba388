"""Every choice of a run, with defaults that follow the machine."""

from dataclasses import dataclass

import torch

from liger_kernel import _env
from liger_kernel.train import UsageError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
OPTIMIZERS = ("adamw", "sgd")
TOLERANCES = {
    "fp32": 1e-4,
    "bf16": 1e-2,
}  # largest relative difference of a loss that still counts as equal

# CPU: 10 steps of SmolLM2-135M take about a minute on 2 cores, and 1,024 tokens a step are enough for the logits to
# show in the peak (at 512 they are no larger than the head's gradient). Accelerator: lengths that people train on.
_ON_CPU = {"steps": 10, "batch": 2, "seq": 512, "dtype": "fp32"}
_ON_ACCELERATOR = {"steps": 60, "batch": 4, "seq": 2048, "dtype": "bf16"}
_LEARNING_RATES = {
    ("adamw", True): 5e-5,
    ("adamw", False): 3e-4,
    ("sgd", True): 1e-2,
    ("sgd", False): 1e-1,
}


@dataclass(frozen=True)
class Settings:
    """One comparison. `model` and `text` are what the user wrote, None for the defaults."""

    model: str | None
    text: str | None
    steps: int
    batch: int
    seq: int
    dtype: str
    device: str
    optimizer: str
    lr: float
    seed: int
    parallel: str | None = None  # "ddp" or "fsdp"
    ranks: int = 1

    @property
    def step_tokens(self) -> int:
        """Token ids that one step reads, on all processes together."""
        return self.ranks * self.batch * self.seq

    @property
    def tokens(self) -> int:
        """Token ids that the whole run reads."""
        return self.steps * self.step_tokens

    @property
    def tolerance(self) -> float:
        """Largest relative difference of a loss that still counts as equal."""
        return TOLERANCES[self.dtype]


def complete(asked: dict[str, object], pretrained: bool) -> Settings:
    """`asked` with every None replaced by this machine's default; the learning rate also follows `pretrained`."""
    launched = _env.launch()
    _check_launch(asked.get("parallel"), launched)
    device = _device(asked["device"])
    if launched is not None:
        asked = {**asked, "ranks": launched.ranks}
        if device.type != "cpu":
            device = torch.device(device.type, launched.local_rank)
    defaults = _ON_CPU if device.type == "cpu" else _ON_ACCELERATOR
    rate = _LEARNING_RATES[str(asked["optimizer"]), pretrained]
    filled = {k: v for k, v in asked.items() if v is not None}
    free = {"model": None, "text": None}
    return Settings(**{**free, **defaults, "lr": rate, **filled, "device": str(device)})  # type: ignore[arg-type]


def _check_launch(parallel: object, launched: _env.Launch | None) -> None:
    if parallel is not None and launched is None:
        raise UsageError(
            f"--{parallel} needs several processes: torchrun --nproc-per-node 2 -m liger_kernel train --{parallel} ..."
        )
    if parallel is None and launched is not None:
        raise UsageError(f"{launched.ranks} processes were started: add --ddp or --fsdp.")


def _device(name: object) -> torch.device:
    if name is None:
        return _env.default_device()
    here = sorted({"cpu", _env.infer_device()})
    try:
        device = torch.device(str(name))
    except RuntimeError:
        device = None
    if device is None or device.type not in here:
        raise UsageError(
            f"--device must be one of {', '.join(here)} on this machine; got {name!r}."
        )
    if (device.index or 0) >= _env.device_count(device.type):
        raise UsageError(
            f"--device {name} does not exist: {_env.device_count(device.type)} found here."
        )
    return device
