"""What `--text` means: the documents of a file, a folder or the running Python's standard library, in a fixed order."""

import os
import random
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from liger_kernel.train import UsageError

_CHUNK = 1 << 20  # characters read at a time: a large file is read as far as it is needed
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})


def title(text: str | None) -> str:
    """What the table and the picture call the text."""
    if text is None:
        return f"the Python {sys.version_info.major}.{sys.version_info.minor} standard library"
    return Path(text).expanduser().resolve().name


def documents(text: str | None, seed: int) -> Iterator[str]:
    """The text piece by piece; the order of files depends on their names and `seed` alone.

    A file must be UTF-8; inside a folder, hidden files and files that are not UTF-8 text are passed over.

    Raises:
        UsageError: nothing there, not readable or not text.
    """
    if text is None:
        yield from _files(_library(), seed)
        return
    path = Path(text).expanduser()
    if path.is_dir():
        yield from _files(_folder(path), seed)
    elif path.is_file():
        yield from _pieces(path)
    else:
        raise UsageError(f"--text {text}: no such file or folder.")


def _pieces(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8") as file:
            while piece := file.read(_CHUNK):
                yield piece
    except UnicodeDecodeError as error:
        raise UsageError(
            f"--text {path}: not UTF-8 text (byte {error.start} of a piece)."
        ) from error
    except OSError as error:
        raise UsageError(f"--text {path}: {error.strerror}.") from error


def _files(paths: list[Path], seed: int) -> Iterator[str]:
    random.Random(seed).shuffle(paths)
    for path in paths:
        try:
            yield from _pieces(path)
        except UsageError:
            continue  # one file of many that is no text


def _library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    found = [p for p in root.rglob("*.py") if _NOT_LIBRARY.isdisjoint(p.relative_to(root).parts)]
    if not found:
        raise UsageError(
            f"this Python has no standard library sources in {root}; name a text with --text."
        )
    return sorted(found)


def _folder(root: Path) -> list[Path]:
    found: list[Path] = []
    for folder, names, files in os.walk(root):
        names[:] = sorted(n for n in names if not n.startswith(".") and n != "__pycache__")
        found += [Path(folder, f) for f in sorted(files) if not f.startswith(".")]
    if not found:
        raise UsageError(f"--text {root}: the folder holds no files.")
    return found
