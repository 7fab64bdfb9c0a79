"""Files that commands cannot read or write: the message names the file, the cause and the remedy."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import weftplan as mx
from weftplan.cli import main
from weftplan.cli.file_errors import in_words


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a small model, an input, a text file and a folder, as the current folder."""
    monkeypatch.chdir(tmp_path)
    network = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=2, name="fc")
    weights = {"fc_weight": mx.nd.ones((2, 3)), "fc_bias": mx.nd.ones(2)}
    mx.model.save_checkpoint("net", 1, network, weights, {})
    np.save("x.npy", np.ones((1, 3), np.float32))
    Path("text").write_text("text")
    Path("folder").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("convert missing 1 a.onnx", "there is no file 'missing'"),
        ("convert folder 1 a.onnx", "'folder' is a folder; give a model file in it"),
        ("convert net missing a.params", "there is no parameter file 'missing'"),
        ("convert net folder a.params", "'folder' is a folder; give a parameter file in it"),
        ("convert net 1 no/a.params", "there is no folder no; create it, or give another name"),
        ("convert net 1 no/a.safetensors", "there is no folder no; create it, or give another name"),
        ("convert net 1 no/a.json", "there is no folder no; create it, or give another name"),
        ("convert net 1 text/a.params", "text is a file, expected a folder; give another name"),
        ("inspect folder", "'folder' is a folder; give a model file in it"),
        ("inspect .", "'.' is a folder; give a model file in it"),
        ("run . --input x.csv", "'.' is a folder; give a model file in it"),
        ("inspect net folder", "'folder' is a folder; give a parameter file in it"),
        ("inspect net 1 --html no/a.html", "there is no folder no; create it"),
        ("plan folder", "'folder' is a folder; give a model file in it"),
        ("plan mlp --html no/a.html", "there is no folder no; create it"),
        ("plan mlp --save text/a.json", "text is a file, expected a folder"),
        ("plan mlp --picture no/a.svg", "there is no folder no; create it"),
        ("plan mlp --log-file no/a", "there is no folder no; create it"),
        ("run net 1 --input missing.npy", "there is no file 'missing.npy'"),
        ("run net 1 --input x.npy -o no/a.npz", "there is no folder no; create it"),
        ("run net 1 --input x.npy -o no/a.csv", "there is no folder no; create it"),
        ("train --report text/a", "text is a file, expected a folder"),
        ("train --checkpoint text/a", "text is a file, expected a folder"),
        ("pack missing", "File 'missing' does not exist"),
    ],
)
def test_commands_say_what_is_wrong_with_a_file(place: Path, arguments: str, words: str) -> None:
    """Every command names the cause and the remedy; no message has a number of the system."""
    done = CliRunner().invoke(main, arguments.split())
    assert done.exit_code in (1, 2), done.output
    assert words in " ".join(done.output.split())
    assert "Errno" not in done.output


@pytest.mark.parametrize(
    ("number", "name", "words"),
    [
        (errno.ENOENT, "missing", "missing: there is no such file; check its name and the folder {place}"),
        (errno.ENOENT, "/missing", "/missing: there is no such file; check its name"),
        (errno.EISDIR, "folder", "folder: it is a folder, expected a file; give the name of a file"),
        (errno.EACCES, "text", "text: this user may not use text; change its permissions, or give another name"),
        (
            errno.EACCES,
            "folder/a",
            "folder/a: this user may not use folder; change its permissions, or give another name",
        ),
        (errno.EIO, "text", "text: " + os.strerror(errno.EIO)),
        (errno.EIO, None, os.strerror(errno.EIO)),
    ],
)
def test_errors_of_the_system_in_words(place: Path, number: int, name: str | None, words: str) -> None:
    """The errors that any command may meet while it reads or writes."""
    assert in_words(OSError(number, os.strerror(number), name)).startswith(words.format(place=place))
