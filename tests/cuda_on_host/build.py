"""Translation of CUDA C to C++ for the host's compiler: a few words are replaced, the rest is the kernel's own text.

* ``T*`` becomes a checked pointer, ``T&`` a checked element, ``__shared__ T s[n]`` a checked array
  (``include/memory.h``).
* A cast to an integer saturates, as on a GPU; in C++ it is undefined.
* ``extern "C"`` is removed, since every source has its own namespace.

The compiler's own checks are on: signed overflow, division by zero, shifts, local arrays.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import pathlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any

INCLUDE = pathlib.Path(__file__).parent / "include"
COMPILER = shutil.which("g++")
FLAGS = (
    "-std=c++17", "-O0", "-fPIC", "-shared", "-w", "-ffp-contract=off", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE",
    "-fsanitize=signed-integer-overflow,shift,integer-divide-by-zero,bounds,bool",
    "-ftrivial-auto-var-init=pattern", f"-I{INCLUDE}",
)  # fmt: skip
"""Flags of g++, without optimisation: for the tests' small inputs, compiling takes longer than running."""
_WHOLE = r"unsigned long long|long long|unsigned char|signed char|unsigned int|unsigned|int"
_TYPE = rf"(?:{_WHOLE}|bool|__half|float16|float|double)"
_POINTER = re.compile(rf"\b(const )?({_TYPE}) ?\* ?(?=(?:__restrict__ )?\w+ ?[,;=)])")
_REFERENCE = re.compile(rf"\b(const )?({_TYPE})& (?=\w+ =)")
_SHARED = re.compile(rf"__shared__ ({_TYPE}) (\w+)\[(\w+)\](?:\[(\w+)\])?;")
_CAST = re.compile(rf"\(({_WHOLE})\)(?=[\w(-])")
_ALIGNED = re.compile(rf"\((?:const )?{_TYPE} ?\*\) ?__builtin_assume_aligned\(")
_KERNEL = re.compile(r"__global__ void (?:__launch_bounds__\([^)]*\) )?(\w+)\(")


class HostCompileError(AssertionError):
    """An error for a source that the host's compiler refuses."""


@functools.cache
def missing() -> str:
    """Return why nothing can be compiled on this machine, or an empty string if it can."""
    if COMPILER is None:
        return "g++ is not installed"
    probe = "#include <launch.h>\n"
    done = subprocess.run([COMPILER, *FLAGS, "-x", "c++", "-fsyntax-only", "-"], input=probe, capture_output=True,
                          text=True, check=False)  # fmt: skip
    return f"g++ does not take the headers: {done.stderr.strip()[:500]}" if done.returncode else ""


@functools.cache
def _folder() -> pathlib.Path:
    result = tempfile.mkdtemp(prefix="cuda_on_host_")
    atexit.register(shutil.rmtree, result, ignore_errors=True)
    return pathlib.Path(result)


def kernels_of(text: str) -> list[str]:
    """Return the kernels of a source, by name.

    >>> kernels_of('extern "C" __global__ void f(int* x) {}')
    ['f']
    """
    return _KERNEL.findall(text)


def translated(text: str) -> str:
    """Return a source for the host's compiler.

    >>> print(translated("__shared__ float s[8];\\nconst int* p = x; y[(long long)z] = 1;"))
    static host::shared<float, 8> s("shared memory s");
    host::ptr<const int> p = x; y[(host::whole<long long>)z] = 1;
    """
    text = re.sub(r"#include <cuda_fp16\.h>\n", "", text).replace('extern "C" ', "")
    text = _SHARED.sub(
        lambda m: f'static host::shared<{m[1]}, {m[3]}{", " + m[4] if m[4] else ""}> {m[2]}("shared memory {m[2]}");',
        text,
    )
    text = _ALIGNED.sub("host::aligned(", text)
    text = _CAST.sub(r"(host::whole<\1>)", text)
    text = _REFERENCE.sub(lambda m: f"const {m[2]} " if m[1] else f"host::ref<{m[2]}> ", text)
    return _POINTER.sub(lambda m: f"host::ptr<{m[1] or ''}{m[2]}> ", text)


def _unit(texts: Sequence[str]) -> str:
    parts = ["#include <launch.h>\n"]
    for text in texts:
        digest = _digest(text)
        parts.append(f'namespace source_{digest} {{\n#line 1 "{", ".join(kernels_of(text))}"\n{translated(text)}\n}}\n')
        for name in kernels_of(text):
            result = f"host::Kernel<source_{digest}::{name}>"
            parts.append(
                f'extern "C" const char* signature_{name}_{digest}() {{ return {result}::signature(); }}\n'
                f'extern "C" const char* launch_{name}_{digest}(const unsigned* grid, const unsigned* block, '
                f"const host::Argument* given, unsigned seed, const uint64_t* only, unsigned some) "
                f"{{ return {result}::launch(grid, block, given, seed, only, some); }}\n"
            )
    return "".join(parts)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


_libraries: dict[str, Any] = {}
"""The library of each source, by the source's digest."""


def build(texts: Iterable[str], units: int = 2) -> None:
    """Compile new sources in up to ``units`` translation units at the same time."""
    new = [text for text in dict.fromkeys(texts) if _digest(text) not in _libraries]
    jobs = []
    for k in range(min(units, len(new))):
        part = new[k::units]
        unit = _unit(part)
        path = _folder() / f"{_digest(unit)}.cpp"
        path.write_text(unit)
        command = [str(COMPILER), *FLAGS, "-o", str(path.with_suffix(".so")), str(path)]
        jobs.append((part, path, subprocess.Popen(command, stderr=subprocess.PIPE, text=True)))
    for part, path, job in jobs:
        _, log = job.communicate()
        if job.returncode:
            raise HostCompileError(f"{log[:4000]}\n{path}")
        # The interpreter's lock is held during a launch: threads, blocks and shared memory are those of one launch.
        library = ctypes.PyDLL(str(path.with_suffix(".so")))
        for text in part:
            _libraries[_digest(text)] = library


class Compiled:
    """One kernel: its signature from the compiler, and its launch function."""

    def __init__(self, text: str, name: str) -> None:
        build([text])
        library = _libraries[_digest(text)]
        signature = getattr(library, f"signature_{name}_{_digest(text)}")
        signature.restype = ctypes.c_char_p
        self.parameters: list[str] = [word for word in signature().decode().split(",") if word]
        self.launch: Any = getattr(library, f"launch_{name}_{_digest(text)}")
        self.launch.restype = ctypes.c_char_p
