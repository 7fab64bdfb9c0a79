"""Regenerate the golden ``.params`` files in this folder, with a Python that has MXNet 1.9.1 and NumPy < 1.24.

MXNet writes versions 2 and 3. This script assembles the older versions, and checks that MXNet reads them with the right
values.
"""

import struct
from pathlib import Path

import mxnet as mx
import numpy as np

HERE = Path(__file__).parent
DTYPES = "float32 float64 float16 uint8 int32 int8 int64".split()  # noqa: SIM905


def ramp(dtype: str) -> np.ndarray:
    """Return a (2, 3) array of six values of a dtype, with negative values unless it is uint8."""
    return (np.arange(6).reshape(2, 3) - (0 if dtype == "uint8" else 2)).astype(dtype)


def record(version: int, array: np.ndarray, code: int) -> bytes:
    """Return the bytes of an array in version 0 or 1; ``code`` is MXNet's number of the dtype."""
    dims = array.shape
    head = struct.pack(f"<I{len(dims)}I", len(dims), *dims)
    if version == 1:
        head = struct.pack(f"<Ii{len(dims)}q", 0xF993FAC8, len(dims), *dims)
    return head + struct.pack("<iii", 1, 0, code) + array.tobytes()


def listed(records: list, names: list) -> bytes:
    """Return the bytes of a file with these records and names."""
    named = b"".join(struct.pack("<Q", len(name)) + name.encode() for name in names)
    return struct.pack("<QQQ", 0x112, 0, len(records)) + b"".join(records) + struct.pack("<Q", len(names)) + named


def main() -> None:
    """Write every golden file of this folder."""
    mx.nd.save(str(HERE / "dtypes.params"), {f"arg:{name}": mx.nd.array(ramp(name), dtype=name) for name in DTYPES})
    mx.nd.save(str(HERE / "list.params"), [mx.nd.array([1.5, -2]), mx.nd.array([[3]])])
    mx.nd.save(str(HERE / "single.params"), mx.nd.array([1.5, -2]))
    dense = mx.nd.array([[0, 0], [1, 2], [0, 0]])
    mx.nd.save(str(HERE / "row_sparse.params"), {"dense": dense, "embedding": dense.tostype("row_sparse")})
    mx.nd.save(str(HERE / "csr.params"), {"matrix": dense.tostype("csr")})
    for version in (0, 1):
        path = HERE / f"version{version}.params"
        path.write_bytes(listed([record(version, ramp("float32"), 0), record(version, ramp("int32"), 4)], ["w", "i"]))
        loaded = mx.nd.load(str(path))
        assert np.array_equal(loaded["w"].asnumpy(), ramp("float32")), version
        assert np.array_equal(loaded["i"].asnumpy(), ramp("int32")), version
    mx.npx.set_np()
    mx.npx.save(str(HERE / "version3.params"), {"scalar": mx.np.array(2.5), "row": mx.np.array([1.0, 2.0])})


if __name__ == "__main__":
    main()
