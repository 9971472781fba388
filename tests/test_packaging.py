"""The wheel: what is in it, what its metadata says, and that it works where nothing else is."""

import email
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from isolated import run
from packaging.specifiers import SpecifierSet

pytestmark = pytest.mark.plain

ROOT = Path(__file__).parents[1]
VERSION = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel built from the sources alone, unpacked as an installer would."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    ignored = shutil.ignore_patterns("*.egg-info", "__pycache__")
    shutil.copytree(ROOT / "src", tree / "src", ignore=ignored)
    code = f"from setuptools import build_meta; print(build_meta.build_wheel({str(out)!r}))"
    subprocess.run([sys.executable, "-c", code], cwd=tree, check=True, capture_output=True)
    (built,) = out.glob("*.whl")
    zipfile.ZipFile(built).extractall(out / "site")
    return out / "site"


@pytest.fixture(scope="module")
def metadata(wheel):
    return email.message_from_string(
        (wheel / f"liger_kernel-{VERSION}.dist-info" / "METADATA").read_text()
    )


def test_wheel_has_every_source_file(wheel):
    sources = {p.relative_to(ROOT / "src") for p in (ROOT / "src" / "liger_kernel").rglob("*.py")}
    packed = {p.relative_to(wheel) for p in (wheel / "liger_kernel").rglob("*.py")}
    assert packed == sources
    assert (wheel / "liger_kernel" / "py.typed").is_file()
    assert {p.name for p in wheel.iterdir()} == {
        "liger_kernel",
        f"liger_kernel-{VERSION}.dist-info",
    }


def test_wheel_metadata(metadata):
    assert metadata["Name"] == "liger-kernel"
    assert metadata["Version"] == VERSION
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("License-File") == ["LICENSE"]
    assert {"train", "dev"} <= set(metadata.get_all("Provides-Extra"))
    hard = [r for r in metadata.get_all("Requires-Dist") if "extra ==" not in r]
    assert [re.match(r"[\w-]+", r)[0] for r in hard] == ["torch", "triton"]


def test_wheel_works_from_its_own_folder(wheel):
    code = """
import importlib.metadata, liger_kernel, torch
print(liger_kernel.__file__, liger_kernel.__version__)
assert importlib.metadata.version("liger_kernel") == liger_kernel.__version__
assert liger_kernel.functional.rms_norm(torch.ones(2, 4), torch.ones(4)).sum() > 7
"""
    file, version = run(code, wheel).split()
    assert Path(file) == wheel / "liger_kernel" / "__init__.py"
    assert version == VERSION


def test_console_script(wheel):
    scripts = (wheel / f"liger_kernel-{VERSION}.dist-info" / "entry_points.txt").read_text()
    assert "liger-kernel = liger_kernel.cli:main" in scripts
    assert "usage" in run("import liger_kernel.cli, sys; sys.argv = ['liger-kernel', '--help']\n"
                          "try: liger_kernel.cli.main()\nexcept SystemExit: pass", wheel).lower()  # fmt: skip


def test_command_works_from_the_sources_alone():
    """As `make demo VENV=` runs it: on the path, not installed."""
    code = """
import importlib.metadata
def missing(name, known=importlib.metadata.version):
    if name.replace("_", "-") == "liger-kernel":
        raise importlib.metadata.PackageNotFoundError(name)
    return known(name)
importlib.metadata.version = missing
import liger_kernel.cli
liger_kernel.cli.main(["env"])
"""
    assert VERSION in run(code)


@pytest.mark.parametrize("gate", [">=0.3.0", ">=0.8.2", ">=0.7.0", "==0.8.4", "<0.9,>=0.6"])
def test_version_passes_the_gates_of_frameworks(gate):
    assert VERSION in SpecifierSet(gate)


def test_hugging_face_finds_the_wheel(wheel):
    pytest.importorskip("transformers")
    code = "from transformers.utils import is_liger_kernel_available as a; assert a()"
    run(code, wheel)


def test_another_distribution_of_the_name_is_reported_once(tmp_path):
    info = tmp_path / "liger_kernel_nightly-0.8.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: liger_kernel_nightly\nVersion: 0.8.5\n"
    )
    (info / "RECORD").write_text("liger_kernel/__init__.py,,\n")
    (tmp_path / "liger_kernel").mkdir()
    (tmp_path / "liger_kernel" / "__init__.py").touch()
    code = """
import liger_kernel, importlib
importlib.import_module("liger_kernel.functional")
from liger_kernel import env_report
env_report.print_env_report()
"""
    seen = run(code, ROOT / "src", tmp_path)
    assert seen.count("UserWarning: liger_kernel_nightly 0.8.5 brings another package") == 1
    assert "WARNING" in seen


def test_constraints_pin_what_the_extras_need():
    pins = set(re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), re.M))
    text = (ROOT / "pyproject.toml").read_text()
    lists = re.search(r"\[project.optional-dependencies\](.*?)\n\[", text, re.S)[1]
    wanted = set(re.findall(r'"([\w-]+)(?:\[\w+\])?[^"]*"', lists)) - {"liger-kernel"}
    assert wanted | {"torch", "triton"} <= pins
