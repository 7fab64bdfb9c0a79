"""Files as a device, and the text that lists targets."""

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


def test_homes_are_read_in_every_spelling():
    """Sizes in units, folders with and without one, what stands for host memory, and for none."""
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
    """An offload target's limit, and a budget are read by one rule: GB is 10^9, GiB is 2^30."""
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
def test_a_bad_list_of_homes_says_which_part_is_wrong(text, why):
    """Unknown kinds, sizes without a unit or below 1, and folders that are missing."""
    with pytest.raises(ConfigError, match=why):
        parse(text)


def test_memory_of_a_file_has_no_name_and_keeps_its_bytes(tmp_path):
    """Written bytes are read back, the folder looks empty, and the statistics follow."""
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
    """A request beyond it says how many bytes are left, and takes none."""
    place = FileDevice(FILE, str(tmp_path), limit=10_000)
    place.allocate(6000)
    with pytest.raises(OutOfMemoryError, match="5,000 bytes requested, 4,000 of the 10,000 that WEFTPLAN_SPILL allows"):
        place.allocate(5000)
    assert place.used == 6000


def test_a_full_disk_refuses_before_anything_is_written(tmp_path, monkeypatch):
    """The bytes are reserved when the file is made, so that no copy meets a full disk."""

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    place = FileDevice(FILE, str(tmp_path))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OutOfMemoryError, match=r"5,000 bytes in '.*' were refused: .*No space left"):
        place.allocate(5000)
    assert place.used == 0
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_used_is_told_at_once(tmp_path):
    """One that is not there, and a file in place of one."""
    (tmp_path / "file").write_text("")
    for wrong in ("missing", "file"):
        with pytest.raises(DeviceError, match=r"no file can be made in .*name a folder in WEFTPLAN_SPILL"):
            FileDevice(FILE, str(tmp_path / wrong))


def test_a_folder_that_vanishes_takes_nothing_with_it(tmp_path):
    """Existing bytes stay; new allocations are refused with the folder's name."""
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


def test_what_a_killed_process_leaves_goes_with_the_next_start(tmp_path, monkeypatch):
    """Where files need a name for a moment, a kill in just that moment leaves one, and the next device removes it."""
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


def test_files_that_need_a_name_lose_it_at_once(tmp_path, monkeypatch):
    """The way without O_TMPFILE gives the same memory."""
    monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    place = FileDevice(FILE, str(tmp_path))
    raw = place.allocate(3_000_000)
    raw.fill(5)
    assert (raw == 5).all()
    assert os.listdir(tmp_path) == []


def test_a_context_without_a_folder_says_what_to_set():
    """``file(i)`` exists if WEFTPLAN_SPILL lists more than ``i`` folders."""
    with pytest.raises(DeviceError, match=r"file\(7\) has no folder: WEFTPLAN_SPILL lists 0"):
        device.get(device.Context("file", 7))
