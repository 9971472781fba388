"""What machine is this?  The only module that asks.

Everything that depends on the machine or on an environment variable is answered here, so that no
other file names a device type or reads `os.environ`. Importing it touches no accelerator.

Environment variables
    LIGER_KERNEL_IMPL            auto (default) | triton | torch: which path every op takes
    LIGER_KERNEL_IMPL_<OP>       the same for one op, e.g. LIGER_KERNEL_IMPL_RMS_NORM=torch
    LIGER_KERNEL_MEMORY_BUDGET   bytes of transient buffers the vocabulary head may use (suffixes K, M, G)
    LIGER_KERNEL_SCHEDULES       folder of schedules measured by `liger-kernel tune` (~/.cache/liger_kernel), off: none
    LIGER_KERNEL_VALIDATE        1: check labels on accelerators too (costs one synchronisation per call)
    TRITON_INTERPRET             1: Triton's own switch; the kernels then run on CPU tensors
"""

import contextlib
import functools
import importlib.util
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

IMPLS = ("auto", "triton", "torch")
_OTHER_NAMES = {"nvidia-triton": "triton", "pytorch": "torch"}
_VENDOR_NAMES = frozenset(
    {"cutile", "cutedsl", "cute", "ascend", "nvidia-cutile", "nvidia-cutedsl", "nvidia-cute"}
)
_TRITON_DEVICES = frozenset({"cuda", "xpu"})  # ROCm calls itself "cuda"
_NO_GUARD = contextlib.nullcontext()
MIB = 1 << 20


# Which implementation

_chosen: str | None = None
_resolved: dict[str, str] = {}


def impl(op: str) -> str:
    """The implementation asked for `op`: "auto", "triton" or "torch"."""
    found = _resolved.get(op)
    if found is None:
        found = _resolve(op)
        if not torch.compiler.is_compiling():  # a side effect that checkpointed code may not have
            _resolved[op] = found
    return found


def set_impl(name: str | None) -> None:
    """Choose the implementation of every op that no environment variable pins; None returns to
    "auto".
    """
    global _chosen
    _chosen = None if name is None else normalise_impl(name)
    _resolved.clear()


def get_impl() -> str | None:
    """What `set_impl` was last given, None if nothing."""
    return _chosen


def refresh() -> None:
    """Forget what was read from the environment (for tests that change it)."""
    _resolved.clear()


@contextlib.contextmanager
def using_impl(name: str | None) -> Iterator[None]:
    """`set_impl(name)` for the duration of a block."""
    before = _chosen
    set_impl(name)
    try:
        yield
    finally:
        set_impl(before)


def normalise_impl(name: str, source: str = "impl") -> str:
    """One of `IMPLS` for any accepted spelling; ValueError for an unknown one."""
    short = _OTHER_NAMES.get(name.lower(), name.lower())
    if short in _VENDOR_NAMES:
        warn_once(
            f"{source}={name!r} names a vendor path this package does not have; using 'auto'."
        )
        return "auto"
    if short not in IMPLS:
        raise ValueError(f"{source} must be one of {', '.join(IMPLS)}; got {name!r}.")
    return short


def _resolve(op: str) -> str:
    for variable in (f"LIGER_KERNEL_IMPL_{op.upper()}", "LIGER_KERNEL_IMPL"):
        value = os.environ.get(variable)
        if value:
            return normalise_impl(value, variable)
    return _chosen or "auto"


@functools.cache
def warn_once(message: str) -> None:
    """Warn, but only the first time this message comes up in the process."""
    warnings.warn(message, stacklevel=4)


# Triton


# Triton reads the variable when a kernel is defined, so one answer holds for the whole process.
_INTERPRETING = os.environ.get("TRITON_INTERPRET", "0").lower() in {"1", "true", "yes", "on"}


def interpreting() -> bool:
    """Whether Triton kernels run in Triton's CPU interpreter."""
    return _INTERPRETING


def triton_runs_on(device_type: str) -> bool:
    """Whether a Triton kernel can be launched on tensors of this device type."""
    if device_type == "meta":
        return planned_memory is not None
    return device_type in _TRITON_DEVICES or (device_type == "cpu" and interpreting())


# Bytes of the accelerator that meta tensors stand for, where a step is only counted: under a dispatch
# mode operators are asked for shapes, and no kernel is launched.
planned_memory: int | None = None


# Devices


