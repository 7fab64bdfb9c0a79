"""Kernels are linked even if free memory is scattered over the address space."""

import subprocess
import sys

import pytest

from weftplan.kernels.compiled.target import host

CHILD = """
import ctypes
import sys

import weftplan.ops
from weftplan.kernels.compiled.winograd import implementation as winograd, weights as winograd_weights
from weftplan.kernels.compiled.target import host

libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def reserve(nbytes):
    return libc.mmap(None, nbytes, 0, 0x4022, -1, 0)  # no access, private, anonymous, not counted


def fill_holes():
    # The kernel takes the highest hole that is large enough: until one comes from below everything else.
    for size in (64 << 20, 16 << 20, 4 << 20, 1 << 20, 256 << 10, 64 << 10, 16 << 10, 4096):
        for _ in range(20_000):
            here, below = reserve(size), reserve(8 << 30)
            libc.munmap(below, 8 << 30)
            if below <= here <= below + (8 << 30) + 2 * size:
                libc.munmap(here, size)
                break


pages = int(sys.argv[1])
winograd.functions(host())  # what the linker itself needs is there
fill_holes()
hole = reserve(pages * 4096)
reserve(3 << 30)
libc.munmap(hole, pages * 4096)
winograd_weights.functions(host())
"""


@pytest.mark.skipif(sys.platform != "linux" or isinstance(host(), str), reason="needs Linux, and compiled kernels")
@pytest.mark.parametrize("pages", [1, 3])
def test_a_module_is_linked_where_free_pages_lie_gigabytes_apart(pages: int):
    """A module links if only a few pages are free and the next free memory is 3 GiB away.

    Code and constants are placed near each other all the same.
    """
    done = subprocess.run([sys.executable, "-c", CHILD, str(pages)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
