"""The command and the examples on several processes."""

import json
import math
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from distributed import run
from tiny_run import ASKED, EXAMPLES, checkpoint, example, write

from liger_kernel import _env
from liger_kernel.train import UsageError, parallel
from liger_kernel.train.settings import complete

pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.plain,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

DEVICES = _env.device_count(_env.infer_device())


@pytest.fixture
def tiny(tmp_path):
    write(tmp_path, words=4000)
    return tmp_path


# liger-kernel train --ddp, --fsdp


def _train(settings, patched, blocks, kind=None):
    from liger_kernel.train.worker import train

    losses = []

    def emit(event, **values):
        if event == "step":
            losses.append(values["loss"])
        else:
            assert (values["patch"] is not None) == patched

    train(settings, patched, blocks, getattr(parallel, kind) if kind else lambda m: m, emit)
    return losses


def _both(settings, blocks, kind):
    return [_train(settings, patched, blocks, kind) for patched in (False, True)]


@pytest.mark.parametrize("kind", ["_ddp", "_fsdp"])
def test_the_losses_of_one_process(tiny, kind):
    settings = complete({**ASKED, "model": str(tiny / "tiny.json")}, pretrained=False)
    blocks = torch.randint(320, (3, 4, 16), generator=torch.Generator().manual_seed(0))
    wanted = pytest.approx(_train(settings, False, blocks), rel=1e-5)
    for plain, patched in run(_both, 2, settings, blocks, kind):
        assert plain == wanted
        assert patched == wanted


def test_engines_need_a_launcher_and_the_launcher_an_engine(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(UsageError, match="--fsdp needs several processes: torchrun"):
        complete({**ASKED, "parallel": "fsdp"}, pretrained=False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(UsageError, match="4 processes were started: add --ddp or --fsdp"):
        complete(ASKED, pretrained=False)
    settings = complete({**ASKED, "parallel": "ddp"}, pretrained=False)
    assert (settings.ranks, settings.tokens) == (4, 4 * 3 * 2 * 16)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["--fsdp", "--ddp"])
def test_torchrun(tiny, engine):
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29533",
        "-m", "liger_kernel", "train", engine, "--steps=2", "--seq=16", "--device=cpu",
        f"--model={tiny / 'tiny.json'}", f"--text={tiny / 'text.txt'}", f"--out={tiny / 'out'}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("report.json") == 1
    found = json.loads((tiny / "out" / "report.json").read_text())
    assert found["comparison"]["agree"]
    assert found["comparison"]["steps_compared"] == 2
    assert found["settings"]["ranks"] == 2


# The examples


def _example(name, arguments):
    losses = example(name, arguments)
    assert dist.is_initialized()
    return losses


@pytest.mark.parametrize("name", ["fsdp2", "trainer"])
def test_example(tiny, name):
    checkpoint(tiny)
    arguments = [str(tiny), str(tiny / "text.txt"), "--steps=3", "--seq=16"]
    arguments += [f"--out={tiny}"] if name == "trainer" else ["--lr=1e-2"]
    first, second = run(_example, 2, name, arguments)
    assert first == second
    assert len(first) == 3
    assert all(math.isfinite(loss) for loss in first)
    if name == "fsdp2":
        assert first[-1] < first[0]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICES < 2, reason="needs two accelerators: accelerate has no FSDP on a CPU")
def test_accelerate_launch(tiny):
    checkpoint(tiny)
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--num_processes=2",
        f"--config_file={EXAMPLES / 'accelerate_fsdp2.yaml'}", str(EXAMPLES / "trainer.py"),
        str(tiny), str(tiny / "text.txt"), "--steps=2", "--seq=16", f"--out={tiny}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("'loss'") == 2


def test_configurations_are_readable():
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(EXAMPLES / "accelerate_fsdp2.yaml"))
    assert config.distributed_type == "FSDP"
    assert config.fsdp_config["fsdp_version"] == 2
    assert json.loads((EXAMPLES / "zero3.json").read_text())["zero_optimization"]["stage"] == 3
