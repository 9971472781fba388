"""The squared ReLU of a model: what the probe takes, what it refuses, a training step, and the way back."""

import copy

import pytest
import torch
from models import assert_same_step, batch, tiny
from torch import nn

import liger_kernel
from liger_kernel.transformers.patch import seams
from liger_kernel.transformers.patch.activation import ReLUSquaredSeam

pytest.importorskip("transformers")
pytestmark = pytest.mark.plain

SEAM = next(seam for seam in seams.SEAMS if isinstance(seam, ReLUSquaredSeam))


class SquaredReLU(nn.Module):
    def forward(self, values):
        return nn.functional.relu(values) * nn.functional.relu(values)


class ReLUCubed(nn.Module):
    def forward(self, x):
        return nn.functional.relu(x) ** 3


class ReLUOnce(nn.Module):
    def forward(self, x):
        return nn.functional.relu(x)


class WeightedReLU(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return nn.functional.relu(x).square() * self.weight


def test_a_squared_relu_fits():
    module = SquaredReLU()
    x = torch.randn(3, 8, requires_grad=True)
    expected = module(values=x)
    with liger_kernel.patched(module) as report:
        assert report.count("relu_squared") == 1
        assert torch.equal(module(x), expected)
        assert torch.equal(module(values=x), expected)
    assert "forward" not in vars(module)


@pytest.mark.parametrize("make", [ReLUCubed, ReLUOnce])
def test_what_only_looks_alike_is_left(make):
    report = liger_kernel.patch(make())
    assert [(row.status, row.detail) for row in report.rows if row.seam == "relu_squared"] == [
        ("left", "its values are not those of a squared ReLU")
    ]


@pytest.mark.parametrize("make", [WeightedReLU, nn.ReLU, nn.SiLU])
def test_other_modules_are_no_candidates(make):
    assert not SEAM.match(make())


def test_a_model_trains_the_same():
    plain = tiny("nemotron")
    patched = copy.deepcopy(plain)
    report = liger_kernel.patch(patched)
    assert report.count("relu_squared") == 2
    assert_same_step(plain, patched, **batch())
    report.undo()
    assert all("forward" not in vars(layer.mlp.act_fn) for layer in patched.model.layers)


def test_the_flag_switches_it_off():
    report = liger_kernel.patch(tiny("nemotron"), relu_squared=False)
    assert not [row for row in report.rows if row.seam == "relu_squared"]