@dataclass(frozen=True)
class DeviceInfo:
    """What the launch tables need to know about a device."""

    name: str
    arch: str  # "sm_90", "gfx942", "xpu", "cpu"
    sm_count: int
    max_warps: int  # per program
    shared_memory: int  # bytes one program may use
    total_memory: int  # bytes

    @property
    def capability(self) -> int:
        """CUDA compute capability as major * 10 + minor, 0 elsewhere."""
        return int(self.arch[3:]) if self.arch.startswith("sm_") else 0


@functools.cache
def device_info(device: torch.device) -> DeviceInfo:
    """Facts about `device`, asked once per device."""
    if device.type not in _TRITON_DEVICES:
        return DeviceInfo("cpu", "cpu", 4, 32, 1 << 30, _host_memory())
    props = memory_module(device).get_device_properties(device)
    total = props.total_memory
    if device.type == "xpu":
        return DeviceInfo(props.name, "xpu", props.max_compute_units, 32, 64 << 10, total)
    sms = props.multi_processor_count
    if torch.version.hip:
        return DeviceInfo(props.name, props.gcnArchName.split(":")[0], sms, 16, 64 << 10, total)
    shared = getattr(props, "shared_memory_per_block_optin", 99 << 10)
    return DeviceInfo(props.name, f"sm_{props.major}{props.minor}", sms, 32, shared, total)


def current_device(device_type: str) -> torch.device:
    """The device of this type that new tensors land on."""
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, memory_module(torch.device(device_type)).current_device())


def default_device() -> torch.device:
    """The accelerator if there is one, else the CPU."""
    kind = infer_device()
    return torch.device("cpu") if kind == "cpu" else current_device(kind)


