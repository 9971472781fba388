"""The house rules that a machine can check: who imports whom, how long things are, what is never called."""

import ast
from pathlib import Path

import pytest
from cases import CASES

from liger_kernel.bench.row import load_table

SOURCE = Path(__file__).parent.parent / "src" / "liger_kernel"
FILES = sorted(SOURCE.rglob("*.py"))
MAX_FILE, MAX_FUNCTION, MAX_KERNEL = 400, 60, 120

# layer of a module by the longest prefix that matches; a module imports its own layer or lower ones at module level
LAYERS = {
    "_env": 0,
    "ops._": 1,
    "ops": 2,
    "ops.utils": 3,
    "functional": 3,
    "chunked_loss": 3,
    "transformers": 5,
    "transformers.functional": 3,
    "transformers.functional_losses": 3,
    "transformers.norm": 3,
    "transformers.mlp": 3,
    "transformers.embedding": 3,
    "transformers.experts": 3,
    "transformers.rope": 3,
    "transformers.loss": 3,
    "transformers.divergence": 3,
    "transformers.activation": 3,
    "transformers.group_norm": 3,
    "transformers.model": 4,
    "transformers.patch": 4,
    "megatron": 5,
    "triton": 3,
    "utils": 3,
    "testing": 4,
    "bench": 4,
    "train": 6,
    "estimate": 6,
    "coverage": 6,
    "verification": 6,
    "tuning": 6,
    "cli": 6,
    "__main__": 6,
    "env_report": 3,
    "_aliases": 1,
    "": 1,
}
OPTIONAL = {
    "transformers",
    "peft",
    "trl",
    "megatron",
    "matplotlib",
    "tqdm",
    "rich",
    "accelerate",
    "tokenizers",
    "gguf",
}


def _name(path):
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(p for p in parts if p != "__init__")


def _layer(name):
    fits = [
        k
        for k in LAYERS
        if not k or name == k or name.startswith(k if k.endswith("_") else k + ".")
    ]
    return LAYERS[max(fits, key=len)]


def _parse(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def _module_level(tree):
    """Statements that run at import, `if TYPE_CHECKING` left out."""
    todo = list(tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        yield node
        todo += [n for n in ast.iter_child_nodes(node) if isinstance(n, ast.stmt)]


def _imports(nodes):
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, a.name) for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for a in node.names:
                whole = f"{node.module}.{a.name}"
                inside = (SOURCE.parent / Path(*whole.split("."))).with_suffix(".py").exists()
                yield node.lineno, whole if inside else node.module


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_imports_point_downwards(path):
    own = _layer(_name(path))
    for line, target in _imports(_module_level(_parse(path))):
        if target.split(".")[0] == "liger_kernel":
            inner = target.removeprefix("liger_kernel").lstrip(".")
            assert _layer(inner) <= own, f"{path.name}:{line} imports {target}, a higher layer"


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_optional_packages_are_imported_inside_functions(path):
    for line, target in _imports(_module_level(_parse(path))):
        assert target.split(".")[0] not in OPTIONAL, (
            f"{path.name}:{line} imports {target} at import time"
        )


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_sizes(path):
    lines = path.read_text(encoding="utf-8").count("\n")
    assert lines <= MAX_FILE, f"{path.name} has {lines} lines: split it along an idea"
    for node in ast.walk(_parse(path)):
        if isinstance(node, ast.FunctionDef):
            kernel = any("jit" in ast.dump(d) for d in node.decorator_list)
            first = node.body[0]
            prose = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            doc = first.end_lineno - first.lineno + 1 if prose else 0
            length = node.end_lineno - node.lineno + 1 - doc
            limit = MAX_KERNEL if kernel else MAX_FUNCTION
            assert length <= limit, f"{path.name}:{node.lineno} {node.name} has {length} lines"


@pytest.mark.parametrize("path", [f for f in FILES if f.name != "_env.py"], ids=_name)
def test_only_env_asks_the_machine(path):
    for node in ast.walk(_parse(path)):
        where = f"{path.name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            pair = f"{node.value.id}.{node.attr}"
            assert pair not in {"os.environ", "os.getenv", "torch.cuda", "torch.xpu"}, (
                f"{where} uses {pair}"
            )
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and "train" not in _name(path)
        ):
            assert node.value != "cuda", f"{where} names a device type"


BANNED = {
    "triton.autotune",
    "tl.atomic_",
    "wrap_triton",
    "device_print",
    "torch.equal(",
    ".item()",
}
# Programs of a shared row take their places from a counter. What they add up has an order of its own.
ALLOWED = {"_row_parts.py": {"tl.atomic_"}}


@pytest.mark.parametrize("path", [f for f in FILES if "ops" in f.parts], ids=_name)
def test_banned_calls(path):
    """No tuning in the hot path, no order left to chance, nothing the host would wait for."""
    source = path.read_text(encoding="utf-8")
    for phrase in BANNED - ALLOWED.get(path.name, set()):
        assert phrase not in source, f"{path.name} uses {phrase}"


def test_names_say_something():
    vague = {"utils.py", "helpers.py", "common.py"}
    allowed = {SOURCE / "utils.py", SOURCE / "ops" / "utils.py"}  # paths of the contract
    assert not [f for f in FILES if f.name in vague and f not in allowed]


def test_row_bases_are_64_bit():
    """Inside a kernel no program id meets a stride before `row_base` has widened it."""
    for path in FILES:
        for node in ast.walk(_parse(path)):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
                text = ast.unparse(node)
                narrow = "program_id" in text and any(
                    s in text for s in (" sX", " sY", "stride", "n_cols")
                )
                assert not narrow, f"{path.name}:{node.lineno}: {text}"


def test_every_op_has_its_rows():
    """Every module of `ops` that defines an OP has rows in tests and benchmarks, and a page in the docs."""
    import importlib

    tested = {case.op.name for case in CASES}
    table = load_table(SOURCE.parents[1] / "benchmarks" / "table.py").TABLE
    measured = {row.op for row in table}
    for path in sorted((SOURCE / "ops").glob("*.py")):
        module = importlib.import_module(f"liger_kernel.ops.{path.stem}")
        op = getattr(module, "OP", None)
        if op is not None:
            assert op.name in tested, f"{path.name}: no row in tests/rows"
            assert op.name in measured, f"{path.name}: no row in benchmarks/rows"
            page = SOURCE.parents[1] / "docs" / "ops" / f"{path.stem}.md"
            assert page.exists(), f"{path.name}: no page docs/ops/{path.stem}.md"
