"""Question: how near do the closed forms of ``weftplan scale`` come to exchanges that really happen?

Hosts are network namespaces of this machine, one process each, whose links let a given rate through; so the network is
emulated, MPI and the store are real, and what the rest of the machine does matters little. In the same run links are
*measured* as ``weftplan scale -t measured`` does it (latency and bandwidth while everybody sends to everybody, and an
exchange without data), exchanges of ``dist_sync`` are *measured*, and what the form ``one_step``, which is what
``dist_sync`` does, says of them with those links is *modelled*.

    python bench/bench_scale.py [--rate 100mbit] [--hosts 4] [--rounds 5]       as root, with ip and tc
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
from weftplan.kvstore.distributed.mpi import environment  # noqa: E402
from weftplan.kvstore.scaling import Link, Topology, seconds  # noqa: E402

PEER = os.path.join(ROOT, "bench", "peers", "scale_rank.py")
SIZES = (1 << 20, 4 << 20)


def main():
    """Measure, model, and print both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", default="100mbit", help="what each host may send, as tc writes it")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    print(f"links of {args.rate}, {args.rounds} rounds, medians\n")
    print("| workers | bytes | link, measured | exchange, measured ms | exchange, modelled ms | modelled / measured |")
    print("|---|---|---|---|---|---|")
    with emulated(args.hosts, slots=1, rate=args.rate) as hosts:
        for workers in range(2, args.hosts + 1):
            command = mpiexec_command(workers, None, (PEER, str(args.rounds), *map(str, SIZES)))
            run = subprocess.run(
                hosts.across(command),
                env={**os.environ, **environment(), "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            if run.returncode:
                raise SystemExit(run.stdout + run.stderr)
            found = json.loads(run.stdout.strip().splitlines()[-1])
            link = Link(**found["link"])
            topology = Topology("measured", link, link, 1, found["fixed"])
            for nbytes in SIZES:
                measured = found["exchange"][str(nbytes)]
                modelled = seconds("one_step", nbytes, workers, topology)
                print(
                    f"| {workers} | {nbytes:,} | {link.latency * 1e6:.0f} us, {link.bandwidth / 1e6:.2f} MB/s, "
                    f"{topology.fixed * 1e6:.0f} us "
                    f"| {measured * 1e3:.1f} | {modelled * 1e3:.1f} | {modelled / measured:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
