"""The properties of `liger_kernel.testing.properties` on every row of `cases.py`, on the Triton
path and on the torch path.

On a machine without an accelerator the Triton path runs in Triton's interpreter
(TRITON_INTERPRET=1, set by `make test`).
"""

import pytest
import torch
from cases import CASES

from liger_kernel import _env
from liger_kernel.testing import properties
from liger_kernel.testing.properties import Maker

BY_NAME = {c.name: c for c in CASES}
SMALL = 4096  # elements: the properties other than accuracy use the shapes below this


def _id(value):
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, dict):
        return ",".join(f"{k}={v}" for k, v in value.items()) or "-"
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _points(every_option=False):
    for case in CASES:
        for shape in case.shapes:
            for options in case.grid() if every_option else case.cover():
                yield pytest.param(
                    case, shape, options, id=f"{case.name}-{_id(shape)}-{_id(options)}"
                )


def _small_points():
    for case in CASES:
        shape = next(s for s in case.shapes if 0 not in s)
        for options in case.cover():
            yield pytest.param(case, shape, options, id=f"{case.name}-{_id(shape)}-{_id(options)}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=_id)
@pytest.mark.parametrize(("case", "shape", "options"), list(_points()))
def test_accurate(case, shape, options, dtype, path, device):
    if dtype not in case.dtypes:
        pytest.skip(f"{case.name} is not defined for {dtype}")
    properties.accurate(case, shape, options, dtype, device)


@pytest.mark.parametrize(("case", "shape", "options"), list(_small_points()))
def test_accurate_in_fp16(case, shape, options, path, device):
    """One shape here; every one in `test_accurate_everywhere`."""
    if torch.float16 not in case.dtypes:
        pytest.skip(f"{case.name} is not defined for fp16")
    properties.accurate(case, shape, options, torch.float16, device)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=_id)
@pytest.mark.parametrize(("case", "shape", "options"), list(_points(every_option=True)))
def test_accurate_everywhere(case, shape, options, dtype, path, device):
    if dtype not in case.dtypes:
        pytest.skip(f"{case.name} is not defined for {dtype}")
    properties.accurate(case, shape, options, dtype, device)


@pytest.mark.parametrize(
    "check",
    [properties.written, properties.repeatable, properties.partial],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize(("case", "shape", "options"), list(_small_points()))
def test_kept(check, case, shape, options, path, device):
    check(case, shape, options, case.dtypes[-1], device)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_layouts(case, path, device):
    shapes = [s for s in case.shapes if 0 not in s and torch.Size(s).numel() < SMALL]
    widest = max(shapes, key=len)
    for shape in {shapes[0], widest}:
        properties.layouts(case, shape, next(case.cover()), torch.float32, device)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_traced(case, path, device):
    properties.traced(case, case.shapes[0], next(case.cover()), torch.float32, device)


@pytest.mark.parametrize(("case", "shape", "options"), list(_small_points()))
def test_reference_is_differentiable(case, shape, options, device):
    if not case.differentiable:
        pytest.skip(f"{case.name} holds a part of its loss constant")
    properties.differentiable(case, case.shapes[0], options, device)


@pytest.mark.parametrize("case", [c for c in CASES if c.opchecks], ids=lambda c: c.name)
def test_named_operators(case, device):
    if not _env.triton_runs_on(device.type):
        pytest.skip("kernels need an accelerator or TRITON_INTERPRET=1")
    tensors = case.draw(case.shapes[0], next(case.cover()), torch.float32, device)
    for launcher, args in case.opchecks(tensors):
        torch.library.opcheck(launcher.operator, args)


@pytest.mark.parametrize(
    ("case", "number"),
    [pytest.param(c, i, id=f"{c.name}-{i}") for c in CASES for i in range(len(c.bad))],
)
def test_bad_input_says_what_to_do(case, number, path, device):
    message, call, error = case.bad[number]
    with pytest.raises(error, match=message):
        call(Maker(torch.float32, device))
