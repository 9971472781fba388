"""benchmarks/longest.py: the search, on memory that is made up, and what is left after a trial that did not fit."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from liger_kernel import _env

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "longest.py"
sys.path.append(str(SCRIPT.parent))  # last: tests have a package `rows` too

import longest  # noqa: E402

LIMIT = 40.0
MEMORY = {
    "affine": lambda n: 16 + 0.56 * n,
    "affine, a large unit": lambda n: 16 + 2.4 * n,
    "hardly grows": lambda n: 30 + 0.03 * n,
    "flat, then affine": lambda n: max(20, 12 + 0.56 * n),
    "a jump on the way": lambda n: 16 + 0.4 * n + 5 * (n > 25),
    "a jump over the limit": lambda n: 16 + 0.1 * n + 30 * (n > 77),
    "coarse": lambda n: 16 + 1.5 * (n // 4),
    "the second small size does not fit": lambda n: 15 * n,
    "only one unit fits": lambda n: 21 + 19 * n,
    "nothing fits": lambda n: 41 + n,
    "everything fits": lambda n: 5 + 0.001 * n,
}
granted = pytest.mark.skipif(_env.infer_device() == "cpu", reason="needs an accelerator")


def _search(memory, start, cap=1024, **options):
    tried = []

    def fits(size):
        tried.append(size)
        return memory(size) if memory(size) <= LIMIT else None

    return longest.search(fits, LIMIT, start, cap, **options), tried


@pytest.mark.parametrize("start", [(1, 2), (2, 4)], ids=["batch", "context"])
@pytest.mark.parametrize("name", MEMORY)
def test_the_largest_that_fits_is_found(name, start):
    memory = MEMORY[name]
    right = max((n for n in range(1, 1025) if memory(n) <= LIMIT), default=0)
    (found, stopped), tried = _search(memory, start)
    assert (found, stopped) == (right, "cap" if right == 1024 else "memory")
    assert len(tried) == len(set(tried))
    assert len(tried) <= (6 if name.startswith("affine") else 12)


@pytest.mark.parametrize("cap", [1, 2, 3, 9])
def test_the_cap_is_not_passed(cap):
    (found, stopped), tried = _search(MEMORY["everything fits"], (2, 4), cap)
    assert (found, stopped) == (cap, "cap")
    assert max(tried) == cap


def test_a_size_that_takes_too_long_is_not_tried():
    (found, stopped), tried = _search(MEMORY["affine"], (2, 4), affordable=lambda n: n <= 20)
    assert (found, stopped) == (20, "time")
    assert max(tried) == 20
    assert _search(MEMORY["affine"], (2, 4), affordable=lambda n: False) == ((0, "time"), [])


def test_expected_time():
    assert longest.expected({}, 8) == 0
    assert longest.expected({2: 0.5}, 4) == 2.0  # quadratic as far as anybody knows
    times = {n: 0.1 * n + 0.01 * n * n for n in (2, 4, 32)}
    assert longest.expected(times, 64) == pytest.approx(6.4 + 40.96)
    assert longest.expected({1: 0.5, 2: 0.8}, 10) == pytest.approx(4.0)  # never better than linear


class Card(SimpleNamespace):
    """What a device's module answers, of a card with `used(tokens)` bytes in use by a step."""

    def __init__(self, used):
        super().__init__(used=used, limit=0.0, peak=0.0)
        self.synchronize = self.empty_cache = lambda: None
        self.reset_peak_memory_stats = lambda device: None
        self.max_memory_reserved = lambda device: self.peak
        self.is_available = lambda: False
        self.get_device_properties = lambda device: SimpleNamespace(total_memory=100 * longest.GIB)

    def set_per_process_memory_fraction(self, fraction, device):
        self.limit = fraction * 100 * longest.GIB

    def step(self, model, optimizer, ids, real=longest.steps.train_step):
        self.peak = self.used(ids.numel())
        if self.peak > self.limit:
            some = optimizer.param_groups[0]["params"][0]  # as if in the midst of making states
            optimizer.state.setdefault(some, {"step": torch.tensor(0.0)})
            raise torch.OutOfMemoryError
        return real(model, optimizer, ids[:, :8])


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize(
    ("row", "gib", "right"),
    [
        ("tiny/context/adamw", 40, 43008),
        ("tiny/context/sgd/checkpoint", 40, 43008),
        ("tiny/context/adamw", 2, 2048),
        ("tiny/context/adamw", 1, 1024),  # the smaller of the first two sizes does not fit
        ("tiny/context/adamw", 0.5, 0),
        ("tiny/Bx2048/adamw", 40, 21),
        ("tiny/Bx2048/sgd", 1, 0),
    ],
)
def test_a_row(row, gib, right, monkeypatch):
    card = Card(lambda tokens: tokens / 43500 * 40 * longest.GIB)
    monkeypatch.setattr(torch, "get_device_module", lambda device: card)
    monkeypatch.setattr(longest.steps, "train_step", card.step)
    found = longest.run(row, "shipped", gib, 20.0, torch.device("cpu"))
    assert found["longest"] == right
    assert (found["row"], found["within GiB"], found["stopped"]) == (row, gib, "memory")
    assert (found["tokens/s"] is None) == (right == 0)
    assert right == 0 or 0 < found["peak GiB"] <= gib


@pytest.mark.gpu
@granted
def test_nothing_is_left_of_a_trial_that_did_not_fit(device):
    module = torch.get_device_module(device)
    room = module.memory_allocated(device) + longest.GIB
    module.set_per_process_memory_fraction(room / module.mem_get_info(device)[1], device)
    try:
        trials = longest.Trials("tiny/context/adamw", "patched", device)
        peak = trials(2)
        used = module.memory_allocated(device)
        assert trials(1024) is None
        assert module.memory_allocated(device) == used
        assert trials(2) == peak
    finally:
        module.set_per_process_memory_fraction(1.0, device)


@pytest.mark.gpu
@granted
def test_the_script():
    command = [sys.executable, SCRIPT, "tiny/context/adamw", "tiny/Bx2048/sgd", "--within", "0.25"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for line in done.stdout.splitlines():
        found = json.loads(line)
        assert found["longest"] > 0, done.stderr
        assert found["stopped"] == "memory", done.stderr
        assert found["peak GiB"] <= 0.25 + 0.02  # a segment of 20 MiB
