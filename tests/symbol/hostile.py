"""A program that reads damaged files under a limit of memory: ``python -m tests.symbol.hostile MEGABYTES load|fuzz …``.

``load FILE…`` says of every symbol file whether it was read or refused. ``fuzz SEED COUNT`` damages the files of the
golden folders ``COUNT`` times, reads them, and asks what a user would ask next; whatever is no MXNetError ends it, and
so does a file that takes longer than it may. It prints the seed and the number of each mutation, so that one can be
made again: ``fuzz SEED COUNT FIRST`` begins with mutation FIRST.
"""

from __future__ import annotations

import json
import random
import resource
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import weftplan as mx
from weftplan.errors import MXNetError
from weftplan.ops import registry

GOLDEN = Path(__file__).parents[1] / "golden"
SECONDS = 5
"""Most seconds for one file on a machine that others use too."""
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
    """Let the process take this much more address space than it has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + (megabytes << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def damaged_bytes(rng: random.Random, data: bytes) -> bytes:
    """A few bytes changed, put in, taken out, doubled, or the end cut off; numbers of four and eight bytes set."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        if not found:
            break
        at = rng.randrange(len(found))
        kind = rng.randrange(8)
        if kind == 0:
            found[at] = rng.randrange(256)
        elif kind == 1:
            found[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            del found[at : at + rng.choice((1, 2, 4, 8, 64))]
        elif kind == 3:
            found[at:at] = rng.randbytes(rng.choice((1, 2, 4, 8)))
        elif kind == 4:
            found[at:at] = found[at : at + rng.choice((1, 8, 64, 512))]
        elif kind == 5:
            del found[at:]
        else:
            size = rng.choice((4, 8))
            at = min(at, rng.choice((8, 64, len(found)))) // size * size
            value = rng.choice((0, 1, 2, 32, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**64 - 1))
            found[at : at + size] = (value % (1 << 8 * size)).to_bytes(size, "little")
    return bytes(found)


def damaged_symbol(rng: random.Random, text: str) -> str:
    """A symbol file with some of its values replaced by others of the same file or by unlikely ones."""
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
    except ValueError:  # a value that holds itself
        return "{}"


def _places(value: Any) -> Any:
    """(holder, key) of every value in a document, holders of holders first."""
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


def use(symbol: Any) -> None:
    """What a user asks of a file that was read: names, shapes, dtypes, its text, a plan."""
    symbol.list_arguments()
    symbol.list_outputs()
    symbol.list_auxiliary_states()
    mx.sym.load_json(symbol.tojson())
    symbol.infer_type_partial()
    symbol.infer_shape_partial()
    arguments = symbol.list_arguments()
    symbol.plan({arguments[0]: (2, 3, 16, 16)} if arguments else {}, train=False)


def fuzz(seed: int, count: int, first: int = 0) -> None:
    """Damage, read, use."""
    symbols = [path.read_text() for path in sorted(GOLDEN.glob("interchange/*.json"))]
    arrays = [path.read_bytes() for path in sorted(GOLDEN.glob("*/*.params"))]
    symbols, arrays = [s for s in symbols if len(s) < 40_000], [a for a in arrays if len(a) < 200_000]
    assert symbols
    assert arrays
    print(f"seed {seed}: {len(symbols)} symbol files, {len(arrays)} files of arrays", flush=True)
    read = 0
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for number in range(first, first + count):
        rng = random.Random(f"{seed}/{number}")
        signal.alarm(SECONDS)
        try:
            if rng.random() < 0.6:
                use(mx.sym.load_json(damaged_symbol(rng, rng.choice(symbols))))
            else:
                for array in _values(mx.nd.load_frombuffer(damaged_bytes(rng, rng.choice(arrays)))):
                    array.asnumpy()
            read += 1
        except MXNetError:
            pass
        except BaseException:
            print(f"seed {seed}, mutation {number}", file=sys.stderr, flush=True)
            raise
    signal.alarm(0)
    print(f"{count} mutations, {read} of them read")


def _values(found: Any) -> list[Any]:
    return list(found.values()) if isinstance(found, dict) else list(found)


def load(paths: list[str]) -> None:
    """Say of every file whether it was read or refused."""
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
    limit_memory(int(sys.argv[1]))
    if sys.argv[2] == "load":
        load(sys.argv[3:])
    else:
        fuzz(*map(int, sys.argv[3:]))
