"""The package in a process without POSIX and Linux calls, as on Windows."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

from weftplan.device import host_memory, windows_memory
from weftplan.support import control_groups, user_cache

BARE = """
import asyncio, ctypes, multiprocessing.connection, os, pkgutil, signal, subprocess, sys, tempfile, numpy, threadpoolctl

for name in ("resource", "fcntl", "pwd", "grp", "termios"):
    sys.modules[name] = None
for module, names in (
    (os, "geteuid getuid sysconf fork register_at_fork sched_getaffinity sched_yield posix_fallocate pread "
         "pwrite fchmod uname killpg setsid getpgid mkfifo O_NOFOLLOW O_NONBLOCK O_CLOEXEC O_TMPFILE"),
    (signal, "SIGKILL SIGUSR1 SIGUSR2 SIGHUP SIGCHLD SIGPIPE SIGALRM setitimer pthread_kill pthread_sigmask"),
):
    for name in names.split():
        vars(module).pop(name, None)


class Kernel:
    class Function:
        def __init__(self, answer):
            self.answer = answer

        def __call__(self, *args):
            return self.answer(*args)

    def __init__(self, name):
        def machine(found):
            found._obj.total, found._obj.available = 1 << 40, 1 << 39
            return 1

        def process(handle, found, nbytes):
            found._obj.resident = 123
            return 1

        self.GlobalMemoryStatusEx = self.Function(machine)
        self.K32GetProcessMemoryInfo = self.Function(process)
        self.GetCurrentProcess = self.Function(lambda: -1)


ctypes.WinDLL = Kernel
"""


def run_without_posix(code: str, folder: Path) -> str:
    """Run code in a process without POSIX calls and return its output; cache and spill folders are ``folder``."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder), "WEFTPLAN_SPILL": f"file:{folder}"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", BARE + code], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_module_can_be_imported(tmp_path: Path):
    """Every module can be imported, but for modules that need PyTorch if it is not installed."""
    code = """
import weftplan
for found in pkgutil.walk_packages(weftplan.__path__, "weftplan."):
    if not found.name.endswith("__main__"):
        try:
            __import__(found.name)
        except ModuleNotFoundError as error:
            assert error.name == "torch" and found.name.startswith("weftplan.torch."), found.name
print("all")
"""
    assert run_without_posix(code, tmp_path) == "all\n"


def test_a_network_learns(tmp_path: Path):
    """Training, a checkpoint, memory figures and spilling to files work; no cache is written."""
    code = """
import numpy as np
import weftplan as mx

data = np.random.default_rng(0).standard_normal((64, 8), np.float32)
labels = (data.sum(1) > 0).astype(np.float32)
network = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=2), name="softmax")
module = mx.mod.Module(network, context=[mx.cpu(0), mx.cpu(1)])
module.fit(mx.io.NDArrayIter(data, labels, 16), num_epoch=8, kvstore="device", optimizer_params={"learning_rate": 1.0})
assert module.score(mx.io.NDArrayIter(data, labels, 16), "acc")[0][1] > 0.9
module.save_checkpoint(os.path.join(os.environ["XDG_CACHE_HOME"], "net"), 8)
summary = mx.storage.memory_summary()
assert "process: 123 bytes; the machine or container has 1,099,511,627,776, 549,755,813,888 of them free" in summary
place = mx.device.get(mx.device.Context("file", 0))
raw = place.allocate(3_000_000)
raw.fill(7)
assert raw.sum(dtype=int) == 21_000_000 and place.memory_info()[0] > 0
print("done")
"""
    assert run_without_posix(code, tmp_path) == "done\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["net-0008.params", "net-symbol.json"]


def test_no_cache_without_user_ids(tmp_path: Path, monkeypatch):
    """On a system without user ids the cache is not read or written, and the reason is given."""
    place = tmp_path.resolve() / "kernels"
    place.mkdir(mode=0o700)
    assert user_cache.keep(place, "one", b"content")
    monkeypatch.delattr(os, "geteuid")
    assert user_cache.folder("kernels", {"XDG_CACHE_HOME": "/a"}) is None
    assert user_cache.refusal(place) == f"{place}: this system does not tell who may write there"
    assert user_cache.load(place, "one") is None
    assert not user_cache.keep(place, "two", b"content")
    assert [path.name for path in place.rglob("*") if path.is_file()] == ["one"]


def test_the_structures_are_those_of_windows():
    """The ctypes structures have the size and offsets of MEMORYSTATUSEX and PROCESS_MEMORY_COUNTERS on 64 bits."""
    machine, process = windows_memory._Machine, windows_memory._Process
    assert (ctypes.sizeof(machine), machine.total.offset, machine.available.offset) == (64, 8, 16)
    assert (ctypes.sizeof(process), process.resident.offset) == (72, 16)


def test_memory_without_free_pages(tmp_path: Path, monkeypatch):
    """If the system gives no number of free pages, as macOS, all memory outside this process counts as available."""
    monkeypatch.setattr(host_memory, "_limits", host_memory._Limits())
    monkeypatch.setattr(control_groups, "PROC", tmp_path)
    names = {name: number for name, number in os.sysconf_names.items() if name != "SC_AVPHYS_PAGES"}
    monkeypatch.setattr(os, "sysconf_names", names)
    available, total = host_memory.memory_info()
    assert 0 < host_memory.resident() <= total - available < total
