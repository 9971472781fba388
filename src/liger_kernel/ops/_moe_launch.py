"""The kernels of `fused_moe` as functions of tensors: tile sizes, how operands enter, grids."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_kernel import _env
from liger_kernel.ops import _moe_kernels as kernels
from liger_kernel.ops import _moe_row_kernels as row_kernels
from liger_kernel.ops import _moe_sum_kernels as sums
from liger_kernel.ops._descriptors import TensorDescriptor, aligned, pays
from liger_kernel.ops._dot import precision
from liger_kernel.ops._moe_routing import Routing
from liger_kernel.ops._op import dense
from liger_kernel.ops._triton import block_of, cdiv, launch


class Tile(NamedTuple):
    """`rows` x `columns` of a result, `depth` of the dimension that is summed over at a time."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    per_sm: int

    def meta(self) -> dict[str, int]:
        return {
            "BM": self.rows, "BN": self.columns, "BK": self.depth, "STAGES": self.stages, "num_warps": self.warps,
        }  # fmt: skip

    def half(self) -> list[int]:
        """The block of a result `[rows, parts, columns]` that a descriptor stores."""
        return [self.rows, 1, self.columns // 2]

    def grid(self, device: torch.device, tiles: int) -> tuple[int]:
        """Programs that stay, at most one for each tile."""
        return (min(tiles, _env.device_info(device).sm_count * self.per_sm),)


class Plan(NamedTuple):
    """Tiles of the three products. The first two share their rows, those of the routing's tiles."""

    up: Tile
    rows: Tile
    weight: Tile
    precision: str
    tma: bool

    def slots(self, routing: Routing) -> int:
        """How many there are at most."""
        return routing.tiles.shape[0] * self.up.rows

    def layout(self) -> dict[str, int]:
        """What `_moe_row_kernels` must know."""
        return {"ROWS": self.up.rows, "STEP": self.weight.depth}


# The columns of `up` count gate and up.
_HOPPER = (Tile(128, 256, 64, 8, 4, 1),) * 3
_BLACKWELL = (Tile(128, 256, 64, 8, 3, 1),) * 3  # untried; a fourth stage and a bias do not fit
_OTHER = (Tile(128, 128, 32, 8, 3, 2), Tile(128, 128, 32, 8, 3, 2), Tile(128, 64, 32, 8, 3, 2))
_EXACT = (Tile(64, 64, 32, 4, 2, 2),) * 3
_GROUP = 8  # row tiles that share columns of a weight
_GATHERED = (32, 256)  # slots and columns of a program
_GATED = (16, 256)  # slots of a program, columns at a time
_BIAS_ROWS, _BIAS_BLOCK = 32, 128
_COMBINED = 2048  # elements of a program
_ROUTE_PAIRS, _ROUTE_BLOCK = 32, 128


def plan_of(x: Tensor) -> Plan:
    """By dtype and device, never by the number of tokens."""
    exact = precision(x.dtype)
    if exact != "native":
        return Plan(*_EXACT, precision=exact, tma=False)
    tma = pays(x.device)
    blackwell = tma and _env.device_info(x.device).capability >= 100
    tiles = _BLACKWELL if blackwell else _HOPPER if tma else _OTHER
    return Plan(*tiles, precision=exact, tma=tma and TensorDescriptor is not None)


def clipped(y: Tensor, block: list[int]) -> Any:
    """y `[R, ...]` in blocks that end at a given row, see `_store` in `_moe_kernels.py`.

    A tile's last rows may belong to the next expert, and a descriptor leaves out only what is beyond a dimension. Two
    dimensions more shift the origin: coordinates (CLIP, end, CLIP - n, ...) mean row end - n, as
    CLIP * 2^34 = 2^64 vanishes from an address. Triton's `ragged_tma.py` does it so.
    """
    step, many = y.stride(0), 0x7FFF0000
    shape = [many, many, kernels.CLIP.value, *y.shape[1:]]
    return TensorDescriptor(y, shape, [2**34 - step, step, *y.stride()], [1, 1, *block])


def product_operands(
    a: Tensor, gathered: bool, w: Tensor, y: Tensor, tile: Tile, pair: str, plan: Plan
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Rows `[R, K]`, a weight as `[E, N, K]` of any strides and a result -> arguments (A, sA_row, W, strides e, k, n)
    and flags.

    A weight without adjacent rows or columns is copied.
    """
    if 1 not in w.stride()[1:]:
        w = w.contiguous()
    s_e, s_n, s_k = w.stride()
    k_major = s_k == 1
    tma = plan.tma and aligned(w) and aligned(y) and (gathered or aligned(a))
    flags = {"TMA": tma, "K_MAJOR": k_major, "PRECISION": plan.precision, "GROUP": _GROUP}
    rows, weight = a, w
    if tma:
        depth, columns = tile.depth, tile.columns
        shaped = w if k_major else w.transpose(1, 2)
        block = [1, columns, depth] if k_major else [1, depth, columns]
        if pair == "halves":  # one dimension more, of size 2, for gate and up
            n = 1 if k_major else 2
            shaped = shaped.unflatten(n, (2, shaped.shape[n] // 2))
            block[n : n + 1] = [2, columns // 2]
        weight = TensorDescriptor.from_tensor(shaped, block)
        rows = a if gathered else clipped(a, [tile.rows, depth])
    return (rows, a.stride(0), weight, s_e, s_k, s_n), flags


class Gate(NamedTuple):
    """What the kernels are told of the activation: scalars, and flags."""

    activation: str
    interleaved: bool
    limit: float | None
    alpha: float
    shift: float

    def scalars(self) -> tuple[float, float, float]:
        return self.alpha, self.limit or 0.0, self.shift

    def flags(self) -> dict[str, Any]:
        pair = "interleaved" if self.interleaved else "halves"
        return {"PAIR": pair, "ACT": self.activation, "CLAMP": self.limit is not None}


def up_product(
    x: Tensor, w: Tensor, bias: Tensor | None, routing: Routing, plan: Plan, gate: Gate, keep: bool
) -> tuple[Tensor, Tensor]:
    """-> activation `[S, I]`, gate and up `[S, 2I]` (empty unless they are kept)."""
    pairs, n, tile = routing.pair.shape[0], w.shape[1] // 2, plan.up
    y = torch.empty((pairs, n), dtype=x.dtype, device=x.device)
    both = torch.empty((pairs, 2 * n) if keep else 0, dtype=x.dtype, device=x.device)
    flags = gate.flags()
    operands, how = product_operands(x, True, w, y, tile, flags["PAIR"], plan)
    results = y, both
    if how["TMA"]:
        parts = 1 if gate.interleaved else 2
        kept = both.view(pairs, parts, -1) if keep else y[:, None]
        results = (clipped(t, tile.half()) for t in (y[:, None], kept))
    n_blocks = cdiv(n, tile.columns // 2)
    launch(
        kernels.up_kernel, tile.grid(x.device, routing.tiles.shape[0] * n_blocks), x.device, *results, *operands,
        x if bias is None else dense(bias), routing.token, routing.tiles, routing.n_tiles, x.shape[1], n, n_blocks,
        *gate.scalars(), **flags, HAS_BIAS=bias is not None, KEEP=keep, **how, **tile.meta(),
    )  # fmt: skip
    return y, both


def rows_product(
    a: Tensor, w: Tensor, bias: Tensor | None, routing: Routing, plan: Plan, a_slots: bool = False,
    y_slots: bool = False,
) -> Tensor:  # fmt: skip
    """Rows `[S, K]` times the weights `[E, N, K]` of their experts -> `[S, N]`; each in their order or in slots."""
    n, tile = w.shape[1], plan.rows
    y = torch.empty(
        (plan.slots(routing) if y_slots else routing.pair.shape[0], n),
        dtype=a.dtype,
        device=a.device,
    )
    operands, how = product_operands(a, False, w, y, tile, "none", plan)
    result = clipped(y[:, None], tile.half()) if how["TMA"] else y
    n_blocks = cdiv(n, tile.columns)
    launch(
        kernels.rows_kernel, tile.grid(a.device, routing.tiles.shape[0] * n_blocks), a.device, result, *operands,
        a if bias is None else dense(bias), routing.tiles, routing.n_tiles, a.shape[1], n, n_blocks,
        FROM_SLOTS=a_slots, TO_SLOTS=y_slots, HAS_BIAS=bias is not None, **how, **tile.meta(),
    )  # fmt: skip
    return y


def gather(x: Tensor, routing: Routing, plan: Plan) -> Tensor:
    """Rows of x `[T, N]` in slots."""
    slots, n = plan.slots(routing), x.shape[1]
    y = torch.empty((slots, n), dtype=x.dtype, device=x.device)
    many, block = _GATHERED[0], min(_GATHERED[1], block_of(n))
    launch(
        row_kernels.gather_kernel, (cdiv(slots, many), cdiv(n, block)), x.device, y, x, x.stride(0), routing.token,
        routing.tiles, routing.n_tiles, n, **plan.layout(), MANY=many, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return y


def gate_backward(
    u: Tensor, both: Tensor, weights: Tensor, routing: Routing, plan: Plan, gate: Gate,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """-> d(gate, up) `[slots, 2I]`, r a `[slots, I]` written over u, <u, a> `[S]` fp32; what is not needed is empty."""
    slots, n = u.shape
    dboth = u.new_empty((slots, 2 * n) if needs[0] else 0)
    weighted = u if needs[1] else u.new_empty(0)
    sums = u.new_empty(both.shape[0] if needs[2] else 0, dtype=torch.float32)
    many, block = _GATED[0], min(_GATED[1], block_of(n))
    launch(
        row_kernels.gate_backward_kernel, (cdiv(slots, many),), u.device, dboth, weighted, sums, u, both, weights,
        routing.pair, routing.tiles, routing.n_tiles, n, *gate.scalars(), **gate.flags(),
        NEED_BOTH=needs[0], NEED_WEIGHTED=needs[1], NEED_ROUTE=needs[2], **plan.layout(), MANY=many, BLOCK=block,
        num_warps=8,
    )  # fmt: skip
    return dboth, weighted, sums


def first_tiles(routing: Routing, plan: Plan) -> Tensor:
    """The first row tile of each expert, int32 `[E]`."""
    tiles = (routing.totals + (plan.up.rows - 1)) // plan.up.rows
    return tiles.cumsum(0, dtype=torch.int32) - tiles


def weight_grad(
    dw: Tensor, p: Tensor, q: Tensor, first: Tensor, routing: Routing, plan: Plan
) -> None:
    """dw `[E, M, N]`, any strides: sum over an expert's slots of p[slot]^T q[slot]."""
    if dw.stride(1) == 1 < dw.stride(2):
        dw, p, q = dw.transpose(1, 2), q, p
    (n_experts, m, n), tile = dw.shape, plan.weight
    m_blocks, n_blocks = cdiv(m, tile.rows), cdiv(n, tile.columns)
    tma = plan.tma and aligned(p) and aligned(q) and aligned(dw)
    operands = (dw, p, q)
    if tma:
        depth, rows, columns = tile.depth, tile.rows, tile.columns
        blocks = ([1, rows, columns // 2], [depth, rows], [depth, columns])
        operands = map(TensorDescriptor.from_tensor, operands, blocks)
    result, *operands = operands
    launch(
        kernels.weight_grad_kernel, tile.grid(q.device, n_experts * m_blocks * n_blocks), q.device,
        result, *dw.stride(), *operands, first, routing.totals, n_experts, m, n, m_blocks, n_blocks,
        TMA=tma, PRECISION=plan.precision, ROWS=plan.up.rows, EXPERTS=block_of(n_experts), GROUP=_GROUP, **tile.meta(),
    )  # fmt: skip


def bias_grad(
    p: Tensor, weights: Tensor | None, first: Tensor, routing: Routing, plan: Plan, bias: Tensor
) -> Tensor:
    """Sum over an expert's rows of p[slot], given routing weights of r p[slot]."""
    dbias = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)
    grid = (bias.shape[0], cdiv(bias.shape[1], _BIAS_BLOCK))
    launch(
        sums.bias_grad_kernel, grid, p.device, dbias, p, p if weights is None else weights,
        routing.pair, first, routing.offsets, bias.shape[1],
        WEIGHTED=weights is not None, TILE=plan.up.rows, ROWS=_BIAS_ROWS, BLOCK=_BIAS_BLOCK, num_warps=4,
    )  # fmt: skip
    return dbias


def combine(y: Tensor, weights: Tensor | None, routing: Routing, tokens: int) -> Tensor:
    """`[S, H]` rows -> `[T, H]`, the rows of a token added; given routing weights, weighted by them."""
    width, pairs = y.shape[1], routing.position.shape[0]
    out = torch.empty((tokens, width), dtype=y.dtype, device=y.device)
    block = min(block_of(width), _COMBINED)
    many = _COMBINED // block
    launch(
        sums.combine_kernel, (cdiv(tokens, many), cdiv(width, block)), y.device, out, y,
        y if weights is None else weights, routing.position, tokens, width,
        K=pairs // max(tokens, 1), HAS_ROUTE=weights is not None, TOKENS=many, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out


def route_grad(
    row_sums: Tensor,
    dy: Tensor,
    bias: Tensor | None,
    index: Tensor,
    weights: Tensor,
    routing: Routing,
) -> Tensor:
    """dr `[T, K]` from <u, a> of every row, and dy times the bias of the second product."""
    dweights = torch.empty(weights.shape, dtype=weights.dtype, device=weights.device)
    pairs = index.numel()
    launch(
        sums.route_grad_kernel, (cdiv(pairs, _ROUTE_PAIRS),), dy.device, dweights, row_sums, routing.position,
        dense(index), dy, dy.stride(0), dy if bias is None else dense(bias), pairs, dy.shape[1], weights.shape[1],
        HAS_BIAS=bias is not None, PAIRS=_ROUTE_PAIRS, BLOCK=_ROUTE_BLOCK, num_warps=4,
    )  # fmt: skip
    return dweights
