"""Reading of damaged files under a memory limit: ``python -m tests.stress.hostile MEGABYTES VERB …``.

``load FILE…`` prints for every symbol file whether it was read or refused. ``fuzz KIND SEED COUNT`` damages files of a
kind (``symbol``, ``params``, ``onnx``, ``safetensors``, ``recordio``, ``image``, or several with commas) ``COUNT``
times, reads them, and uses the result like a user. It stops at an error that is no MXNetError, and at a file that takes
too long, and prints the seed and the number of the mutation. ``fuzz KIND SEED COUNT FIRST`` starts with mutation FIRST.
"""

from __future__ import annotations

import contextlib
import json
import random
import resource
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import weftplan as mx
from weftplan.errors import MXNetError
from weftplan.ops.core import registry

GOLDEN = Path(__file__).parents[1] / "golden"
SECONDS = 5
"""Time limit per file in seconds, long enough for a loaded machine."""
MEGABYTES = 600
"""Memory limit in MiB beyond the memory used after the imports; the first argument replaces it."""
NUMBERS = ["0", "1", "-1", "2", "7", "64", "65536", "2147483647", "-2147483648", "4294967296", "9" * 30, "1e400", "nan"]
WORDS = [
    "",
    "None",
    "()",
    "(0,)",
    "(2147483647, 2147483647)",
    "[",
    "{}",
    "True",
    "float16",
    "null",
    "é",
    "\0",
    "__shape__",
]


