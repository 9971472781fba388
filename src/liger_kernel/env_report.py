"""What to paste into a bug report: `python -m liger_kernel.env_report` or `liger-kernel env`."""

import platform

import torch

from liger_kernel import _env, _packages
from liger_kernel.ops import _schedules

_PACKAGES = (
    "triton",
    "transformers",
    "tokenizers",
    "accelerate",
    "peft",
    "trl",
    "deepspeed",
    "numpy",
)


def env_facts() -> dict[str, str]:
    """Name -> fact, in the order to print: system, packages, accelerator, environment variables."""
    facts = {
        "OS": platform.platform(),
        "Python": platform.python_version(),
        "liger_kernel": _packages.package_version(),
        "torch": torch.__version__,
    }
    for name in _PACKAGES:
        facts[name] = _packages.version_of(name) or "not installed"
    facts |= _accelerator()
    if foreign := _packages.foreign_distributions():
        facts["WARNING"] = (
            f"{', '.join(foreign)} brings another package named liger_kernel: uninstall both, "
            "then install one."
        )
    return facts | _env.environment()


def _accelerator() -> dict[str, str]:
    kind = _env.infer_device()
    facts = {
        "CUDA of torch": torch.version.cuda or "none",
        "HIP of torch": torch.version.hip or "none",
    }
    if kind == "cpu":
        return facts | {"accelerator": "none"}
    device = _env.default_device()
    info, tuned = _env.device_info(device), _schedules.path_of(_schedules.card_of(device))
    memory = f"{info.total_memory / 2**30:.0f} GiB"
    found = (
        f"{_env.device_count(kind)} x {info.name} ({info.arch}, {info.sm_count} units, {memory})"
    )
    own = {"schedules": str(tuned)} if tuned and tuned.exists() else {}
    return facts | {"accelerator": found} | own


def print_env_report() -> None:
    """Print `env_facts()`, one fact a line."""
    facts = env_facts()
    width = max(map(len, facts))
    for name, fact in facts.items():
        print(f"{name:<{width}}  {fact}")


if __name__ == "__main__":
    print_env_report()
