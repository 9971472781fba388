"""The longest sequence and the largest micro-batch whose training step fits in so much device memory, as JSON lines.

    python benchmarks/longest.py [ROW ...] [--within 40 80] [--variant shipped|patched|rematerialised ...]

A row is MODEL/context/OPTIMIZER, the longest sequence in units of 1,024 tokens, or MODEL/Bx2048/OPTIMIZER, with a
literal B: the largest batch of sequences of that many tokens. A fourth part, the models and the step are those of
steps.py. --within is GiB that this process's allocator may reserve of the device, as on a smaller card; what lies
outside the allocator (the context, loaded kernels) is not counted. The peak is what was reserved, so fragmentation
counts. The script sets PYTORCH_ALLOC_CONF=expandable_segments:True before it imports torch.

--seconds bounds the time that a step is expected to take: a row that stops there says "time". tokens/s are of a second
step at the size found. Each trial is a line on stderr.
"""

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable

if __name__ == "__main__":  # the allocator reads it when torch is imported
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"  # of torch before 2.9
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"

import steps
import torch

GIB = 1 << 30
UNIT = 1024  # tokens by which a sequence grows
CAP = 1024  # units: a million tokens, or sequences of a batch
ROWS = {
    "1b/context/adamw": (40.0,),
    "1b/Bx2048/adamw": (40.0,),
    "8b/context/sgd/checkpoint": (40.0,),
    "8b/context/sgd": (80.0,),
    "8b/context/adamw/lora": (80.0,),
}  # row -> GiB


def two_of(points: dict[int, float]) -> tuple[int, int]:
    """The largest size and the next that is a fifth smaller: far enough apart for a line through both."""
    large = max(points)
    return max((size for size in points if size <= 0.8 * large), default=min(points)), large


def reach(peaks: dict[int, float], limit: float) -> float:
    """The size at which a line through two peaks meets the limit."""
    if len(peaks) < 2:
        return float("inf")
    small, large = two_of(peaks)
    slope = (peaks[large] - peaks[small]) / (large - small)
    return large + (limit - peaks[large]) / slope if slope > 0 else float("inf")


def expected(seconds: dict[int, float], size: int) -> float:
    """The time of a step of that size, from the times of others: seconds = a size + b size^2 (attention)."""
    if not seconds:
        return 0.0
    small, large = two_of(seconds)
    if small == large:
        return seconds[large] * max(size / large, 1.0) ** 2
    rate = seconds[large] / large
    growth = max((rate - seconds[small] / small) / (large - small), 0.0)
    return size * (rate + growth * max(size - large, 0))


def propose(guess: float, low: int, high: int, step: int) -> int:
    """A size between `low`, which fits, and `high`, which does not: the guess unless it is refuted already."""
    middle = (low + high) // 2
    if low == 0:
        return middle
    if guess > 2 * low:  # a long way is stopped short of: it then fits, and makes a better line
        guess = low + 0.95 * (guess - low)
    size = int(min(guess, 8 * low))
    if size <= low:
        size = low + step
    return size if size < high else middle


def search(
    fits: Callable[[int], float | None],
    limit: float,
    start: tuple[int, int],
    cap: int,
    affordable: Callable[[int], bool] = lambda size: True,
) -> tuple[int, str]:
    """The largest size up to `cap` that fits, 0 if none does, and what stopped it: "memory", "time" or "cap".

    `fits`: a size -> its peak, or None. `start`: two small sizes, to begin with. `affordable`: a size -> whether it may
    be tried, asked anew before every trial.
    """
    peaks: dict[int, float] = {}
    low, high, step = 0, cap + 1, 1
    while high - low > 1:
        size = next((size for size in start if low < size < high), 0)
        if not size:
            guess = reach(peaks, limit)
            size = propose(min(guess, cap) if high > cap else guess, low, high, step)
            step *= 2 if guess < low + 1 else 1
        if not affordable(size):
            size = max((s for s in range(low + 1, size) if affordable(s)), default=low)
            if size == low or size < 1.1 * low:  # estimates of time are no better than that
                return low, "time"
        peak = fits(size)
        if peak is None:
            high = size
        else:
            low, peaks[size] = size, peak
    return low, "memory" if high <= cap else "cap"


