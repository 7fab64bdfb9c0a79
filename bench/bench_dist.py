"""Question: how much does ``dist_sync`` cost compared with the same bytes through a raw ``Allreduce`` of mpi4py?

Both alternate in the same processes on this machine, with one small key or with eight keys that are sent together. A
round begins at a barrier; the store's round ends when every pulled array can be read. Then each runs as many rounds in
a loop without barriers, as training does. The store adds in one order, whatever the sizes and the number of processes;
``Allreduce`` does not promise an order. With more processes than cores both wait for cores. A bucket has all
keys, or at most ``--bucket`` keys.

    python bench/bench_dist.py [--workers 2,4] [--rounds 15] [--bucket 3]
"""

import argparse
import json
import os
import platform
import subprocess
import sys

from weftplan.cli.launch.mpiexec import mpiexec_command
from weftplan.kvstore.distributed.transport.mpi import environment

PEER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "peers", "dist_rank.py")
SIZES = (1 << 10, 1 << 20, 4 << 20, 16 << 20)


def main():
    """Run the processes, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", default="2,4")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--bucket", default="-1", help="gradients of a bucket, -1: all")
    args = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}; {args.rounds} rounds\n")
    print(
        "| processes | bytes | store, us (least) | Allreduce, us (least) | store / Allreduce (of the least) "
        "| both in a loop, us |"
    )
    print("|---|---|---|---|---|---|")
    for workers in map(int, args.workers.split(",")):
        run = subprocess.run(
            mpiexec_command(workers, None, (PEER, str(args.rounds), *map(str, SIZES))),
            env={
                **os.environ,
                **environment(),
                "OMP_NUM_THREADS": "1",
                "FLAGS_fuse_parameter_groups_size": args.bucket,
            },
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
        if run.returncode:
            sys.exit(run.stdout + run.stderr)
        for nbytes, report in json.loads(run.stdout.strip().splitlines()[-1]).items():
            (store, least, loop), (raw, raw_least, raw_loop) = report["store"], report["raw"]
            print(
                f"| {workers} | {int(nbytes):,} | {store * 1e6:,.0f} ({least * 1e6:,.0f}) "
                f"| {raw * 1e6:,.0f} ({raw_least * 1e6:,.0f}) | {store / raw:.2f} ({least / raw_least:.2f}) "
                f"| {loop * 1e6:,.0f}, {raw_loop * 1e6:,.0f} ({loop / raw_loop:.2f}) |",
                flush=True,
            )


if __name__ == "__main__":
    main()
