"""Bytes of the CPU's tensors, counted by a hook that is independent of weftplan and of PyTorch's profiler.

The hook replaces ``posix_memalign`` and ``free`` in the jump table of PyTorch's library ``libc10.so``, which allocates
all tensors. Scratch that other libraries allocate for themselves does not count, as it is in no tensor.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'weftplan[torch]'")

SOURCE = """
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#define SLOTS (1u << 20)
static struct { void *block; size_t size; } table[SLOTS];
static atomic_flag busy = ATOMIC_FLAG_INIT;
long long live = 0, peak = 0;
static unsigned slot(void *block) { return (unsigned)(((uintptr_t)block >> 6) * 2654435761u) & (SLOTS - 1); }
static void lock(void) { while (atomic_flag_test_and_set(&busy)) {} }
int hooked_memalign(void **out, size_t alignment, size_t size) {
    int code = posix_memalign(out, alignment, size);
    if (code) return code;
    lock();
    unsigned k = slot(*out);
    while (table[k].block && table[k].block != (void *)1) k = (k + 1) & (SLOTS - 1);
    table[k].block = *out; table[k].size = size;
    live += size;
    if (live > peak) peak = live;
    atomic_flag_clear(&busy);
    return 0;
}
void hooked_free(void *block) {
    if (block) {
        lock();
        unsigned k = slot(block);
        while (table[k].block && table[k].block != block) k = (k + 1) & (SLOTS - 1);
        if (table[k].block) { live -= table[k].size; table[k].block = (void *)1; }
        atomic_flag_clear(&busy);
    }
    free(block);
}
"""
"""Entries of freed blocks keep the value 1, so that searches go on after them."""


def jump_slots(library: Path, names: set[str]) -> dict[str, int]:
    """Return the offsets of functions in the jump table of an ELF library for x86-64."""
    data = library.read_bytes()
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, table + k * size) for k in range(count)]
    slots = {}
    for _, kind, _, _, offset, nbytes, link, *_ in sections:
        if kind != 4:  # relocations with addends
            continue
        symbols = sections[link]
        text = sections[symbols[6]][4]
        for at in range(offset, offset + nbytes, 24):
            position, info, _ = struct.unpack_from("<QQq", data, at)
            if info & 0xFFFFFFFF != 7:  # R_X86_64_JUMP_SLOT
                continue
            (start,) = struct.unpack_from("<I", data, symbols[4] + 24 * (info >> 32))
            name = data[text + start : data.index(b"\0", text + start)].decode()
            if name in names:
                slots[name] = position
    return slots


class Hook:
    """Counts of the bytes that PyTorch's library holds, from the creation of this object on."""

    def __init__(self) -> None:
        folder = Path(tempfile.mkdtemp())
        try:
            (folder / "hook.c").write_text(SOURCE)
            command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(folder / "hook.so"), str(folder / "hook.c")]
            subprocess.run(command, check=True, capture_output=True)
            self._code = ctypes.CDLL(str(folder / "hook.so"))
        finally:
            shutil.rmtree(folder)
        library = (Path(torch.__file__).parent / "lib" / "libc10.so").resolve()
        lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
        base = min(int(line[0].partition("-")[0], 16) for line in lines if line[-1] == str(library))
        hooked = {"posix_memalign": self._code.hooked_memalign, "free": self._code.hooked_free}
        for name, position in jump_slots(library, set(hooked)).items():
            address = ctypes.cast(hooked[name], ctypes.c_void_p).value
            ctypes.c_void_p.from_address(base + position).value = address
        self._live, self._peak = (ctypes.c_longlong.in_dll(self._code, name) for name in ("live", "peak"))

    @property
    def live(self) -> int:
        """Bytes that are allocated now."""
        return self._live.value

    def peak(self, work: Callable[..., Any], *args: Any) -> int:
        """Return the largest number of bytes during ``work(*args)``, without those that are allocated before it."""
        before = self._peak.value = self.live
        work(*args)
        return self._peak.value - before


@functools.lru_cache(maxsize=1)
def hook() -> Hook:
    """Return the hook of this process; skip the test on systems for which there is none."""
    if sys.platform != "linux" or platform.machine() != "x86_64" or shutil.which("cc") is None:
        pytest.skip("the hook needs Linux on x86-64 and a C compiler")
    return Hook()
