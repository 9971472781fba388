"""What every kernel is launched with on a GPU that is not there, recorded from the rows of `cases.py`; and compiled.

The launches of a target are those that its own properties lead to (multiprocessors, shared memory, warps, vendor), and
Triton's own binder specialises their arguments: what is compiled here is what that GPU would be given.
"""

import collections
import contextlib
import functools
import importlib
import itertools
import math
import pkgutil
import re
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from cases import CASES
from test_int8int2 import CASE as INT8INT2

from liger_kernel import _env, ops
from liger_kernel._env import DeviceInfo
from liger_kernel.ops import _triton
from liger_kernel.ops.head import exponentials, valid
from liger_kernel.testing.properties import Case, Maker, Options, Tensors, outputs_of

# name, architecture, multiprocessors, warps a program may have, KiB of shared memory it may use, GiB of memory
_CARDS = (
    ("MI300X", "gfx942", 304, 16, 64, 192),
    ("A40", "sm_86", 84, 32, 99, 48),
    ("L40S", "sm_89", 142, 32, 99, 48),
    ("RTX 5090", "sm_120", 170, 32, 99, 32),
    ("A100", "sm_80", 108, 32, 163, 80),
    ("H200", "sm_90", 132, 32, 227, 141),
    ("B200", "sm_100", 148, 32, 227, 180),
)
TARGETS = {
    arch: DeviceInfo(name, arch, sms, warps, kib << 10, gib << 30)
    for name, arch, sms, warps, kib, gib in _CARDS
}
DTYPES = (torch.bfloat16, torch.float32)

# Sizes beside those of the rows: every block of the schedules, and models. Shapes are in the row's own terms.
_WIDTHS = tuple(1 << n for n in range(7, 17))
_BY_WIDTH = [(2, width) for width in _WIDTHS]
_NORMS = ("fused_add_rms_norm", "layer_norm", "rms_norm")
_VOCABULARIES = (1024, 4096, 16384, 32000, 50257, 65536, 128256)
_SHAPES: dict[str, Iterable[tuple[int, ...]]] = {
    "attn_res": [(8, 2, width) for width in _WIDTHS],
    "cross_entropy": [(2, size) for size in _VOCABULARIES],
    "embedding": [(8, width, 200) for width in _WIDTHS],
    "fused_add_rms_norm": [(n, width) for n in (1025, 2) for width in _WIDTHS],
    "fused_ce_tvd": [(2, size) for size in _VOCABULARIES],
    "fused_linear_cross_entropy": [(2, 8, size) for size in _VOCABULARIES],
    "fused_linear_jsd": [(2, 8, size) for size in _VOCABULARIES],
    "fused_linear_kl_div": [(2, 8, size) for size in _VOCABULARIES],
    "fused_moe": [(64, 8, 128, 2048, 768), (64, 2, 8, 4096, 14336)],
    "fused_moe biases": [(64, 4, 32, 2880, 2880)],
    "fused_moe variants": [(64, 4, 32, 2880, 2880)],
    "fused_neighborhood_attention": [(1, 2, 256, width) for width in (64, 128, 256)],
    "fused_neighborhood_attention padded": [(1, 2, 256, width) for width in (64, 128, 256)],
    "group_norm": [(2, 32, size) for size in (16, 256, 1024, 2048)] + [(1, 64, 512, 512)],
    "jsd": [(2, size) for size in _VOCABULARIES],
    "kl_div": [(2, size) for size in _VOCABULARIES],
    "linear_distillation": [(2, 8, size) for size in _VOCABULARIES],
    "linear_distillation from a stored teacher": [(2, 8, size) for size in _VOCABULARIES],
    "linear_logprob": [(2, 8, size) for size in _VOCABULARIES],
    "llama4_rope": [(1, 64, 40, 8, 128)],
    "low_rank_update": [(4096, 16, 64, 14336), (4096, 256, 64, 4096)],
    "low_rank_update around a layer": [(4096, rank, 64, 4096) for rank in (16, 32, 64, 128, 256)],
    "mhc_coeffs": [(64, 4, 4096), (64, 6, 1024), (64, 8, 1024)],
    "mhc_post_res": [(2, streams, width) for streams in (4, 8) for width in (1024, 4096)],
    "mhc_pre": [(2, streams, width) for streams in (4, 8) for width in (1024, 4096)],
    "mlp": [(14336, 64, 4096)],
    "mm_int8int2": [(m, 1024, 256) for m in (1, 32, 64, 128, 512, 8192)],
    "modulated_rms_norm": [(2, 3, width) for width in _WIDTHS],
    "multi_token_attention": [(1, 2, length, length) for length in _WIDTHS],
    "multi_token_attention sparse": [(1, 2, length, length) for length in _WIDTHS],
    "qwen2vl_mrope": [(1, 28, 4, 64, 128)],
    "rms_norm": [(n, width) for n in (1025, 2) for width in _WIDTHS],
    "softmax": [*_BY_WIDTH, (2, 131072), (2, 131085)],
    "rope": [(1, 32, 8, 64, 64), (1, 32, 8, 64, 128), (1, 16, 8, 64, 256)],
    "rope partial": [(1, 32, 8, 64, 128)],
    "tvd": [(2, size) for size in _VOCABULARIES],
    **{f"{name} in phases": [(1025, width - 1) for width in _WIDTHS[1:7]] for name in _NORMS},
}
_LARGE = 1 << 19  # elements of a shape beyond which only the sizes of tensors exist


