"""What a released wheel imports from liger_kernel and how it calls it: facts, read off the syntax tree.

    python tests/frameworks/extract.py WHEEL ...              JSON lines, a wheel's after each other
    python tests/frameworks/extract.py --into FOLDER WHEEL ...   one JSON file a wheel, named after it

A dotted path names an object. Two signs extend it: `X()` is an instance of the class X, `X[]` any value of the table X.

    requires   what the wheel's metadata asks of liger-kernel's version
    imports    paths that are imported or read, also those that stand in strings
    assigned   paths the wheel replaces: they must exist, and be looked up where they are replaced
    calls      [path, positional arguments, keywords, keywords that `**` may bring,
               "" or what else adds arguments: "*", "**", "partial"]

Names are followed through `as`, assignments, attributes of `self`, `functools.partial`, `getattr` with a constant
and `super()`, without regard to the order of statements: a name that is bound twice stands for both. An
`apply_liger_kernel_to_...` of an unknown object is one of `liger_kernel.transformers`.
"""

import argparse
import ast
import json
import re
import zipfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = "liger_kernel"
_PATH = re.compile(rf"{ROOT}(\.\w+)+")
_PATCHER = re.compile(r"apply_liger_kernel_to_\w+")
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


class Scope:
    """Names of a module, a class or a function, and the scope around it."""

    def __init__(self, outer: "Scope | None" = None):
        self.outer = outer
        self.names: dict[str, set[str]] = {}
        self.keys: dict[str, set[str]] = {}  # constant keys of the dicts that a name stands for

    def find(self, name: str) -> set[str]:
        """The paths of a name, from the innermost scope that has it."""
        if name in self.names:
            return self.names[name]
        return self.outer.find(name) if self.outer else set()

    def spread(self, name: str) -> set[str]:
        """The keys that `**name` may bring."""
        if name in self.keys:
            return self.keys[name]
        return self.outer.spread(name) if self.outer else set()


