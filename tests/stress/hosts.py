"""Several emulated hosts on one machine: network namespaces on a bridge, each with its own address and name.

MPI starts a daemon on each host, as on real machines, and its messages use TCP. This needs root and the commands ``ip``
and ``unshare``; :func:`emulated` skips the test without them. A script in place of ssh enters the namespace.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

_AGENT = """#!/bin/bash
while [[ "$1" == -* ]]; do shift; done
host=$1; shift
exec ip netns exec "$host" unshare --uts bash -c "hostname $host; $*"
"""

_numbers = itertools.count()


@dataclass(frozen=True)
class Hosts:
    """Names of the emulated hosts, and a folder with the files that MPI needs to reach them."""

    names: tuple[str, ...]
    folder: Path

    @property
    def file(self) -> Path:
        """The file of hosts for ``--hostfile``."""
        return self.folder / "hosts"

    def on_first(self, command: Sequence[str]) -> list[str]:
        """Return a command that runs the given command on the first host, from which MPI reaches the others."""
        reach = f"export PRTE_MCA_plm_ssh_agent={self.folder / 'agent'}"
        inside = ["bash", "-c", f'hostname {self.names[0]}; {reach}; exec "$@"', "bash", *command]
        return ["ip", "netns", "exec", self.names[0], "unshare", "--uts", *inside]

    def end(self) -> None:
        """Kill all remaining processes on the hosts."""
        for name in self.names:
            listing = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
            for word in listing.stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(word), signal.SIGKILL)


@contextlib.contextmanager
def emulated(count: int = 3, slots: int | None = 2, rate: str | None = None) -> Iterator[Hosts]:
    """Emulate ``count`` hosts inside the block, then remove them with all their processes.

    ``slots`` is the number of slots per host (None: the file of hosts names none), ``rate`` the bandwidth in the syntax
    of ``tc`` (None: no limit).
    """
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("hosts are emulated as root, with the commands ip and unshare")
    # A name can be used once: the kernel removes namespaces and their links some time after the command.
    mark, net = f"{os.getpid() % 10_000}x{next(_numbers)}", f"10.{100 + os.getpid() % 100}.{os.getpid() // 100 % 250}"
    names = tuple(f"wp{mark}h{index}" for index in range(1, count + 1))
    bridge, etc = f"wp{mark}br", Path("/etc/netns")
    cleanup: list[list[str]] = []

    def ip(words: str, undo: str | None = None) -> None:
        done = subprocess.run(["ip", *words.split()], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"this machine emulates no hosts: ip {words}: {done.stderr.strip()}")
        if undo is not None:
            cleanup.append(["ip", *undo.split()])

    with tempfile.TemporaryDirectory() as folder:
        hosts = Hosts(names, Path(folder))
        (hosts.folder / "agent").write_text(_AGENT)
        (hosts.folder / "agent").chmod(0o755)
        hosts.file.write_text("".join(f"{name} slots={slots}\n" if slots else f"{name}\n" for name in names))
        known = "127.0.0.1 localhost\n" + "".join(f"{net}.{i} {name}\n" for i, name in enumerate(names, 1))
        try:
            ip(f"link add {bridge} type bridge", f"link del {bridge}")
            ip(f"link set {bridge} up")
            for index, name in enumerate(names, 1):
                ip(f"netns add {name}", f"netns del {name}")
                (etc / name).mkdir(parents=True, exist_ok=True)
                (etc / name / "hosts").write_text(known)
                ip(f"link add wp{mark}v{index} type veth peer name eth0 netns {name}")
                ip(f"link set wp{mark}v{index} master {bridge} up")
                ip(f"-n {name} addr add {net}.{index}/24 dev eth0")
                ip(f"-n {name} link set eth0 up")
                ip(f"-n {name} link set lo up")
                if rate is not None:
                    ip(f"netns exec {name} tc qdisc add dev eth0 root tbf rate {rate} burst 64kb latency 20ms")
            yield hosts
        finally:
            hosts.end()
            for command in reversed(cleanup):
                subprocess.run(command, capture_output=True, check=False)
            for name in names:
                shutil.rmtree(etc / name, ignore_errors=True)
