"""Rotary functions of other forms than Llama's: recognised, replaced, and right in whole models."""

import copy
import importlib

import pytest
import torch
from models import assert_same_step, batch, tiny

import liger_kernel
from liger_kernel.transformers.patch import seams
from liger_kernel.transformers.patch.apply import original_of
from liger_kernel.transformers.patch.probe import Refused

pytest.importorskip("transformers")
pytestmark = pytest.mark.plain

# model, function -> what the probe finds
FORMS = {
    ("deepseek_v3", "apply_rotary_pos_emb_interleave"): "interleaved to halves",
    ("deepseek_v2", "apply_rotary_emb"): "complex",
    ("llama4", "apply_rotary_emb"): "complex",
    ("llama4", "vision_apply_rotary_emb"): "complex",
    ("gptj", "apply_rotary_pos_emb"): "interleaved, one value a pair",
    ("deepseek_v4", "apply_rotary_pos_emb"): "interleaved, last columns, partial",
}


def _found(model, name):
    module = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
    function = getattr(module, name, None)
    if function is None:
        pytest.skip(f"this version of transformers has no {name} in {model}")
    return original_of(function)


@pytest.mark.parametrize(("model", "name"), FORMS)
def test_forms(model, name):
    assert seams.ROPE.probe(_found(model, name))[0] == FORMS[model, name]


def _sections(rows):
    """`apply_multimodal_rotary_pos_emb` in Hugging Face's form; rows: which table each section reads."""

    def apply_multimodal_rotary_pos_emb(q, k, cos, sin, mrope_section, unsqueeze_dim=1):
        def mixed(table):
            pieces = table.split(list(mrope_section) * 2, dim=-1)
            joined = torch.cat([piece[rows[i % 3]] for i, piece in enumerate(pieces)], dim=-1)
            return joined.unsqueeze(unsqueeze_dim)

        def turn(x):
            a, b = x.chunk(2, -1)
            return x * mixed(cos) + torch.cat((-b, a), -1) * mixed(sin)

        return turn(q), turn(k)

    return apply_multimodal_rotary_pos_emb


def test_three_sections():
    function = _sections((0, 1, 2))
    form, replacement = seams.ROPE.probe(function)
    assert form == "rotate-half, three sections"
    q, k = torch.randn(2, 3, 5, 16), torch.randn(2, 1, 5, 16)
    tables = torch.randn(3, 2, 5, 16), torch.randn(3, 2, 5, 16)
    for given in (
        (q, k, *tables, [2, 3, 3]),
        (q.transpose(1, 2), k.transpose(1, 2), *tables, [2, 3, 3], 2),
    ):
        for found, expected in zip(replacement(*given), function(*given), strict=True):
            torch.testing.assert_close(found, expected)
    with pytest.raises(Refused, match="usual sense"):  # height and width swapped
        seams.ROPE.probe(_sections((0, 2, 1)))


def test_vision_tables_of_every_shape():
    function = _found("llama4", "vision_apply_rotary_emb")
    replaced = seams.ROPE.probe(function)[1]
    q, k = torch.randn(2, 5, 3, 16), torch.randn(2, 5, 3, 16)
    freqs = torch.polar(torch.ones(5, 8), torch.randn(5, 8))
    for table in (freqs, freqs[:, None], freqs[None], freqs[None, :, None]):
        for found, expected in zip(
            replaced(q, k, freqs_ci=table), function(q, k, table), strict=True
        ):
            torch.testing.assert_close(found, expected)
    with pytest.raises(RuntimeError):  # the original's own error
        replaced(q, k, freqs[:4])


def test_calls_by_name_and_calls_that_are_wrong():
    replaced = seams.ROPE.probe(_found("gptj", "apply_rotary_pos_emb"))[1]
    x, sin, cos = torch.randn(2, 5, 3, 8), torch.randn(2, 5, 4), torch.randn(2, 5, 4)
    expected = replaced(x, sin, cos)
    assert torch.equal(replaced(cos=cos, tensor=x, sin=sin), expected)
    for wrong in (
        lambda: replaced(x, sin),
        lambda: replaced(x, cos=cos),
        lambda: replaced(x, sin, cos, cos=cos),
        lambda: replaced(x, sin, cos, 1),
        lambda: replaced(x, sin, cosine=cos),
    ):
        with pytest.raises(TypeError):
            wrong()


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("deepseek_v3", "apply_rotary_pos_emb_interleave"),
        ("llama4_text", "apply_rotary_emb"),
    ],
)
def test_training_step(family, name, monkeypatch):
    """The replacement is called and the step is the same."""
    plain = tiny(family)
    patched = copy.deepcopy(plain)
    folder = family.removesuffix("_text")
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    with liger_kernel.patched(patched) as report:
        assert any(row.target == f"modeling_{folder}.{name}" for row in report.rows)
        calls = []
        replacement = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, **k: calls.append(1) or replacement(*a, **k))
        assert_same_step(plain, patched, **batch())
        monkeypatch.undo()
    assert calls
    assert getattr(module, name) is original_of(replacement)
