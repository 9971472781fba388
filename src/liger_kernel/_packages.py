"""Which packages are installed, in which versions, and whether one of them is in our way."""

import functools
import importlib.metadata
import pathlib
import re
import sys

DISTRIBUTION = "liger-kernel"


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution, None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def package_version() -> str:
    """This package's version: its checkout's when it runs in one, else its installed metadata's."""
    project = pathlib.Path(__file__).parents[2] / "pyproject.toml"
    if project.is_file():
        fields = dict(re.findall(r'^(name|version) = "(.+)"$', project.read_text("utf-8"), re.M))
        if fields.get("name") == DISTRIBUTION:
            return fields["version"]
    return version_of(DISTRIBUTION) or "0+unknown"


def foreign_distributions() -> list[str]:
    """Other installed distributions that bring files named `liger_kernel`, as "name version".

    They overwrite this package's files or hide them: metadata then speaks of one, code is of the
    other. Looks only at distributions whose name begins with "liger", to keep the import fast.
    """
    found = []
    for folder in dict.fromkeys(sys.path):
        for info in sorted(pathlib.Path(folder or ".").glob("[lL]iger*.dist-info")):
            dist = importlib.metadata.Distribution.at(info)
            name = dist.metadata["Name"].lower().replace("_", "-")
            ours = name == DISTRIBUTION and dist.version == package_version()
            files = {str(file) for file in dist.files or ()}
            if not ours and "liger_kernel/__init__.py" in files:
                found.append(f"{dist.metadata['Name']} {dist.version}")
    return found
