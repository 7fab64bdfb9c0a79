"""Compiled objects on disk: reused, recompiled if other users could have written them, and not required."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from weftplan.kernels.compiled import ir, jit
from weftplan.kernels.compiled.target import Target, choose, host

HOST = host()
needs_compiler = pytest.mark.skipif(isinstance(HOST, str), reason=f"no compiled kernels: {HOST}")
posix = pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")

Start = Callable[..., tuple[str, tuple[int, int]]]

SCRIPT = """
import json, os, sys
import numpy as np, weftplan as mx
import weftplan.executor
from weftplan.kernels.compiled import jit

for line in sys.stdin:
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        continue
    os.environ |= json.loads(line)
    data = mx.sym.Variable("data")
    net = mx.sym.Convolution(data, kernel=(3, 3), pad=(1, 1), num_filter=5)
    executor = net.simple_bind(mx.cpu(), data=(2, 3, 6, 6))
    for array in executor.arg_dict.values():
        array[:] = np.arange(array.size).reshape(array.shape) % 7
    print(executor.forward()[0].asnumpy().tobytes().hex(), jit.statistics.compiled, jit.statistics.loaded, flush=True)
    os._exit(0)
"""
"""Code that runs a convolution per input line in a forked child that has only imported the package.

A child therefore prints what a new process would.
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that runs a convolution in a new process with more environment variables.

    It returns the bits of the result, and (modules compiled, modules loaded).
    """
    home = tmp_path.resolve()
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("XDG_", "WEFTPLAN_", "MXNET_"))}
    environment |= {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")}
    with (tmp_path / "errors").open("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None

        def one(**more: str) -> tuple[str, tuple[int, int]]:
            process.stdin.write(json.dumps(more) + "\n")
            process.stdin.flush()
            bits, compiled, loaded = process.stdout.readline().split()
            return bits, (int(compiled), int(loaded))

        yield one
        process.stdin.close()
        assert process.wait(100) == 0
        process.stdout.close()
        errors.seek(0)
        assert [line for line in errors.read().splitlines() if not line.startswith("nothing is kept in ")] == []


def objects(home: Path) -> list[Path]:
    """Return the paths of the cached object files."""
    return sorted((home / "cache" / "weftplan" / "kernels").glob("*/*"))


@needs_compiler
@posix
@pytest.mark.shows("WEFTPLAN_KERNEL_CACHE")
def test_a_second_process_compiles_nothing_and_damage_is_mended(tmp_path: Path, start: Start):
    """A second process loads the object that the first compiled.

    A corrupt or empty object, and one that other users could write, is compiled again.
    """
    home = tmp_path.resolve()
    bits, counts = start()
    assert counts == (1, 0)
    (only,) = objects(home)
    assert only.stat().st_mode & 0o777 == 0o600
    assert only.parent.stat().st_mode & 0o777 == 0o700
    whole = only.read_bytes()
    assert start() == (bits, (0, 1))
    only.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert start() == (bits, (1, 0))
    assert only.read_bytes() == whole
    only.write_bytes(b"")
    assert start() == (bits, (1, 0))
    only.chmod(0o666)
    assert start() == (bits, (1, 0))
    only.parent.parent.chmod(0o770)
    assert start() == (bits, (1, 0))
    assert start(WEFTPLAN_KERNEL_CACHE="0") == (bits, (1, 0))


@needs_compiler
@posix
def test_a_folder_that_cannot_be_made_costs_time_only(tmp_path: Path, start: Start):
    """If the cache folder cannot be created, modules are compiled in each process."""
    (tmp_path / "cache").write_text("in the way")
    assert start()[1] == (1, 0)


def test_processors():
    """``choose`` selects the widest vectors of a processor; for an unsupported processor it returns the reason."""
    avx2 = {"avx2": True, "fma": True}
    wide = {**avx2, "avx512f": True, "avx512vl": True, "avx512bw": True, "avx512dq": True}
    for features, bits, places in (
        (avx2, 256, (6, 4)),
        (wide, 512, (8, 4)),
        ({**wide, "avx512vl": False}, 256, (6, 4)),
    ):
        actual = choose("x86_64", "one", features, "LLVM")
        assert isinstance(actual, Target)
        assert (actual.bits, actual.tile_sizes) == (bits, places)
    actual = choose("arm64", "m1", {}, "LLVM")
    assert isinstance(actual, Target)
    assert (actual.bits, actual.name) == (128, "NEON")
    assert choose("x86_64", "old", {"avx2": True}, "LLVM") == "the processor (old) has no AVX2 with FMA"
    assert choose("riscv64", "one", {}, "LLVM") == "kernels are not written for riscv64 processors"


@needs_compiler
def test_threads_compile_once():
    """If eight threads request a module at the same time, one compiles it and all get the same functions."""
    calls = []

    def functions(target: Target) -> list[ir.Function]:
        calls.append(1)
        return [ir.Function("nothing", (("ptr", "words"),), "float", 4)]

    results = []
    threads = [
        threading.Thread(target=lambda: results.append(jit.library("test-threads", functions, ("nothing",))))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert all(one is results[0] for one in results)
    results[0]["nothing"](0)


@needs_compiler
def test_a_module_that_does_not_compile_leaves_nothing_behind():
    """An error while a module is built is raised, and the next call builds it again."""

    def broken(target: Target) -> list[ir.Function]:
        raise RuntimeError("not written")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="not written"):
            jit.library("test-broken", broken, ("nothing",))
