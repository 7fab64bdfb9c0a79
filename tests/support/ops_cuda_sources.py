"""All CUDA C sources that the package can launch, and NVIDIA's compilers if they are installed."""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import pathlib
import pkgutil
import re
import shutil
import subprocess
import sys

import numpy as np

import weftplan.kernels.cuda
from tests.support.pointwise_networks import NETWORKS, groups, planned
from weftplan.kernels.cuda import philox, pointwise, pooling, updates
from weftplan.ops.core.cuda_source import OPTIONS, THREADS, WIDE, text_of
from weftplan.ops.optimizer.fused_update import formula_of

FLOATS = ("float32", "float16", "float64")
INDICES = (*FLOATS, "int32", "int64", "uint8", "int8")
LETTERS = {"T": FLOATS, "L": INDICES, "I": INDICES, "H": ("float16",)}
"""Possible dtypes of each type placeholder, a capital letter in a source; the dtype of ``A`` follows from ``T``."""
ONLY = {"philox": (*FLOATS, "int64"), "roi_pooling": ("float32", "float64"), "updates": ("float32", "float64"),
        "pointwise": ("float32", "float64")}  # fmt: skip
"""Possible dtypes of ``T`` in files that refuse some floats or also support integers."""
STEPS = {"sgd_update": 0, "sgd_mom_update": 1, "adam_update": 2}
"""Numbers of states of optimizer steps, by operator."""
_FOUND = re.compile(r"Compiling entry function '(\w+)__(\d+)'[\s\S]*?(\d+) bytes stack frame, (\d+) bytes spill "
                    r"stores[\s\S]*?Used (\d+) registers[^\n]*")  # fmt: skip


def codes():
    """Yield (location, code) of every source: constants of modules, and sources generated per call."""
    for actual in pkgutil.iter_modules(weftplan.kernels.cuda.__path__, "weftplan.kernels.cuda."):
        module = importlib.import_module(actual.name)
        for name, value in vars(module).items():
            if isinstance(value, str) and "__global__" in value and value not in (philox._FILL, pooling._SOURCE):
                yield f"{actual.name.rpartition('.')[2]}.{name}", value
    for kind in ("float", "double"):
        yield f"philox.{kind}", philox._FILL.replace("U(key0", f"uniform_{kind}(key0")
    for (size, stride, pad), kind in itertools.product(((2, 2, 0), (3, 2, 1)), (0, 1)):
        windows = (1, size, size, 1, stride, stride, 0, pad, pad)
        yield f"pooling.{size}x{size}.{kind}", pooling.source(windows, kind=kind, padded=1, flat=True)
    for name, narrow in itertools.product(STEPS, (False, True)):
        formula = step_formula(name, np.float32).formula
        yield f"updates.{name}{' narrow' * narrow}", updates.source(formula, updates.GROUP, narrow=narrow)
    for k, code in enumerate(generated()):
        yield f"pointwise.{k}", code


def step_formula(name, dtype, lr=0.1):
    """Return the formula of an optimizer step in :data:`STEPS`, with weight decay and clipping."""
    numbers = {"lr": lr, "wd": 0.01, "rescale_grad": 0.5, "clip_gradient": 0.4}
    numbers |= {"sgd_mom_update": {"momentum": 0.9}, "adam_update": {"beta1": 0.9, "beta2": 0.99}}.get(name, {})
    return formula_of(name, numbers, 2 + STEPS[name], np.dtype(dtype))


@functools.cache
def generated():
    """Return the sources for the fused elementwise nodes of a few networks, for vectors and for single elements."""
    every = [group for make, shape in NETWORKS.values() for group in groups(planned(make(), shape).graph)]
    kernels = [
        pointwise.kernel_of(group, (True,) * len(group.results), lanes)
        for group in every
        for lanes in sorted({1, pointwise.lanes_of(group)})
    ]
    return list(dict.fromkeys(kernel.code for kernel in kernels))


def texts(every):
    """Return {label: source} as a compiler reads it, for ``every`` dtype of each placeholder or only for its first."""
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
    """Return the largest block size with which the kernel ``name`` is launched."""
    body = text[text.index(f"void {name}(") :].split('extern "C"')[0]
    return WIDE if "__shared__" in body else THREADS


def joined(sources):
    """Return all sources in one text; kernel ``name`` of the k-th source becomes ``name__k``."""
    parts = []
    for k, text in enumerate(sources):
        text = re.sub(r"(__global__ void \w+)\(", rf"\1__{k}(", text.replace("#include <cuda_fp16.h>\n", ""))
        parts.append(f"namespace source_{k} {{\n{text}\n}}\n")
    return "#include <cuda_fp16.h>\n" + "".join(parts)


def nvcc(sources, folder, arch="sm_90"):
    """Compile sources with nvcc; return (kernel, source, registers, bytes of spills) of each kernel.

    Warnings are errors. Callers must skip this if :data:`NVCC` is None.
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
    """Return the PTX of each kernel in a source, by name."""
    path = pathlib.Path(folder, "kernel.cu")
    path.write_text(text)
    command = [NVCC, "-ptx", f"-arch={arch}", *OPTIONS, "-ftz=true", "-o", str(path.with_suffix(".ptx")), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    listing = path.with_suffix(".ptx").read_text()
    return {kernel[1]: kernel[0] for kernel in re.finditer(r"\.entry (\w+)\(.*?\n\}\n", listing, re.DOTALL)}


def sass(text, folder, arch="sm_90", options=OPTIONS):
    """Return the machine instructions (address, text) of each kernel in a source, by name."""
    path = pathlib.Path(folder, "kernel.cu")
    path.write_text(text)
    cubin = path.with_suffix(".cubin")
    command = [NVCC, "-cubin", f"-arch={arch}", *options, "-ftz=true", "-o", str(cubin), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    done = subprocess.run([CUOBJDUMP, "-sass", str(cubin)], capture_output=True, text=True, check=True)
    parts = done.stdout.split("Function : ")[1:]
    matches = {part.split()[0]: re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", part) for part in parts}
    return {name: [(int(address, 16), words) for address, words in code] for name, code in matches.items()}


def loops(body):
    """Yield the parts of a PTX kernel between a label and a jump back to it."""
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


def _cuobjdump():
    """Return the path of cuobjdump, from the toolkit or from the wheel nvidia-cuda-cuobjdump, or None."""
    wheels = [pathlib.Path(folder, "nvidia") for folder in sys.path if folder]
    actual = (path for wheel in wheels if wheel.is_dir() for path in sorted(wheel.glob("*/bin/cuobjdump")))
    return shutil.which("cuobjdump") or next(map(str, actual), None)


NVCC = shutil.which("nvcc")
CUOBJDUMP = _cuobjdump()
INCLUDES = [
    *os.environ.get("CPATH", "").split(os.pathsep),
    *([str(pathlib.Path(NVCC).resolve().parents[1] / "include")] if NVCC else []),
    "/usr/local/cuda/include",
]
