"""Norms of rows that begin anywhere: programs take rows of one phase, and the ends of rows by themselves."""

import itertools

import pytest
import torch
from cases import CASES

from liger_kernel import _env
from liger_kernel.ops import (
    _layer_norm_kernels,
    _rms_kernels,
    fused_add_rms_norm,
    layer_norm,
    rms_norm,
)
from liger_kernel.ops._row_phases import in_phases, phases_of
from liger_kernel.ops._triton import forget_plans
from liger_kernel.testing import properties

NAMES = ("rms_norm", "fused_add_rms_norm", "layer_norm")
ROWS = [case for case in CASES if case.op.name in NAMES]
PLAIN = [case for case in ROWS if not case.label]
OURS = {
    kernels.forward_phases_kernel: kernels.backward_phases_kernel
    for kernels in (_rms_kernels, _layer_norm_kernels)
}
# Greatest divisors that widths have in common with 8: 1, 2, 4 and 8. Rows that no number of phases divides, more of
# them than programs' tiles hold; and blocks of 128 to 4,096 columns.
SHAPES = [(131, 129), (37, 130), (70, 132), (21, 200), (1, 255)]
LARGE = [(19, 511), (11, 1537), (9, 4095)]
# fp32 rows are not taken so, fp16 are; the interpreter cuts bf16.
DTYPES = (torch.float32, torch.float16) if _env.interpreting() else (torch.float32, torch.bfloat16)
GUARD = 24  # elements around a result that nobody may touch


@pytest.fixture
def kernels(monkeypatch):
    """The device; few rows have no kernel of their own."""
    device = _env.default_device()
    if not _env.triton_runs_on(device.type):
        pytest.skip("kernels need an accelerator or TRITON_INTERPRET=1")
    monkeypatch.setattr(rms_norm, "_FEW_ROWS", 0)
    forget_plans()
    with _env.using_impl("triton"):
        yield device
    forget_plans()


@pytest.mark.parametrize(
    ("case", "shape"),
    [*itertools.product(ROWS, SHAPES), *itertools.product(PLAIN, LARGE)],
    ids=lambda given: given.name if isinstance(given, properties.Case) else str(given),
)
def test_accurate(kernels, ran, case, shape):
    """Every casting mode, an offset, mixed dtypes, a gradient to add, no weight: as exact as rows that are aligned."""
    for options, dtype in itertools.product(case.cover(), DTYPES):
        ran.clear()
        properties.accurate(case, shape, options, dtype, kernels)
        first = next(iter(case.draw(shape, options, dtype, kernels).values()))
        forward = ran & OURS.keys()
        assert bool(forward) == in_phases(first.element_size(), shape[-1])
        assert {OURS[kernel] for kernel in forward} == ran & set(OURS.values())


@pytest.mark.parametrize("width", [1, 7, 63, 8193])
@pytest.mark.parametrize("case", PLAIN, ids=lambda case: case.name)
def test_too_narrow_or_too_wide(kernels, ran, case, width):
    (options, *_) = case.cover()
    properties.accurate(case, (3, width), options, torch.float32, kernels)
    assert not ran & (OURS.keys() | set(OURS.values()))


@pytest.mark.parametrize("case", PLAIN, ids=lambda case: case.name)
@pytest.mark.parametrize(
    "check",
    [properties.written, properties.repeatable, properties.partial, properties.layouts],
    ids=lambda check: check.__name__,
)
def test_keeps(kernels, check, case):
    """The same bits again, whatever is needed, in memory of any content; any layout, any first address."""
    (options, *_) = case.cover()
    check(case, (11, 133), options, torch.float16, kernels)


@pytest.mark.parametrize("width", [129, 130, 132])
@pytest.mark.parametrize("case", PLAIN, ids=lambda case: case.name)
def test_neighbours(kernels, monkeypatch, case, width):
    """A row of NaN leaves every other row as it was; what lies around a result stays."""
    results = []

    def guarded(x, dtype=None):
        whole = torch.full((x.numel() + 2 * GUARD,), 7.0, dtype=dtype or x.dtype, device=x.device)
        results.append(whole)
        return whole[GUARD:-GUARD].view(x.shape)

    for module in (rms_norm, fused_add_rms_norm, layer_norm):
        monkeypatch.setattr(module, "like", guarded)
    (options, *_) = case.cover()
    for rows in (1, 2, 3, 5, 8, 10):
        tensors = case.draw((rows, width), options, torch.float16, kernels)
        clean = properties.run(case.function, tensors, options, case.grads)
        spoiled = next(iter(tensors.values()))
        spoiled[rows // 2] = float("nan")
        others = [i for i in range(rows) if i != rows // 2]
        found = properties.run(case.function, tensors, options, case.grads)
        for name, value in found.items():
            if value.shape == (rows, width):
                torch.testing.assert_close(value[others], clean[name][others], rtol=0, atol=0)
                assert value[rows // 2].isnan().all()
    assert len(results) >= 24
    for whole in results:
        assert (whole[:GUARD] == 7).all()
        assert (whole[-GUARD:] == 7).all()


def test_strides_of_one_phase(kernels, ran):
    """Rows apart that begin like the results' rows; else none of our kernels."""
    weight = torch.randn(131, device=kernels).half()
    for step, ours in ((131, True), (131 + 8, True), (131 + 4, False), (136, False)):
        ran.clear()
        x = torch.randn(11, step, device=kernels).half()[:, :131]
        y = rms_norm.rms_norm(x, weight)
        torch.testing.assert_close(y, rms_norm.reference(x, weight))
        assert bool(ran & OURS.keys()) is ours


def test_phases():
    assert [phases_of(width) for width in (4095, 4094, 4092, 4088)] == [8, 4, 2, 1]
    assert in_phases(2, 4095, 4095, None)
    assert in_phases(2, 4088)
    assert in_phases(2, 4096, 4104)
    for itemsize, *widths in [(2, 4096), (2, 4095, 4096), (2, 127), (2, 8193), (4, 4095)]:
        assert not in_phases(itemsize, *widths)