def infer_device() -> str:
    """ "cuda" > "npu" > "xpu" > "cpu": the first device type torch reports as usable."""
    for kind in ("cuda", "npu", "xpu"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            return kind
    return "cpu"


def device_count(device_type: str) -> int:
    """How many devices of this type there are (1 CPU)."""
    return 1 if device_type == "cpu" else memory_module(torch.device(device_type)).device_count()


def on_device(device: torch.device) -> Any:
    """A context in which `device` is current; free when it already is."""
    if device.type == "cpu":
        return _NO_GUARD
    module = memory_module(device)
    if device.index is None or module.current_device() == device.index:
        return _NO_GUARD
    return module.device(device)


def has_raw_streams(device: torch.device) -> bool:
    """Whether `raw_stream` knows devices of this type, and Triton's compiled kernels take its handles."""
    return device.type == "cuda" and torch.version.hip is None


def raw_stream(index: int) -> int | None:
    """The handle of the current stream of accelerator `index`; None unless that device is current."""
    return (
        torch._C._cuda_getCurrentRawStream(index) if torch._C._cuda_getDevice() == index else None
    )


def synchronize(device: torch.device) -> None:
    """Wait for everything queued on `device`."""
    if device.type != "cpu":
        memory_module(device).synchronize(device)


def event(device: torch.device) -> Any:
    """A timing event of the accelerator `device`."""
    return memory_module(device).Event(enable_timing=True)


def capturing(device: torch.device) -> bool:
    """Whether nothing may wait for a value: a CUDA graph is being recorded, or there are no values."""
    recording = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return recording or device.type == "meta"


def memory_module(device: torch.device) -> Any:
    """The torch module with `max_memory_allocated` and friends for an accelerator `device`."""
    return getattr(torch, device.type)


def _host_memory() -> int:
    known = hasattr(os, "sysconf")
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if known else 8 << 30


# Settings


def memory_budget(device: torch.device) -> int:
    """Default bytes of transient buffers for the vocabulary head: 0.5 % of device memory within
    128..640 MiB; CPU 64 MiB.
    """
    asked = os.environ.get("LIGER_KERNEL_MEMORY_BUDGET")
    if asked:
        return parse_bytes(asked, "LIGER_KERNEL_MEMORY_BUDGET")
    if device.type == "cpu":
        return 64 * MIB
    total = planned_memory if device.type == "meta" else None
    return min(max((total or device_info(device).total_memory) // 200, 128 * MIB), 640 * MIB)


# What torch.compiler.assume_constant_result does, which would import the whole compiler.
memory_budget._dynamo_marked_constant = True  # type: ignore[attr-defined]


def parse_bytes(text: str, source: str) -> int:
    """ "256M" -> 268435456. Suffixes K, M, G (binary), optionally followed by B or iB."""
    number = text.strip().lower().removesuffix("b").removesuffix("i")
    shift = {"k": 10, "m": 20, "g": 30}.get(number[-1:], 0)
    try:
        value = int(float(number[:-1] if shift else number) * (1 << shift))
    except ValueError:
        value = 0
    if value <= 0:
        raise ValueError(
            f"{source} must be a positive number of bytes such as 268435456 or 256M; got {text!r}."
        )
    return value


def schedules_folder() -> str:
    """Where schedules that were measured for this machine's cards lie, "" if they are switched off."""
    asked = os.environ.get("LIGER_KERNEL_SCHEDULES")
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return "" if asked == "off" else os.path.expanduser(asked or f"{cache}/liger_kernel")


def validate_labels() -> bool:
    """Whether labels are checked on accelerators too."""
    return os.environ.get("LIGER_KERNEL_VALIDATE", "0") == "1"


def has_module(name: str) -> bool:
    """Whether a top-level module can be imported, without importing it."""
    return importlib.util.find_spec(name) is not None


# Names of architectures

_NVIDIA = {
    **dict.fromkeys(("sm_70", "sm_72", "sm_75"), "volta_turing"),
    **dict.fromkeys(("sm_80", "sm_86", "sm_87", "sm_89"), "ampere_ada"),
    "sm_90": "hopper",
    "sm_100": "blackwell",
    "sm_103": "blackwell_ultra",
    **dict.fromkeys(("sm_120", "sm_121"), "blackwell_consumer"),
}
_AMD = {"gfx908": "cdna1", "gfx90a": "cdna2", "gfx942": "cdna3", "gfx950": "cdna4"}


def arch_family(device: torch.device) -> str:
    """The architecture's common name: "hopper", "cdna3", "pvc"; its code if it has none here."""
    if device.type == "npu":
        name = memory_module(device).get_device_name(device).lower()
        return next((f"ascend{n}" for n in ("910", "310") if n in name), "npu")
    info = device_info(device)
    if device.type == "xpu":
        name = info.name.lower()
        return "pvc" if "max" in name else "arc" if "arc" in name else "xpu"
    return _NVIDIA.get(info.arch) or _AMD.get(info.arch) or info.arch


def is_hip() -> bool:
    """Whether torch was built for AMD GPUs."""
    return torch.version.hip is not None


def infer_comm_backend() -> str:
    """The collective library that fits this machine: nccl > hccl > xccl > mpi > gloo."""
    by_device = {"cuda": "nccl", "npu": "hccl", "xpu": "xccl"}.get(infer_device())
    if by_device:
        return by_device
    dist = torch.distributed
    return "mpi" if dist.is_available() and dist.is_mpi_available() else "gloo"


@dataclass(frozen=True)
class Launch:
    """This process among those that a launcher such as torchrun has started."""

    rank: int
    local_rank: int
    ranks: int


def launch() -> Launch | None:
    """What the launcher says, None without one or with a single process."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks == 1:
        return None
    rank = int(os.environ["RANK"])
    return Launch(rank, int(os.environ.get("LOCAL_RANK", rank)), ranks)


# The process environment


def environment() -> dict[str, str]:
    """The variables in force that this package or Triton reads."""
    prefixes = ("LIGER_", "TRITON_")
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefixes)}


def export(name: str, value: str) -> None:
    """Set an environment variable of this process, for a library that reads nothing else."""
    os.environ[name] = value


# Matrix products


@functools.cache
def mixed_products(device: torch.device) -> bool:
    """Whether `torch.mm(a, b, out_dtype=torch.float32)` takes 16-bit operands here (torch >= 2.8, CUDA)."""
    version = tuple(int(p) for p in torch.__version__.split(".")[:2])
    return device.type == "cuda" and version >= (2, 8)


_HALVES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def exact_products(device: torch.device, dtype: torch.dtype) -> Any:
    """A context in which split-K products of this dtype add their parts in fp32: cuBLAS may reduce them in 16 bits."""
    half = _HALVES.get(dtype) if device.type == "cuda" else None
    flag = f"allow_{half}_reduced_precision_reduction"
    off = half is None or not getattr(torch.backends.cuda.matmul, flag)
    return _NO_GUARD if off else _Off(flag)


@dataclass
class _Off:
    """Within the block a flag is off. `contextlib.contextmanager` would take twice the time."""

    flag: str

    def __enter__(self) -> None:
        setattr(torch.backends.cuda.matmul, self.flag, False)

    def __exit__(self, *_: object) -> None:
        setattr(torch.backends.cuda.matmul, self.flag, True)
