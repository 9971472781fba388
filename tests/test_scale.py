"""Buffers times a scalar on the device, in one launch."""

import pytest
import torch

from liger_kernel import _env
from liger_kernel.ops import _scale
from liger_kernel.ops._scale import scale_, scale_all_


@pytest.mark.parametrize("factor", [1.0, 0.3])
@pytest.mark.parametrize(
    "sizes", [(3,), (9000, 5), (1, 40_000, 4096), (0, 7, 3), (None, 5000, 2), (None, None, None)]
)
def test_each_buffer_is_multiplied_in_its_place(sizes, factor, device):
    dtypes = (torch.bfloat16, torch.float32, torch.float16)
    given = [
        None if n is None else torch.randn(n, device=device).to(dtype)
        for n, dtype in zip(sizes, dtypes, strict=False)
    ]
    by = torch.tensor(factor, device=device)
    want = [None if g is None else (g.float() * by).to(g.dtype) for g in given]
    got = scale_all_(given, by)
    assert len(got) == len(given)
    for g, w, before in zip(got, want, given, strict=True):
        assert g is before
        if g is not None:  # the interpreter rounds bf16 in its own way
            torch.testing.assert_close(g, w, rtol=2**-7, atol=0)


def test_one_launch_for_all(device, monkeypatch):
    if not _env.triton_runs_on(device.type):
        pytest.skip("plain products")
    made = []
    plan = _scale._plan
    monkeypatch.setattr(_scale, "_plan", lambda *sizes: made.append(sizes) or plan(*sizes))
    buffers = [torch.ones(n, device=device) for n in (2, 3)]
    scale_all_([None, *buffers], torch.tensor(2.0, device=device))
    assert len(made) == 1


def test_fp64_is_a_plain_product(device):
    x = torch.ones(3, dtype=torch.float64, device=device)
    assert scale_(x, torch.tensor(0.5, device=device)) is x
    assert x.tolist() == [0.5] * 3
