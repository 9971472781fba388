"""Chunks of tokens through the head, without their logits: products of our own, whose epilogue is the softmax.

For losses of the targets' log-probabilities alone. Formulas: `ops._head_exp_kernels`. Per chunk

    x_y                      a dot product a token, in fp32
    E = exp(x - x_y), sums   the first product; nothing is written when no gradient is wanted
    logp                     from the sums
    dW += E'^T (f h)         a plain matrix product         db += E'^T f
    dh = f (E' W)            another product of ours

against product, row kernel, two products of `head.engine`: one read and one write of the chunk less, and fp32 logits.
The first chunk's product needs no count of the tokens (`head.valid`): the kernel reads it.

Every chunk reads and writes all of dW once more, which small chunks pay for. But until the first one's product fills it
dW is memory that nobody uses, and it has room for the E of as many tokens as a row of W has elements. So where a budget
asks for many chunks, the first is that large: its pages of E lie where the rows of dW for these columns will be, and
leave for the chunks' buffer, a group of pages at a time, before the group's product is written over them.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_kernel import _env
from liger_kernel.ops import _head_exp_kernels as kernels
from liger_kernel.ops._descriptors import TensorDescriptor, aligned, pays
from liger_kernel.ops._dot import precision
from liger_kernel.ops._logp_kernels import transform_of
from liger_kernel.ops._op import dense, no_autocast, rows
from liger_kernel.ops._triton import block_of, cdiv, launch
from liger_kernel.ops.head.engine import Gradients, Sums, Wanted, part
from liger_kernel.ops.head.logits import product
from liger_kernel.ops.head.params import HeadParams
from liger_kernel.ops.head.plan import MAX_CHUNKS, Plan, chunked, cuts_of, fitting
from liger_kernel.ops.head.valid import Counting, positions

# rows, columns, depth, warps and stages of a tile, and row tiles that share columns of the weight. Measured on H200,
# see NOTES.md. A product that writes nothing has room for one more stage.
_TILE = {"BM": 128, "BN": 256, "BK": 64, "num_warps": 8}
_STAGES, _STAGES_UNWRITTEN, _GROUP = 3, 4, 16
_SUMMED = {"BLOCKS": 64, "ROWS": 32, "num_warps": 4}
_BLOCK = 2048
# Below this width the epilogue takes longer than what it saves.
_NARROW = 896
# dh is torch's product where tiles would leave more than the rest of the programs' rounds empty.
_BUSY = 0.9
_PAGE = _TILE["BN"] // 2
# Pages that a product of a group must have at the least: what it reads besides, f h, is read again for each group.
_GROUP_PAGES = 16


class Targets(NamedTuple):
    """What is known of a chunk's targets, `[C]` fp32: log-probabilities (0 where ignored, NaN for a label out of range)
    and, where asked for, 1 where the target's logit is above all others."""

    logp: Tensor
    correct: Tensor | None

    def first(self, n: int) -> "Targets":
        """Of the first n tokens."""
        return Targets(self.logp[:n], None if self.correct is None else self.correct[:n])


# (targets, start, stop, index) -> (anything, dL/dlogp [C] if a gradient is wanted)
PerToken = Callable[[Targets, int, int, Tensor | None], tuple[Any, Tensor | None]]


def apply_to(hidden: Tensor, head: HeadParams, kernels: bool) -> bool:
    """Whether this head's tokens can take this way: bf16, which has the exponents of fp32; a whole head without a
    low-rank term; Hopper. Blackwell's products are others, and untested.
    """
    device, weight = hidden.device, head.weight
    if not kernels or TensorDescriptor is None or hidden.dtype != torch.bfloat16:
        return False
    hopper = pays(device) and _env.device_info(device).capability < 100
    whole = head.shard is None and head.low_rank is None
    if not (whole and ((hopper and hidden.shape[-1] >= _NARROW) or _env.interpreting())):
        return False
    # of another dtype it is copied, and the copy of adjacent rows is aligned
    fits = weight.stride(1) == 1 and (aligned(weight) or weight.dtype != hidden.dtype)
    return fits and hidden.shape[-1] % 8 == 0


