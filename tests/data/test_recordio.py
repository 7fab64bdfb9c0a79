"""Record files: the bytes of MXNet 1.9.1, indices, headers and damaged files."""

import pickle
import struct
import tracemalloc

import numpy as np
import pytest

import weftplan as mx
from weftplan.errors import FormatError, MXNetError, ParameterError

MAGIC = b"\x0a\x23\xd7\xce"
FILE = b"".join(
    [
        MAGIC, b"\x03\x00\x00\x00", b"abc\x00",
        MAGIC, b"\x04\x00\x00\x20", b"abcd", MAGIC, b"\x04\x00\x00\x60", b"efgh",
        MAGIC, b"\x06\x00\x00\x00", b"x" + MAGIC + b"y\x00\x00",
    ]
)  # fmt: skip
"""RECORDS as MXNet 1.9.1 writes them: it splits a record at an aligned magic word, not at an unaligned magic word."""
RECORDS = [b"abc", b"abcd" + MAGIC + b"efgh", b"x" + MAGIC + b"y"]


def test_bytes(tmp_path):
    """Records are written as MXNet writes them, and read back; reading at the end returns None."""
    path = tmp_path / "a.rec"
    writer = mx.recordio.MXRecordIO(path, "w")
    for record in RECORDS:
        writer.write(record)
    writer.close()
    assert path.read_bytes() == FILE
    reader = mx.recordio.MXRecordIO(path, "r")
    for _ in range(2):
        assert [reader.read() for _ in range(4)] == [*RECORDS, None]
        reader.reset()
    copy = pickle.loads(pickle.dumps(reader))
    assert copy.read() == RECORDS[0]
    reader.close()
    reader.close()
    with pytest.raises(MXNetError, match="is closed"):
        reader.read()
    with pytest.raises(ParameterError, match="'r' or 'w', got 'a'"):
        mx.recordio.MXRecordIO(path, "a")
    with pytest.raises(FileNotFoundError):
        mx.recordio.MXRecordIO(tmp_path / "nowhere", "r")


@pytest.mark.parametrize("seed", range(20))
def test_any_bytes_come_back(tmp_path, seed):
    """Random records that contain magic words are read as they were written."""
    rng = np.random.default_rng(seed)
    records = []
    for _ in range(20):
        parts = [rng.bytes(int(rng.integers(0, 9))) if rng.random() < 0.6 else MAGIC for _ in range(rng.integers(0, 8))]
        records.append(b"".join(parts))
    writer = mx.recordio.MXRecordIO(tmp_path / "a.rec", "w")
    for record in records:
        writer.write(record)
    writer.close()
    reader = mx.recordio.MXRecordIO(tmp_path / "a.rec", "r")
    assert [reader.read() for _ in records] == records
    assert reader.read() is None


def test_damage(tmp_path):
    """A truncated or changed file raises FormatError or gives other records; no other exception occurs."""
    path = tmp_path / "a.rec"
    rng = np.random.default_rng(3)
    seen = set()
    for k in range(600):
        data = bytearray(FILE)
        if k < len(FILE):
            data = data[:k]
        else:
            data[rng.integers(0, len(data))] = rng.integers(0, 256)
        path.write_bytes(data)
        reader = mx.recordio.MXRecordIO(path, "r")
        try:
            while reader.read() is not None:
                pass
        except FormatError as error:
            seen.add(str(error).split(": ")[1])
        reader.close()
    assert {"truncated", "damaged", "no record at byte 0"} <= seen


def test_an_index(tmp_path):
    """An index gives records by key in any order; a missing key and a damaged index raise."""
    writer = mx.recordio.MXIndexedRecordIO(tmp_path / "a.idx", tmp_path / "a.rec", "w", key_type=str)
    for k in range(10):
        writer.write_idx(f"k{k}", bytes([k] * k))
    writer.close()
    reader = mx.recordio.MXIndexedRecordIO(tmp_path / "a.idx", tmp_path / "a.rec", "r", key_type=str)
    assert reader.keys == [f"k{k}" for k in range(10)]
    for k in (7, 0, 3):
        assert reader.read_idx(f"k{k}") == bytes([k] * k)
    with pytest.raises(ParameterError, match="no record has the key 'k99'"):
        reader.read_idx("k99")
    (tmp_path / "a.idx").write_text("1\t0\nnonsense\n")
    with pytest.raises(FormatError, match="line 2 must be a key"):
        mx.recordio.MXIndexedRecordIO(tmp_path / "a.idx", tmp_path / "a.rec", "r")


def test_headers():
    """``unpack`` returns the header, with one label or an array, and the content; short records raise."""
    header, remaining = mx.recordio.unpack(mx.recordio.pack((0, 3.5, 7, 8), b"image"))
    assert (header, remaining) == ((0, 3.5, 7, 8), b"image")
    assert mx.recordio.pack((0, 3.5, 7, 8), b"") == b"\0\0\0\0\0\0\x60\x40" + b"\x07" + b"\0" * 7 + b"\x08" + b"\0" * 7
    header, remaining = mx.recordio.unpack(mx.recordio.pack(mx.recordio.IRHeader(0, [1, 2, 3], 4, 5), b"image"))
    assert (header.flag, header.label.tolist(), header.id, remaining) == (3, [1, 2, 3], 4, b"image")
    for bad in (b"short", mx.recordio.pack((0, [1.0, 2.0], 0, 0), b"")[:-1]):
        with pytest.raises(FormatError, match="unpack"):
            mx.recordio.unpack(bad)


def test_a_damaged_length_takes_no_memory(tmp_path):
    """A record that claims 400 MB in a file of 12 bytes raises before memory is allocated."""
    path = tmp_path / "claims.rec"
    path.write_bytes(struct.pack("<II", 0xCED7230A, 400 << 20) + bytes(4))
    tracemalloc.start()
    try:
        with pytest.raises(MXNetError, match="truncated: the record at byte 0 needs 419,430,400 bytes"):
            mx.recordio.MXRecordIO(str(path), "r").read()
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
