"""Root links, CI commands, names of MXNet's modules, import effects, and words that must not appear."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import weftplan

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "weftplan"


def written_as_text(link: Path, target: str) -> bool:
    """Return whether git has written ``link`` as a text file with its target, since ``core.symlinks`` is false."""
    if link.is_symlink() or not link.is_file() or link.read_text() != target:
        return False
    asked = subprocess.run(["git", "config", "core.symlinks"], cwd=link.parent, capture_output=True, text=True)
    return asked.stdout.strip() == "false"


@pytest.mark.parametrize("name", ["engine", "planner", "kvstore"])
def test_root_links(name: str):
    """The folders engine, planner and kvstore at the root are relative links into the package."""
    link = ROOT / name
    if written_as_text(link, f"weftplan/{name}"):
        pytest.skip(f"this clone has no symbolic links: git wrote {name} as text, since core.symlinks is false")
    assert link.is_symlink()
    assert os.readlink(link) == f"weftplan/{name}"
    assert (link / "__init__.py").is_file()


@pytest.mark.parametrize(
    ("linkable", "text", "skips"), [("false", "x", True), ("true", "x", False), ("false", "y", False)]
)
def test_only_clones_without_links_skip(tmp_path: Path, linkable: str, text: str, skips: bool):
    """A text file in place of a link counts as a link only if git has written it."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    subprocess.run(["git", "config", "core.symlinks", linkable], cwd=tmp_path, check=True)
    (tmp_path / "link").write_text(text)
    assert written_as_text(tmp_path / "link", "x") is skips


