"""Question: how near do the closed forms of ``weftplan scale`` come to exchanges that really happen?

Hosts are network namespaces of this machine, one process each, whose links let a given rate through; so the network
is emulated, MPI and the store are real. In turn links and store are *measured* as ``weftplan scale -t measured`` does
it, with exchanges of 8 KB and 2 MB or more and keys of 64 bytes, exchanges of 1 MB and of 4 MB are *measured*, and
what the form ``one_step``, which is what ``dist_sync`` does, says of these is *modelled*. The slowest host counts,
and medians are taken. On fast links the cores that carry all hosts are what is measured: a real host has its own.

    python bench/bench_scale.py [--rate 100mbit] [--hosts 4] [--rounds 5]       as root, with ip and tc
    python bench/bench_scale.py --training [--rounds 5]
    python bench/bench_scale.py --simgrid-python PATH

The second runs real training on this machine, in 2 and 4 processes: in each job forward and backward of all processes
at once are *measured*, and exchanges with all that the store does for a key and a byte, updates included; a step is
*modelled* from these, with the store's buckets, and *measured*. All begin at once in all processes, the slowest
counts, and medians are taken. The third asks SimGrid instead, which simulates every message: PATH is a Python that
imports ``simgrid`` (Debian: python3-simgrid). Closed forms and SimGrid get the same links.
"""

import argparse
import json
import os
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

from tests.stress.hosts import emulated  # noqa: E402
from weftplan.cli.launch import mpiexec_command  # noqa: E402
from weftplan.kvstore.distributed.transport.mpi import environment  # noqa: E402
from weftplan.kvstore.scaling import Link, Topology, seconds  # noqa: E402

PEER = os.path.join(ROOT, "bench", "peers", "scale_rank.py")
SIMGRID = os.path.join(ROOT, "bench", "peers", "simgrid_exchange.py")
TRAINING = os.path.join(ROOT, "bench", "peers", "scale_training.py")
SIZES = (1 << 20, 4 << 20)
NETWORKS = ("mlp", "lenet")


def main():
    """Measure, model, and print both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", default="100mbit", help="what each host may send, as tc writes it")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--simgrid-python", help="an interpreter that imports simgrid: compare with SimGrid instead")
    parser.add_argument("--training", action="store_true", help="steps of real training on this machine instead")
    parser.add_argument("--workers", default="2,4", help="with --training")
    args = parser.parse_args()
    if args.training:
        training([int(word) for word in args.workers.split(",")], args.rounds)
        return
    if args.simgrid_python:
        simulated(args.simgrid_python)
        return
    print(f"links of {args.rate}, {args.rounds} rounds, medians\n")
    print("| workers | bytes | link and store, measured | measured, ms | modelled, ms | modelled / measured |")
    print("|---|---|---|---|---|---|")
    with emulated(args.hosts, slots=1, rate=args.rate) as hosts:
        for workers in range(2, args.hosts + 1):
            command = mpiexec_command(workers, None, (PEER, str(args.rounds), *map(str, SIZES)))
            found = said_by(hosts.across(command))
            link = found["link"]
            for nbytes in SIZES:
                modelled, measured = found["modelled"][str(nbytes)], found["measured"][str(nbytes)]
                print(
                    f"| {workers} | {nbytes:,} | {link['latency'] * 1e6:.0f} us, {link['bandwidth'] / 1e6:.2f} MB/s, "
                    f"{link['fixed'] * 1e6:.0f} us, {link['per_byte'] * 1e9:.2f} ns a byte "
                    f"| {measured * 1e3:.1f} | {modelled * 1e3:.1f} | {modelled / measured:.2f} |",
                    flush=True,
                )


def said_by(command):
    """What a job prints as JSON in its last line."""
    run = subprocess.run(
        command,
        env={**os.environ, **environment(), "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if run.returncode:
        raise SystemExit(run.stdout + run.stderr)
    return json.loads(run.stdout.strip().splitlines()[-1])


def training(counts, rounds):
    """Print steps of training, two jobs for each network and number of workers."""
    print(f"{os.cpu_count()} cores, {rounds} rounds of ten steps, medians\n")
    print("| network | workers | alone, ms | a key, us | exchanges, modelled | step, modelled | measured, ms | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    for network in NETWORKS:
        for workers in counts:
            for _ in range(2):
                found = said_by(mpiexec_command(workers, None, (TRAINING, network, str(rounds))))
                modelled, measured = found["modelled"], found["measured"]
                print(
                    f"| {network} | {workers} | {found['alone'] * 1e3:.2f} | {found['key'] * 1e6:.0f} "
                    f"| {found['exchanges'] * 1e3:.2f} "
                    f"| {modelled * 1e3:.2f} | {measured * 1e3:.2f} | {modelled / measured:.2f} |",
                    flush=True,
                )


def simulated(python):
    """Print what SimGrid says of exchanges, and the closed forms."""
    print("| algorithm | workers | bytes | link | SimGrid, ms | modelled, ms | modelled / SimGrid |")
    print("|---|---|---|---|---|---|---|")
    for latency, bandwidth in ((20e-6, 1.1e9), (5e-6, 11.5e9)):
        link = Link(latency, bandwidth, 0.0)
        for algorithm, workers in (("one_step", 4), ("one_step", 32), ("ring", 8), ("ring", 64)):
            for nbytes in SIZES:
                command = [python, SIMGRID, algorithm, workers, nbytes, latency, bandwidth]
                run = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300, check=False)
                if run.returncode:
                    raise SystemExit(run.stdout + run.stderr)
                found = float(run.stdout.strip().splitlines()[-1])
                modelled = seconds(algorithm, nbytes, workers, Topology("given", link, link, 1))
                print(
                    f"| {algorithm} | {workers} | {nbytes:,} | {latency * 1e6:.0f} us, {bandwidth / 1e9:.1f} GB/s "
                    f"| {found * 1e3:.4f} | {modelled * 1e3:.4f} | {modelled / found:.4f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
