"""Triton's interpreter, faster: it replaces the functions of `triton.language` anew for every call of a @jit function,
nested ones too, which is most of the time of a small launch. Here once a launch is enough.
"""

from typing import Any


class _OncePerLaunch:
    """Stands in for `_patch_lang`, and for the scopes it returns: the launch's `restore` ends them all."""

    def __init__(self, patch: Any) -> None:
        self.patch = patch
        self.scopes: dict[frozenset[int], Any] = {}

    def __call__(self, fn: Any) -> "_OncePerLaunch":
        import triton.language as tl

        key = frozenset(id(v) for v in fn.__globals__.values() if v is tl or v is tl.core)
        if key not in self.scopes:
            self.scopes[key] = self.patch(fn)
        return self

    def restore(self) -> None:
        for key in reversed(list(self.scopes)):
            self.scopes.pop(key).restore()


def speed_up() -> None:
    """Install it, if this Triton's interpreter is built that way."""
    from triton.runtime import interpreter

    if hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = _OncePerLaunch(interpreter._patch_lang)  # type: ignore[attr-defined]
