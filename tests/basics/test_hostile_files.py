"""Hostile files raise FormatError before they use much memory, and so do folders in place of files."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import pickle
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weftplan as mx
from weftplan.cli.model_files import _text
from weftplan.cli.plan.inputs import load_network
from weftplan.cli.run.inputs import read as _read
from weftplan.convert import load_safetensors
from weftplan.errors import FormatError
from weftplan.kvstore.updater import Updater
from weftplan.ndarray.formats import safetensors
from weftplan.planner import MemoryPlan
from weftplan.support.atomic_files import FREE
from weftplan.training.fit.checkpoint_writer import read_snapshot
from weftplan.training.module.optimizer_states import read_states

MUCH = 4 * FREE
Load = Callable[[Path], Any]


def load_states(path: Path) -> None:
    """Load optimizer states from a file into an updater."""
    Updater(mx.optimizer.create("sgd", momentum=0.9)).set_states(path.read_bytes())


def packed_zeros(head: bytes = b"") -> bytes:
    """Return gzip content that unpacks to ``head`` and :data:`MUCH` zeros."""
    held = io.BytesIO()
    with gzip.GzipFile(fileobj=held, mode="wb", compresslevel=1) as file:
        file.write(head)
        for _ in range(MUCH >> 20):
            file.write(bytes(1 << 20))
    return held.getvalue()


def states_archive(layout: Any, save: Callable[..., None] = np.savez, **arrays: Any) -> bytes:
    """Return an archive of optimizer states with this layout and these arrays."""
    texts = {"__version__": 2, "__layout__": layout, "__counts__": []}
    held = io.BytesIO()
    save(held, **{name: np.frombuffer(json.dumps(text).encode(), np.uint8) for name, text in texts.items()}, **arrays)
    return held.getvalue()


def packed_npz() -> bytes:
    """Return an npz file with one compressed array of :data:`MUCH` zero bytes."""
    held = io.BytesIO()
    np.savez_compressed(held, x=np.broadcast_to(np.float32(0), (MUCH // 4,)))
    return held.getvalue()


def npy_header() -> bytes:
    """Return an npy header that declares 10**13 numbers, without data."""
    held = io.BytesIO()
    np.lib.format.write_array_header_1_0(held, {"descr": "<f4", "fortran_order": False, "shape": (10**13,)})
    return held.getvalue()


def shared_bytes() -> bytes:
    """Return a safetensors file whose 600 arrays share the same 500,000 bytes."""
    entry = {"dtype": "U8", "shape": [500_000], "data_offsets": [0, 500_000]}
    header = json.dumps({f"a{k}": entry for k in range(600)}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(500_000)


def shared_values(levels: int) -> bytes:
    """Return a pickle of pairs whose two items are the same pair, nested ``levels`` deep."""
    value: Any = (None, None)
    for _ in range(levels):
        value = (value, value)
    return pickle.dumps({0: value}, 2)


def onnx_file(build: Callable[[Any], tuple[list[Any], list[Any]]]) -> bytes:
    """Return an ONNX file with the nodes and initializers that ``build`` returns; its output uses none of them."""
    onnx = pytest.importorskip("onnx")
    nodes, initializers = build(onnx)
    one = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in ("x", "y")]
    nodes.append(onnx.helper.make_node("Add", ["x", "x"], ["y"]))
    model = onnx.helper.make_model(onnx.helper.make_graph(nodes, "graph", one[:1], one[1:], initializers))
    content: bytes = model.SerializeToString()
    return content


def filled_arrays(onnx: Any) -> tuple[list[Any], list[Any]]:
    """Return (nodes, initializers) for eight arrays of zeros, each within the limit."""
    shape = onnx.helper.make_tensor("s", onnx.TensorProto.INT64, [1], [FREE // 8])
    return [onnx.helper.make_node("ConstantOfShape", ["s"], [f"c{k}"]) for k in range(8)], [shape]


def long_range(onnx: Any) -> tuple[list[Any], list[Any]]:
    """Return (nodes, initializers) for a range of :data:`MUCH` numbers."""
    ends = [onnx.helper.make_tensor(name, onnx.TensorProto.INT64, [], [value]) for name, value in
            (("a", 0), ("b", MUCH), ("c", 1))]  # fmt: skip
    return [onnx.helper.make_node("Range", ["a", "b", "c"], ["r"])], ends


def broadcast_sum(onnx: Any) -> tuple[list[Any], list[Any]]:
    """Return (nodes, initializers) for the sum of a column and a row of 9000 numbers."""
    ends = [onnx.numpy_helper.from_array(np.zeros(shape, "f4"), name) for name, shape in
            (("a", (9000, 1)), ("b", (1, 9000)))]  # fmt: skip
    return [onnx.helper.make_node("Add", ["a", "b"], ["c"])], ends


def repeated_rows(onnx: Any) -> tuple[list[Any], list[Any]]:
    """Return (nodes, initializers) for a row of 9000 numbers gathered 9000 times."""
    inputs = [onnx.numpy_helper.from_array(values, name) for name, values in
              (("a", np.zeros((1, 9000), "f4")), ("i", np.zeros(9000, "i8")))]  # fmt: skip
    return [onnx.helper.make_node("Gather", ["a", "i"], ["c"])], inputs


def repeated_concat(onnx: Any) -> tuple[list[Any], list[Any]]:
    """Return (nodes, initializers) for an array whose size is doubled twenty times by concatenation."""
    names = ["a", *(f"c{k}" for k in range(20))]
    joins = [onnx.helper.make_node("Concat", [one, one], [two], axis=0)
             for one, two in itertools.pairwise(names)]  # fmt: skip
    return joins, [onnx.numpy_helper.from_array(np.zeros(1000, "f4"), "a")]


NO_SHAPE = struct.pack("<QQQ", 0x112, 0, 200_000) + bytes(800_000) + struct.pack("<Q", 0)
CASES: dict[str, tuple[str, Callable[[], bytes], Load]] = {
    "safetensors, arrays share bytes": ("a.safetensors", shared_bytes, safetensors.read),
    "params, arrays without a shape": ("a.params", lambda: NO_SHAPE, mx.nd.load),
    "states, compressed": (
        "a.states",
        lambda: states_archive(
            [[0, "int", "a0"]], np.savez_compressed, a0=np.broadcast_to(np.float32(0), (MUCH // 4,))
        ),
        load_states,
    ),
    "states, an array named often": (
        "a.states",
        lambda: states_archive([[0, "int", ["a0"] * 2000]], a0=np.zeros(250_000, np.float32)),
        load_states,
    ),
    "states, pickled values named often": ("a.states", lambda: shared_values(24), load_states),
    "states, a pickled length": ("a.states", lambda: b"\x80\x05\x96" + struct.pack("<Q", MUCH) + b"abc", load_states),
    "symbol, packed": ("a-symbol.json.gz", packed_zeros, lambda path: load_network(str(path))),
    "labels, packed": ("a.gz", packed_zeros, _text),
    "mnist, packed": (
        "a.gz",
        lambda: packed_zeros(struct.pack(">IIII", 0x803, MUCH // 784, 28, 28)),
        lambda path: mx.io.MNISTIter(image=path, label=path),
    ),
    "csv, packed": ("a.csv.gz", packed_zeros, lambda path: mx.io.CSVIter(data_csv=path, data_shape=(2,))),
    "npz, compressed": ("a.npz", packed_npz, lambda path: _read(path)),
    "npy, a shape without data": ("a.npy", npy_header, lambda path: _read(path)),
    **{
        f"onnx, {build.__name__}": ("a.onnx", lambda build=build: onnx_file(build), mx.onnx.import_model)
        for build in (filled_arrays, long_range, broadcast_sum, repeated_rows, repeated_concat)
    },
}


@pytest.mark.parametrize("case", CASES)
def test_declared_sizes_are_not_trusted(case: str, tmp_path: Path):
    """A small file that declares a large size raises before that memory is allocated."""
    name, make, load = CASES[case]
    path = tmp_path / name
    path.write_bytes(make())
    assert path.stat().st_size < 3 << 20
    tracemalloc.start()
    try:
        with pytest.raises(FormatError):
            load(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2.2 * FREE, f"{peak:,} bytes"


def test_large_images_are_refused(tmp_path: Path):
    """``run`` refuses an image beyond Pillow's warning limit."""
    pillow = pytest.importorskip("PIL.Image")
    pillow.new("1", (10_000, 9_500)).save(tmp_path / "a.png")
    with pytest.raises(FormatError, match="exceeds limit"):
        _read(tmp_path / "a.png")