def plan_for(
    hidden: Tensor, head: HeadParams, tokens: int, budget: int, dropped: bool, gradient: bool
) -> Plan:
    """The plan for `tokens` rows of hidden `[*, H]`; dropped: they are picked out of more; gradient: one is wanted."""
    vocab, width = head.weight.shape
    size = hidden.element_size()
    stride = cdiv(vocab, _PAGE) * _PAGE
    kept = stride * size * gradient + 4 * cdiv(vocab, _TILE["BN"])
    return chunked(tokens, stride, kept + width * size * dropped, budget)


def run(
    hidden: Tensor, head: HeadParams, per_token: PerToken, wanted: Wanted, *, targets: Tensor, ignore_index: int,
    keep: Tensor | Counting | None, budget: int, accum_dtype: torch.dtype | None,
    cuts: list[tuple[int, int]] | None = None, into: Tensor | None = None, hits: bool = False,
) -> tuple[list[Any], Gradients]:  # fmt: skip
    """`head.engine.run` for losses of log-probabilities: per_token gets a chunk's targets and place, and returns
    anything and the derivative of the loss by logp. hits: it also gets `correct`.

    Where gradients are wanted, tokens that are still being counted go through their first product meanwhile.
    """
    h, targets = rows(hidden), dense(targets)
    if h.numel() and not aligned(h):
        h = h.clone(memory_format=torch.contiguous_format)
    cast = head.to(h.dtype)
    if not wanted.any:
        keep = positions(keep)
    counting, keep = (keep, None) if isinstance(keep, Counting) else (None, keep)
    dropped = keep is not None
    n = h.shape[0] if keep is None else keep.numel()
    todo = plan_for(h, head, n, budget, dropped, wanted.any)
    free_to_choose = cuts is None and not dropped
    cuts = todo.slices() if cuts is None else cuts
    sums = Sums(h, cast, head, wanted, len(cuts), n, accum_dtype, hidden.shape, dropped, into)
    longest = max((stop - start for start, stop in cuts), default=0)
    home = _home(sums, h.dtype, todo) if free_to_choose else None
    chunk = _Chunk(cast, ignore_index, longest, todo.row_stride, wanted.any, hits, h, home)
    most = longest if home is None else home.shape[1]
    found: list[Any] = []
    with no_autocast(h.device.type), _env.exact_products(h.device, h.dtype):
        if counting is not None:
            first, keep, n = _first(chunk, sums, h, counting, per_token, most)
            found, cuts = [first], cuts_of(min(most, n), n, longest)
        elif home is not None:
            cuts = [(0, most), *cuts_of(most, n, longest)]
        for start, stop in cuts:
            index = None if keep is None else keep[start:stop]
            chunk.begin(stop - start, at_home=home is not None and start == 0)
            y, free = part(targets, start, stop, index), chunk.free()
            if index is not None:
                room, free = _carved(free, (stop - start, h.shape[1]))
                x = torch.index_select(h, 0, index, out=room)
            else:
                x, room = h[start:stop], None if sums.dh is None else sums.dh[start:stop]
                free = free if room is None or chunk.at_home else room.view(-1)
            result, a = per_token(chunk.measure(x, y, free), start, stop, index)
            found.append(result)
            if wanted.any:
                assert a is not None
                room = _carved(free, x.shape)[0] if room is None else room
                _add(sums, chunk, a, room, start, index)
        return found, sums.finish()


def _first(
    chunk: "_Chunk", sums: Sums, h: Tensor, counting: Counting, per_token: PerToken, most: int
) -> tuple[Any, Tensor | None, int]:
    """The first `most` tokens that count, or as many as there are: rows without a token add nothing.
    -> per_token's result, where all those that count are, and their number.
    """
    index, y, dh = counting.index[:most], counting.labels[:most], sums.dh
    # A row of dh is written at the end of its chunk, so that until then there is room for rows of h.
    x = torch.index_select(h, 0, index, out=None if dh is None else dh[:most])
    chunk.begin(most, at_home=chunk.home is not None)
    free = chunk.free() if dh is None or chunk.at_home else dh[most : 2 * most].view(-1)
    known = chunk.measure(x, y, free, counting.count)
    keep = counting.kept()
    n = h.shape[0] if keep is None else keep.numel()
    stop = min(most, n)
    index = None if keep is None else keep[:stop]
    chunk.end_at(stop)
    result, a = per_token(known.first(stop), 0, stop, index)
    assert a is not None
    _add(sums, chunk, a, x[:stop], 0, None)
    if index is not None and dh is not None:
        aside, _ = _carved(chunk.buffer.view(-1), (stop, dh.shape[1]))
        aside.copy_(x[:stop])
        dh.zero_().index_copy_(0, index, aside)
    return result, keep, n


