"""What is measured. `liger-kernel bench [ROW ...]` runs it.

Each file of `rows/` is a family of operators: `ROWS`, and the calls of other libraries it can be
held against. A row names its inputs, its shapes, and the plain torch that users would write without
this package (`eager`: also what torch.compile compiles and what results are checked against). `ours`
defaults to the operator's public function, the floor comes from its `OP.cost`.
"""

import importlib.util
from pathlib import Path
from typing import Any

from liger_kernel.bench.row import Bench, Peer


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"benchmark_rows_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_FILES = [_load(path) for path in sorted((Path(__file__).parent / "rows").glob("*.py"))]


def _calls(name: str) -> dict[str, Any]:
    """op -> call of a library, from every file that has some."""
    return {op: call for file in _FILES for op, call in getattr(file, name, {}).items()}


TABLE: list[Bench] = [row for file in _FILES for row in file.ROWS]

# Other libraries, in processes of their own: `--peer upstream=FOLDER`, the folder that holds the installed package.
PEERS = {
    "upstream": Peer(  # bears this package's name
        module="liger_kernel.transformers.functional",
        distribution="liger-kernel",
        calls=_calls("UPSTREAM"),
    ),
}
