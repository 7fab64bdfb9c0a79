"""The .params format: files of MXNet 1.9.1 in every version, this package's files, damage, and atomic writes.

MXNet 1.9.1 has written the golden files, or has read them (``tests/golden/params/make.py``).
"""

import os
import struct
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import weftplan as mx
from weftplan import nd
from weftplan.errors import DTypeError, FormatError

GOLDEN = Path(__file__).parent.parent / "golden" / "params"


def ramp(dtype):
    """Return the values that the golden script stored in this dtype."""
    return (np.arange(6).reshape(2, 3) - (0 if dtype == "uint8" else 2)).astype(dtype)


def test_every_dtype_of_an_mxnet_file():
    """A version 2 file loads with its names and seven dtypes."""
    loaded = nd.load(GOLDEN / "dtypes.params")
    assert list(loaded) == [f"arg:{d}" for d in "float32 float64 float16 uint8 int32 int8 int64".split()]  # noqa: SIM905
    for name, array in loaded.items():
        dtype = name[4:]
        assert array.dtype == np.dtype(dtype)
        np.testing.assert_array_equal(array.asnumpy(), ramp(dtype))


@pytest.mark.parametrize("version", [0, 1])
def test_old_versions(version):
    """Files of versions 0 and 1 load, as in MXNet 1.9.1."""
    loaded = nd.load(GOLDEN / f"version{version}.params")
    np.testing.assert_array_equal(loaded["w"].asnumpy(), ramp("float32"))
    np.testing.assert_array_equal(loaded["i"].asnumpy(), ramp("int32"))


def test_version_three():
    """The format that MXNet writes under npx.set_np() loads, including a scalar."""
    loaded = nd.load(GOLDEN / "version3.params")
    assert loaded["scalar"].shape == ()
    assert loaded["scalar"].asscalar() == 2.5
    np.testing.assert_array_equal(loaded["row"].asnumpy(), [1, 2])


@pytest.mark.parametrize("name", ["dtypes", "list", "single"])
def test_written_bytes_equal_mxnets(name, tmp_path):
    """Loading an MXNet file and saving it again gives the same bytes."""
    golden = GOLDEN / f"{name}.params"
    nd.save(tmp_path / "ours", nd.load(golden))
    assert (tmp_path / "ours").read_bytes() == golden.read_bytes()


def test_list_and_single_and_dictionary(tmp_path):
    """A list or a single array loads as a list, and a dictionary as a dictionary in its order."""
    path = str(tmp_path / "x.params")
    nd.save(path, nd.array([1, 2]))
    assert [a.asnumpy().tolist() for a in nd.load(path)] == [[1, 2]]
    nd.save(path, [nd.array([1, 2]), nd.array([3])])
    assert [a.asnumpy().tolist() for a in nd.load(path)] == [[1, 2], [3]]
    nd.save(path, {"b": nd.array([1]), "ä": nd.array([2])})
    assert {k: v.asscalar() for k, v in nd.load(path).items()} == {"b": 1, "ä": 2}
    assert list(nd.load_frombuffer(Path(path).read_bytes())) == ["b", "ä"]
    nd.save(path, [])
    assert nd.load(path) == []


def test_context_and_pending_work_and_empty_arrays(tmp_path):
    """Saving waits for pending values, and keeps empty shapes.

    An array of cpu(1) loads on cpu(1); arrays of sim and pinned memory load on cpu(0).
    """
    path = tmp_path / "x.params"
    x = nd.zeros(3, mx.cpu(1))
    x += 2
    nd.save(
        path,
        {
            "x": x,
            "s": nd.ones(2, mx.sim(83)),
            "p": nd.ones(2, mx.cpu_pinned()),
            "e": nd.zeros((0, 3)),
            "d": nd.array(7),
        },
    )
    loaded = nd.load(path)
    assert [loaded[k].context for k in "xsp"] == [mx.cpu(1), mx.cpu(0), mx.cpu(0)]
    assert (loaded["e"].shape, loaded["d"].shape, loaded["d"].asscalar()) == ((0, 3), (), 7)
    np.testing.assert_array_equal(loaded["x"].asnumpy(), [2, 2, 2])


@pytest.mark.parametrize(
    ("name", "array", "kind"), [("row_sparse", "embedding", "row_sparse"), ("csr", "matrix", "csr")]
)
def test_sparse_arrays_are_named(name, array, kind):
    """A sparse array raises an error that names it, although names come last in the file."""
    with pytest.raises(FormatError, match=f"array '{array}' is {kind}: only dense arrays are supported"):
        nd.load(GOLDEN / f"{name}.params")


def params_file(code, payload, shape=(2,), context=(1, 0)):
    """Return a file with one unnamed version 2 record of dtype ``code``."""
    head = struct.pack(f"<QQQIii{len(shape)}qiii", 0x112, 0, 1, 0xF993FAC9, 0, len(shape), *shape, *context, code)
    return head + payload + struct.pack("<Q", 0)


def test_bfloat16_becomes_float32_with_a_warning():
    """bfloat16 values load as float32, with a warning."""
    with pytest.warns(UserWarning, match="bfloat16 and was read as float32"):
        (array,) = nd.load_frombuffer(params_file(12, struct.pack("<HH", 0x3FC0, 0xC000)))
    assert array.dtype == np.float32
    np.testing.assert_array_equal(array.asnumpy(), [1.5, -2])


