"""Paths, devices and the few warnings of others that tests cannot avoid."""

import os
import sys
from pathlib import Path

import pytest
import torch

from liger_kernel import _env
from liger_kernel.ops._triton import Launch

sys.path.insert(0, str(Path(__file__).parent))
os.environ["LIGER_KERNEL_SCHEDULES"] = "off"  # what this user has tuned is not what is tested

if _env.triton_runs_on("cpu"):
    import interpreter

    interpreter.speed_up()


def pytest_addoption(parser):
    parser.addoption(
        "--kernels", default="", help="test_launches_compile: kernels whose names hold one of these, by commas (all)"
    )  # fmt: skip


@pytest.fixture
def device() -> torch.device:
    """The accelerator if there is one, else the CPU (kernels then run in Triton's interpreter)."""
    return _env.default_device()


@pytest.fixture
def ran(monkeypatch) -> set:
    """The kernels that `Launch` runs."""
    found, call = set(), Launch.__call__

    def noted(launch, *tensors):
        found.add(launch._given[0])
        call(launch, *tensors)

    monkeypatch.setattr(Launch, "__call__", noted)
    return found


@pytest.fixture
def fresh_impl():
    """Forget what was read from the environment before and after a test that changes it."""
    _env.refresh()
    yield
    _env.refresh()


@pytest.fixture(params=["triton", "torch"])
def path(request, device):
    """The Triton path, where there is one, and the torch path."""
    if request.param == "triton" and not _env.triton_runs_on(device.type):
        pytest.skip("kernels need an accelerator or TRITON_INTERPRET=1")
    with _env.using_impl(request.param):
        yield request.param
