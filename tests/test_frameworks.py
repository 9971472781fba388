"""Every import and every call of liger_kernel in released frameworks, against this package.

`frameworks/*.json` hold what `frameworks/extract.py` read off their wheels; `make frameworks` does so
again with the newest releases. A path must resolve, and its call must bind to our signature.
"""

import ast
import importlib
import inspect
import json
import textwrap
from pathlib import Path

import pytest
import torch
from frameworks.extract import Facts
from packaging.specifiers import SpecifierSet

import liger_kernel

pytest.importorskip("transformers")
pytestmark = pytest.mark.plain

RELEASES = {
    path.stem: json.loads(path.read_text())
    for path in sorted((Path(__file__).parent / "frameworks").glob("*.json"))
}

# (release, path) that we do not serve, and why. Each must still be a miss.
KNOWN: dict[tuple[str, str], str] = {}


def _find(path):
    """What a path names: for `X[]` all values of X, for `X()` the class X."""
    parts = path.split(".")
    found = importlib.import_module(parts[0])
    for n, part in enumerate(parts[1:], start=2):
        name = part.rstrip("[]()")
        if not hasattr(found, name):
            importlib.import_module(".".join(parts[:n]))
        found = getattr(found, name)
    return list(found.values()) if path.endswith("[]") else found


def _signature(path):
    """What the last part of a path takes, `self` apart."""
    owner = path.rpartition(".")[0]
    found = _find(path)
    if path.endswith("()"):  # an instance is called
        found = found.forward if issubclass(found, torch.nn.Module) else found.__call__
    elif not owner.endswith("()"):
        return inspect.signature(found)
    parameters = list(inspect.signature(found).parameters.values())
    return inspect.Signature(parameters[1:])


def _check_call(path, count, keywords, maybe, more):
    if path.endswith("[]"):  # one of many: which of them takes a keyword, the caller asks itself
        signatures = [inspect.signature(f) for f in _find(path)]
        for keyword in maybe:
            assert any(keyword in s.parameters for s in signatures), keyword
        for signature in signatures:
            signature.bind(*[None] * count, **dict.fromkeys(keywords))
        return
    if inspect.isbuiltin(_find(path)):
        return
    signature = _signature(path)
    bind = signature.bind_partial if more else signature.bind
    bind(*[None] * count, **dict.fromkeys(keywords))
    for keyword in maybe:
        signature.bind_partial(**{keyword: None})


def _misses(release):
    """path -> why it fails."""
    facts, found = RELEASES[release], {}
    for path in facts["imports"] + facts["assigned"]:
        try:
            _find(path)
        except (ImportError, AttributeError) as error:
            found[path] = str(error)
    for path, *call in facts["calls"]:
        try:
            _check_call(path, *call)
        except (ImportError, AttributeError, TypeError, AssertionError) as error:
            found[path] = f"{call}: {error}"
    return found


@pytest.mark.parametrize("release", RELEASES)
def test_imports_resolve_and_calls_bind(release):
    known = {path for name, path in KNOWN if name == release}
    misses = _misses(release)
    assert not {path: why for path, why in misses.items() if path not in known}
    assert not known - misses.keys(), "no longer misses: strike them off KNOWN"


@pytest.mark.parametrize("release", RELEASES)
def test_our_version_is_asked_for(release):
    for text in RELEASES[release]["requires"]:
        assert SpecifierSet(text).contains(liger_kernel.__version__), text


def test_known_misses_are_of_known_releases():
    assert {release for release, _ in KNOWN} <= RELEASES.keys()
    assert {"axolotl", "llamafactory", "ms_swift", "transformers", "trl", "verl"} <= {
        facts["name"] for facts in RELEASES.values()
    }