def test_ci_runs_the_commands_of_the_readme():
    """``.ci/run`` takes its commands from the shell blocks of README.md."""
    done = subprocess.run([str(ROOT / ".ci/run"), "--commands"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    blocks = re.findall(r"```sh\n(.*?)\n```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert [block for block in blocks if block.startswith("python -m venv")] == done.stdout.splitlines()
    assert "'.[examples]' && .venv/bin/weftplan train" in done.stdout
    assert "'.[dev]' && .venv/bin/python -m pytest" in done.stdout


def test_public_names_resolve():
    """Each name in ``__all__`` resolves, ``dir`` has the lazy names, and an unknown name raises with a suggestion."""
    for name in weftplan.__all__:
        assert getattr(weftplan, name) is not None
    assert set(weftplan._LAZY) <= set(dir(weftplan))
    with pytest.raises(AttributeError, match=r"module 'weftplan' has no attribute 'nonsense'$"):
        _ = weftplan.nonsense
    with pytest.raises(AttributeError, match=r"has no attribute 'symbl'; did you mean 'symbol'\?$"):
        _ = weftplan.symbl


@pytest.mark.parametrize("name", sorted(weftplan._ABSENT))
def test_absent_modules_say_what_to_use(name: str):
    """Access to a module of MXNet that is absent on purpose raises; the alternatives in the error exist."""
    assert not hasattr(weftplan, name)
    with pytest.raises(AttributeError, match=f"weftplan has no {name} on purpose: ") as caught:
        getattr(weftplan, name)
    for path in re.findall(r"mx((?:\.\w+)+)", str(caught.value)):
        actual: object = weftplan
        for part in path.split(".")[1:]:
            actual = getattr(actual, part)


@pytest.mark.parametrize("name", sorted(name for name, place in weftplan._LAZY.items() if ":" not in place))
def test_modules_can_be_imported_by_mxnets_names(name: str):
    """``import weftplan.io`` gives the same module as the attribute, with its own name and spec."""
    module = importlib.import_module(f"weftplan.{name}")
    assert module is getattr(weftplan, name)
    assert module.__spec__ is not None
    assert module.__spec__.name == module.__name__
    assert importlib.import_module(module.__name__) is module


def test_names_can_be_imported_from_mxnets_modules():
    """A class imported from a module with MXNet's name is the same class."""
    namespace: dict[str, object] = {}
    exec("from weftplan.io import DataBatch, NDArrayIter\nfrom weftplan.metric import Accuracy", namespace)
    assert namespace["DataBatch"] is weftplan.io.DataBatch
    assert namespace["Accuracy"] is weftplan.metric.Accuracy


@pytest.mark.parametrize("name", sorted(weftplan._ABSENT))
def test_imports_of_absent_modules_say_what_to_use(name: str):
    """An import of an absent module raises ModuleNotFoundError with the attribute's message."""
    parent, _, child = f"weftplan.{name}".rpartition(".")
    for line in (f"import weftplan.{name}", f"from {parent} import {child}", f"from weftplan.{name} import x"):
        with pytest.raises(ModuleNotFoundError, match=f"weftplan has no {name} on purpose: "):
            exec(line, {})
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'weftplan\.nonsense'"):
        importlib.import_module("weftplan.nonsense")


NAMES_OF_MXNET = {
    "module.base_module": "BaseModule",
    "module.bucketing_module": "BucketingModule",
    "module.module": "Module",
    "module.sequential_module": "SequentialModule",
    "io.io": "NDArrayIter",
    "optimizer.optimizer": "SGD",
    "rnn.rnn_cell": "LSTMCell",
    "rnn.io": "BucketSentenceIter",
    "rnn.rnn": "do_rnn_checkpoint",
    "misc": "FactorScheduler",
    "contrib.onnx": "import_model",
    "contrib.svrg_optimization.svrg_module": "SVRGModule",
    "executor_manager": "_split_input_slice",
    "gluon.utils": "clip_global_norm",
    "notebook.callback": "LiveLearningCurve",
    "contrib.text": "vocab",
    "image.image": "ImageIter",
    "image.detection": "ImageDetIter",
    "ndarray.ndarray": "NDArray",
    "symbol.symbol": "Symbol",
    "context": "Context",
}
"""{module of MXNet 1.9.1: a name that scripts import from it}."""


@pytest.mark.parametrize("name", NAMES_OF_MXNET)
def test_deep_modules_of_mxnet(name: str):
    """A dotted module name of MXNet gives the existing module, not a second copy."""
    wanted = NAMES_OF_MXNET[name]
    code = (
        f"import weftplan.{name} as found\n"
        f"from weftplan.{name} import {wanted}\n"
        "import sys, weftplan\n"
        "assert found.__spec__.name == found.__name__ and sys.modules[found.__name__] is found\n"
        f"near = getattr(weftplan.{name.partition('.')[0]}, {wanted!r}, {wanted})\n"
        f"assert near is {wanted}, near\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_no_file_is_loaded_twice():
    """A module that is imported under two names is loaded once."""
    code = (
        "import importlib, pkgutil, sys, weftplan\n"
        "for name in sorted(weftplan._ALIASES):\n"
        "    module = importlib.import_module(f'weftplan.{name}')\n"
        "    for part in pkgutil.iter_modules(getattr(module, '__path__', [])):\n"
        "        if f'{name}.{part.name}' in weftplan._DEEPER: continue\n"
        "        other = importlib.import_module(f'weftplan.{name}.{part.name}')\n"
        "        assert other is importlib.import_module(f'{module.__name__}.{part.name}'), part.name\n"
        "files = [(m.__file__, m) for m in {id(m): m for m in sys.modules.values()}.values()\n"
        "         if getattr(m, '__file__', None) and '/weftplan/' in m.__file__]\n"
        "assert len(files) == len({file for file, _ in files}) > 200\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "line",
    [
        "import weftplan.contrib.amp",
        "from weftplan.contrib import amp",
        "from weftplan.contrib.amp import amp",
        "from weftplan.contrib.quantization import quantize_model",
        "import weftplan.gluon.nn",
        "from weftplan.gluon.model_zoo import vision",
        "from weftplan.executor_manager import DataParallelExecutorManager",
    ],
)
def test_deep_imports_say_what_to_use(line: str):
    """An import from a module that is absent on purpose raises with the reason."""
    done = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, timeout=100)
    assert re.match(r"ModuleNotFoundError: \S+ (has no [\w.]+|is absent) on purpose: ", done.stderr.splitlines()[-1])


LAZY_SUBPACKAGES = {place.partition(":")[0].partition(".")[0] for place in weftplan._LAZY.values()} - {"device"}
"""Subpackages that are imported on first use; ``device`` is left out, because weftplan itself imports it."""


@pytest.mark.parametrize("subpackage", sorted(LAZY_SUBPACKAGES))
def test_missing_subpackage_is_named(subpackage: str, tmp_path: Path):
    """If the package lacks a subpackage, its attributes and imports raise an error that names it."""
    broken = tmp_path / "weftplan"
    broken.mkdir()
    for part in PACKAGE.iterdir():
        if part.stem != subpackage:
            (broken / part.name).symlink_to(part)
    names = [name for name, place in weftplan._LAZY.items() if place.partition(":")[0].partition(".")[0] == subpackage]
    lines = [f"weftplan.{names[0]}", f"from weftplan import {names[0]}"]
    lines += [f"import weftplan.{name}" for name in names if ":" not in weftplan._LAZY[name]]
    code = (
        "import weftplan\n"
        f"for line in {lines!r}:\n"
        "    try: exec(line)\n"
        "    except ModuleNotFoundError as error: print(error.name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.stdout.splitlines() == [f"weftplan.{subpackage}"] * len(lines), done.stderr[-2000:]


def test_import_starts_nothing():
    """``import weftplan`` imports no layer above device, starts no thread and needs no optional package."""
    code = (
        "import sys, threading, weftplan\n"
        "parts = {name.split('.')[1] for name in sys.modules if name.startswith('weftplan.')}\n"
        "print(sorted(parts - {'default_settings', 'config', 'device', 'errors', 'locks', 'support'}),\n"
        "      threading.active_count(),\n"
        "      [name for name in ('cupy', 'scipy', 'matplotlib', 'mpi4py') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.stdout.split("\n")[0] == "[] 1 []", done.stdout + done.stderr


def test_processes_of_the_tests_share_what_is_compiled():
    """A process that a test starts writes bytecode to the same cache."""
    code = "import sys; print(sys.dont_write_bytecode, sys.pycache_prefix)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == f"False {sys.pycache_prefix}\n"


TEXT = {".py", ".md", ".toml", ".yaml", ".yml", ".csv", ".json", ".html", ".svg", ".txt", ".cfg", ".sh", ""}
FORBIDDEN = {
    # Written in pieces, so that this file does not contain them.
    "an absolute path of one machine": r"(?<![\w.])/(?:wo" + r"rk|ro" + r"ot|ho" + r"me)/\w",
    "a folder beside the repository": r"\.\./sh" + r"ared",
    "a package registry": r"\b(?:files\.)?py" + r"pi\.org|py" + r"thonhosted",
    "an issue number": r"\biss" + r"ues? #?\d",
}


def text_files() -> Iterator[Path]:
    """Yield the text files of the repository, without links, caches and environments."""
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [
            name
            for name in folders
            if (not name.startswith(".") or name == ".ci")
            and name not in {"__pycache__", "dist", "build"}
            and not (Path(folder) / name).is_symlink()
        ]
        for name in files:
            path = Path(folder) / name
            if path.suffix in TEXT and not path.is_symlink() and not (name.startswith(".") and name != ".gitignore"):
                yield path


def test_no_forbidden_words():
    """No file has a path of one machine, a registry host or a numbered issue."""
    results = []
    for path in text_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for what, pattern in FORBIDDEN.items():
            results += [
                f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}: {what}: {match[0]!r}"
                for match in re.finditer(pattern, text, re.IGNORECASE)
            ]
    assert results == []


def test_text_walk_sees_the_sources():
    """The walk reaches every kind of text file, and each pattern matches an example."""
    seen = {path.relative_to(ROOT).as_posix() for path in text_files()}
    assert {
        "README.md",
        ".ci/run",
        "weftplan/config.py",
        "tests/repository/test_repository.py",
        "docs/environment.md",
    } <= seen
    samples = ("see /wo" + "rk/x", "../sh" + "ared/spec", "https://py" + "pi.org", "iss" + "ue 4")
    for sample, pattern in zip(samples, FORBIDDEN.values(), strict=True):
        assert re.search(pattern, sample)
    assert not re.search(FORBIDDEN["an absolute path of one machine"], "bench/wo" + "rk/a and x.org/ho" + "me/a")


def test_a_test_file_that_cannot_be_imported_is_an_error(tmp_path: Path):
    """Collection fails for a test file that imports a missing module; the collector of doctests would skip it."""
    (tmp_path / "test_broken.py").write_text("import no_such_module\n")
    command = [sys.executable, "-m", "pytest", "--collect-only", "-p", "tests.conftest", "-c", "pyproject.toml"]
    done = subprocess.run([*command, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == pytest.ExitCode.INTERRUPTED, done.stdout
    assert "No module named 'no_such_module'" in done.stdout
