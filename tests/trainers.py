"""Run test_*NAME*.py with every release of NAME in trainers.txt, each in an environment of its own.

    python tests/trainers.py trl [arguments of pytest]

An environment holds what its line of trainers.txt says and finds everything else, torch too, in the environment of this
interpreter. It is made once, under build/trainers, and again when the line changes.
"""

import os
import site
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent


def environment(name: str, packages: list[str]) -> Path:
    """The interpreter of an environment with these packages, made if need be."""
    folder = ROOT / "build" / "trainers" / name
    python, done = folder / "bin" / "python", folder / "packages.txt"
    wanted = "\n".join([sys.executable, *packages])
    if not done.exists() or done.read_text() != wanted:
        venv.create(folder, clear=True, symlinks=True)
        (own,) = folder.glob("lib/python*/site-packages")
        # addsitedir, not a path: it also reads the .pth files of editable installs
        lines = [f"import site; site.addsitedir({shared!r})\n" for shared in site.getsitepackages()]
        (own / "shared.pth").write_text("".join(lines))
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
        done.write_text(wanted)
    return python


def main(name: str, *arguments: str) -> int:
    """The number of releases that failed."""
    lines = (HERE / "trainers.txt").read_text().splitlines()
    releases = [line.split() for line in lines if line.startswith(f"{name}-")]
    if not releases:
        sys.exit(f"trainers.txt has no line for {name!r}.")
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    failed = []
    for release, *packages in releases:
        print(f"{release}:", flush=True)
        tests = sorted(HERE.glob(f"test_*{name}*.py"))
        command = [environment(release, packages), "-m", "pytest", *tests, *arguments]
        if subprocess.run(command, cwd=ROOT, env=offline, check=False).returncode:
            failed.append(release)
    print(f"{len(releases) - len(failed)} of {len(releases)} releases passed", *failed)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
