"""Every writer of the package writes atomically: a file is complete or unchanged."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

import weftplan as mx
from weftplan.profiler.recorder import EventRecorder
from weftplan.profiler.trace_file import write_trace
from weftplan.support.atomic_files import put, replacing
from weftplan.training.optimizers import sgd_adam as optimizers


def write_states(path: Path) -> None:
    """Write the optimizer states of a kvstore."""
    kv = mx.kv.create()
    kv.init("w", mx.nd.zeros((2,)))
    kv.set_optimizer(optimizers.create("sgd", momentum=0.9))
    kv.push("w", mx.nd.ones((2,)))
    kv.save_optimizer_states(path)


def write_empty_trace(path: Path) -> None:
    """Write the profile of an empty recorder."""
    write_trace(EventRecorder(), path)


WRITERS = {
    "arrays": lambda path: mx.nd.save(path, mx.nd.ones((2,))),
    "symbol": lambda path: mx.sym.Variable("x").save(path),
    "states": write_states,
    "trace": write_empty_trace,
}


@pytest.fixture(params=WRITERS)
def write(request):
    """Return a function that writes a file to a given path; parametrized over all writers."""
    return WRITERS[request.param]


@pytest.fixture
def umask():
    """Set the umask 0o027: the group may not write, others may do nothing."""
    before = os.umask(0o027)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    """Return the permission bits of a file."""
    return stat.S_IMODE(path.stat().st_mode)


def test_new_file_follows_the_umask(write, tmp_path, umask):
    """A new file has the permissions of the umask, and no other file remains."""
    write(tmp_path / "new")
    assert mode(tmp_path / "new") == 0o640
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_a_file_keeps_its_permissions(write, tmp_path):
    """Writing to an existing file keeps its permissions."""
    path = tmp_path / "old"
    path.write_text("before")
    path.chmod(0o604)
    write(path)
    assert mode(path) == 0o604
    assert path.read_bytes() != b"before"


def test_a_link_stays_a_link(write, tmp_path):
    """Writing to a symbolic link replaces or creates its target, and keeps the link."""
    (tmp_path / "folder").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "folder" / "real")
    for _ in range(2):
        write(link)
        assert link.is_symlink()
        assert (tmp_path / "folder" / "real").stat().st_size > 0
    assert len(list((tmp_path / "folder").iterdir())) == 1


def test_the_longest_name(write, tmp_path):
    """A file whose name has 255 characters is written."""
    write(tmp_path / ("n" * 255))
    assert len(list(tmp_path.iterdir())) == 1


def test_a_pipe_is_written_and_stays(write, tmp_path):
    """Writing to a named pipe writes into it and does not replace it."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read = []
    thread = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    thread.start()
    write(pipe)
    thread.join(60)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert len(read[0]) > 10


@pytest.mark.parametrize(("where", "error"), [("absent/x", FileNotFoundError), (".", IsADirectoryError)])
def test_errors_name_the_path(write, tmp_path, where, error):
    """An error names the requested path, not that of a temporary file, and no file remains."""
    with pytest.raises(error) as caught:
        write(tmp_path / where)
    assert caught.value.filename == str(tmp_path / where)
    assert list(tmp_path.iterdir()) == []


def test_read_only_file_is_not_replaced(write, tmp_path, monkeypatch):
    """Writing to a file without write permission raises and keeps its contents."""
    path = tmp_path / "kept"
    path.write_text("mine")
    monkeypatch.setattr(os, "access", lambda path, how: how != os.W_OK)
    with pytest.raises(PermissionError, match="write-protected"):
        write(path)
    assert path.read_text() == "mine"


def test_an_error_while_writing_leaves_the_old_contents(tmp_path):
    """If writing raises, the file keeps its contents, and no other file remains."""
    path = tmp_path / "x"
    path.write_text("before")

    def half() -> None:
        with replacing(path) as file:
            file.write(b"after")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        half()
    assert path.read_text() == "before"
    assert [actual.name for actual in tmp_path.iterdir()] == ["x"]


def test_concurrent_writers(tmp_path):
    """With concurrent writers a file always has the complete output of one of them."""
    path, wrong = tmp_path / "x", []

    def work(number: int) -> None:
        for _ in range(30):
            with replacing(path) as file:
                for _ in range(20):
                    file.write(bytes([number]) * 5000)
            if len(set(path.read_bytes())) != 1 or path.stat().st_size != 100_000:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert [actual.name for actual in tmp_path.iterdir()] == ["x"]


def test_cached_file_is_private(tmp_path, umask, monkeypatch):
    """``put`` writes a file that only its owner may read, replaces a symbolic link, and survives a short write."""
    path, second = tmp_path / "put", tmp_path / "other"
    second.write_bytes(b"not to be touched")
    path.symlink_to(second)
    put(str(path), b"first")
    assert (path.read_bytes(), second.read_bytes()) == (b"first", b"not to be touched")
    assert not path.is_symlink()
    assert mode(path) == 0o600
    monkeypatch.setattr(os, "write", lambda handle, content: len(content) - 1)
    with pytest.raises(OSError, match="expected to write 6 bytes, the disk took 5"):
        put(str(path), b"second")
    assert path.read_bytes() == b"first"
    assert sorted(os.listdir(tmp_path)) == ["other", "put"]
