"""The policy that judges everything else: what passes it, and what must not."""

import math

import pytest
import torch

from liger_kernel.ops import relu_squared
from liger_kernel.testing import properties
from liger_kernel.testing.properties import Case
from liger_kernel.testing.tolerance import Verdict, assert_close_to_truth, demand, pooled

pytestmark = pytest.mark.plain
CPU = torch.device("cpu")


def _of(error, eager=1.0, room=0.0):
    return [Verdict("x", error, eager, room, "maximum")]


def _results(**values):
    return {k: torch.tensor(v) for k, v in values.items()}


def test_twice_eagers_error_and_a_rounding():
    truth = {"x": torch.tensor([1.0, 2.0], dtype=torch.float64)}
    eager, ulp = _results(x=[1.0, 2.0 + 1e-3]), torch.finfo(torch.float32).eps * 2
    assert_close_to_truth(_results(x=[1.0, 2.0 + 2e-3]), eager, truth)
    with pytest.raises(AssertionError, match=r"x: maximum error 2\.100e-03 against"):
        assert_close_to_truth(_results(x=[1.0, 2.0 + 2.1e-3]), eager, truth)
    exact = _results(x=[1.0, 2.0])
    assert_close_to_truth(_results(x=[1.0, 2.0 + ulp]), exact, truth)
    with pytest.raises(AssertionError):
        assert_close_to_truth(_results(x=[1.0, 2.0 + 30 * ulp]), exact, truth)
    with pytest.raises(AssertionError):
        assert_close_to_truth(_results(x=[1.0, math.nan]), exact, truth)


def test_luck_of_one_draw_does_not_count():
    lucky = [_of(2.5, eager=0.1), *[_of(1.0) for _ in range(15)]]
    assert not lucky[0][0].ok
    demand(pooled(lucky))


@pytest.mark.parametrize("wrong", [2.1, math.nan])
def test_what_is_always_worse_fails(wrong):
    with pytest.raises(AssertionError):
        demand(pooled([_of(wrong) for _ in range(16)]))


@pytest.mark.parametrize("wrong", [1e3, math.nan, math.inf])
def test_one_gross_error_fails(wrong):
    with pytest.raises(AssertionError):
        demand(pooled([_of(wrong), *[_of(0.5, room=1.0) for _ in range(15)]]))


@pytest.mark.parametrize("off", [1e-5, -1e-5])
def test_a_small_case_with_a_wrong_gradient_fails(off):
    """Drawn sixteen times, too."""
    tiny = Case(
        relu_squared.OP, lambda x: x.relu().square() + off * x, lambda shape, make: {"x": make(*shape)},
        shapes=[(1, 1)], grads=("x",),
    )  # fmt: skip
    with pytest.raises(AssertionError, match="dx: maximum error"):
        properties.accurate(tiny, (1, 1), {}, torch.float32, CPU)