def test_array_of_missing_gpu_loads_on_host():
    """A checkpoint saved on gpu(63) loads on any machine."""
    (array,) = nd.load_frombuffer(params_file(0, struct.pack("<ff", 1, 2), context=(2, 63)))
    assert array.context == mx.cpu(0)


@pytest.mark.parametrize("name", ["dtypes", "row_sparse", "csr", "version0", "version1", "version3"])
def test_every_truncation_is_a_format_error(name):
    """A file cut at any length raises a FormatError."""
    data = (GOLDEN / f"{name}.params").read_bytes()
    for length in range(len(data)):
        with pytest.raises(FormatError, match=r"truncated|damaged"):
            nd.load_frombuffer(data[:length])


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_garbage_is_a_format_error_or_loads(data):
    """A file with overwritten bytes raises a FormatError, or loads, because a changed value is legal."""
    damaged = bytearray((GOLDEN / "version1.params").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        loaded = nd.load_frombuffer(bytes(damaged))
    except FormatError:
        return
    assert len(loaded) in (0, 2)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "truncated"),
        (b"PK\x03\x04" * 10, "no .params file"),
        (struct.pack("<QQQ", 0x112, 0, 1 << 60) + b"x" * 50, "cannot fit"),
        (params_file(99, b"12345678"), "unknown dtype code 99"),
        (params_file(0, b"12345678", context=(9, 0)), "device type 9"),
        (params_file(0, b"12345678", shape=(-2,)), r"shape \(-2,\)"),
        (params_file(0, b"12345678") + b"!", "1 bytes follow"),
        (params_file(0, b"1234", shape=(1 << 60,)), "truncated"),
        (params_file(0, b"", shape=(0, 1 << 62)), r"shape \(0, 4611686018427387904\)"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
            "pointer of Git LFS.*git lfs pull",
        ),
        (b'{"nodes": [], "arg_nodes": [], "heads": []}', "JSON text; a symbol file is opened with mx.sym.load"),
        (b"<!DOCTYPE html>\n<html><body>404</body></html>", "page of HTML"),
        (b"0.5 0.25\n", "text, beginning with '0.5 0.25"),
        (b"hello, this is a text of some length\n", "text, beginning with 'hello, this"),
        (b"\x1f\x8b\x08\x00" + bytes(40), "gzip file; unpack it first"),
        (b"\x80\x04\x95" + bytes(40), "pickle"),
    ],
)
def test_damage_is_described(data, says):
    """Each kind of damage raises a FormatError with its own message."""
    with pytest.raises(FormatError, match=says):
        nd.load_frombuffer(data)


def test_files_that_are_missing_or_empty(tmp_path):
    """The error for a missing or empty file contains the path; a buffer must be contiguous bytes."""
    with pytest.raises(FileNotFoundError, match="nowhere"):
        nd.load(tmp_path / "nowhere")
    (tmp_path / "empty").touch()
    with pytest.raises(FormatError, match="the file is empty"):
        nd.load(tmp_path / "empty")
    with pytest.raises(DTypeError, match="needs bytes"):
        nd.load_frombuffer("text")
    with pytest.raises(DTypeError, match="needs contiguous bytes"):
        nd.load_frombuffer(memoryview(b"abcdefgh")[::2])


def test_a_number_is_no_path(tmp_path):
    """``load`` refuses a number as path, which would be used as a file descriptor and closed."""
    with open(tmp_path / "open", "w+b") as file:
        for bad in (file.fileno(), True, None, b"bytes", ["a"]):
            with pytest.raises(DTypeError, match="load needs the path of a file"):
                nd.load(bad)
        file.write(b"still open")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_is_read_to_its_end(tmp_path):
    """A named pipe can be loaded without an intermediate file."""
    nd.save(tmp_path / "x", {"w": nd.arange(50_000)})
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=lambda: (tmp_path / "pipe").write_bytes((tmp_path / "x").read_bytes()))
    writer.start()
    loaded = nd.load(tmp_path / "pipe")
    writer.join()
    np.testing.assert_array_equal(loaded["w"].asnumpy(), np.arange(50_000))


@pytest.mark.parametrize("bad", [5, {"a": 1}, {1: 2}, [1], "text", None])
def test_only_arrays_can_be_saved(bad, tmp_path):
    """``save`` refuses objects that are not arrays, and creates no file."""
    with pytest.raises(DTypeError, match="save"):
        nd.save(tmp_path / "x", bad)
    assert os.listdir(tmp_path) == []


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    """If the disk is full during a save, the old file stays intact and no temporary file remains."""
    path = tmp_path / "x.params"
    nd.save(path, [nd.array([1])])
    before = path.read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        nd.save(path, [nd.array([2])])
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["x.params"]


def test_the_file_has_ordinary_permissions(tmp_path):
    """A saved file has the permissions of the umask, although it is written through a private temporary file."""
    nd.save(tmp_path / "x", nd.ones(1))
    (tmp_path / "plain").touch()
    assert (tmp_path / "x").stat().st_mode == (tmp_path / "plain").stat().st_mode
