"""Distributions: sdist and wheel are built offline, and the wheel of the sdist is installed and run."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import weftplan
from tests.support.scripts import script

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel of the working tree and return its path."""
    folder = tmp_path_factory.mktemp("dist")
    build("wheel", ROOT, folder)
    (path,) = folder.glob("*.whl")
    return path


def package_files() -> set[str]:
    """Return the package's files in the working tree, named as in the wheel."""
    return {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "weftplan").rglob("*")
        if path.is_file() and path.suffix in {".py", ".pyi", ".md", ".typed", ".json", ".css", ".js", ".html", ".csv"}
    }


def test_wheel_holds_the_package_and_nothing_else(wheel: Path):
    """The wheel has exactly the package's files and its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    info = f"weftplan-{weftplan.__version__}.dist-info"
    expected = {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
    assert names == package_files() | expected
    assert {
        "weftplan/__init__.py",
        "weftplan/py.typed",
        "weftplan/cli/doctor/command.py",
        "weftplan/engine/__init__.py",
    } <= names
    assert {name.split("/")[0] for name in names} == {"weftplan", info}


def test_metadata(wheel: Path):
    """The metadata has the expected name, licence, Python, dependencies, extras, command and page."""
    with zipfile.ZipFile(wheel) as archive:
        info = f"weftplan-{weftplan.__version__}.dist-info"
        metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
        commands = archive.read(f"{info}/entry_points.txt").decode()
        licence = archive.read(f"{info}/licenses/LICENSE").decode()
    assert metadata["Name"] == "weftplan"
    assert metadata["Version"] == weftplan.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Description-Content-Type"] == "text/markdown"
    page = metadata.get_payload()
    assert page.startswith("# weftplan")
    assert [link for link in re.findall(r"\]\(([^)]+)\)", page) if not re.match(r"https?:", link)] == []
    assert "'weftplan[examples]'" in page
    required = metadata.get_all("Requires-Dist") or []
    runtime = {line.split(">")[0].strip() for line in required if "extra ==" not in line}
    assert runtime == {"numpy", "click", "threadpoolctl", "llvmlite"}
    extras = {"cuda12", "cuda13", "mpi", "plot", "examples", "fast", "test", "dev"}
    assert extras <= set(metadata.get_all("Provides-Extra") or [])
    assert "weftplan = weftplan.cli:main" in commands
    assert "Apache License" in licence
    assert "Version 2.0, January 2004" in licence


def test_links_of_the_package_page() -> None:
    """Relative links get the given address, or become text without an address; web addresses stay."""
    page = script("package_page").without_relative_links
    text = "[a](docs/a.md#b) ![p](p.png) [w](https://example.org) [h](#top)"
    assert page(text, None) == "a  [w](https://example.org) [h](#top)"
    assert page(text, "https://x.org/v1") == (
        "[a](https://x.org/v1/docs/a.md#b) ![p](https://x.org/v1/p.png) [w](https://example.org) [h](#top)"
    )


def test_the_newest_section_of_the_changelog_is_this_version() -> None:
    """The newest section of the changelog is called Unreleased or has this version."""
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest is not None
    assert newest[1] in ("Unreleased", weftplan.__version__)


PLATFORMS = {
    ("linux", "x86_64", "3.11"): True,
    ("linux", "aarch64", "3.14"): True,
    ("darwin", "arm64", "3.12"): True,
    ("win32", "AMD64", "3.13"): True,
    ("linux", "riscv64", "3.13"): False,
    ("darwin", "x86_64", "3.12"): False,
    ("win32", "ARM64", "3.13"): False,
    ("linux", "x86_64", "3.15"): False,
}
"""{(system, machine, Python version): whether llvmlite publishes a wheel}."""


@pytest.mark.parametrize("platform", PLATFORMS, ids=" ".join)
def test_llvmlite_dependency_marker(platform: tuple[str, str, str]):
    """llvmlite is a dependency exactly on the platforms for which it publishes wheels."""
    system, machine, version = platform
    environment = {"sys_platform": system, "platform_machine": machine, "python_version": version}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (llvmlite,) = (one for one in map(Requirement, project["dependencies"]) if one.name == "llvmlite")
    assert llvmlite.marker is not None
    assert llvmlite.marker.evaluate(environment) is PLATFORMS[platform]


def test_wheel_works_outside_the_repository(wheel: Path, tmp_path: Path):
    """Imported directly from the wheel in another folder, the package and its command line work."""
    code = (
        f"import sys; sys.path.insert(0, {str(wheel)!r}); import weftplan; "
        f"assert weftplan.__file__.startswith({str(wheel)!r}), weftplan.__file__; "
        "from weftplan.cli import main; main(['doctor', '--markdown'])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("# Environment variables")


def tracked() -> set[str]:
    """Return the repository's existing files, including new files that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    if listed.returncode:
        pytest.skip("this is no checkout, so which files belong to it cannot be said")
    return {name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build an sdist from a copy of the repository with additional files that do not belong to it; return its path."""
    tree = tmp_path_factory.mktemp("tree")
    names = [*tracked(), "engine", "kvstore", "planner"]
    packed = subprocess.run(
        ["tar", "-cT-"], cwd=ROOT, input="\n".join(names).encode(), capture_output=True, timeout=100
    )
    subprocess.run(["tar", "-x"], cwd=tree, input=packed.stdout, check=True, timeout=100)
    for name in (".venv2/bin/python", "notes/plan.md", "resnet-0001.params", "mlp-symbol.json"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).touch()
    folder = tmp_path_factory.mktemp("sdist")
    build("sdist", tree, folder)
    (path,) = folder.glob("*.tar.gz")
    return path


def test_sdist_holds_the_repository(sdist: Path):
    """The sdist has every tracked file but those of CI, no links, and no other file."""
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    prefix = f"weftplan-{weftplan.__version__}/"
    own = {name for name in tracked() if not name.startswith((".ci/", ".github/", ".pre-commit"))}
    assert {member.name.removeprefix(prefix) for member in members} == own | {"PKG-INFO"}
    assert not [member.name for member in members if member.issym() or member.islnk()]


def test_wheel_of_the_sdist_works(sdist: Path, tmp_path: Path):
    """A wheel built from the sdist and installed in a clean environment works.

    All modules can be imported, each subpackage is used, and the command runs.
    """
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    source = tmp_path / sdist.name.removesuffix(".tar.gz")
    build("wheel", source, tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    clean = tmp_path / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", clean)
    python = clean / "bin/python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel)
    # Dependencies come from this environment, after the clean environment's folder and without .pth files.
    (place,) = clean.glob("lib/python*/site-packages")
    (place / "needs.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(python, "-W", "error", source / "tests/repository/installed_check.py")
    assert "planned" in run(clean / "bin/weftplan", "plan", "lenet", "--budget", "80%")
    where = run(python, "-c", "import weftplan; print(weftplan.__file__)")
    assert where.startswith(str(clean))


def build(target: str, tree: Path, folder: Path) -> None:
    """Build a target of the source tree ``tree`` into ``folder`` with the backend itself, without network."""
    run(sys.executable, "-m", "hatchling", "build", "-t", target, "-d", folder, cwd=tree)


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Run a command without PYTHONPATH, check that it succeeds, and return its output."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd or "/", env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
