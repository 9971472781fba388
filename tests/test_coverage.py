"""`liger-kernel models`: configs made tiny, verdicts, isolation, and the page that is committed."""

import copy
import json
import os
import re
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from liger_kernel.cli import main
from liger_kernel.transformers.patch.report import Report

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.plain

from liger_kernel.coverage import build, families, fleet, matrix, page, shrink, unseen  # noqa: E402

PAGE = Path(__file__).parent.parent / "docs" / "models.md"


# Configs


def _shrunk(model_type):
    return shrink.shrunk(transformers.CONFIG_MAPPING[model_type]())


def test_one_layer_of_every_kind_remains():
    config = _shrunk("qwen3_next")
    assert config.layer_types == ["linear_attention", "full_attention"]
    assert config.num_hidden_layers == 2
    config = _shrunk("gemma3n_text")  # two lists of layers: four kinds
    assert config.num_hidden_layers == len(config.layer_types) == len(config.intermediate_size) == 4
    assert len(set(zip(config.layer_types, config.activation_sparsity_pattern, strict=True))) == 4
    config = _shrunk("mllama_text_model")  # a list of the layers that are special
    assert (config.num_hidden_layers, config.cross_attention_layers) == (2, [1])


def test_sizes():
    config = _shrunk("llama")
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (32, 48, 99)
    assert config.num_attention_heads == config.num_key_value_heads == 4
    config = _shrunk("mixtral")
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    assert (config.num_local_experts, config.num_experts_per_tok) == (4, 2)


def test_parts_and_special_tokens():
    config = _shrunk("qwen2_5_vl")
    inner = config.text_config, config.vision_config
    assert {part.model_type for part in inner} <= {p.model_type for p in shrink.parts(config)}
    assert config.vision_config.out_hidden_size == config.text_config.hidden_size
    special = [config.image_token_id, config.video_token_id, config.vision_start_token_id]
    assert len(set(special)) == 3
    assert all(shrink.WORDS <= token < shrink.VOCAB for token in special)


# One class


def test_verdicts():
    family = matrix.examine("MixtralForCausalLM", check=True)
    assert (family.model_type, family.built, family.wrong) == ("mixtral", True, False)
    fused = ("norm", "RoPE", "experts", "head + loss")
    assert family.verdicts == {t: matrix.ALL if t in fused else matrix.ABSENT for t in matrix.SEAMS}
    assert 0 <= family.loss < 1e-6
    assert 0 < family.gradients < 1e-5
    assert set(family.ways) == {
        "right padding", "left padding", "num_items_in_batch", "shift_labels", "packed position_ids", "inputs_embeds",
        "evaluation",
    }  # fmt: skip
    assert max(family.ways.values()) < 1e-5


def test_reasons_and_what_is_not_counted():
    family = matrix.examine("NanoChatForCausalLM", check=False)
    assert family.verdicts["RoPE"] == matrix.NONE
    assert [title for title, *_ in family.reasons] == ["RoPE"]
    assert family.loss is None
    assert "no model class" in matrix.examine("AutoModelForCausalLM", check=False).skipped


def test_a_wrong_step_is_seen(monkeypatch):
    from liger_kernel.transformers.patch import norm

    family = matrix.Family("Wrong", loss=0.0, gradients=float("nan"))
    assert family.wrong
    monkeypatch.setattr(norm, "_norm", lambda x, w, eps, offset, mode: x)
    norm.NormSeam.forward.cache_clear()
    try:
        assert matrix.examine("LlamaForCausalLM", check=True).wrong
    finally:
        norm.NormSeam.forward.cache_clear()


def test_a_failing_patcher_is_seen(monkeypatch):
    monkeypatch.setattr(unseen, "add_unseen", lambda *_: 1 / 0)
    family = matrix.examine("LlamaForCausalLM", check=True)
    assert (family.built, family.wrong, family.failed[:17]) == (False, True, "ZeroDivisionError")
    assert "PATCHING FAILED, LlamaForCausalLM" in page.text([family])


def test_pictures_are_offered():
    """A class that takes no step on text alone."""
    model = build.tiny(transformers.BlipForConditionalGeneration)
    given, _ = build.plain_step(model)
    assert given["pixel_values"].dim() == 4


class FancyNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x, temperature):
        return x * temperature * self.scale


