"""Every command on every page runs in a test, or :data:`NOT_RUN` says why not.

Commands are the lines of blocks marked ``sh``, ``bash`` and ``console``, and inline code that begins with a program of
:data:`PROGRAMS`. Each names options, files and tests that exist; those of blocks are run: by the test that
:data:`ELSEWHERE` names, or by this file.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from tests.repository.test_documents import documents
from tests.support.together import together
from weftplan import models
from weftplan.cli import main

ROOT = Path(__file__).parents[2]
PROGRAMS = ("weftplan", "python", "pip", ".ci/run", ".ci/wheels", "git", "eval")
ELSEWHERE = {
    r"weftplan (inspect|plan|run|convert) model\b.*": "tests/cli/test_model_page.py",
    r"weftplan fits train\.py:step .*": "tests/torch/test_guide.py",
    r"weftplan plan --torch mystep:step .*": "tests/torch/test_guide.py",
    r"weftplan plan resnet50 --batch 8 --card 8GB": "tests/repository/test_figures.py",
    r"weftplan train": ".ci/run",
    r"weftplan launch -n 4 --restarts 3 --elastic train\.py": "tests/kvstore/test_elastic.py",
    r"weftplan (train --data photos|run mine) .*": "tests/cli/test_photos.py",
    r"python -m pytest -q examples/course/grade\.py": "tests/repository/test_course.py",
    r"python docs/draw_layers\.py": "tests/repository/test_imports.py",
    r"python docs/draw_(overlap|plans)\.py": "tests/repository/test_pictures.py",
    r"python docs/draw_states\.py": "tests/engine/test_states_picture.py",
    r"python docs/refresh\.py": "tests/repository/test_generated_files.py",
    r"python docs/build_site\.py": "tests/repository/test_site.py",
    r"python -m build": "tests/repository/test_packaging.py",
    r"eval .*_WEFTPLAN_COMPLETE=bash_source .*": "tests/cli/test_completion.py",
    r"python -m pytest bench --benchmark.*": ".ci/run",
    r"python -m pytest -m gpu --first-contact": "tests/first_contact/test_first_contact.py",
    r"python -m tests\.stress\.mutation .*": "tests/stress/test_mutation.py",
}
"""Pattern of commands -> the test that runs them, with fewer rounds if they take minutes."""
NOT_RUN = {
    r"(python -m venv|pip install|pip uninstall|\.|git|pre-commit) .*": "changes environments or the working tree",
    r"\.ci/(run|wheels)": "runs all tests, this one among them",
    r"python -m pytest -q( -n 3.*| -x --lf| -m (stress|site|'')|)( tests/engine)?": "the suite itself",
    r"python -m pytest (-q )?-m gpu": "needs a GPU and CuPy",
    r"weftplan plan .* --device gpu0.*": "needs a GPU and CuPy",
    r"python bench/bench_(gpu|planner)\.py": "minutes, or a GPU; tests/repository/test_benches.py starts each bench",
    r"python tests/golden/generate\.py": "needs MXNet 1.9.1",
    r"python -m tests\.stress\.(trials|kill_points|kills) .*": "minutes; pytest -m stress runs it with fewer rounds",
}
"""Pattern of commands -> why no test runs them as they stand."""
SLOW = r"weftplan plan resnet50 (--compare|--curve|.*--budget (2GB|8GiB).*|--recompute .*)|weftplan launch .*"
"""Commands that take seconds; ``-m stress`` runs them."""


@dataclass(frozen=True)
class Command:
    """One command of a page."""

    page: Path
    text: str
    in_block: bool

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT).as_posix()}: {self.text}"


def commands_of(page: Path, text: str) -> list[Command]:
    """Return the commands of a page: lines of blocks (in ``console`` those after ``$``) and inline code."""
    commands = []
    for kind, block in re.findall(r"^```(sh|bash|console)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        lines = block.splitlines()
        if kind == "console":
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        for line in lines:
            parts = re.split(r" && |; ", re.sub(r"\s+# .*|^# .*", "", line))
            commands += [Command(page, part.strip(), True) for part in parts if part.strip()]
    for inline in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)):
        for part in inline.split("; "):
            if part.split(" ")[0] in PROGRAMS and len(part.split(" ")) > 1:
                commands.append(Command(page, part, False))
    return commands


COMMANDS = list(
    dict.fromkeys(
        command
        for page in documents()
        if page.name != "CHANGELOG.md" and "history" not in page.parts
        for command in commands_of(page, page.read_text(encoding="utf-8"))
    )
)


def plain(text: str) -> str:
    """Return a command with ``python`` for the Python of an environment, and without settings before it."""
    return re.sub(r"^([A-Z_]+=\S+ )*(\.venv/bin/)?", "", text)


def mistakes(text: str) -> list[str]:
    """Return the options, scripts, tests and marks of a command that do not exist."""
    words = shlex.split(plain(text))
    if words[0] == "weftplan":
        return unknown_options(words[1:])
    if words[0] != "python" or len(words) < 2:
        return []
    if words[1] == "-m" and words[2] == "pytest":
        paths = [word.partition("::")[0] for word in words[3:] if "/" in word]
        markers = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        marks = [words[at + 1] for at, word in enumerate(words) if word == "-m" and at > 1]
        return [path for path in paths if not (ROOT / path).exists()] + [
            m for m in marks if m and f'"{m}: ' not in markers
        ]
    if words[1] == "-m":
        module = ROOT / words[2].replace(".", "/")
        known = module.with_suffix(".py").exists() or module.is_dir() or words[2] in ("build", "venv")
        return [] if known else [words[2]]
    if not (ROOT / words[1]).exists():
        return [words[1]]
    code = (ROOT / words[1]).read_text(encoding="utf-8")
    return [word for word in words[2:] if word.startswith("--") and word not in code]


def unknown_options(words: list[str]) -> list[str]:
    """Return the first mistake that click finds in a command line of weftplan, or none."""
    if words[0] not in main.list_commands(click.Context(main)):
        return [words[0]]
    command = main.get_command(click.Context(main), words[0])
    assert command is not None
    try:
        command.make_parser(click.Context(command, **command.context_settings)).parse_args(words[1:])
    except click.NoSuchOption as error:
        return [error.option_name]
    except click.UsageError:
        pass  # prose names an option without its value
    return []


@together()
@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_command_names_what_exists(command: Command) -> None:
    """The options, scripts, modules, tests and marks of a command exist."""
    assert mistakes(command.text) == []


def row_of(text: str) -> str | None:
    """Return the test that runs a command, or the reason why none does."""
    rows = {**ELSEWHERE, **NOT_RUN}
    return next((row for pattern, row in rows.items() if re.fullmatch(pattern, plain(text))), None)


HERE = list(dict.fromkeys(command.text for command in COMMANDS if command.in_block and row_of(command.text) is None))
"""Commands that this file runs."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files that the commands name."""
    path = tmp_path_factory.mktemp("commands")
    models.get("resnet18").save(str(path / "net-symbol.json"))
    (path / "train.py").write_text("from weftplan import models\n\nnet = models.get('resnet18')\n")
    return path


