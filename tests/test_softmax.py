"""Softmax of rows that registers do not hold: parts of a row, odd widths and strides, numbers that are none."""

import pytest
import torch

from liger_kernel import _env
from liger_kernel.ops import _softmax_kernels as wide
from liger_kernel.ops import softmax
from liger_kernel.ops.softmax import softmax_backward_kernel, softmax_forward_kernel
from liger_kernel.testing.tolerance import assert_close_to_truth

pytestmark = [
    # The interpreter computes with numpy, which warns where hardware quietly makes an infinity or a NaN.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(
        not _env.triton_runs_on(_env.default_device().type),
        reason="kernels need an accelerator or TRITON_INTERPRET=1",
    ),
]
INF, NAN = float("inf"), float("nan")


def _spaced(rows, step):
    """The same rows, `step` elements apart."""
    apart = rows.new_full((rows.shape[0], step), 7.0)
    apart[:, : rows.shape[1]] = rows
    return apart[:, : rows.shape[1]]


def _hard(device, width):
    """Rows of noise; rows that hold nothing but -inf in the first half, in the second, everywhere; +inf, NaN."""
    x = torch.randn(8, width, generator=torch.Generator().manual_seed(0)).mul_(3).to(device)
    x[1, : width // 2], x[2, width // 2 :], x[3] = -INF, -INF, -INF
    x[4, width - 1], x[5, 7], x[6, :-1] = INF, NAN, -INF
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("width", [40009, 65536, 65537])
def test_rows_in_pieces(width, dtype, device):
    """Of any width and at any distance: accesses are aligned where all operands allow it."""
    make = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(2, width, generator=make).to(device, dtype) for _ in range(2))
    y = torch.softmax(x, -1)
    dx = torch.ops.aten._softmax_backward_data(dy, y, -1, dtype)
    true_y = torch.softmax(x.double(), -1)
    dot = (dy.double() * y.double()).sum(-1, keepdim=True)
    eager, truth = {"y": y, "dx": dx}, {"y": true_y, "dx": y.double() * (dy.double() - dot)}
    for more, other in ((0, 0), (16, 0), (1, 1), (1, 0)):
        given = _spaced(dy, width + more), _spaced(y, width + other)
        found = {
            "y": softmax_forward_kernel(_spaced(x, width + more)),
            "dx": softmax_backward_kernel(*given),
        }
        assert_close_to_truth(found, eager, truth)


@pytest.fixture
def in_pieces(monkeypatch):
    """Every row counts as wide."""
    monkeypatch.setattr(softmax, "_MAX_BLOCK", 0)
    monkeypatch.setattr(softmax, "_MAX_BYTES", 0)


def _both(x, dy, schedule):
    """y, and dx of the y that torch finds."""
    with wide.FORWARD.using(schedule), wide.BACKWARD.using(schedule):
        return softmax_forward_kernel(x), softmax_backward_kernel(dy, torch.softmax(x, -1))


def test_numbers_that_are_none(in_pieces, device):
    x = _hard(device, 1013)
    y, dx = _both(x, x.clone().normal_(), (1, 2, 0, 1))
    torch.testing.assert_close(y, torch.softmax(x, -1), rtol=1e-5, atol=0, equal_nan=True)
    assert y[3:6].isnan().all()
    assert dx[3:6].isnan().all()
    assert not dx[:3].isnan().any()


@pytest.mark.skipif(not _env.interpreting(), reason="real programs wait: test_programs_share_a_row")
@pytest.mark.parametrize("width", [640, 1013, 1032])
@pytest.mark.parametrize("parts", [2, 4, 8])
def test_parts_of_a_row(width, parts, in_pieces, device, monkeypatch):
    """Programs that take turns cannot wait for one another: on a board that is full they do not, and the second time
    what they read is right."""
    x = _hard(device, width)
    dy = torch.randn(8, width, device=device)
    y, dx = _both(x, dy, (1, 2, 0, 1))
    boards = [torch.ones(1 + 8 * parts, dtype=torch.int64, device=device) for _ in range(2)]
    monkeypatch.setattr(wide, "can_wait", lambda device: True)
    for _ in range(2):
        turn = iter(boards)
        monkeypatch.setattr(softmax, "board", lambda *_, turn=turn: next(turn))
        for board in boards:
            board[0] = 0
        shared = _both(x, dy, (1, 2, 2, parts))
    assert [board[0] for board in boards] == [8 * parts] * 2
    for got, want in zip(shared, (y, dx), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.skipif(_env.infer_device() == "cpu", reason="needs an accelerator")
@pytest.mark.parametrize("width", [131_072, 131_085])
@pytest.mark.parametrize("parts", [2, 4, 8, 16])
def test_programs_share_a_row(parts, width, device):
    """As one program finds it, with the same bits every time."""
    x = _hard(device, width).bfloat16().repeat(200, 1)
    dy = torch.randn_like(x)
    alone, shared = _both(x, dy, (16, 2, 2, 1)), _both(x, dy, (8, 2, 4, parts))
    for got, want in zip(shared, alone, strict=True):
        torch.testing.assert_close(got, want, rtol=2**-6, atol=1e-6, equal_nan=True)
    for got, want in zip(_both(x, dy, (8, 2, 4, parts)), shared, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
