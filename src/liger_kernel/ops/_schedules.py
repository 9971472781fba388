"""Schedules: how many rows a program takes, with how many warps, in how many programs an SM.

An op file declares a `Table` for each kernel that has one: entries by key, measured on an H200. What was measured on
another card by `liger-kernel tune` comes first: `<arch>-<multiprocessors>.json` in the folder LIGER_KERNEL_SCHEDULES,
read once, at the first launch that could need it. A call pays one look-up in a cache.

An entry may change the last bits of a result: sums over rows are added up in the order that programs take them. The
same tables on the same card give the same bits.
"""

import contextlib
import functools
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from liger_kernel import _env
from liger_kernel.ops._triton import forget_plans, planned

Entry = tuple[int, ...]
Record = dict[str, Any]
_FORMAT = 1

# What the tuner tries, where rows are taken whole.
WARPS = (1, 2, 4, 8, 16, 32)
TILE = {"rows": (1, 2, 4, 8, 16), "warps": WARPS}
SM_WARPS = 64  # that an SM holds at a time
_REGISTERS = 65536  # of an SM
_LARGEST_TILE = 16384  # elements of several rows

TABLES: dict[str, "Table"] = {}  # by name, those of the op files that were imported


class Table:
    """The schedules of one kernel.

    name     "<op>.<direction>"
    fields   name of a field -> the values the tuner tries
    entries  key -> a value for each field, keys ascending. A size takes the smallest key that holds it, the largest if
             none does.
    fits     (key, *entry) -> whether a combination of values is worth trying; others are refused from files
    """

    def __init__(
        self, name: str, fields: Mapping[str, Sequence[int]], entries: Mapping[int, Entry],
        fits: Callable[..., bool],
    ) -> None:  # fmt: skip
        self.name, self.fields, self.entries = name, fields, entries
        self.widest = max(entries)
        self._fits = fits
        self._forced: Entry | None = None
        TABLES[name] = self

    def entry(self, size: int, x: Tensor) -> Entry:
        """The schedule for `size` (a block of columns, say) on the device and at the element size of x."""
        return _chosen(self, size, x.device, x.element_size())

    def key(self, size: int) -> int:
        """The key whose entry `size` takes."""
        return next((key for key in self.entries if key >= size), self.widest)

    def candidates(self, key: int) -> list[Entry]:
        """Every entry that the tuner tries and a file may hold."""
        return [e for e in itertools.product(*self.fields.values()) if self._fits(key, *e)]

    @contextlib.contextmanager
    def using(self, entry: Entry | None) -> Iterator[None]:
        """Within the block every size takes this entry (None: what the table holds)."""
        before = self._forced
        self._forced = entry
        forget_plans()
        try:
            yield
        finally:
            self._forced = before
            forget_plans()

    def choose(self, size: int, itemsize: int, card: str) -> Entry:
        """`entry` on a kind of card."""
        if self._forced is not None:
            return self._forced
        key = self.key(size)
        schedule = _measured(card).get((self.name, key, itemsize))
        if schedule is None:
            return self.entries[key]
        for entry in self.candidates(key):
            if dict(zip(self.fields, entry, strict=True)) == schedule:
                return entry
        _env.warn_once(
            f"{path_of(card)}: {self.name} has a schedule that this version does not know: {schedule}. "
            "The built-in one is used; `liger-kernel tune --again` measures anew."
        )
        return self.entries[key]


@planned
def _chosen(table: Table, size: int, device: torch.device, itemsize: int) -> Entry:
    return table.choose(size, itemsize, card_of(device))


def resident(device: torch.device, warps: int, programs: int) -> dict[str, int]:
    """The compile option that leaves `programs` programs of an SM room at a time (0: the compiler's choice): registers
    are shared out among them. Older cards' code needs more than Hopper's and would spill.
    """
    if not programs or not measured_on(device):
        return {}
    return {"maxnreg": min(_REGISTERS // (32 * warps * programs) // 8 * 8, 255)}


def measured_on(device: torch.device) -> bool:
    """Whether the built-in entries were measured on such a device. What could harm elsewhere stays away from others."""
    return _env.device_info(device).arch == "sm_90"


def fits_tile(block: int, rows: int, warps: int) -> bool:
    """Whether a tile keeps the threads of a program busy and fits their registers: 8 to 64 values each."""
    few = rows == 1 or rows * block <= _LARGEST_TILE
    return few and 8 <= rows * block // (32 * warps) <= 64


def card_of(device: torch.device) -> str:
    """The kind of card, "sm_90-132": schedules measured on one are used on all."""
    info = _env.device_info(device)
    return f"{info.arch}-{info.sm_count}"


# Files


def path_of(card: str) -> Path | None:
    """Where this user's schedules for a kind of card lie, None if they are switched off."""
    folder = _env.schedules_folder()
    return Path(folder, f"{card}.json") if folder else None


def read(path: Path, card: str) -> list[Record]:
    """The records of a file; ValueError says what is wrong with it, OSError that it cannot be read.

    A record has at least `table`, `key`, `bytes` (of an element) and `schedule` (field -> value).
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ValueError(f"it is not a file of schedules in format {_FORMAT}")
    if content.get("card") != card:
        raise ValueError(f"it was measured on {content.get('card')}, this card is {card}")
    records = content.get("schedules")
    if not isinstance(records, list) or not all(map(_is_record, records)):
        raise ValueError("its schedules are incomplete")
    return records


def _is_record(record: Any) -> bool:
    types = {"table": str, "key": int, "bytes": int, "schedule": dict}
    return isinstance(record, dict) and all(
        isinstance(record.get(name), kind) for name, kind in types.items()
    )


def write(path: Path, card: str, records: Sequence[Record]) -> None:
    """Replace a file as a whole: who reads it sees the old one or the new one."""
    listed = ",\n".join(f"  {json.dumps(record)}" for record in records)
    text = f'{{"format": {_FORMAT}, "card": {json.dumps(card)}, "schedules": [\n{listed}\n]}}\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def forget() -> None:
    """Read files again at the next launch (after one was written)."""
    _measured.cache_clear()
    forget_plans()


@functools.cache
def _measured(card: str) -> dict[tuple[str, int, int], dict[str, int]]:
    """(table, key, bytes of an element) -> schedule, from the user's file."""
    path = path_of(card)
    try:
        records = read(path, card) if path else []
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        _env.warn_once(f"{path} is ignored, built-in schedules are used: {error}.")
        return {}
    return {(r["table"], r["key"], r["bytes"]): r["schedule"] for r in records}
