"""Launches that repeat go straight to the compiled kernel, with the arguments Triton would pass; others do not."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from liger_kernel import _env
from liger_kernel.ops import _triton

pytest.importorskip("triton")
pytestmark = pytest.mark.plain


class _Kernel:
    """Stands for a kernel of Triton and, as it needs no more, for what it compiles to: notes how it is called."""

    arg_names = ("X", "Y", "n", "scale", "BLOCK")
    function, packed_metadata = "function", "metadata"

    def __init__(self):
        self.compiled, self.direct, self.told = 0, [], 0

    def __getitem__(self, grid):
        def call(*args, **meta):
            if meta:
                self.compiled += 1
            else:
                self.told += 1
            return self

        return call

    def run(self, *args):
        self.direct.append(args)


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(_env, "has_raw_streams", lambda device: True)
    monkeypatch.setattr(_env, "raw_stream", lambda index: 7)
    monkeypatch.setattr(_triton, "_compiled", {})
    return _Kernel()


def _launch(kernel):
    return _triton.Launch(kernel, (3,), torch.device("cpu"), 5, 0.5, BLOCK=64, num_warps=4)


def test_repeated_launch_is_direct(kernel):
    x, y = torch.zeros(8), torch.zeros(8, dtype=torch.bfloat16)
    run = _launch(kernel)
    for _ in range(3):
        run(x, y)
    expected = (3, 1, 1, 7, "function", "metadata", None, None, None, x.data_ptr(), y.data_ptr())
    assert kernel.compiled == 1
    assert kernel.direct == 2 * [(*expected, 5, 0.5, 64)]


def test_launches_share_compiled_kernels(kernel):
    """What was compiled serves every size that Triton does not tell apart."""
    x = torch.zeros(8)
    for n in (5, 6, 7):
        _triton.Launch(kernel, (n,), torch.device("cpu"), n, 0.5, BLOCK=64, num_warps=4)(x, x)
    assert kernel.compiled == 1
    assert [call[0] for call in kernel.direct] == [6, 7]


def test_other_tensors_are_other_kernels(kernel):
    """Alignment, dtype and absence are told apart, and what is remembered of the first stays right."""
    x = torch.zeros(16)
    others = (x[1:9], x.to(torch.float16), None)
    run = _launch(kernel)
    run(x, x)
    for number, other in enumerate(others, start=2):
        run(x, other)
        assert kernel.compiled == number
    run(x, x)
    assert kernel.compiled == 1 + len(others)
    assert kernel.direct[-1][9:11] == (x.data_ptr(), x.data_ptr())


def test_profilers_hear_of_launches(kernel, monkeypatch):
    """With a hook set Triton's own call is taken, which tells it."""
    runtime = SimpleNamespace(launch_enter_hook=None, launch_exit_hook=None)
    monkeypatch.setattr(_triton, "triton", SimpleNamespace(knobs=SimpleNamespace(runtime=runtime)))
    x, run = torch.zeros(8), _launch(kernel)
    run(x, x)
    for hook in (print, SimpleNamespace(calls=[print])):
        runtime.launch_exit_hook = hook
        run(x, x)
    assert kernel.told == 2
    assert not kernel.direct
    runtime.launch_exit_hook = SimpleNamespace(calls=[])
    run(x, x)
    assert len(kernel.direct) == 1


def test_device_that_is_not_current(kernel, monkeypatch):
    x, run, entered = torch.zeros(8), _launch(kernel), []
    run(x, x)

    @contextlib.contextmanager
    def on_device(device):
        entered.append(device)
        monkeypatch.setattr(_env, "raw_stream", lambda index: 8)
        yield
        monkeypatch.setattr(_env, "raw_stream", lambda index: None)

    monkeypatch.setattr(_env, "raw_stream", lambda index: None)
    monkeypatch.setattr(_env, "on_device", on_device)
    run(x, x)
    run(x, x)
    assert len(entered) == 2
    assert [call[3] for call in kernel.direct] == [8, 8]


def test_empty_grid(kernel):
    _triton.Launch(kernel, (0,), torch.device("cpu"), 5, 0.5, BLOCK=64)(torch.zeros(0), None)
    assert kernel.compiled == 0


def test_plans_are_bounded():
    @_triton.planned
    def plan(n):
        return n

    for n in range(3000):
        plan(n)
    assert plan.cache_info().currsize <= 1024
    _triton.forget_plans()
    assert plan.cache_info().currsize == 0
