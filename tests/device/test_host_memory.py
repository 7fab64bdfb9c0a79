"""Available memory and CPUs of the machine and of control groups of both versions, simulated by folders."""

import os

import numpy as np
import pytest

from weftplan import device
from weftplan.device import host_memory
from weftplan.support import blas_threads, control_groups

MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def system(tmp_path, monkeypatch):
    """Return ``write(path, text)``, which writes files into the folders that replace /proc and /sys/fs/cgroup."""
    monkeypatch.setattr(host_memory, "_limits", host_memory._Limits())
    monkeypatch.setattr(control_groups, "PROC", tmp_path / "proc")
    monkeypatch.setattr(control_groups, "ROOT", tmp_path / "cgroup")
    control_groups.cpu_quota.cache_clear()

    def write(path, text):
        target = tmp_path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    write("proc/meminfo", f"MemTotal: 1 kB\nMemAvailable:   {MACHINE // 2048} kB\n")
    yield write
    control_groups.cpu_quota.cache_clear()


def write_group(write, folder, limit, used, cache, *, old=False):
    """Write the memory files of a control group; ``old`` selects version 1, ``cache`` is its page cache in bytes."""
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if old else ("memory.max", "memory.current")
    write(f"cgroup/{folder}/{names[0]}", f"{limit}\n")
    write(f"cgroup/{folder}/{names[1]}", f"{used}\n")
    line = f"inactive_file 7\ntotal_inactive_file {cache}" if old else f"inactive_file {cache}"
    write(f"cgroup/{folder}/memory.stat", f"anon 5\n{line}\nslab 3\n")


def test_the_machine_alone(system):
    """Without control groups the kernel's figures are returned."""
    assert host_memory.memory_info() == (MACHINE // 2048 * 1024, MACHINE)


def test_without_proc(tmp_path, monkeypatch):
    """Without /proc the free bytes are the system's count of free pages."""
    monkeypatch.setattr(host_memory, "_limits", host_memory._Limits())
    monkeypatch.setattr(control_groups, "PROC", tmp_path)
    free, total = host_memory.memory_info()
    assert 0 < free <= total == MACHINE


@pytest.mark.parametrize("old", [False, True], ids=["version 2", "version 1"])
def test_a_container(system, old):
    """In a container the total is its limit; free is the limit without its usage, not counting page cache."""
    system("proc/self/cgroup", "3:cpu,memory:/box\n1:name=systemd:/box\n" if old else "0::/box\n")
    limit = MACHINE // 8
    write_group(system, "memory/box" if old else "box", limit, limit // 2, 4096, old=old)
    assert host_memory.memory_info() == (limit - limit // 2 + 4096, limit)
    assert device.get(device.cpu()).memory_info() == (limit - limit // 2 + 4096, limit)


@pytest.mark.parametrize("old", [False, True], ids=["version 2", "version 1"])
def test_the_tightest_of_group_and_parents(system, old):
    """The smallest total and the smallest free memory of a group and its parents are returned."""
    system("proc/self/cgroup", "4:memory:/outer/inner\n" if old else "0::/outer/inner\n")
    top = "memory/" if old else ""
    small = MACHINE // 8
    write_group(system, top + "outer/inner", small * 2, small * 2 - 100, 0, old=old)
    write_group(system, top + "outer", small, small // 2, 0, old=old)
    assert host_memory.memory_info() == (100, small)


def test_machine_path_inside_a_container(system):
    """If a container's group path is that of the machine, the root group that it sees counts."""
    system("proc/self/cgroup", "0::/system.slice/docker-1234.scope\n")
    write_group(system, ".", MACHINE // 4, 0, 0)
    assert host_memory.memory_info() == (MACHINE // 4, MACHINE // 4)


@pytest.mark.parametrize("limit", ["max", str((1 << 63) - 4096), "", "-1"])
def test_no_limit(system, limit):
    """A limit in any spelling of "none", or an unreadable one, does not count."""
    system("proc/self/cgroup", "0::/box\n")
    write_group(system, "box", limit, 5000, 0)
    assert host_memory.memory_info() == (MACHINE // 2048 * 1024, MACHINE)


def test_group_usage_is_read_every_time(system, monkeypatch):
    """The list of groups is cached for five seconds; their usage is read in every call, and a group may vanish."""
    system("proc/self/cgroup", "0::/box\n")
    write_group(system, "box", MACHINE // 8, 0, 0)
    assert host_memory.memory_info() == (MACHINE // 8, MACHINE // 8)
    write_group(system, "box", MACHINE // 8, 1000, 0)
    assert host_memory.memory_info() == (MACHINE // 8 - 1000, MACHINE // 8)
    write_group(system, ".", MACHINE // 16, 0, 0)
    now = host_memory.time.monotonic()
    monkeypatch.setattr(host_memory.time, "monotonic", lambda: now + 6)
    assert host_memory.memory_info() == (MACHINE // 16, MACHINE // 16)
    system("cgroup/memory.max", "max")
    assert host_memory.memory_info() == (MACHINE // 8 - 1000, MACHINE // 8)


def test_usage_above_the_limit(system):
    """If a group's usage exceeds its lowered limit, 0 bytes are free."""
    system("proc/self/cgroup", "0::/\n")
    write_group(system, ".", MACHINE // 8, MACHINE // 4, 0)
    assert host_memory.memory_info() == (0, MACHINE // 8)


def test_resident_memory_follows_written_arrays():
    """``resident()`` grows by at least 32 MiB when an array of 64 MiB is written."""
    before = host_memory.resident()
    held = np.ones(64 << 20, np.uint8)
    assert host_memory.resident() - before > 32 << 20
    assert held.nbytes == 64 << 20


def test_resident_memory_without_proc(monkeypatch, tmp_path):
    """Without /proc, ``resident()`` returns the process's own peak."""
    monkeypatch.setattr(control_groups, "PROC", tmp_path)
    assert host_memory.resident() > 1 << 20


@pytest.mark.parametrize("old", [False, True], ids=["version 2", "version 1"])
@pytest.mark.parametrize(
    ("inner", "outer", "expected"),
    [("max", "max", 64), (150_000, "max", 2), ("max", 800_000, 8), (800_000, 400_000, 4), (1_000, "max", 1)],
)
def test_cpus_of_a_container(system, monkeypatch, inner, outer, expected, old):
    """Of 64 CPUs, the tightest quota of a group and its parents, rounded up, is usable."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)), raising=False)
    system("proc/self/cgroup", "7:cpu,cpuacct:/outer/inner\n5:memory:/\n" if old else "0::/outer/inner\n")
    for folder, quota in (("outer/inner", inner), ("outer", outer)):
        if old:
            system(f"cgroup/cpu/{folder}/cpu.cfs_quota_us", f"{-1 if quota == 'max' else quota}\n")
            system(f"cgroup/cpu/{folder}/cpu.cfs_period_us", "100000\n")
        else:
            system(f"cgroup/{folder}/cpu.max", f"{quota} 100000\n")
    assert blas_threads.usable_cpus() == expected


def test_no_cpu_quota(system, monkeypatch):
    """Without control groups, or with unreadable quotas, all CPUs of the affinity mask are usable."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)), raising=False)
    assert blas_threads.usable_cpus() == 64
    system("proc/self/cgroup", "0::/box\n")
    for text in ("", "100 0\n", "many 100000\n"):
        system("cgroup/box/cpu.max", text)
        control_groups.cpu_quota.cache_clear()
        assert blas_threads.usable_cpus() == 64