def limit_memory(megabytes: int) -> None:
    """Limit the process to ``megabytes`` MiB more address space than it has now."""
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + (megabytes << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


def damaged_bytes(rng: random.Random, data: bytes) -> bytes:
    """Return ``data`` with bytes changed, inserted, removed or duplicated, its end cut off, or numbers replaced."""
    damaged = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        if not damaged:
            break
        at = rng.randrange(len(damaged))
        kind = rng.randrange(8)
        if kind == 0:
            damaged[at] = rng.randrange(256)
        elif kind == 1:
            damaged[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            del damaged[at : at + rng.choice((1, 2, 4, 8, 64))]
        elif kind == 3:
            damaged[at:at] = rng.randbytes(rng.choice((1, 2, 4, 8)))
        elif kind == 4:
            damaged[at:at] = damaged[at : at + rng.choice((1, 8, 64, 512))]
        elif kind == 5:
            del damaged[at:]
        else:
            size = rng.choice((4, 8))
            at = min(at, rng.choice((8, 64, len(damaged)))) // size * size
            value = rng.choice((0, 1, 2, 32, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**64 - 1))
            damaged[at : at + size] = (value % (1 << 8 * size)).to_bytes(size, "little")
    return bytes(damaged)


def damaged_symbol(rng: random.Random, text: str) -> str:
    """Return a symbol file with some values replaced by other values of the file or by unlikely values."""
    if rng.random() < 0.3:
        return damaged_bytes(rng, text.encode()).decode("utf-8", "surrogateescape")
    document = json.loads(text)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        places = list(_places(document))
        values = [place for place in places if isinstance(place[0], dict) and "op" not in place[0]]
        holder, key = rng.choice(values if values and rng.random() < 0.6 else places)
        value = holder[key]
        kind = rng.randrange(7)
        if kind == 0 and isinstance(holder, dict):
            del holder[key]
        elif kind == 1 and isinstance(holder, dict):
            holder[rng.choice([*WORDS, *ATTRIBUTES])] = rng.choice([*NUMBERS, *WORDS])
        elif kind == 2 and isinstance(holder, list):
            holder.insert(key, rng.choice((value, None, [], {}, 0, -1, 2**31, "x")))
        elif isinstance(value, str):
            others = [v for h, k in places if isinstance(v := h[k], str)]
            holder[key] = rng.choice(
                (rng.choice(NUMBERS), rng.choice(WORDS), rng.choice(others), rng.choice(OPERATORS))
            )
        elif isinstance(value, int):
            holder[key] = rng.choice((0, 1, -1, value + 1, value - 1, 2**31 - 1, 2**63, 10**30, 0.5, None, "1"))
        else:
            holder[key] = rng.choice((None, [], {}, 0, "x", value, rng.choice(places)[0]))
    try:
        return json.dumps(document)
    except ValueError:  # a value that contains itself
        return "{}"


def _places(value: Any) -> Any:
    """Yield (holder, key) of every value in a document, outer holders first."""
    stack, seen = [value], set()
    while stack:
        holder = stack.pop()
        if id(holder) in seen:
            continue
        seen.add(id(holder))
        for key in holder if isinstance(holder, dict) else range(len(holder)):
            yield holder, key
            if isinstance(holder[key], (dict, list)):
                stack.append(holder[key])


OPERATORS = sorted(registry.names())
ATTRIBUTES = [
    "num_args",
    "num_outputs",
    "num_layers",
    "sections",
    "num_hidden",
    "shape",
    "kernel",
    "axis",
    "dtype",
    "reps",
]


def use(symbol: Any, shape: tuple[int, ...] | None = (2, 3, 16, 16)) -> None:
    """Call what a user calls on a loaded symbol: names, shapes, dtypes, its text, and a plan if ``shape`` is given."""
    symbol.list_arguments()
    symbol.list_outputs()
    symbol.list_auxiliary_states()
    mx.sym.load_json(symbol.tojson())
    symbol.infer_type_partial()
    symbol.infer_shape_partial()
    arguments = symbol.list_arguments()
    if shape is not None:
        symbol.plan({arguments[0]: shape} if arguments else {}, train=False)


Kind = tuple[list[bytes], Callable[[random.Random, bytes], bytes], Callable[[bytes, Path], None]]
"""A kind of files: contents to damage, the function that damages them, and the reader.

The reader gets the bytes and a path to which it may write them.
"""


def _use_params(content: bytes, path: Path) -> None:
    for array in _values(mx.nd.load_frombuffer(content)):
        array.asnumpy()


def _use_symbol(content: bytes, path: Path) -> None:
    use(mx.sym.load_json(content.decode("utf-8", "surrogateescape")))


def symbol_kind() -> Kind:
    """Return contents, damage function and reader for the symbol files of the golden folder."""
    texts = [path.read_text() for path in sorted(GOLDEN.glob("interchange/*.json"))]
    return (
        [text.encode() for text in texts if len(text) < 40_000],
        lambda rng, data: damaged_symbol(rng, data.decode()).encode("utf-8", "surrogateescape"),
        _use_symbol,
    )


def params_kind() -> Kind:
    """Return contents, damage function and reader for the parameter files of the golden folder."""
    arrays = [path.read_bytes() for path in sorted(GOLDEN.glob("*/*.params"))]
    return [one for one in arrays if len(one) < 200_000], damaged_bytes, _use_params


def _small_models() -> list[tuple[Any, dict[str, Any], dict[str, Any], tuple[int, ...]]]:
    """Return (symbol, arguments, auxiliary states, data shape) of three small networks: image, sequence, arithmetic."""
    data = mx.sym.Variable("data")
    x = mx.sym.Convolution(data, kernel=(3, 3), pad=(1, 1), num_filter=4, name="conv")
    x = mx.sym.Pooling(mx.sym.Activation(mx.sym.BatchNorm(x, name="bn"), act_type="relu"), kernel=(2, 2), stride=(2, 2))
    image = mx.sym.softmax(mx.sym.FullyConnected(mx.sym.reshape(x, shape=(0, -1)), num_hidden=3, name="fc"))
    cell = mx.rnn.FusedRNNCell(4, mode="gru", bidirectional=True, get_next_state=True, prefix="gru_")
    sequence = cell.unroll(3, inputs=data, begin_state=cell.begin_state(), merge_outputs=True, layout="TNC")[0]
    plain = mx.sym.clip(mx.sym.transpose(data) * 2 + 1, 0, 4)
    models = []
    for symbol, shape in ((image, (1, 2, 8, 8)), (sequence, (3, 1, 5)), (plain, (2, 3))):
        of_arguments, _, of_states = symbol.infer_shape(data=shape)
        random_ = np.random.RandomState(1)
        tables = [
            {n: mx.nd.array(random_.rand(*s)) for n, s in zip(names, shapes, strict=True) if n != "data"}
            for names, shapes in (
                (symbol.list_arguments(), of_arguments), (symbol.list_auxiliary_states(), of_states)
            )
        ]  # fmt: skip
        models.append((symbol, *tables, shape))
    return models


def _use_onnx(content: bytes, path: Path) -> None:
    from weftplan.convert.onnx_in import import_model

    path.write_bytes(content)
    symbol, args, aux = import_model(path)
    for array in (*args.values(), *aux.values()):
        array.asnumpy()
    use(symbol, None)


def onnx_kind() -> Kind:
    """Return contents, damage function and reader for ONNX models that the package exports."""
    from weftplan.convert.onnx_out import export_model

    models = [export_model(symbol, args, aux, {"data": shape}) for symbol, args, aux, shape in _small_models()]
    return [model.SerializeToString() for model in models], damaged_bytes, _use_onnx


def _use_safetensors(content: bytes, path: Path) -> None:
    from weftplan.convert.safetensors import load_safetensors

    path.write_bytes(content)
    for table in load_safetensors(path):
        for array in table.values():
            array.asnumpy()


def safetensors_kind() -> Kind:
    """Return contents, damage function and reader for safetensors files that the package writes."""
    from weftplan.convert.safetensors import save_safetensors

    contents = []
    with tempfile.TemporaryDirectory() as folder:
        for _, args, aux, _ in _small_models()[:2]:
            path = Path(folder, "model.safetensors")
            save_safetensors(path, args, aux)
            contents.append(path.read_bytes())
    return contents, damaged_bytes, _use_safetensors


def _images() -> list[bytes]:
    from weftplan.data.image_files import encode

    pixels = np.random.RandomState(2).randint(0, 256, (12, 14, 3)).astype(np.uint8)
    return [encode(pixels, 80, ".jpg"), encode(pixels, 6, ".png"), encode(pixels[:, :, :1], 6, ".png")]


def _use_recordio(content: bytes, path: Path) -> None:
    path.write_bytes(content)
    file = mx.recordio.MXRecordIO(str(path), "r")
    try:
        while (record := file.read()) is not None:
            mx.recordio.unpack(record)
    finally:
        file.close()
    iterator = mx.io.ImageRecordIter(path, data_shape=(3, 8, 8), batch_size=2, preprocess_threads=1, prefetch_buffer=1)
    for batch in iterator:
        batch.data[0].asnumpy()


def recordio_kind() -> Kind:
    """Return contents, damage function and reader for record files with images and labels."""
    contents = []
    with tempfile.TemporaryDirectory() as folder:
        for labels in (1.0, [1.0, 2.0]):
            path = Path(folder, "images.rec")
            file = mx.recordio.MXRecordIO(str(path), "w")
            for number, image in enumerate(_images()):
                file.write(mx.recordio.pack(mx.recordio.IRHeader(0, labels, number, 0), image))
            file.close()
            contents.append(path.read_bytes())
    return contents, damaged_bytes, _use_recordio


def image_kind() -> Kind:
    """Return contents, damage function and reader for JPEG and PNG files."""
    return _images(), damaged_bytes, lambda content, path: mx.image.imdecode(content).wait_to_read()


KINDS: dict[str, Callable[[], Kind]] = {
    "symbol": symbol_kind,
    "params": params_kind,
    "onnx": onnx_kind,
    "safetensors": safetensors_kind,
    "recordio": recordio_kind,
    "image": image_kind,
}


def fuzz(kind: str, seed: int, count: int, first: int = 0) -> None:
    """Damage and read files of a kind, ``count`` times from mutation ``first``; raise any error but MXNetError."""
    contents, damage, read = KINDS[kind]()
    assert contents
    print(f"seed {seed}: {len(contents)} files of kind {kind}", flush=True)
    good = 0
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"damaged.{kind}")
        for content in contents:  # triggers the reader's imports before memory is limited
            with contextlib.suppress(MXNetError):
                read(content, path)
        limit_memory(MEGABYTES)
        for number in range(first, first + count):
            rng = random.Random(f"{kind}/{seed}/{number}")
            signal.alarm(SECONDS)
            try:
                read(damage(rng, rng.choice(contents)), path)
                good += 1
            except MXNetError:
                pass
            except BaseException:
                print(f"{kind}, seed {seed}, mutation {number}", file=sys.stderr, flush=True)
                raise
        signal.alarm(0)
    print(f"{count} mutations of kind {kind}, {good} of them read")


def _values(found: Any) -> list[Any]:
    return list(found.values()) if isinstance(found, dict) else list(found)


def load(paths: list[str]) -> None:
    """Print for every file whether it was read or refused."""
    for path in paths:
        signal.alarm(SECONDS)
        try:
            symbol = mx.sym.load(path)
            symbol.infer_shape_partial()
            symbol.list_outputs()
            print(path, "read")
        except MXNetError as error:
            print(path, "refused:", error)


if __name__ == "__main__":
    warnings.simplefilter("error")
    MEGABYTES = int(sys.argv[1])
    if sys.argv[2] == "load":
        limit_memory(MEGABYTES)
        load(sys.argv[3:])
    else:
        for kind in sys.argv[3].split(","):
            fuzz(kind, *map(int, sys.argv[4:]))