class Gated(nn.Module):
    def __init__(self, a=8, b=12):
        super().__init__()
        self.one, self.two, self.three = nn.Linear(a, b), nn.Linear(a, b), nn.Linear(b, a)

    def forward(self, x, mask):
        return self.three(self.one(x) * self.two(x) * mask)


def apply_some_rope(x, angle):
    return x * angle


@pytest.mark.parametrize(
    ("module", "found"),
    [
        (FancyNorm(), ("layer_norm", "FancyNorm")),
        (Gated(), ("gated_mlp", "Gated")),
        (Gated(8, 8), None),  # query, key and value
        (nn.BatchNorm1d(4), None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_what_no_seam_looks_at(module, found):
    report = Report("model")
    unseen.add_unseen(module, report)
    rows = [(row.seam, row.target) for row in report.rows if row.seam != "rope"]
    assert rows == ([found] if found else [])
    if found:
        assert ("rope", "test_coverage.apply_some_rope") in [
            (r.seam, r.target) for r in report.rows
        ]


# Many classes


def test_command(tmp_path, capsys):
    """Two classes, each in its own process."""
    to = tmp_path / "models.json"
    page_to = tmp_path / "models.md"
    argv = ["--family", "^(nemotron|nanochat)for", "--check", "--jobs", "2"]
    assert main(["models", *argv, "--json", str(to), "--markdown", str(page_to)]) == 0
    said = capsys.readouterr().out
    found = {entry["name"]: entry for entry in json.loads(to.read_text())}
    assert set(found) == {"NemotronForCausalLM", "NanoChatForCausalLM"}
    assert found["NemotronForCausalLM"]["verdicts"]["activation"] == "all"
    assert "2 training steps compared, 0 differ" in said
    assert "in the usual sense (NanoChatForCausalLM)" in page_to.read_text()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--family", "("], "no regular expression"),
        (["--family", "nonesuch"], "names no class"),
        (["--jobs", "0"], "--jobs"),
    ],
)
def test_bad_arguments(argv, said, capsys):
    assert main(["models", *argv]) == 2
    assert said in capsys.readouterr().err


class Crash(str):
    """A name that ends the process that reads it."""

    def __reduce__(self):
        return os._exit, (3,)


class Sleep(str):
    """A name that takes long to read."""

    def __reduce__(self):
        return time.sleep, (60,)


def test_a_process_that_ends_or_never_does():
    names = [Crash("Crash"), "NoSuchModel"]
    found = {one.name: one.unbuilt for one in fleet.examine_all(names, False, jobs=1, limit=60)}
    assert "exit code 3" in found["Crash"]
    assert "AttributeError" in found["NoSuchModel"]
    (late,) = fleet.examine_all([Sleep("Sleep")], check=False, jobs=1, limit=0.5)
    assert "took more than" in late.unbuilt


def test_totals_and_page():
    verdicts = dict.fromkeys(matrix.SEAMS, matrix.ABSENT)
    one = matrix.Family("A", "a", verdicts={**verdicts, "RoPE": matrix.ALL})
    two = copy.deepcopy(one)
    two.name, two.verdicts["RoPE"] = "B", matrix.NONE
    two.reasons = [("RoPE", "apply", "it turns | the other way")]
    three = matrix.Family("C", "c", unbuilt="ImportError: timm")
    found = [one, two, three, matrix.Family("D", skipped="its forward takes no labels")]
    said = page.text(found)
    assert re.search(r"RoPE +2 have it +all +50.0%", said)
    assert "C: ImportError: timm" in said
    written = page.markdown(found)
    assert "| RoPE | 2 | 1 | 0 | 1 | 50.0% | 50.0% |" in written
    assert "* RoPE, `apply`: it turns | the other way (B)" in written
    assert "* `D`: its forward takes no labels" in written


def test_the_committed_page_is_of_this_transformers():
    """Every class is on the page; if one is missing, write it anew: its first lines say how."""
    content = PAGE.read_text(encoding="utf-8")
    version = re.search(r"class of transformers ([\w.]+),", content).group(1)
    if version != transformers.__version__:
        pytest.skip(f"the page is of transformers {version}")
    listed = set(re.findall(r"^(?:\||\*) `(\w+)`", content, re.MULTILINE))
    assert set(families.names()) == listed
