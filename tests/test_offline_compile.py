"""Every kernel compiles for real targets, without a GPU: Triton's interpreter accepts programs its compiler refuses.

The launches of every row of `cases.py` are recorded instead of run, and each distinct one is handed to the compiler
with the arguments' own specialisation.
"""

import sys

import pytest
import torch
from cases import CASES

from liger_kernel import _env
from liger_kernel.ops import _triton
from liger_kernel.testing import properties

pytestmark = pytest.mark.plain
triton = pytest.importorskip("triton")

NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.float64: "fp64",
}
SHARED_MEMORY = {"cuda:80": 163 << 10, "cuda:90": 227 << 10, "hip:gfx942": 64 << 10}


def _argument(value, constant):
    """Signature entry and whether the compiler may assume a multiple of 16."""
    if constant or value is None or (type(value) is int and value == 1):
        return "constexpr", False
    if isinstance(value, torch.Tensor):
        return f"*{NAMES[value.dtype]}", True
    if isinstance(value, bool):
        return "i1", False
    if isinstance(value, int):
        return ("i32" if -(1 << 31) <= value < 1 << 31 else "i64"), value % 16 == 0
    return "fp32", False


def _record(case, dtype, monkeypatch):
    """The distinct launches of a case: kernel, signature, constants, aligned positions, warps."""
    seen = {}

    def launch(kernel, grid, device, *args, **meta):
        values = dict(zip(kernel.arg_names, args, strict=False))
        values |= {k: v for k, v in meta.items() if k in kernel.arg_names}
        signature, constants, aligned = {}, {}, []
        for i, name in enumerate(kernel.arg_names):
            kind, multiple = _argument(values[name], name in meta)
            signature[name] = kind
            if kind == "constexpr":
                constants[(i,)] = values[name]
            elif multiple:
                aligned.append(i)
        warps = meta.get("num_warps", 4)
        key = (kernel.__name__, tuple(signature.values()), str(constants), tuple(aligned), warps)
        seen[key] = (kernel, signature, constants, aligned, warps)

    original = _triton.launch
    monkeypatch.setattr(_env, "triton_runs_on", lambda kind: True)
    for name, module in list(sys.modules.items()):
        if name.startswith("liger_kernel.ops.") and getattr(module, "launch", None) is original:
            monkeypatch.setattr(module, "launch", launch)
    cpu = torch.device("cpu")
    for options in case.cover():
        tensors = case.draw(
            max(case.shapes, key=lambda s: torch.Size(s).numel()), options, dtype, cpu
        )
        properties.run(case.function, tensors, options, case.grads)
    return seen


def _compile(kernel, signature, constants, aligned, warps, target):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    backend, arch = target.split(":")
    lanes = 64 if backend == "hip" else 32
    machine = GPUTarget(backend, int(arch) if arch.isdigit() else arch, lanes)
    attrs = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    options = {"num_warps": min(warps, 16) if backend == "hip" else warps}
    return triton.compile(source, target=machine, options=options)


def _check(case, dtype, target, monkeypatch):
    if _env.interpreting():
        pytest.skip("the interpreter has replaced the kernels")
    launches = _record(case, dtype, monkeypatch)
    assert launches, "no kernel was launched"
    for kernel, *how in launches.values():
        compiled = _compile(kernel, *how, target)
        assert compiled.metadata.shared <= SHARED_MEMORY[target], kernel.__name__


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_compiles_for_hopper(case, monkeypatch):
    _check(
        case,
        torch.bfloat16 if torch.bfloat16 in case.dtypes else case.dtypes[0],
        "cuda:90",
        monkeypatch,
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("target", ["cuda:80", "hip:gfx942"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_compiles_elsewhere(case, target, dtype, monkeypatch):
    if dtype not in case.dtypes:
        pytest.skip(f"{case.name} is not defined for {dtype}")
    _check(case, dtype, target, monkeypatch)
