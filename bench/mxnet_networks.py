"""The networks whose plans were measured in MXNet 1.9.1: its own symbol files, and the batch sizes."""

import gzip
from pathlib import Path

import weftplan as mx

SYMBOLS = Path(__file__).parent / "data" / "symbols"


def batch_of(name):
    """Return the batch size at which MXNet's plans were measured."""
    return 64 if name in ("mlp", "lenet") else 32


def symbol_file(name):
    """Return the path of the symbol file that MXNet wrote, gzipped or not."""
    return next(path for path in (SYMBOLS / f"{name}.json", SYMBOLS / f"{name}.json.gz") if path.exists())


def load(name):
    """Return a network's symbol as MXNet exported it."""
    content = symbol_file(name).read_bytes()
    return mx.sym.load_json((gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content).decode())
