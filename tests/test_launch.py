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


class _Launcher:
    """What Triton 3.6 launches through: it adds flags, and scratch where a kernel needs any."""

    launch_cooperative_grid, launch_pdl = "cooperative", "pdl"

    def __init__(self, scratch=0):
        self.global_scratch_size, self.profile_scratch_size = 0, scratch
        self.passed, self.calls = [], 0
        self.launch = lambda *args: self.passed.append(args)

    def __call__(self, x, y, z, stream, function, *args):
        self.calls += 1
        flags = self.launch_cooperative_grid, self.launch_pdl
        scratch = None, "scratch" if self.profile_scratch_size else None
        self.launch(x, y, z, stream, function, *flags, *scratch, *args)


def _launch_through(launcher):
    """Three calls, the first of which compiles, the last with other tensors."""
    kernel = _Kernel()
    kernel.run = launcher
    x, y = torch.zeros(8), torch.zeros(8, dtype=torch.bfloat16)
    others = x.clone(), y.clone()
    run = _launch(kernel)
    for tensors in ((x, y), (x, y), others):
        run(*tensors)
    assert kernel.compiled == 1
    return [tuple(t.data_ptr() for t in tensors) for tensors in ((x, y), others)]


@pytest.mark.parametrize("known", [True, False])
def test_launchers_are_passed_by(kernel, monkeypatch, known):
    """The kernel gets the same arguments whether its launcher is called or, where it is known to add flags, is not."""
    monkeypatch.setattr(_triton, "_LAUNCHER_IS_KNOWN", known)
    launcher = _Launcher()
    pointers = _launch_through(launcher)
    before = (3, 1, 1, 7, "function", "cooperative", "pdl", None, None, "metadata")
    own = [(*given, 5, 0.5, 64) for given in pointers]
    assert launcher.passed == [(*before, None, None, None, *args) for args in own]
    assert launcher.calls == (0 if known else 2)


def test_launchers_with_scratch_are_called(kernel, monkeypatch):
    monkeypatch.setattr(_triton, "_LAUNCHER_IS_KNOWN", True)
    launcher = _Launcher(scratch=64)
    _launch_through(launcher)
    assert launcher.calls == 2
    assert [call[8] for call in launcher.passed] == 2 * ["scratch"]


@pytest.mark.parametrize("name", ["launch", "launch_pdl", "profile_scratch_size"])
def test_launchers_of_another_kind_are_called(kernel, monkeypatch, name):
    """Other versions lack an attribute."""
    monkeypatch.setattr(_triton, "_LAUNCHER_IS_KNOWN", True)
    given = {**vars(_Launcher()), "launch_cooperative_grid": False, "launch_pdl": False}
    del given[name]

    class Other(SimpleNamespace):
        def __call__(self, *args):
            self.passed.append(args)

    launcher = Other(**given)
    pointers = _launch_through(launcher)
    before = (3, 1, 1, 7, "function", "metadata", None, None, None)
    assert launcher.passed == [(*before, *given, 5, 0.5, 64) for given in pointers]


def test_launcher_that_is_installed(kernel, monkeypatch):
    """Passed by, where its version is known, a kernel gets what the class itself would pass on."""
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    traits = {**vars(_Launcher()), "num_ctas": 1}
    traits |= {"global_scratch_align": 1, "profile_scratch_align": 1}
    traits |= {"launch_cooperative_grid": False, "launch_pdl": True}
    traits |= {"arg_annotations": (), "kernel_signature": b""}  # of 3.7
    seen = []
    for known in (_triton._LAUNCHER_IS_KNOWN, False):
        monkeypatch.setattr(_triton, "_LAUNCHER_IS_KNOWN", known)
        launcher = object.__new__(driver.CudaLauncher)
        passed = []
        vars(launcher).update(traits, launch=lambda *args, to=passed: to.append(args))
        pointers = _launch_through(launcher)
        seen.append([_without(call, given) for call, given in zip(passed, pointers, strict=True)])
    assert seen[0] == seen[1]


def _without(call, pointers):
    """A call's arguments, those that are nested too, with pointers by number."""
    flat = [*call[:-1], *(call[-1] if isinstance(call[-1], tuple) else call[-1:])]
    return [pointers.index(a) if a in pointers else a for a in flat]


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
