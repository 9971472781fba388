"""Every op's row, collected from `tests/rows/`: one file an op, each with a list `ROWS`."""

import importlib
import pkgutil

import rows

from liger_kernel.testing.properties import Case

CASES: list[Case] = [
    case
    for module in sorted(m.name for m in pkgutil.iter_modules(rows.__path__))
    for case in importlib.import_module(f"rows.{module}").ROWS
]
