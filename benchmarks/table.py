"""What is measured. `liger-kernel bench [ROW ...]` runs it.

Each file of `rows/` is a family of operators: `ROWS`, and the calls of the established library they
can be held against. A row names its inputs, its shapes, and the plain torch that users would write
without this package (`eager`: also what torch.compile compiles and what results are checked
against). `ours` defaults to the operator's public function, the floor comes from its `OP.cost`.
Calls of other libraries stand in `peers.py`, the rows of `--sizes` in `sizes.py`.
"""

import importlib.util
from pathlib import Path
from typing import Any

from liger_kernel.bench.row import Bench, Peer

_HERE = Path(__file__).parent


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"benchmark_{path.parent.name}_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_FILES = [_load(path) for path in sorted((_HERE / "rows").glob("*.py"))]


def _calls(name: str) -> dict[str, Any]:
    """op -> call of a library, from every file that has some."""
    return {op: call for file in _FILES for op, call in getattr(file, name, {}).items()}


TABLE: list[Bench] = [row for file in _FILES for row in file.ROWS]

# op -> label -> sizes, of `--sizes`
SIZES: dict[str, dict[str, tuple[int, ...]]] = _load(_HERE / "sizes.py").SIZES

# Other libraries, in processes of their own: `--peer NAME=FOLDER`, the folder that holds the installed package.
PEERS: dict[str, Peer] = {
    "upstream": Peer(  # bears this package's name
        module="liger_kernel.transformers.functional",
        distribution="liger-kernel",
        calls=_calls("UPSTREAM"),
    ),
    **_load(_HERE / "peers.py").PEERS,
}