def test_compressible_data_is_read(tmp_path: Path):
    """Highly compressed data is read if it is small, as is larger data that is compressed less."""
    np.savez_compressed(tmp_path / "zeros.npz", x=np.zeros(1_000_000, np.float32))
    assert _read(tmp_path / "zeros.npz")["x"].shape == (1_000_000,)
    (tmp_path / "images").write_bytes(gzip.compress(struct.pack(">IIII", 0x803, 1000, 28, 28) + bytes(784_000)))
    (tmp_path / "labels").write_bytes(gzip.compress(struct.pack(">II", 0x801, 1000) + bytes(1000)))
    assert len(list(mx.io.MNISTIter(image=tmp_path / "images", label=tmp_path / "labels", batch_size=100))) == 10


def record_file(path: Path) -> Path:
    """Write a record file with one record; return its path."""
    record = mx.recordio.MXRecordIO(path, "w")
    record.write(b"one")
    record.close()
    return path


FOLDERS: dict[str, Load] = {
    "nd.load": mx.nd.load,
    "sym.load": mx.sym.load,
    "load_safetensors": load_safetensors,
    "checkpoint": read_snapshot,
    "onnx": mx.onnx.import_model,
    "recordio": lambda path: mx.recordio.MXRecordIO(path, "r"),
    "records": lambda path: mx.recordio.MXIndexedRecordIO(path, path, "r"),
    "index": lambda path: mx.recordio.MXIndexedRecordIO(path, record_file(path / "a.rec"), "r"),
    "MNISTIter": lambda path: mx.io.MNISTIter(image=path, label=path),
    "CSVIter": lambda path: mx.io.CSVIter(data_csv=path, data_shape=(2,)),
    "ImageRecordIter": lambda path: mx.io.ImageRecordIter(path_imgrec=path, data_shape=(3, 4, 4), batch_size=1),
    "image list": lambda path: mx.image.ImageIter(1, (3, 4, 4), path_imglist=path, path_root=path),
    "image": mx.image.imread,
    "states of a module": read_states,
    "run": lambda path: _read(path),
    "run image": lambda path: _read(path / "folder.png"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_a_folder_is_no_file(case: str, tmp_path: Path):
    """Each reader raises FormatError with the folder's name if the path is a folder."""
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(FormatError, match=f"{tmp_path}.* is a folder|{tmp_path}.*[Ii]s a directory"):
        FOLDERS[case](tmp_path)


@pytest.mark.parametrize(
    "index",
    [
        b"0\t99999999999999999999\n",
        b"0\t-1\n",
        b"0\t" + b"9" * 5000 + b"\n",
        b"0\t12\n",
        b"0 0\n",
        b"x\t0\n",
        b"\xff\xfe\t0\n",
        b"0\t0\n1\n",
    ],
)
def test_hostile_indices(index: bytes, tmp_path: Path):
    """An invalid index line, or a position beyond the records, raises with the file and line."""
    (tmp_path / "a.idx").write_bytes(index)
    with pytest.raises(FormatError, match=r"a\.idx: line \d"):
        mx.recordio.MXIndexedRecordIO(tmp_path / "a.idx", record_file(tmp_path / "a.rec"), "r")


def test_deep_nesting(tmp_path: Path):
    """Text or a pickle nested beyond the parser's limit raises FormatError."""
    deep = "[" * 200_000
    (tmp_path / "a.json").write_text(deep)
    for load in (mx.sym.load, lambda path: MemoryPlan.from_json(path.read_text())):
        with pytest.raises(FormatError):
            load(tmp_path / "a.json")
    (tmp_path / "a.safetensors").write_bytes(len(deep).to_bytes(8, "little") + deep.encode())
    with pytest.raises(FormatError):
        safetensors.read(tmp_path / "a.safetensors")
    for name, facts in (("a", deep), ("b", '{"version": ' + deep)):
        safetensors.write(tmp_path / f"{name}.safetensors", {}, {"weftplan.run": facts, "aux": deep})
        with pytest.raises(FormatError):
            read_snapshot(tmp_path / f"{name}.safetensors")
    (tmp_path / "a.states").write_bytes(b"\x80\x02}K\x00" + b")" + b"\x85" * 5000 + b"s.")
    with pytest.raises(FormatError):
        load_states(tmp_path / "a.states")
