"""Code run in a fresh interpreter, for what only shows at the first import."""

import os
import subprocess
import sys
from pathlib import Path

SRC = Path(__file__).parents[1] / "src"


def run(code: str, *paths: Path, **variables: str) -> str:
    """What `code` prints, with `paths` (or else the sources) importable and none of our variables set."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("LIGER_", "TRITON_"))}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, paths or [SRC]))
    done = subprocess.run(
        [sys.executable, "-W", "error::ImportWarning", "-c", code],
        env=environment | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr
