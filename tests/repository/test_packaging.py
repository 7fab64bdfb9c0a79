"""What is shipped: the wheel and the sdist are built offline and their contents asserted."""

from __future__ import annotations

import email
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import weftplan

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist of the working tree, built by the backend itself: no network."""
    folder = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-t", "sdist", "-d", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    """The wheel's path."""
    (path,) = built.glob("*.whl")
    return path


def sources() -> set[str]:
    """The files of the package in the working tree, as the wheel names them."""
    return {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "weftplan").rglob("*")
        if path.is_file() and path.suffix in {".py", ".pyi", ".md", ".typed", ".json", ".css", ".js", ".html", ".csv"}
    }


def test_wheel_holds_the_package_and_nothing_else(wheel: Path):
    """Exactly the package's own files and the metadata: no tests, no root links, no caches."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    info = f"weftplan-{weftplan.__version__}.dist-info"
    expected = {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
    assert names == sources() | expected
    assert {
        "weftplan/__init__.py",
        "weftplan/py.typed",
        "weftplan/cli/doctor/command.py",
        "weftplan/engine/__init__.py",
    } <= names
    assert {name.split("/")[0] for name in names} == {"weftplan", info}


def test_metadata(wheel: Path):
    """Name, version, licence, Python, runtime dependencies, extras and the command."""
    with zipfile.ZipFile(wheel) as archive:
        info = f"weftplan-{weftplan.__version__}.dist-info"
        metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
        commands = archive.read(f"{info}/entry_points.txt").decode()
        licence = archive.read(f"{info}/licenses/LICENSE").decode()
    assert metadata["Name"] == "weftplan"
    assert metadata["Version"] == weftplan.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    required = metadata.get_all("Requires-Dist") or []
    runtime = {line.split(">")[0].strip() for line in required if "extra ==" not in line}
    assert runtime == {"numpy", "rich", "click", "threadpoolctl"}
    extras = {"cuda12", "cuda13", "mpi", "plot", "examples", "fast", "test", "dev"}
    assert extras <= set(metadata.get_all("Provides-Extra") or [])
    assert "weftplan = weftplan.cli:main" in commands
    assert "Apache License" in licence
    assert "Version 2.0, January 2004" in licence


def test_wheel_works_outside_the_repository(wheel: Path, tmp_path: Path):
    """Imported straight from the wheel, in another folder, the package and its command line work."""
    code = (
        f"import sys; sys.path.insert(0, {str(wheel)!r}); import weftplan; "
        f"assert weftplan.__file__.startswith({str(wheel)!r}), weftplan.__file__; "
        "from weftplan.cli import main; main(['doctor', '--markdown'])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("# Environment variables")


def test_sdist_holds_what_builds_and_tests(built: Path):
    """The sdist has sources, tests and documents; no root link (a link would double the package), no CI."""
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        members = archive.getmembers()
    prefix = f"weftplan-{weftplan.__version__}/"
    names = {member.name.removeprefix(prefix) for member in members}
    assert {
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "weftplan/config.py",
        "tests/repository/test_packaging.py",
    } <= names
    assert not {name.split("/")[0] for name in names} & {"engine", "planner", "kvstore", ".ci", ".venv", ".git"}
    assert not [member.name for member in members if member.issym() or member.islnk()]
