"""What is run for each table: the op that it belongs to, on rows of a width."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from liger_kernel.bench.work import BACKWARD, BOTH, FORWARD, Function, Inputs, Make
from liger_kernel.ops import (
    attn_res,
    cross_entropy,
    fused_add_rms_norm,
    gated_rms_norm,
    group_norm,
    layer_norm,
    modulated_rms_norm,
    poly_norm,
    relu_squared,
    rms_norm,
    softmax,
    swiglu,
)
from liger_kernel.ops._schedules import TABLES, Table
from liger_kernel.ops._triton import block_of

_ELEMENTS = 1 << 25  # of a matrix: 64 MiB in 16 bits, more than caches hold
_LOGITS = 1 << 28  # 1,024 rows of the widest vocabularies
_BLOCKS = 8  # that attention residuals mix
_GROUPS, _CHANNELS = 32, 4  # of an image, and channels of a group
_SAMPLE = 256  # rows of x that share a row of scale, as in an image


@dataclass(frozen=True)
class Subject:
    """How a table is put to use.

    function, reference    take `inputs(make, rows, width)` as keywords
    grads                  the inputs whose gradients are taken
    mode                   what is timed; FORWARD is forward without gradients
    widths                 measured unless others are asked for
    size                   (width, bytes of an element) -> what the table is asked with
    """

    table: Table
    function: Function
    reference: Function
    inputs: Callable[[Make, int, int], Inputs]
    grads: tuple[str, ...]
    mode: str
    widths: tuple[int, ...]
    size: Callable[[int, int], int]
    elements: int = _ELEMENTS

    def rows(self, width: int) -> int:
        """Rows of this width that make a large matrix."""
        return max(self.elements // width, 1)


def _one(make: Make, rows: int, width: int) -> Inputs:
    return {"x": make(rows, width)}


def _norm(make: Make, rows: int, width: int) -> Inputs:
    return {"x": make(rows, width), "weight": make(width)}


def _added(make: Make, rows: int, width: int) -> Inputs:
    return {"x": make(rows, width), "residual": make(rows, width), "weight": make(width)}


def _layer(make: Make, rows: int, width: int) -> Inputs:
    return {"x": make(rows, width), "weight": make(width), "bias": make(width)}


def _gated_norm(make: Make, rows: int, width: int) -> Inputs:
    return {"x": make(rows, width), "gate": make(rows, width), "weight": make(width)}


def _modulated(make: Make, rows: int, width: int) -> Inputs:
    samples = max(rows // _SAMPLE, 1)
    modulation = {name: make(samples, 1, width) for name in ("scale", "shift")}
    return {"x": make(samples, rows // samples, width), "weight": make(width), **modulation}


def _poly(make: Make, rows: int, width: int) -> Inputs:
    return {"x": make(rows, width), "weight": make(3), "bias": make(1)}


def _image(make: Make, rows: int, width: int) -> Inputs:
    channels = _GROUPS * _CHANNELS
    x = make(max(rows // _GROUPS, 1), channels, max(width // _CHANNELS, 1))
    return {"x": x, "weight": make(channels), "bias": make(channels)}


def _blocks(make: Make, rows: int, width: int) -> Inputs:
    return {"V": make(_BLOCKS, rows, width), "w_query": make(width), "w_norm": make(width)}


def _gate_up(make: Make, rows: int, width: int) -> Inputs:
    return {"gate": make(rows, width), "up": make(rows, width)}


def _logits(make: Make, rows: int, width: int) -> Inputs:
    return {"input": make(rows, width), "target": make.ids(width, rows)}


def _loss(function: Function) -> Function:
    def loss(**inputs: Tensor) -> Tensor:
        return function(**inputs).loss

    return loss


def _by_block(width: int, itemsize: int) -> int:
    return block_of(width)


def _by_bytes(width: int, itemsize: int) -> int:
    return width * itemsize


def _always(width: int, itemsize: int) -> int:
    return 1


def _rows_of(
    module: Any, inputs: Callable[..., Inputs], *grads: str, elements: int = _ELEMENTS, given: Any = None
) -> list[Subject]:  # fmt: skip
    """The forward and the backward table, by block of columns, of an op whose module has its name; given: options."""
    op, options = module.OP, given or {}
    call = partial(getattr(module, op.name), **options)
    tables = [(TABLES[f"{op.name}.{mode}"], mode) for mode in (FORWARD, BACKWARD)]
    return [
        Subject(
            table,
            call,
            partial(op.reference, **options),
            inputs,
            grads,
            mode,
            tuple(table.entries),
            _by_block,
            elements,
        )
        for table, mode in tables
    ]


def _tiles(
    table: str, module: Any, inputs: Callable[..., Inputs], mode: str, *grads: str
) -> Subject:
    """A table of one entry."""
    op = module.OP
    call = getattr(module, op.name)
    return Subject(TABLES[table], call, op.reference, inputs, grads, mode, (14336,), _always)


def _cross_entropy(table: str, mode: str) -> Subject:
    op = cross_entropy
    return Subject(
        TABLES[f"cross_entropy.{table}"], _loss(op.cross_entropy), _loss(op.reference), _logits, ("input",), mode,
        (1024, 4096, 16384, 32000, 65536, 128256), _by_bytes, _LOGITS,
    )  # fmt: skip


def _wide_softmax(mode: str, bytes_of: Callable[[int, int], int], *widths: int) -> Subject:
    """Rows that registers do not hold; of others this table is not asked."""
    table, op = TABLES[f"softmax.{mode}_wide"], softmax

    def size(width: int, itemsize: int) -> int:
        return bytes_of(width, itemsize) or table.widest + 1

    return Subject(table, op.softmax, op.reference, _one, ("x",), mode, widths, size, _LOGITS)


SUBJECTS = [
    *_rows_of(rms_norm, _norm, "x", "weight"),
    *_rows_of(fused_add_rms_norm, _added, "x", "residual", "weight"),
    *_rows_of(layer_norm, _layer, "x", "weight", "bias"),
    *_rows_of(gated_rms_norm, _gated_norm, "x", "gate", "weight"),
    *_rows_of(modulated_rms_norm, _modulated, "x", "weight", "scale", "shift"),
    *_rows_of(poly_norm, _poly, "x", "weight", "bias"),
    *_rows_of(attn_res, _blocks, "V", "w_query", "w_norm", elements=_ELEMENTS // _BLOCKS),
    *_rows_of(softmax, _one, "x"),
    _wide_softmax(FORWARD, softmax.forward_bytes, 65536, 131072, 151936, 262144),
    _wide_softmax(BACKWARD, softmax.backward_bytes, 49152, 65536, 131072, 262144),
    *_rows_of(group_norm, _image, "x", "weight", "bias", given={"num_groups": _GROUPS}),
    _cross_entropy("gradient", BOTH),
    _cross_entropy("loss", FORWARD),
    _tiles("gated.forward", swiglu, _gate_up, FORWARD, "gate", "up"),
    _tiles("gated.backward", swiglu, _gate_up, BACKWARD, "gate", "up"),
    _tiles("elementwise", relu_squared, _one, BOTH, "x"),
]
