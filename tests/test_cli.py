"""The command: which errors it tells how, and that a subcommand imports only itself. (Training: test_train.py)"""

import isolated
import pytest

from liger_kernel.cli import main

pytestmark = pytest.mark.plain


def _fails(capsys, *argv):
    """The one line that a user error prints; nothing else may appear."""
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1, err
    return err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--steps", "0"], "--steps: must be at least 1; got 0"),
        (["--steps", "many"], "--steps: invalid int value: 'many'"),
        (["--lr", "0"], "--lr: must be above 0; got 0"),
        (["--lr", "nan"], "--lr: must be above 0; got nan"),
        (["--seq", "1"], "--seq: must be at least 2"),
        (["--dtype", "fp8"], "'fp8'"),
        (["--optimizer", "lion"], "'lion'"),
        (["--stepz", "3"], "--stepz"),
        (["--device", "quantum"], "--device must be one of"),
        (["--device", "cpu:1"], "--device cpu:1 does not exist"),
        (["--model", "missing.gguf"], "no such file"),
        (["--model", "./nowhere"], "no folder with a config.json"),
        (["--model", "lama"], "Did you mean"),
        (["--model", "t5"], "no next-token loss"),
        (["--text", "nowhere"], "--text nowhere: no such file or folder"),
        (["--seq", "100000"], "knows 2048 positions"),
    ],
    ids=lambda value: "-".join(value).lstrip("-") if isinstance(value, list) else "",
)
def test_bad_arguments(capsys, tmp_path, arguments, said):
    small = [] if "--model" in arguments else ["--model", "llama"]
    assert said in _fails(capsys, "train", "--out", str(tmp_path), *small, *arguments)


def test_bad_texts(capsys, tmp_path):
    def said(path):
        return _fails(
            capsys, "train", "--model", "llama", "--out", str(tmp_path), "--text", str(path)
        )

    (tmp_path / "short.txt").write_text("a few words")
    assert "the text holds" in said(tmp_path / "short.txt")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x80")
    assert "not UTF-8" in said(tmp_path / "binary")
    (tmp_path / "empty").mkdir()
    assert "holds no files" in said(tmp_path / "empty")


def test_out_that_is_a_file(capsys, tmp_path):
    (tmp_path / "file").touch()
    assert "--out" in _fails(capsys, "train", "--out", str(tmp_path / "file"))


def test_broken_checkpoints(capsys, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "nonesuch"}')
    assert "nonesuch" in _fails(capsys, "train", "--out", str(tmp_path), "--model", str(tmp_path))
    (tmp_path / "broken.json").write_text("{")
    assert "broken" in _fails(capsys, "probe", str(tmp_path / "broken.json"))


def test_broken_gguf(capsys, tmp_path):
    pytest.importorskip("gguf")
    (tmp_path / "not.gguf").write_bytes(b"GGUF but not really")
    assert "not" in _fails(
        capsys, "train", "--out", str(tmp_path), "--model", str(tmp_path / "not.gguf")
    )


def test_help_and_version(capsys):
    for argv, said in (
        (["--help"], "fine-tune"),
        (["--version"], "0.8"),
        (["train", "--help"], "--optimizer"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(argv)
        assert stop.value.code == 0
        assert said in capsys.readouterr().out


def test_unknown_command(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["tarin"])
    assert stop.value.code == 2
    assert "tarin" in capsys.readouterr().err


def test_env(capsys):
    assert main(["env"]) == 0
    assert "torch" in capsys.readouterr().out


def test_probe(capsys):
    assert main(["probe", "qwen3"]) == 0
    assert "RMSNorm" in capsys.readouterr().out


def test_nothing_heavy_is_imported():
    code = "import sys, liger_kernel.cli as c; c.main(['env']); print('heavy', 'transformers' in sys.modules)"
    assert "heavy False" in isolated.run(code)


def test_plan_says_what_it_will_do(capsys):
    assert main(["plan", "--budget", "512M"]) == 0
    said = capsys.readouterr().out
    assert "chunks     4 of 2,048 tokens" in said
    assert "logits     501 MiB at a time, of 2,004 MiB" in said
    assert "64 MiB for the hidden states, 1,002 MiB for the head" in said


@pytest.mark.parametrize("argv", [["--tokens", "0"], ["--budget", "lots"]])
def test_plan_refuses_nonsense_in_one_line(argv, capsys):
    assert main(["plan", *argv]) == 2
    assert capsys.readouterr().err.count("\n") == 1
