"""Files as a device, and the text that lists offload targets."""

import errno
import os
import subprocess
import sys

import numpy as np
import pytest

from weftplan import device
from weftplan.device.amounts import bytes_of
from weftplan.device.file_device import FileDevice
from weftplan.device.offload_targets import OffloadTarget, parse
from weftplan.errors import ConfigError, DeviceError, OutOfMemoryError

FILE = device.Context("file", 0)
GIB = 1 << 30


def test_offload_targets_are_parsed():
    """``parse`` reads sizes in units, folders with and without a size, and words for host memory and for none."""
    assert parse("host:8GB, file:/a/b:50GiB ,peer") == (
        OffloadTarget("host", 8 * 10**9),
        OffloadTarget("file", 50 * GIB, "/a/b"),
        OffloadTarget("peer"),
    )
    assert parse("file:/a:b") == (OffloadTarget("file", None, "/a:b"),)
    for size in ("512kb", "512k", "512e3", "500Ki"):
        assert parse(f"file:/a:{size}, host:{size}") == (
            OffloadTarget("file", 512_000, "/a"),
            OffloadTarget("host", 512_000),
        )
    assert parse("file:/a:512000") == (OffloadTarget("file", None, "/a:512000"),)
    assert parse("true") == parse("1") == (OffloadTarget("host"),)
    assert parse("false") == parse("0") == parse("") == ()


@pytest.mark.parametrize("size", ["1GB", "1GiB", "1.5 MB", "64KiB", "4096B", "2tb"])
def test_a_size_means_the_same_in_every_setting(size):
    """A size means the same for an offload target as for a budget: GB is 10^9 bytes, GiB is 2^30."""
    assert parse(f"host:{size}") == (OffloadTarget("host", bytes_of(size)),)
    assert parse(f"file:/a:{size}") == (OffloadTarget("file", bytes_of(size), "/a"),)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("disk", "'disk' in 'disk' is no offload target: expected .*host:8GB"),
        ("host:much", "the size 'much' of 'host:much'"),
        ("host:-1GB", "the size '-1GB'"),
        ("host:8", "the size '8'"),
        ("peer:0GB", "is 0: leave the offload target out"),
        ("host:1.2.3GB", "the size '1.2.3GB'"),
        ("file", "names no folder: write file:FOLDER"),
        ("file::5GB", "names no folder"),
        ("host,,peer", "'' in 'host,,peer' is no offload target"),
    ],
)
def test_bad_target_list_error_names_wrong_part(text, why):
    """Unknown kinds, bad sizes and missing folders raise ConfigError with the wrong part of the list."""
    with pytest.raises(ConfigError, match=why):
        parse(text)


def test_file_memory_is_unnamed(tmp_path):
    """Memory of a file keeps its bytes, the folder looks empty, and ``used`` follows."""
    place = FileDevice(FILE, str(tmp_path), limit=1 << 20)
    raws = [place.allocate(n) for n in (1, 4096, 70_000)]
    for value, raw in enumerate(raws):
        assert (raw.dtype, raw.ndim, raw.flags.writeable) == (np.uint8, 1, True)
        raw.fill(value + 1)
    assert os.listdir(tmp_path) == []
    assert [raw.nbytes for raw in raws] == [1, 4096, 70_000]
    assert all((raw == value + 1).all() for value, raw in enumerate(raws))
    assert place.used == 74_097
    assert place.memory_info() == ((1 << 20) - 74_097, 1 << 20)
    for raw in raws:
        place.free(raw)
    assert place.used == 0


def test_the_limit_of_a_folder_is_kept(tmp_path):
    """A request beyond the limit raises OutOfMemoryError with the bytes that are left, and takes none."""
    place = FileDevice(FILE, str(tmp_path), limit=10_000)
    place.allocate(6000)
    with pytest.raises(OutOfMemoryError, match="5,000 bytes requested, 4,000 of the 10,000 that WEFTPLAN_SPILL allows"):
        place.allocate(5000)
    assert place.used == 6000


def test_a_full_disk_refuses_before_anything_is_written(tmp_path, monkeypatch):
    """Bytes are reserved when a file is created, so a full disk raises OutOfMemoryError there, not during a copy."""

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    place = FileDevice(FILE, str(tmp_path))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OutOfMemoryError, match=r"5,000 bytes in '.*' were refused: .*No space left"):
        place.allocate(5000)
    assert place.used == 0
    assert os.listdir(tmp_path) == []


def test_unusable_folder_is_refused(tmp_path):
    """A missing folder, or a file in its place, raises DeviceError when the device is created."""
    (tmp_path / "file").write_text("")
    for wrong in ("missing", "file"):
        with pytest.raises(DeviceError, match=r"no file can be made in .*name a folder in WEFTPLAN_SPILL"):
            FileDevice(FILE, str(tmp_path / wrong))


def test_deleted_folder_keeps_memory_usable(tmp_path):
    """If the folder is deleted, its memory stays usable; an allocation raises OutOfMemoryError with its name."""
    folder = tmp_path / "gone"
    folder.mkdir()
    place = FileDevice(FILE, str(folder))
    raw = place.allocate(5000)
    raw.fill(7)
    folder.rmdir()
    assert (raw == 7).all()
    with pytest.raises(OutOfMemoryError, match=r"bytes in '.*gone' were refused: .*No such file"):
        place.allocate(10)
    assert place.memory_info()[0] == 0
    place.free(raw)


def test_file_of_killed_process_is_removed(tmp_path, monkeypatch):
    """A file left by a process that was killed during its creation is removed by the next device."""
    killed = (
        "import os, signal; from weftplan import device; from weftplan.device.file_device import FileDevice\n"
        f"place = FileDevice(device.Context('file', 0), {str(tmp_path)!r})\n"
        "del os.O_TMPFILE\n"
        "os.unlink = lambda path: os.kill(os.getpid(), signal.SIGKILL)\n"
        "place.allocate(5000)\n"
    )
    assert subprocess.run([sys.executable, "-c", killed], check=False).returncode == -9
    assert len(os.listdir(tmp_path)) == 1
    (tmp_path / "mine").write_text("")
    FileDevice(FILE, str(tmp_path))
    assert os.listdir(tmp_path) == ["mine"]


def test_files_without_o_tmpfile(tmp_path, monkeypatch):
    """Without O_TMPFILE and posix_fallocate, memory keeps its bytes, and its file loses its name immediately."""
    monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    place = FileDevice(FILE, str(tmp_path))
    raw = place.allocate(3_000_000)
    raw.fill(5)
    assert (raw == 5).all()
    assert os.listdir(tmp_path) == []


def test_context_without_folder_error_names_variable():
    """The context ``file(i)`` raises DeviceError unless WEFTPLAN_SPILL lists more than ``i`` folders."""
    with pytest.raises(DeviceError, match=r"file\(7\) has no folder: WEFTPLAN_SPILL lists 0"):
        device.get(device.Context("file", 7))
