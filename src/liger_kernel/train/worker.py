"""One run, in a process of its own:  python -m liger_kernel.train.worker JOB.json

Writes one JSON object a line to its standard output (whatever libraries print goes to standard error):

    {"event": "loaded", "parameters": ..., "seconds": ..., "memory_method": ...,
     "patch": null | {...}, "patch_text": null | "..."}
    {"event": "step", "loss": ..., "seconds": ..., "peak_memory": ...}      one a step
    {"event": "failed", "message": ..., "usage": true | false}              instead of the rest
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from liger_kernel import _env
from liger_kernel.train import UsageError
from liger_kernel.train.memory import PeakMemory
from liger_kernel.train.model import find, one_line
from liger_kernel.train.parallel import Wrap, engine, mean_over_ranks, own_rows
from liger_kernel.train.settings import DTYPES, Settings

Emit = Callable[..., None]


def main() -> int:
    """Do the job whose file is the first argument."""
    emit = _claim_stdout()
    job = json.loads(Path(sys.argv[1]).read_text())
    try:
        settings, name = Settings(**job["settings"]), job["run"]
        with engine(settings, name) as wrap:
            train(settings, name == "patched", torch.load(job["blocks"]), wrap, emit)
    except UsageError as error:
        emit("failed", message=str(error), usage=True)
        return 2
    except Exception as error:
        traceback.print_exc()
        emit("failed", message=f"{type(error).__name__}: {one_line(error)}", usage=False)
        return 1
    return 0


def train(settings: Settings, patched: bool, blocks: Tensor, wrap: Wrap, emit: Emit) -> None:
    """Fine-tune on this process's part of `blocks` `[steps, ranks * batch, seq]` and report every step."""
    began = time.perf_counter()
    device = torch.device(settings.device)
    torch.manual_seed(settings.seed)
    source = find(settings.model)
    model = source.load(DTYPES[settings.dtype], device).train()
    model.config.get_text_config().use_cache = False
    parameters = sum(p.numel() for p in model.parameters())
    report = _patch(model) if patched else None
    model = wrap(model)
    memory = PeakMemory(device)
    emit(
        "loaded",
        parameters=parameters,
        seconds=time.perf_counter() - began,
        memory_method=memory.method,
        patch=report and report.as_dict(),
        patch_text=report and str(report),
    )
    optimizer = _optimizer(settings, model)
    torch.manual_seed(settings.seed)
    for block in blocks:
        began = time.perf_counter()
        loss = mean_over_ranks(_step(model, optimizer, own_rows(block).to(device)))
        _env.synchronize(device)
        seconds = time.perf_counter() - began
        emit("step", loss=loss.item(), seconds=seconds, peak_memory=memory.peak())


def _step(model: Any, optimizer: torch.optim.Optimizer, ids: Tensor) -> Tensor:
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _patch(model: Any) -> Any:
    import liger_kernel

    return liger_kernel.patch(model)


def _optimizer(settings: Settings, model: Any) -> torch.optim.Optimizer:
    # fused: one pass over the state and no temporaries of the parameters' size, so the peak is the model's own
    kind = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[settings.optimizer]
    return kind(model.parameters(), lr=settings.lr, fused=True)


def _claim_stdout() -> Emit:
    """Keep standard output for events; file descriptor 1 becomes a copy of 2 for everybody else."""
    events = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)

    def emit(event: str, **values: Any) -> None:
        events.write(json.dumps({"event": event, **values}) + "\n")

    return emit


if __name__ == "__main__":
    sys.exit(main())
