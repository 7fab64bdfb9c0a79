"""All CUDA C sources that the package can launch, and NVIDIA's compilers if available."""

from __future__ import annotations

import importlib
import itertools
import os
import pathlib
import pkgutil
import re
import shutil
import subprocess

import numpy as np

import weftplan.ops.cuda
from weftplan.ops.core.cuda_source import OPTIONS, THREADS, WIDE, text_of
from weftplan.ops.cuda import philox, updates

FLOATS = ("float32", "float16", "float64")
INDICES = (*FLOATS, "int32", "int64", "uint8", "int8")
LETTERS = {"T": FLOATS, "L": INDICES, "I": INDICES}
"""Dtypes for the letters of a source; ``A`` follows ``T``."""
ONLY = {"philox": (*FLOATS, "int64"), "roi_pooling": ("float32", "float64"), "updates": ("float32", "float64")}
"""Dtypes of ``T`` in files that refuse some floats, or also support integers."""
_FOUND = re.compile(r"Compiling entry function '(\w+)__(\d+)'[\s\S]*?(\d+) bytes stack frame, (\d+) bytes spill "
                    r"stores[\s\S]*?Used (\d+) registers[^\n]*")  # fmt: skip


def codes():
    """Return (location, code) of every source: constants of the modules, and sources generated per call."""
    for found in pkgutil.iter_modules(weftplan.ops.cuda.__path__, "weftplan.ops.cuda."):
        module = importlib.import_module(found.name)
        for name, value in vars(module).items():
            if isinstance(value, str) and "__global__" in value and value is not philox._FILL:
                yield f"{found.name.rpartition('.')[2]}.{name}", value
    for kind in ("float", "double"):
        yield f"philox.{kind}", philox._FILL.replace("U(key0", f"uniform_{kind}(key0")
    for rule in updates._STEPS:
        yield f"updates.{rule}", updates.source(rule, updates.GROUP)


def texts(every):
    """Yield sources as a compiler reads them: in float32 only, or for ``every`` dtype of each letter."""
    expanded = {}
    for where, code in codes():
        letters = sorted(set(re.findall(r"\b[A-Z]\b", code)) & set(LETTERS))
        table = [LETTERS[letter] if every or letter != "T" else ("float32",) for letter in letters]
        if not every:
            table = [row[:1] for row in table]
        if every and where.split(".")[0] in ONLY:
            table[letters.index("T")] = ONLY[where.split(".")[0]]
        for kinds in itertools.product(*table):
            label = " ".join([where, *map(str, kinds)])
            expanded[label] = text_of(code, **{k: np.dtype(v) for k, v in zip(letters, kinds, strict=True)})
    return expanded


def threads_of(text, name):
    """Return the largest block size with which a kernel is launched."""
    body = text[text.index(f"void {name}(") :].split('extern "C"')[0]
    return WIDE if "__shared__" in body else THREADS


def joined(sources):
    """Concatenate sources; kernel ``name`` of the k-th becomes ``name__k``."""
    parts = []
    for k, text in enumerate(sources):
        text = re.sub(r"(__global__ void \w+)\(", rf"\1__{k}(", text.replace("#include <cuda_fp16.h>\n", ""))
        parts.append(f"namespace source_{k} {{\n{text}\n}}\n")
    return "#include <cuda_fp16.h>\n" + "".join(parts)


def nvcc(sources, folder, arch="sm_90"):
    """Compile with nvcc; return (kernel, its source, registers, bytes of spills) of each kernel.

    Warnings are errors. Tests skip it if :data:`NVCC` is None.
    """
    path = pathlib.Path(folder, "kernels.cu")
    path.write_text(joined(sources))
    command = [NVCC, "-cubin", f"-arch={arch}", *OPTIONS, "-ftz=true", "-Werror=all-warnings", "-Xptxas", "-v",
               "-o", str(path.with_suffix(".cubin")), str(path)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [(name, sources[int(k)], int(used), int(spilled))
            for name, k, _, spilled, used in _FOUND.findall(done.stderr)]  # fmt: skip


def ptx(text, folder, arch="sm_90"):
    """Return the PTX of each kernel of a source, by name."""
    path = pathlib.Path(folder, "kernel.cu")
    path.write_text(text)
    command = [NVCC, "-ptx", f"-arch={arch}", *OPTIONS, "-ftz=true", "-o", str(path.with_suffix(".ptx")), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    listing = path.with_suffix(".ptx").read_text()
    return {kernel[1]: kernel[0] for kernel in re.finditer(r"\.entry (\w+)\(.*?\n\}\n", listing, re.DOTALL)}


def loops(body):
    """Return the parts of a PTX kernel between a label and a jump back to it."""
    lines = body.splitlines()
    labels = {line[:-1]: number for number, line in enumerate(lines) if re.fullmatch(r"\$L\w+:", line)}
    for number, line in enumerate(lines):
        jump = re.search(r"\bbra(?:\.uni)?\s+(\$L\w+);", line)
        if jump and labels.get(jump[1], number) < number:
            yield "\n".join(lines[labels[jump[1]] : number])


def nvrtc(text, arch="sm_90"):
    """Compile with NVRTC and CuPy's options, as the first launch does; raise AssertionError with the compiler's log.

    Raises:
        ImportError: CuPy or the library is missing.
    """
    library = importlib.import_module("cupy_backends.cuda.libs.nvrtc")
    try:
        library.getVersion()
    except Exception as error:  # CuPy's own class
        raise ImportError(f"NVRTC cannot be loaded: {error}") from error
    program = library.createProgram(text, "kernel.cu", (), ())
    try:
        includes = [f"-I{folder}" for folder in INCLUDES if os.path.isdir(folder)]
        library.compileProgram(program, (*OPTIONS, "-ftz=true", "-std=c++17", f"-arch={arch}", *includes))
        return library.getCUBIN(program)
    except library.NVRTCError as error:
        raise AssertionError(f"{library.getProgramLog(program)}\n{text}") from error
    finally:
        library.destroyProgram(program)


NVCC = shutil.which("nvcc")
INCLUDES = [
    *os.environ.get("CPATH", "").split(os.pathsep),
    *([str(pathlib.Path(NVCC).resolve().parents[1] / "include")] if NVCC else []),
    "/usr/local/cuda/include",
]