class Trials:
    """One model and its optimizer; a call is a trial of a size. The optimizer's state stays from trial to trial."""

    def __init__(self, row: str, variant: str, device: torch.device):
        self.name, self.size, optimizer, extra = (*row.split("/"), "")[:4]
        self.label = f"{row} {variant}"
        self.context = self.size == "context"
        self.start = (2, 4) if self.context else (1, 2)
        self.device, self.module = device, torch.get_device_module(device)
        self.seconds: dict[int, float] = {}
        self.count = 0
        longest = self.shape(CAP)[1]
        self.model = steps.build(self.name, longest, device, variant, extra)
        self.optimizer = steps.optimizer_of(self.model, optimizer)

    def shape(self, size: int) -> tuple[int, int]:
        return (1, size * UNIT) if self.context else (size, int(self.size.removeprefix("Bx")))

    def __call__(self, size: int) -> int | None:
        """The peak of reserved bytes, or None: it does not fit.

        At the small sizes a second step counts: AdamW's states are made at the end of the first, kernels are compiled
        in it.
        """
        return self.attempt(size, 2 if size <= self.start[1] else 1)

    def attempt(self, size: int, times: int) -> int | None:
        self.count += 1
        gc.collect()  # models have cycles
        self.module.empty_cache()
        found = self._steps(size, times)
        if found is None:  # the exception and its frames are gone by now
            self.optimizer.zero_grad(set_to_none=True)
            if not self.seconds:  # the first step may have broken off with some of the states made
                self.optimizer.state.clear()
            gc.collect()
            self.module.empty_cache()
        else:
            self.seconds[size] = found[1]
        said = f"{found[0] / GIB:.2f} GiB, {found[1]:.3f} s" if found else "does not fit"
        print(f"{self.label} {self.shape(size)}: {said}", file=sys.stderr, flush=True)
        return found and found[0]

    def _steps(self, size: int, times: int) -> tuple[int, float] | None:
        """Peak of reserved bytes and the last step's seconds. The exception ends here: it holds tensors."""
        self.module.reset_peak_memory_stats(self.device)
        seconds = 0.0
        try:
            vocabulary = steps.MODELS[self.name]["vocab_size"]
            ids = torch.randint(vocabulary, self.shape(size), device=self.device)
            for _ in range(times):
                self.module.synchronize()
                begin = time.perf_counter()
                steps.train_step(self.model, self.optimizer, ids)
                self.module.synchronize()
                seconds = time.perf_counter() - begin
        except torch.OutOfMemoryError:
            return None
        return self.module.max_memory_reserved(self.device), seconds


def run(row: str, variant: str, within: float, seconds: float, device: torch.device) -> dict:
    found = {"row": row, "variant": variant, "within GiB": within, "longest": 0}
    found |= {"peak GiB": None, "tokens/s": None, "trials": 0, "stopped": "memory"}
    module = torch.get_device_module(device)
    total = module.get_device_properties(device).total_memory
    module.set_per_process_memory_fraction(within * GIB / total, device)
    try:
        trials = Trials(row, variant, device)
    except torch.OutOfMemoryError:
        return found
    size, stopped = search(
        trials, within * GIB, trials.start, CAP, lambda n: expected(trials.seconds, n) <= seconds
    )
    peak = None
    while size and (peak := trials.attempt(size, 2)) is None:  # the first step left pieces
        size -= 1
    found |= {"trials": trials.count, "stopped": stopped}
    if peak is None:
        return found
    batch, tokens = trials.shape(size)
    return found | {
        "longest": tokens if trials.context else batch,
        "peak GiB": round(peak / GIB, 2),
        "tokens/s": round(batch * tokens / trials.seconds[size]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", default=list(ROWS), metavar="ROW")
    parser.add_argument("--within", type=float, nargs="+", metavar="GIB", help="default: by row")
    parser.add_argument("--variant", choices=steps.VARIANTS, nargs="+", default=["patched"])
    parser.add_argument("--seconds", type=float, default=20.0)
    args = parser.parse_args()
    kind = torch.accelerator.current_accelerator()
    if kind is None:
        parser.error("needs an accelerator")
    device = torch.device(kind.type, 0)
    torch.accelerator.set_device_index(0)
    for row in args.rows:
        for within in args.within or ROWS.get(row, (40.0, 80.0)):
            for variant in args.variant:
                found = run(row, variant, within, args.seconds, device)
                gc.collect()  # models have cycles
                torch.get_device_module(device).empty_cache()
                print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