@pytest.mark.parametrize(
    "command",
    [pytest.param(text, marks=[pytest.mark.stress] * bool(re.fullmatch(SLOW, text))) for text in HERE],
)
def test_a_command_runs(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command of a block that no other test runs ends with 0 in a folder with the files that it names."""
    words = shlex.split(plain(command))
    if words[0] == "python" and words[1].startswith("examples/"):
        done = subprocess.run([sys.executable, str(ROOT / words[1]), *words[2:]], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return
    assert words[0] == "weftplan", f"name the test of {command!r} in ELSEWHERE, or the reason in NOT_RUN"
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PATH", os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))
    if words[1] == "launch":
        if shutil.which("mpiexec") is None:
            pytest.skip("needs the extra mpi")
        done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, timeout=250)
        assert done.returncode == 0, done.stderr
    else:
        result = CliRunner().invoke(main, words[1:])
        assert result.exit_code == 0, result.output


def test_every_row_is_used() -> None:
    """Each row of the tables belongs to a command, and each named test exists."""
    for pattern, row in {**ELSEWHERE, **NOT_RUN}.items():
        assert any(re.fullmatch(pattern, plain(command.text)) for command in COMMANDS if command.in_block), pattern
        assert pattern in NOT_RUN or (ROOT / row).exists(), row


def test_commands_are_found_and_checked(tmp_path: Path) -> None:
    """Blocks and inline code give their commands; options, scripts and tests that do not exist are mistakes."""
    text = "`weftplan plan a --nope` `weftplan` ``no`` \n```sh\na && b  # c\n```\n```console\n$ d\nout\n```\n"
    assert [(c.text, c.in_block) for c in commands_of(tmp_path, text)] == [
        ("a", True),
        ("b", True),
        ("d", True),
        ("weftplan plan a --nope", False),
    ]
    assert mistakes("weftplan plan a --nope") == ["--nope"]
    assert mistakes("weftplan fly") == ["fly"]
    assert mistakes("python docs/gone.py") == ["docs/gone.py"]
    assert mistakes("python docs/refresh.py --gone") == ["--gone"]
    assert mistakes("python -m pytest -m gone tests/gone.py") == ["tests/gone.py", "gone"]
    assert mistakes("python -m tests.gone") == ["tests.gone"]
    assert mistakes(".venv/bin/python docs/refresh.py") == []
