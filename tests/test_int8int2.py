"""Int8 times packed ternary weights. (Integers only: the properties that make sense, on a row of their own.)"""

import pytest
import torch

from liger_kernel import _env
from liger_kernel.ops import _triton, mm_int8int2
from liger_kernel.testing import properties
from liger_kernel.testing.properties import Case, Maker


def _inputs(shape, make, **_):
    m, k, n = shape
    a = (make.ids(256, m, k) - 128).to(torch.int8)
    return {"a": a, "b": mm_int8int2.pack_weights(make.ids(3, k, n).to(torch.int8) - 1)}


def _definition(a, b):
    return mm_int8int2.reference(a, b)


CASE = Case(
    mm_int8int2.OP_MATMUL,
    mm_int8int2.matmul,
    _inputs,
    # the last one as models have them: rows of 16 bytes, and enough of them for a transposed copy
    shapes=[(3, 8, 5), (1, 4, 1), (0, 4, 3), (3, 0, 16), (70, 264, 130), (2100, 128, 32)],
    reference=_definition,
    dtypes=(torch.float32,),
)


@pytest.mark.parametrize("shape", CASE.shapes, ids=str)
def test_exact(shape, path, device):
    tensors = CASE.draw(shape, {}, torch.float32, device)
    a, weights = tensors["a"], mm_int8int2.unpack_weights(tensors["b"])
    assert torch.equal(mm_int8int2.matmul(**tensors).cpu(), a.cpu().int() @ weights.cpu().int())


@pytest.fixture
def launched(monkeypatch, device):
    """What kernels are launched with."""
    if not _env.triton_runs_on(device.type):
        pytest.skip("kernels need an accelerator or TRITON_INTERPRET=1")
    seen = []

    def launch(kernel, grid, where, *args, **meta):
        seen.append(meta)
        return _triton.launch(kernel, grid, where, *args, **meta)

    monkeypatch.setattr(mm_int8int2, "launch", launch)
    return seen


@pytest.fixture
def descriptors(monkeypatch, device):
    """Tiles come through descriptors wherever these can be made, in the interpreter too."""
    if mm_int8int2.TensorDescriptor is None:
        pytest.skip("this Triton has no tensor descriptors")
    if not (_env.interpreting() or mm_int8int2.pays(device)):
        pytest.skip("tensor descriptors need the TMA unit")
    monkeypatch.setattr(mm_int8int2, "pays", lambda device: True)


@pytest.mark.parametrize("n_rows", [*mm_int8int2._TILES, 1, 17, 33, 65, 129, 2100])
def test_descriptors(n_rows, launched, descriptors, device):
    """Every entry of the table, with rows, columns and a K / 4 that fill no tile."""
    a, b = CASE.draw((n_rows, 4 * 80, 48), {}, torch.float32, device).values()
    c = mm_int8int2.matmul(a, b, impl="triton")
    assert torch.equal(c.cpu(), a.cpu().int() @ mm_int8int2.unpack_weights(b).cpu().int())
    *turned, product = launched
    assert product["TMA"]
    assert len(turned) == product["TURNED"] == (n_rows > max(mm_int8int2._TILES))


def test_what_descriptors_cannot_describe(launched, descriptors, device):
    wide = CASE.draw((20, 4 * 48, 48), {}, torch.float32, device)
    a, b = wide["a"], wide["b"]
    shifted = torch.zeros(20, 208, dtype=torch.int8, device=device)[:, 1:193]
    shifted.copy_(a)
    for x, y in (
        (shifted, b),  # no base of 16 bytes
        (a[:1].expand(20, -1), b),  # rows that lie on each other
        (a, b[:, :47]),
        (a[:, : 4 * 40], b[:40]),  # K / 4 is no multiple of 16
    ):
        launched.clear()
        c = mm_int8int2.matmul(x, y, impl="triton")
        assert torch.equal(c.cpu(), x.cpu().int() @ mm_int8int2.unpack_weights(y).cpu().int())
        assert not launched[-1]["TMA"]


def _large_sum(device):
    """K beyond 2^17: an odd sum above 2^24, which fp32 would round."""
    k = (1 << 17) + 64
    a = torch.full((1, k), -128, dtype=torch.int8, device=device)
    a[0, -1] = -127
    b = torch.zeros(k // 4, 16, dtype=torch.uint8, device=device)  # all weights are -1
    assert (mm_int8int2.matmul(a, b, impl="triton") == 128 * k - 1).all()


def test_large_sums(launched, monkeypatch, device):
    monkeypatch.setattr(mm_int8int2, "pays", lambda device: False)
    _large_sum(device)
    assert not launched[-1]["TMA"]


def test_large_sums_by_descriptors(launched, descriptors, device):
    _large_sum(device)
    assert launched[-1]["TMA"]


@pytest.mark.parametrize(
    "check",
    [properties.written, properties.repeatable, properties.traced],
    ids=lambda f: f.__name__,
)
def test_kept(check, path, device):
    check(CASE, CASE.shapes[0], {}, torch.float32, device)


def test_strides(path, device):
    a, b = CASE.draw(CASE.shapes[0], {}, torch.float32, device).values()
    plain = mm_int8int2.matmul(a, b)
    turned = mm_int8int2.matmul(a.t().contiguous().t(), b.t().contiguous().t())
    assert torch.equal(plain, turned)
    wide = torch.zeros(3, 11, dtype=torch.int8, device=device)
    wide[:, 2:10] = a
    assert torch.equal(plain, mm_int8int2.matmul(wide[:, 2:10], b))


def test_named_operator(device):
    if not _env.triton_runs_on(device.type):
        pytest.skip("kernels need an accelerator or TRITON_INTERPRET=1")
    tensors = CASE.draw(CASE.shapes[0], {}, torch.float32, device)
    torch.library.opcheck(mm_int8int2.int8int2_matmul.operator, tuple(tensors.values()))


def test_packing(device):
    make = Maker(torch.float32, device)
    weights = make.ids(3, 12, 5).to(torch.int8) - 1
    kept = weights.clone()
    packed = mm_int8int2.pack_weights(weights)
    assert packed.shape == (3, 5)
    assert packed.dtype == torch.uint8
    assert torch.equal(mm_int8int2.unpack_weights(packed), weights)
    assert torch.equal(weights, kept)
    column = torch.tensor([-1, 0, 1, 1])  # bits 00, 01, 10, 10 from the lowest up
    assert mm_int8int2.pack_weights(column).tolist() == [0b10100100]


def test_bad_input_says_what_to_do():
    with pytest.raises(ValueError, match="multiple of 4"):
        mm_int8int2.pack_weights(torch.zeros(5, 2))
    with pytest.raises(ValueError, match="got bits=4"):
        mm_int8int2.unpack_weights(torch.zeros(5, 2, dtype=torch.uint8), bits=4)
    with pytest.raises(ValueError, match="a must be int8"):
        mm_int8int2.matmul(torch.zeros(2, 4), torch.zeros(1, 2, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"b \[K / 4, N\]"):
        mm_int8int2.matmul(
            torch.zeros(2, 4, dtype=torch.int8), torch.zeros(2, 2, dtype=torch.uint8)
        )