def test_a_miss_is_found():
    """The check itself: a name, a keyword and a count that are not ours."""
    wrong = [
        ("liger_kernel.transformers.LigerRMSNorm", 1, ["epsilon"], [], ""),
        ("liger_kernel.transformers.LigerRMSNorm", 0, [], [], ""),
        ("liger_kernel.transformers.LigerRMSNorm", 1, [], ["epsilon"], "**"),
        ("liger_kernel.transformers.LigerRMSNorm()", 3, [], [], ""),
        ("liger_kernel.transformers.LigerSwiGLUMLP().__init__", 4, [], [], ""),
        ("liger_kernel.transformers.monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN[]", 0, [], ["x"], ""),
    ]
    for call in wrong:
        with pytest.raises((TypeError, AssertionError)):
            _check_call(*call)
    _check_call("liger_kernel.transformers.LigerRMSNorm", 0, ["eps"], [], "**")
    for path in ("liger_kernel.nothing", "liger_kernel.transformers.LigerRMSNorm.nothing"):
        with pytest.raises(ImportError):
            _find(path)


SOURCE = """
    import importlib
    import liger_kernel.ops as k
    import liger_kernel.transformers
    from functools import partial
    from liger_kernel.transformers import LigerA as A, apply_liger_kernel_to_x as patch
    if old:
        from liger_kernel.transformers import apply_liger_kernel_to_y as patch
    from other import A as foreign

    def start(A=None, **kwargs):
        A(3)                        # a parameter, nobody's
        options = {"a": 1}
        options["b"] = 2
        patch(**options, **kwargs)
        foreign(1)

    class Sub(A):
        def __init__(self, x, loss=None):
            super().__init__(x, eps=1)
            self.loss = k.LigerLoss(beta=1) if x else None
        def step(self, *args):
            return self.loss(1, *args, y=2)

    class Plain(A):
        pass

    Plain(7)
    Sub(1, 2)
    made = TABLE = liger_kernel.transformers.TABLE["x"]
    TABLE(rope=True)
    TABLE2 = liger_kernel.transformers.TABLE
    TABLE2.get("x")(1)
    k.loss = wrapped
    setattr(k, "other_loss", wrapped)
    wrap(k, "third_loss")
    getattr(k, "fourth_loss")(4)
    model.hook(liger).apply_liger_kernel_to_z(model=1)
    run = partial(k.fifth_loss, 1, z=2)
    importlib.import_module("liger_kernel.ops.sixth")
    "liger_kernel.ops.seventh" in modules
"""


def test_extraction():
    facts = Facts(ast.parse(textwrap.dedent(SOURCE)))
    t, k = "liger_kernel.transformers", "liger_kernel.ops"
    assert facts.calls == {
        (f"{t}.apply_liger_kernel_to_x", 0, (), ("a", "b"), "**"),
        (f"{t}.apply_liger_kernel_to_y", 0, (), ("a", "b"), "**"),
        (f"{t}.apply_liger_kernel_to_z", 0, ("model",), (), ""),
        (f"{t}.LigerA", 1, (), (), ""),
        (f"{t}.LigerA().__init__", 1, ("eps",), (), ""),
        (f"{k}.LigerLoss", 0, ("beta",), (), ""),
        (f"{k}.LigerLoss()", 1, ("y",), (), "*"),
        (f"{t}.TABLE[]", 0, ("rope",), (), ""),
        (f"{t}.TABLE[]", 1, (), (), ""),
        (f"{t}.TABLE.get", 1, (), (), ""),
        (f"{k}.fourth_loss", 1, (), (), ""),
        (f"{k}.fifth_loss", 1, ("z",), (), "partial"),
    }
    assert facts.assigned == {f"{k}.loss", f"{k}.other_loss", f"{k}.third_loss"}
    names = ["LigerA", "TABLE", "TABLE.get", *(f"apply_liger_kernel_to_{x}" for x in "xyz")]
    wanted = {t, k, *(f"{t}.{name}" for name in names), f"{k}.LigerLoss"}
    wanted |= {f"{k}.{name}" for name in ("fourth_loss", "fifth_loss", "sixth", "seventh")}
    assert facts.imports == wanted
