"""Names of what can be switched, and what to say about a name that is not one of them."""

import difflib
import functools
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

DEFAULTS: dict[str, bool] = {
    "rope": True,
    "cross_entropy": False,
    "fused_linear_cross_entropy": True,
    "rms_norm": True,
    "swiglu": True,
    "geglu": True,
    "layer_norm": True,
    "relu_squared": True,
    "experts": True,
    "lora": True,
    "rematerialise": True,
}
# Flags that the contract's functions take without naming them: frameworks read their signatures and switch on whatever
# they find there.
UNNAMED = ("experts", "lora", "rematerialise")


def checked(flags: Mapping[str, Any], function: str, known: Iterable[str]) -> dict[str, bool]:
    """The flags as bools, None as False; TypeError for an unknown one."""
    for name in flags:
        if name not in known:
            raise TypeError(
                f"{function}() got an unexpected keyword argument {name!r}.{hint(name, known)}"
            )
    return {name: bool(value) for name, value in flags.items()}


def hint(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest known one, else all of them."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {near[0]!r}?" if near else f" Known: {', '.join(known)}."


@functools.cache
def warn_unknown(name: str) -> None:
    """Say once that a generic entry ignores a flag."""
    warnings.warn(
        f"liger_kernel: unknown flag {name!r} is ignored.{hint(name, DEFAULTS)}", stacklevel=4
    )
