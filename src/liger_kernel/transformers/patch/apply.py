"""The one way anything gets replaced: a ledger of `(owner, name, old, new)`, which can be taken back.

An owner is a module instance (then `new` becomes a bound method), a class, or a Python module whose
functions the classes in it call by name. What sits in a Python module is shared by all models of
that file: it stays replaced until the last model that asked for it is undone.
"""

import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

_ABSENT: Any = object()
_users: dict[
    tuple[Any, str], "weakref.WeakSet[Any]"
] = {}  # (Python module or class, name) -> who asked


def seam_of(function: Any) -> str | None:
    """The seam that made this function (or bound method), None if it is not ours."""
    return getattr(function, "__liger_seam__", None)


def original_of(function: Any) -> Any:
    """The function that ours replaced, or the function itself."""
    while seam_of(function) is not None:
        function = function.__wrapped__
    return function


def made_by(function: Any, seam: str) -> bool:
    """Whether a seam made this function or one that it calls."""
    while seam_of(function) is not None:
        if seam_of(function) == seam:
            return True
        function = function.__wrapped__
    return False


@contextmanager
def unshared() -> Iterator[None]:
    """Within the block the functions that models share are the originals, as if no model had asked for others."""
    users = dict(_users)
    found = [(owner, name, getattr(owner, name)) for owner, name in users]
    _users.clear()
    for owner, name, function in found:
        setattr(owner, name, original_of(function))
    try:
        yield
    finally:
        _users.update(users)
        for owner, name, function in found:
            setattr(owner, name, function)


@dataclass(frozen=True)
class Change:
    """One replaced attribute."""

    owner: Any
    name: str
    old: Any
    new: Any
    user: Any = None  # the model it was shared for


class Ledger:
    """What one call of the patcher replaced, in order."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self._claims: dict[tuple[int, str], str] = {}
        self._later: list[Callable[[], None]] = []

    def bind(self, owner: Any, name: str, new: Any, seam: Any) -> bool:
        """Replace `owner.name` by a function; False if it already holds one of this seam."""
        if seam_of(getattr(owner, name, None)) == seam:
            return False
        bound = types.MethodType(new, owner) if isinstance(owner, nn.Module) else new
        self.put(owner, name, bound, seam)
        return True

    def put(self, owner: Any, name: str, new: Any, seam: str) -> None:
        """Replace `owner.name` by any object. RuntimeError if another seam has claimed it."""
        other = self._claims.setdefault((id(owner), name), seam)
        if other != seam:
            raise RuntimeError(
                f"Two seams claim {type(owner).__name__}.{name}: {other!r} and {seam!r}. Switch one of them off."
            )
        self._replace(owner, name, new)

    def become(self, module: nn.Module, cls: type) -> None:
        """Change the class of a module instance. Undoing it also drops what the class kept as `_liger*`."""
        self.changes.append(Change(module, "__class__", type(module), cls))
        module.__class__ = cls

    def share(self, namespace: Any, name: str, new: Any, user: Any) -> None:
        """Replace a function of a Python module or class on behalf of `user`."""
        users = _users.setdefault((namespace, name), weakref.WeakSet())
        if user not in users:
            users.add(user)
            self._replace(namespace, name, new, user)

    def later(self, take_back: Callable[[], None]) -> None:
        """Call this too when everything is put back, for changes to objects that the ledger shall not keep alive."""
        self._later.append(take_back)

    def _replace(self, owner: Any, name: str, new: Any, user: Any = None) -> None:
        self.changes.append(Change(owner, name, vars(owner).get(name, _ABSENT), new, user))
        setattr(owner, name, new)

    def undo(self) -> list[str]:
        """Put everything back, last change first. Returns what others have replaced since, left alone."""
        kept = []
        for take_back in self._later:
            take_back()
        for change in reversed(self.changes):
            if change.user is not None:
                self._release(change)
            elif change.name == "__class__":
                change.owner.__class__ = change.old
                for name in [name for name in vars(change.owner) if name.startswith("_liger")]:
                    del vars(change.owner)[name]
            elif vars(change.owner).get(change.name) != change.new:
                kept.append(f"{type(change.owner).__name__}.{change.name}")
            elif change.old is _ABSENT:
                delattr(change.owner, change.name)
            else:
                setattr(change.owner, change.name, change.old)
        self.changes.clear()
        return kept

    @staticmethod
    def _release(change: Change) -> None:
        users = _users[change.owner, change.name]
        users.discard(change.user)
        if not users:
            setattr(change.owner, change.name, original_of(getattr(change.owner, change.name)))
