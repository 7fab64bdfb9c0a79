"""Question: how much memory and time do loops of array operations take, waited for or not, beside MXNet 1.9.1?

Loops over arrays of one size (``a = a * 1.0001``), over results that are only summed, and over arrays of ever other
sizes. Nobody waits inside the loop, or every step is waited for. Resident memory above that before the loop: its peak,
and what is left when all arrays have gone. Each loop runs in a process of its own, in turn; medians over the rounds.
Linux only.

    python bench/bench_memory_of_loops.py --mxnet-python PATH [--mib 16] [--steps 300] [--rounds 3]
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys

import numpy as np

PEER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "peers", "memory_of_loops.py")
LOOPS = ("one size", "temporaries", "other sizes")


def run(python, package, loop, mib, steps):
    """What the peer prints."""
    command = [python, PEER, package, loop, str(mib), str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        raise SystemExit(f"{package}, {loop} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=16, help="of one array; the largest of other sizes has ten times it")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mxnet-python", required=True, help="interpreter of an environment with mxnet==1.9.1")
    args = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, NumPy {np.__version__}")
    print(f"{args.rounds} rounds, {args.steps} steps, arrays of {args.mib} MiB (other sizes: up to {10 * args.mib})\n")
    print("| loop | peak, MB | MXNet | ratio | left, MB | MXNet | seconds | MXNet | CPU s | MXNet |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for loop in (name + wait for name in LOOPS for wait in ("", ", waiting")):
        mib, steps = (10 * args.mib, max(args.steps // 4, 1)) if loop.startswith("other") else (args.mib, args.steps)
        pairs = [
            (run(sys.executable, "weftplan", loop, mib, steps), run(args.mxnet_python, "mxnet", loop, mib, steps))
            for _ in range(args.rounds)
        ]
        ours, theirs = ({key: statistics.median(pair[k][key] for pair in pairs) for key in pairs[0][k]} for k in (0, 1))
        mb = [f"{one[key] / 1e6:.0f}" for key in ("peak", "left") for one in (ours, theirs)]
        ratio = ours["peak"] / max(theirs["peak"], 1)
        print(
            f"| {loop} | {mb[0]} | {mb[1]} | {ratio:.2f} | {mb[2]} | {mb[3]} | {ours['wall_s']:.2f} "
            f"| {theirs['wall_s']:.2f} | {ours['cpu_s']:.2f} | {theirs['cpu_s']:.2f} |"
        )


if __name__ == "__main__":
    main()