class _Sizes(Maker):
    """Tensors without memory."""

    def __init__(self, dtype: torch.dtype):
        super().__init__(dtype, torch.device("meta"))

    def __call__(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Any:
        return torch.empty(shape, dtype=dtype or self.dtype, device="meta")

    def ids(self, high: int, *shape: int) -> Any:
        return torch.empty(shape, dtype=torch.int64, device="meta")

    def chance(self, probability: float, *shape: int) -> Any:
        return torch.empty(shape, dtype=torch.bool, device="meta")


@dataclass(frozen=True)
class Launch:
    """A kernel and all that its compilation depends on. `real`: at a size of models, not of tests alone."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]
    real: bool

    @functools.cached_property
    def traits(self) -> dict[str, Any]:
        """Constants, types of tensors and warps by name; not that a number happens to be 1."""
        given: dict[str, Any] = dict(self.signature)
        for (i,), value in self.constants.items():
            given[self.kernel.params[i].name] = value
        told = {
            p.name: given[p.name]
            for p in self.kernel.params
            if p.is_constexpr or given[p.name] is None or str(given[p.name])[0] in "*t"
        }
        return {**told, "num_warps": self.options["num_warps"]}

    @property
    def size(self) -> int:
        """The product of its constant sizes, a measure of how much a program holds."""
        return math.prod(v for v in self.traits.values() if type(v) is int and v > 1)

    def __str__(self) -> str:
        told = ", ".join(f"{name}={value}" for name, value in self.traits.items())
        return f"{name_of(self.kernel)}({told})"


def name_of(kernel: Any) -> str:
    """Module and name, `_rms_kernels.forward_kernel`."""
    return f"{kernel.__module__.rpartition('.')[2]}.{kernel.__name__}"


def kernels() -> dict[str, Any]:
    """Every kernel of the package by name; other @jit functions are parts of kernels."""
    found = {}
    for module in pkgutil.walk_packages(ops.__path__, "liger_kernel.ops."):
        for thing in vars(importlib.import_module(module.name)).values():
            if isinstance(thing, _triton.triton.JITFunction) and thing.__name__.endswith("_kernel"):
                found[name_of(thing)] = thing
    return found


# Recording


class _Driver:
    """Stands in for Triton's driver of a machine: says what to compile for."""

    def __init__(self, target: str):
        from triton.backends.compiler import GPUTarget

        amd = target.startswith("gfx")
        arch = target if amd else int(target.removeprefix("sm_"))
        self.target = GPUTarget("hip" if amd else "cuda", arch, 64 if amd else 32)

    def get_current_target(self) -> Any:
        return self.target


@contextlib.contextmanager
def _machine(target: str, launch: Any) -> Iterator[None]:
    """Within the block every device is the target, and `launch` is called instead of launching."""
    from triton.runtime import driver

    original, info = _triton.launch, TARGETS[target]
    modules = [m for n, m in sys.modules.items() if n.startswith("liger_kernel.ops.")]
    replaced: list[tuple[Any, str, Any]] = [
        (_env, "triton_runs_on", lambda kind: True),
        (_env, "device_info", lambda device: info),
        (_env, "is_hip", lambda: target.startswith("gfx")),
        (driver, "_active", _Driver(target)),
        # autocast knows no tensors without memory
        (torch, "autocast", lambda kind, **_: contextlib.nullcontext()),
        (torch, "is_autocast_enabled", lambda kind: False),
        # nobody has counted
        (valid, "_sent", lambda count: lambda: 1),
        # at the sizes of rows these products would be torch's
        *((exponentials, name, 0) for name in ("_NARROW", "_BUSY")),
        *((m, "launch", launch) for m in modules if getattr(m, "launch", None) is original),
    ]
    _triton.forget_plans()
    with contextlib.ExitStack() as stack:
        stack.callback(_triton.forget_plans)
        for thing, name, value in replaced:
            stack.enter_context(mock.patch.object(thing, name, value))
        yield


def _rows() -> list[Case]:
    """Every row; norms of rows that begin anywhere; the gradients of an expert's biases, which no property takes."""
    phases = [replace(c, label=f"{c.name} in phases") for c in CASES if c.name in _NORMS]
    (variants,) = (case for case in CASES if case.name == "fused_moe variants")
    biases = {"options": {"variant": ["gpt_oss"]}, "grads": ("gate_up_bias", "down_bias")}
    return [*CASES, *phases, INT8INT2, replace(variants, **biases, label="fused_moe biases")]


def _record(case: Case, dtype: torch.dtype, full: bool, real: bool) -> None:
    """Call a row at the sizes of models or at its own; at the ends or the largest of them unless `full`.

    At its own first shape each gradient is taken alone as well, and none.
    """
    by_width = _BY_WIDTH if case.op.rows and not case.label else ()
    shapes = list(_SHAPES.get(case.name, by_width) if real else case.shapes)
    if not full:
        shapes = [*shapes[:1], *shapes[-1:]] if real else [max(shapes, key=math.prod)]
    for shape, options in itertools.product(shapes, case.cover()):
        if math.prod(shape) > _LARGE:
            tensors = case.inputs(shape, _Sizes(dtype), **options)
        else:
            tensors = case.draw(shape, options, dtype, torch.device("cpu"))
        parts = {(name,) for name in case.grads} | {()} if shape == case.shapes[0] else set()
        for grads in sorted({case.grads, *parts}):
            _call(case, tensors, options, grads)


def _call(case: Case, tensors: Tensors, options: Options, grads: Sequence[str]) -> None:
    leaves = {k: t.detach().requires_grad_(k in grads) for k, t in tensors.items()}
    results = outputs_of(case.function(**leaves, **options)).values()
    outputs = [t for t in results if t.requires_grad]
    if outputs:
        upstream = [torch.empty_like(t) for t in outputs]
        torch.autograd.grad(outputs, [leaves[k] for k in grads], upstream, allow_unused=True)


@functools.cache
def launches(target: str, full: bool) -> dict[str, list[Launch]]:
    """The distinct launches of every kernel on the target, by the kernel's name; a choice of them unless `full`."""
    found: dict[str, dict[str, Launch]] = collections.defaultdict(dict)
    binders = {}

    def launch(kernel: Any, grid: Any, device: torch.device, *args: Any, **meta: Any) -> None:
        if 0 in grid:
            return
        if name_of(kernel) == "valid._compact_kernel":
            args[0].zero_()  # positions, by which rows are gathered
        if kernel not in binders:
            binders[kernel] = kernel.create_binder()
        *_, backend, bind = binders[kernel]
        bound, specialization, _ = bind(*args, **meta)
        key = f"{specialization}{meta}"
        if key not in found[name_of(kernel)]:
            options, *rest = kernel._pack_args(backend, meta, bound, specialization, meta)
            found[name_of(kernel)][key] = Launch(kernel, *rest, vars(options), real)

    with _machine(target, launch):
        for real, case, dtype in itertools.product((True, False), _rows(), DTYPES):
            if dtype in case.dtypes:
                _record(case, dtype, full, real)
        # what comes before products that write fp32
        for real, dtype in itertools.product((True, False), DTYPES):
            few, labels = torch.empty(4, 4096 if real else 8, dtype=dtype), torch.empty(4).long()
            for weight in (None, torch.empty(8)):
                valid.without_ignored(few, labels, 0, torch.empty(2), weight, 8)
            valid.without_ignored(few, labels, 0)
    return {name: list(some.values()) for name, some in found.items()}


def by_novelty(launches: Iterable[Launch]) -> list[Launch]:
    """Launches that together have all traits: the largest, those that have most new ones, then the sizes of tests."""
    todo = sorted(launches, key=lambda one: (-one.real, -one.size, str(one)))
    chosen, known = [], set()

    def news(one: Launch) -> int:
        return len(one.traits.items() - known)

    while todo:
        best = (
            max(todo, key=lambda one: (news(one) > 0, one.real, news(one))) if chosen else todo[0]
        )
        if not news(best):
            break
        chosen.append(best)
        known |= best.traits.items()
    return chosen


# Compiling


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes: bytes of shared memory of a program, and of a thread's registers spilled."""

    shared: int
    spilled: int


def compiled(launch: Launch, target: str) -> Resources:
    """Compile a launch for its target with the assembler that Triton brings."""
    from triton.compiler import ASTSource

    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
    machine = _Driver(target).target
    result = _triton.triton.compile(source, target=machine, options=launch.options)
    spilled = (
        _frame(result.asm["cubin"]) if "cubin" in result.asm else _scratch(result.asm["amdgcn"])
    )
    return Resources(result.metadata.shared, spilled)


_NV_INFO, _FRAME_SIZE = 0x70000000, 0x11  # of sections, of the attributes in them


def _frame(cubin: bytes) -> int:
    """The stack frame that an NVIDIA binary tells of. Kernels have no arrays of their own: it holds spills."""
    start, size, count = (
        *struct.unpack_from("<Q", cubin, 40),
        *struct.unpack_from("<HH", cubin, 58),
    )
    frames = [0]
    for i in range(count):
        _, kind, _, _, first, length, _, of = struct.unpack_from(
            "<IIQQQQII", cubin, start + i * size
        )
        if (
            kind == _NV_INFO and of == 0
        ):  # what is said of all functions: (attribute, function, value), 12 bytes each
            records = struct.iter_unpack("<HHII", cubin[first : first + length])
            frames += [value for name, _, _, value in records if name >> 8 == _FRAME_SIZE]
    return max(frames)


def _scratch(assembly: str) -> int:
    """Bytes of a thread's private memory in AMD assembly, which spills alone use here."""
    return max(int(n) for n in re.findall(r"\.private_segment_fixed_size: (\d+)", assembly))
