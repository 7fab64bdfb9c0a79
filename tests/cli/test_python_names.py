"""Networks in Python programs: ``weftplan plan FILE.py:NAME`` and ``MODULE:NAME``."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from weftplan.cli import main

PROGRAM = """
from dataclasses import dataclass
import weftplan as mx
from sizes import HIDDEN

@dataclass
class Settings:
    hidden: int = HIDDEN

net = mx.sym.SoftmaxOutput(
    mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=Settings().hidden), name="softmax")
module = mx.mod.Module(net)
def make():
    return net
def generate():
    return net, ("data",), ("softmax_label",)
def needs(n):
    return net
def fails():
    raise ValueError("no such layer")
def leaves():
    raise SystemExit(3)
def imports():
    import torch_of_old
def step():
    return net.infer_shape, (1,)
five = 5
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a program and a module that it imports, and change to their folder; return the program's path."""
    (tmp_path / "sizes.py").write_text("HIDDEN = 3\n")
    (tmp_path / "lacking.py").write_text("import torch_of_old\n")
    path = tmp_path / "mynet.py"
    path.write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "mynet", raising=False)
    return path


@pytest.mark.parametrize("name", ["mynet.py:net", "mynet.py:make", "mynet.py:generate", "mynet.py:module", "mynet:net"])
def test_symbols_of_programs_are_planned(program: Path, name: str) -> None:
    """The name may be a symbol, a Module, or a function that returns a symbol or a tuple that begins with it."""
    result = CliRunner().invoke(main, ["plan", name, "--shape", "data=4,5"])
    assert result.exit_code == 0, result.output
    assert result.output.startswith(f"training {name}, batch 4, float32: ")


def test_inspect_takes_the_name_too(program: Path) -> None:
    """``inspect`` accepts such a name, too."""
    result = CliRunner().invoke(main, ["inspect", "mynet.py:net", "--shape", "data=4,5"])
    assert result.exit_code == 0, result.output
    assert "All its operators are supported" in result.output


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "mynet.py",
            "is a Python program: add the name of a symbol, or of a function that returns one, as in mynet.py:net",
        ),
        ("mynet.py:nett", "mynet.py has no 'nett'; did you mean 'net'?"),
        ("mynet.py:xyzzy", "mynet.py has no 'xyzzy'; it has net"),
        ("mynet.py:five", "must be a symbol or a function without arguments that returns one, got int"),
        ("mynet.py:needs", "mynet.py:needs: TypeError: needs() missing 1 required positional argument: 'n'"),
        ("mynet.py:fails", "mynet.py:fails: ValueError: no such layer, "),
        ("mynet.py:leaves", "mynet.py:leaves: SystemExit: the program ends with status 3"),
        ("nowhere.py:net", "there is no file 'nowhere.py'"),
        ("nowhere:net", "there is no module 'nowhere'"),
        ("nowhere.inside:net", "there is no module 'nowhere'"),
        ("lacking.py:net", "lacking.py: ModuleNotFoundError: No module named 'torch_of_old', "),
        ("lacking:net", "lacking: ModuleNotFoundError: No module named 'torch_of_old', "),
        ("mynet.py:imports", "mynet.py:imports: ModuleNotFoundError: No module named 'torch_of_old', "),
        ("mynet.py:step", "got tuple; add --torch if mynet.py:step makes a step of PyTorch"),
    ],
)
def test_names_that_are_no_networks(program: Path, name: str, words: str) -> None:
    """A wrong name gives an error with the reason; an exception in the program has its source line."""
    result = CliRunner().invoke(main, ["plan", name, "--shape", "data=4,5"])
    assert result.exit_code in (1, 2)
    assert words in " ".join(result.output.split())
    if "ValueError" in words:
        line = PROGRAM.splitlines().index('    raise ValueError("no such layer")') + 1
        assert f"{program}:{line}" in "".join(result.output.split("\n"))