class Facts(ast.NodeVisitor):
    """The facts of one module: first who is called what, until nothing is new, then what is used."""

    def __init__(self, tree: ast.Module):
        self.imports: set[str] = set()
        self.assigned: set[str] = set()
        self.calls: set[tuple[Any, ...]] = set()
        self.scope = Scope()
        self.scopes: dict[ast.AST, Scope] = {}
        self.strings = any(_is_import(node) for node in ast.walk(tree))
        self.binding = True
        before = -1
        while before != (before := self._size()):
            self.visit(tree)
        self.binding = False
        self.visit(tree)

    def _size(self) -> int:
        return sum(len(paths) for scope in self.scopes.values() for paths in scope.names.values())

    def _bind(self, name: str, paths: set[str]) -> None:
        if paths:
            self.scope.names.setdefault(name, set()).update(paths)

    # scopes

    def visit(self, node: ast.AST) -> None:
        if not isinstance(node, (ast.Module, ast.ClassDef, *_FUNCTION)):
            super().visit(node)
            return
        outer = self.scope
        if isinstance(node, ast.ClassDef):
            self._class(node)
        self.scope = self.scopes.setdefault(node, Scope(outer))
        if isinstance(node, _FUNCTION):
            self._parameters(node.args)
        elif isinstance(node, ast.ClassDef):
            bases = {f"{p}()" for base in node.bases for p in self.paths(base)}
            self.scope.names.setdefault("super()", set()).update(bases)
        super().generic_visit(node)
        self.scope = outer

    def _parameters(self, given: ast.arguments) -> None:
        """They hide names of the same spelling further out."""
        several = [given.vararg, given.kwarg, *given.posonlyargs, *given.args, *given.kwonlyargs]
        for name in (a.arg for a in several if a):
            self.scope.names.setdefault(name, set())
            self.scope.keys.setdefault(name, set())

    def _class(self, node: ast.ClassDef) -> None:
        """A subclass that keeps its base's constructor and forward is called as the base is."""
        own = {child.name for child in node.body if isinstance(child, _FUNCTION[:2])}
        if not own & {"__init__", "__new__", "forward"}:
            self._bind(node.name, {p for base in node.bases for p in self.paths(base)})

    # what an expression stands for

    def paths(self, node: ast.AST | None) -> set[str]:
        if isinstance(node, ast.Name):
            return self.scope.find(node.id)
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                return self.scope.find(f"self.{node.attr}")
            bases = self.paths(node.value)
            if not bases and _PATCHER.fullmatch(node.attr):
                bases = {f"{ROOT}.transformers"}
            return {f"{base}.{node.attr}" for base in bases}
        if isinstance(node, ast.Subscript):
            return {f"{base}[]" for base in self.paths(node.value)}
        if isinstance(node, ast.IfExp):
            return self.paths(node.body) | self.paths(node.orelse)
        if isinstance(node, ast.BoolOp):
            return set().union(*map(self.paths, node.values))
        if isinstance(node, ast.NamedExpr):
            return self.paths(node.value)
        return self._result(node) if isinstance(node, ast.Call) else set()

    def _result(self, node: ast.Call) -> set[str]:
        name, arguments = _name(node.func), node.args
        if name == "super":
            return self.scope.find("super()")
        if name == "partial" and arguments:
            return self.paths(arguments[0])
        if name == "getattr" and len(arguments) > 1 and _text(arguments[1]):
            return {f"{base}.{_text(arguments[1])}" for base in self.paths(arguments[0])}
        if name == "import_module" and arguments and _text(arguments[0]).startswith(f"{ROOT}."):
            return {_text(arguments[0])}
        if name == "get":
            return {p.removesuffix(".get") + "[]" for p in self.paths(node.func)}
        return {f"{p}()" for p in self.paths(node.func) if p.split(".")[-1][:1].isupper()}

    # statements that bind

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.split(".")[0] == ROOT:
                self.imports.add(alias.name)
                self._bind(alias.asname or ROOT, {alias.name if alias.asname else ROOT})

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level == 0 and node.module and node.module.split(".")[0] == ROOT:
            for alias in node.names:
                self.imports.add(f"{node.module}.{alias.name}")
                self._bind(alias.asname or alias.name, {f"{node.module}.{alias.name}"})

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._assign(target, node.value)
        self.visit(node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value:
            self._assign(node.target, node.value)
            self.visit(node.value)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self._assign(node.target, node.value)
        self.visit(node.value)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        paths = self.paths(value)
        if isinstance(target, ast.Name):
            self._bind(target.id, paths)
            self.scope.keys.setdefault(target.id, set()).update(_keys(value))
        elif isinstance(target, ast.Attribute):
            if isinstance(target.value, ast.Name) and target.value.id == "self":
                self._owner().names.setdefault(f"self.{target.attr}", set()).update(paths)
            owners = {p for p in self.paths(target.value) if "()" not in p}
            self.assigned |= {f"{p}.{target.attr}" for p in owners}
        elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
            keys = {_text(target.slice)} - {""}
            self.scope.keys.setdefault(target.value.id, set()).update(keys)

    def _owner(self) -> Scope:
        """The class around the present function; the module's scope outside of classes."""
        scope = self.scope
        while scope.outer and "super()" not in scope.names:
            scope = scope.outer
        return scope

    # uses

    def visit_Attribute(self, node: ast.Attribute) -> None:
        found = self.paths(node)
        if found and not self.binding and not any("()" in p or "[]" in p for p in found):
            self.imports |= found
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if self.strings and isinstance(node.value, str):
            if _PATH.fullmatch(node.value):
                self.imports.add(node.value)
            elif _PATCHER.fullmatch(node.value):
                self.imports.add(f"{ROOT}.transformers.{node.value}")

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        if self.binding:
            return
        name, arguments = _name(node.func), node.args
        if name == "partial" and arguments:
            self._call(self.paths(arguments[0]), arguments[1:], node.keywords, "partial")
        elif name in ("getattr", "hasattr", "delattr"):
            self.imports |= set(self._named_attributes(arguments))
        else:  # setattr, or a helper that is told an object and the name of its attribute
            self.assigned |= set(self._named_attributes(arguments))
            self._call(self.paths(node.func), arguments, node.keywords, "")

    def _named_attributes(self, arguments: list[ast.expr]) -> Iterator[str]:
        for owner, name in pairwise(arguments):
            if _text(name).isidentifier():
                yield from (f"{p}.{_text(name)}" for p in self.paths(owner) if "()" not in p)

    def _call(self, paths: set[str], arguments: list[ast.expr], keywords: Any, more: str) -> None:
        if any(isinstance(a, ast.Starred) for a in arguments):
            more = more or "*"
        named = {k.arg for k in keywords if k.arg}
        maybe: set[str] = set()
        for spread in (k.value for k in keywords if k.arg is None):
            maybe |= self.scope.spread(spread.id) if isinstance(spread, ast.Name) else _keys(spread)
            more = more or "**"
        count = sum(not isinstance(a, ast.Starred) for a in arguments)
        fact = (count, tuple(sorted(named)), tuple(sorted(maybe)), more)
        self.calls |= {(path, *fact) for path in paths if not path.endswith(".__new__")}


def _is_import(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.level == 0 and (node.module or "").split(".")[0] == ROOT
    return isinstance(node, ast.Import) and any(a.name.split(".")[0] == ROOT for a in node.names)


def _name(function: ast.expr) -> str:
    """The last part of what is called."""
    return getattr(function, "attr", getattr(function, "id", ""))


def _text(node: ast.AST) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _keys(node: ast.expr) -> set[str]:
    """The constant keys of `{...}` or `dict(...)`."""
    if isinstance(node, ast.Dict):
        return {_text(key) for key in node.keys if key and _text(key)}
    if isinstance(node, ast.Call) and _name(node.func) == "dict":
        return {k.arg for k in node.keywords if k.arg}
    return set()


def facts(wheel: Path) -> dict[str, Any]:
    """The facts of a wheel, sorted."""
    imports, assigned, calls, metadata = set(), set(), set(), ""
    with zipfile.ZipFile(wheel) as files:
        for name in files.namelist():
            if name.endswith(".dist-info/METADATA"):
                metadata = files.read(name).decode()
            elif name.endswith(".py") and ROOT in (
                text := files.read(name).decode(errors="replace")
            ):
                found = Facts(ast.parse(text))
                imports, assigned = imports | found.imports, assigned | found.assigned
                calls |= found.calls
    asked = re.findall(r"^Requires-Dist: liger[-_]kernel\s*([^;\n]*)", metadata, re.MULTILINE)
    return {
        "name": re.findall(r"^Name: (.*)$", metadata, re.MULTILINE)[0].strip(),
        "version": re.findall(r"^Version: (.*)$", metadata, re.MULTILINE)[0].strip(),
        "requires": sorted({text.strip(" ()") for text in asked} - {""}),
        "imports": sorted(imports - {ROOT}),
        "assigned": sorted(assigned),
        "calls": sorted(calls),
    }


def dumped(found: dict[str, Any]) -> str:
    """JSON with one fact a line."""
    parts = []
    for key, value in found.items():
        text = json.dumps(value)
        if isinstance(value, list) and value:
            text = "[\n" + ",\n".join(f"    {json.dumps(entry)}" for entry in value) + "\n  ]"
        parts.append(f"  {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="What wheels use of liger_kernel.")
    parser.add_argument("wheels", nargs="+", type=Path)
    parser.add_argument("--into", type=Path, help="a folder for one JSON file a wheel")
    arguments = parser.parse_args()
    for found in map(facts, arguments.wheels):
        if arguments.into is None:
            print(json.dumps(found))
        elif found["imports"]:
            name = f"{found['name'].lower()}-{found['version']}.json"
            (arguments.into / name).write_text(dumped(found))


if __name__ == "__main__":
    main()