def _home(sums: Sums, dtype: torch.dtype, todo: Plan) -> Tensor | None:
    """The memory of dW as pages for the exponentials of a first chunk, `[pages, tokens, _PAGE]`. None where few chunks
    are enough, dW or dh is not wanted, dW holds something or not whole pages, or dh would be a product of few tiles.
    """
    dw, dh = sums.dw, sums.dh
    if todo.chunks <= MAX_CHUNKS or dw is None or dh is None or sums.into is not None:
        return None
    if dw.shape[0] % _PAGE:
        return None
    pages = dw.view(dtype).view(dw.shape[0] // _PAGE, -1, _PAGE)
    # the buffer holds the sums of E, as pairs of 16 bits, and then f h and a group of pages while dW is written
    width, sums_of_e = dh.shape[1], 4 * cdiv(dw.shape[0], _TILE["BN"])
    held = todo.rows * todo.row_stride // max(width + _GROUP_PAGES * _PAGE, sums_of_e)
    most = min(todo.tokens, pages.shape[1], fitting(held))
    sizes = range(most, todo.rows, -_TILE["BM"])
    found = next((n for n in sizes if _fills(n, width, dh.device)), None)
    return None if found is None else pages[:, :found]


def _fills(tokens: int, width: int, device: torch.device) -> bool:
    """Whether the tiles of dh `[tokens, width]` keep all programs busy; no token does not."""
    tiles, sms = cdiv(tokens, _TILE["BM"]) * cdiv(width, _TILE["BN"]), _sms(device)
    return tiles > _BUSY * cdiv(tiles, sms) * sms


def _sms(device: torch.device) -> int:
    return _env.device_info(device).sm_count


def _carved(memory: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """A tensor of this shape at the start of flat memory and what is left of it; new where it is not enough."""
    size = math.prod(shape)
    if memory.numel() < size:
        return memory.new_empty(shape), memory
    return memory[:size].view(shape), memory[size:]


def _wide(memory: Tensor) -> Tensor:
    """Flat memory as fp32."""
    return memory[: memory.numel() // 2 * 2].view(torch.float32)


def _add(
    sums: Sums, chunk: "_Chunk", a: Tensor, room: Tensor, start: int, index: Tensor | None
) -> None:  # fmt: skip
    """The gradients of a chunk. room `[C, H]` gets dh; until then it may hold x, and holds f h unless E is at home."""
    scaled, free = _carved(chunk.free(), room.shape) if chunk.at_home else (room, chunk.free())
    f = chunk.close(scaled, a)
    if chunk.at_home:
        chunk.back(room, f)
    for columns, dz in chunk.taken(free):
        sums.add_weight(dz, scaled, start, columns)
        if sums.db is not None:
            sums.db[columns] += product(dz.t(), f[:, None].to(dz.dtype), sums.db.dtype)[:, 0]
    if sums.dh is not None and not chunk.at_home:
        chunk.back(room, f)
        if index is not None:
            sums.dh.index_copy_(0, index, room)


class _Chunk:
    """The buffers of chunks of up to `most` tokens, or of those that `home` has pages for, and the launches that fill
    them."""

    def __init__(
        self, head: HeadParams, ignore_index: int, most: int, stride: int, store: bool, hits: bool, like: Tensor,
        home: Tensor | None,
    ):  # fmt: skip
        self.head, self.ignore_index, self.device = head, ignore_index, like.device
        self.bias = None if head.bias is None else dense(head.bias)
        self.store, self.hits, self.home = store, hits, home
        self.vocab, self.width = head.weight.shape
        self.blocks = cdiv(self.vocab, _TILE["BN"])
        scales = (head.pre_scale, head.softcap, head.post_scale / head.temperature)
        self.form, *self.transform, self.slope = transform_of(*scales)
        # zeros: matrix products of a CPU read the padding
        make = torch.zeros if _env.interpreting() else torch.empty
        self.buffer = make(most if store else 1, stride, dtype=like.dtype, device=like.device)
        rows = most if home is None else max(most, home.shape[1])
        self.numbers = like.new_empty((8, rows), dtype=torch.float32)
        self.again = like.new_empty(1, dtype=torch.int32)

    def begin(self, n: int, at_home: bool) -> None:
        """A chunk of n tokens, whose exponentials lie at home or in the buffer."""
        self.n, self.at_home = n, at_home

    def free(self) -> Tensor:
        """The flat memory of the buffer that this chunk leaves free."""
        return self.buffer[0 if self.at_home else self.n :].view(-1)

    def pages(self) -> Tensor:
        """`[pages, C, _PAGE]`."""
        if self.at_home and self.home is not None:
            return self.home[:, : self.n]
        rows, stride = self.buffer.shape
        pages = self.buffer.view(rows, stride // _PAGE, _PAGE).transpose(0, 1)
        return pages[:, : self.n] if self.store else pages

    def taken(self, free: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """E' as matrices `[C, columns]` and which columns. Pages at home are copied to the free memory, a group at a
        time: once a matrix is there, its columns' rows of dW may be written.
        """
        if not self.at_home:
            yield slice(0, self.vocab), self.buffer[: self.n, : self.vocab]
            return
        pages = self.pages()
        many = free.numel() // (self.n * _PAGE)
        for first in range(0, pages.shape[0], many):
            group = pages[first : first + many]
            shape = self.n, group.shape[0], _PAGE
            matrix = _carved(free, shape)[0]
            matrix.view(torch.int64).copy_(group.transpose(0, 1).view(torch.int64))
            columns = slice(first * _PAGE, (first + group.shape[0]) * _PAGE)
            yield columns, matrix.view(self.n, -1)

    def measure(self, x: Tensor, y: Tensor, free: Tensor, count: Tensor | None = None) -> Targets:
        """Of y `[C]` given x `[C, H]`; of the first `count` where it is given, int32 on the device.

        free: flat memory that nobody reads until then, for the sums of E where it is enough.
        """
        n, weight, bias = self.n, self.head.weight, self.bias
        self.x, self.y, self.count = x, y, count
        self.parts, self.tops = self._partials(free)
        numbers = self.numbers[:, :n].unbind(0)
        self.x_y, self.slope_y, self.base, logp, self.total, self.rest, correct, self.f = numbers
        launch(
            kernels.target_kernel, (n,), self.device, self.x_y, self.slope_y, self.base, self.again, x, x.stride(0),
            weight, weight.stride(0), x if bias is None else bias, y, self.vocab, self.width, self.ignore_index,
            *self.transform, FORM=self.form, HAS_BIAS=bias is not None, BLOCK=min(block_of(self.width), _BLOCK),
            num_warps=4,
        )  # fmt: skip
        self._product("store" if self.store else "sum")
        self._finish(logp, correct)
        # From here on nothing happens unless a label lay 55 nats below the largest logit.
        self._product("top", guarded=True)
        self._by_row(kernels.rebase_kernel, self.base, self.rest, self.parts, self.again)
        self._product("store" if self.store else "sum", guarded=True)
        self._finish(logp, correct, guarded=True)
        return Targets(logp.clone(), correct.clone() if self.hits else None)

    def end_at(self, n: int) -> None:
        """Leave out what was measured beyond n tokens."""
        self.x, self.y = self.x[:n], self.y[:n]
        self.begin(n, self.at_home and n > 0)

    def _partials(self, free: Tensor) -> tuple[Tensor, Tensor]:
        """fp32 of every block of columns and every row, for sums and, where asked for, maxima."""
        both, _ = _carved(_wide(free), (1 + self.hits, self.blocks, self.n))
        return both[0], both[-1]

    def _product(self, mode: str, guarded: bool = False) -> None:
        m_blocks, bias = cdiv(self.n, _TILE["BM"]), self.bias
        flags = {
            "MODE": mode, "FORM": self.form, "HAS_BIAS": bias is not None, "HITS": self.hits and mode != "top",
            "GUARDED": guarded, "RAGGED": self.vocab % _TILE["BN"] != 0, "PRECISION": precision(self.x.dtype),
        }  # fmt: skip
        launch(
            kernels.product_kernel, self._grid(m_blocks * self.blocks), self.device, self._paged(_PAGE), self.parts,
            self.tops, _tiled(self.x, "BM", "BK"), _tiled(self.head.weight, "BN", "BK"),
            self.base if bias is None else bias, self.base, self.y, self.again, self.count, self.n, self.vocab,
            self.width, m_blocks, self.blocks, *self.transform, **flags, GROUP=_GROUP,
            STAGES=_STAGES if mode == "store" else _STAGES_UNWRITTEN, **_TILE,
        )  # fmt: skip

    def _finish(self, logp: Tensor, correct: Tensor, guarded: bool = False) -> None:
        results = (logp, self.total, self.rest, correct)
        given = (self.again, self.parts, self.tops, self.x_y, self.base)
        self._by_row(kernels.finish_kernel, *results, *given, HITS=self.hits, GUARDED=guarded)

    def _by_row(self, kernel: Any, *args: Tensor, **flags: bool) -> None:
        grid = (cdiv(self.n, _SUMMED["ROWS"]),)
        launch(kernel, grid, self.device, *args, self.n, self.blocks, **flags, **_SUMMED)

    def _paged(self, columns: int) -> Any:
        """A descriptor of the pages in tiles of so many columns."""
        return TensorDescriptor.from_tensor(self.pages(), [1, _TILE["BM"], columns])

    def _grid(self, tiles: int) -> tuple[int]:
        """Programs that stay, at most one for each tile."""
        return (min(tiles, _sms(self.device)),)

    def close(self, scaled: Tensor, a: Tensor) -> Tensor:
        """-> f `[C]` fp32 from the derivatives a `[C]` of logp; E becomes E', scaled `[C, H]` = f x, may be x."""
        block, pages = min(block_of(self.width), _BLOCK), self.pages()
        launch(
            kernels.close_kernel, (self.n, cdiv(self.width, block)), self.device, scaled, self.f, pages, self.x,
            dense(a), self.total, self.rest, self.slope_y, self.y, scaled.stride(0), *pages.stride()[:2],
            self.x.stride(0), self.vocab, self.width, self.ignore_index, float(self.slope), FORM=self.form,
            PAGE=_PAGE, BLOCK=block, num_warps=4,
        )  # fmt: skip
        return self.f[: self.n]

    def back(self, out: Tensor, f: Tensor) -> None:
        """out `[C, H]` = f (E' W), rounded once."""
        m_blocks, n_blocks = cdiv(self.n, _TILE["BM"]), cdiv(self.width, _TILE["BN"])
        if not (self.at_home or _fills(self.n, self.width, self.device)):
            # out may be the first that lies behind
            room, _ = _carved(_wide(self.free()[out.numel() :]), tuple(out.shape))
            exps = self.buffer[: self.n, : self.vocab]
            torch.mul(product(exps, self.head.weight, f.dtype, room), f[:, None], out=out)
            return
        launch(
            kernels.back_kernel, self._grid(m_blocks * n_blocks), self.device, _tiled(out, "BM", "BN"),
            self._paged(_TILE["BK"]), _tiled(self.head.weight, "BK", "BN"), f, self.n, self.vocab, m_blocks, n_blocks,
            PRECISION=precision(self.x.dtype), GROUP=_GROUP, STAGES=_STAGES, **_TILE,
        )  # fmt: skip


def _tiled(x: Tensor, rows: str, columns: str) -> Any:
    """A descriptor of x in tiles of these sizes."""
    return TensorDescriptor.from_tensor(x, [_TILE[rows], _TILE[columns]])
