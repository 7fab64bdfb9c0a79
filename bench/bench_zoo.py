"""Question: do networks that somebody else's program wrote open, bind and compute what MXNet computes of them?

MXNet 1.9.1 exports every network of its Gluon model zoo for vision, and some made of its other layers, with random
weights. Each pair of files is opened here, inferred, planned and bound; outputs of inference and gradients of all
parameters are compared with MXNet's, gradients in float64 where MXNet can: the largest difference of an array, divided
by the largest value in it. Plans for one image, with scratch and without, stand beside MXNet's (with its fused
operators, and without its scratch), and what is allocated is compared with what is planned. Files are kept in FOLDER,
and made only where they are missing.

    python bench/bench_zoo.py --mxnet-python PATH --folder FOLDER [--only resnet18_v1 lstm]
"""

import argparse
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np

import weftplan as mx
from weftplan.planner import plan_symbol

PEER = Path(__file__).parent / "peers" / "zoo.py"


def peer(python, *args):
    """The lines that the peer prints."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MXNET_SUBGRAPH_VERBOSE": "0"}
    done = subprocess.run([python, str(PEER), *map(str, args)], capture_output=True, text=True, env=env, check=True)
    return done.stdout.split("\n")


def difference(mine, theirs):
    """The largest difference in relation to the largest value."""
    if mine.shape != theirs.shape:
        return float("inf")
    largest = np.abs(theirs).max(initial=0.0)
    return float(np.abs(mine - theirs).max(initial=0.0) / (largest or 1.0))


def judged(folder, name):
    """The cells of a network."""
    wanted = np.load(folder / f"{name}.npz")
    symbol, args, aux = mx.model.load_checkpoint(str(folder / name), 0)
    shape = wanted["data"].shape
    images = len(shape) != 2
    found = symbol.simple_bind(mx.cpu(), grad_req="null", data=shape)
    assert found.allocated_bytes == found.memory_plan.peak
    found.copy_params_from(args, aux)
    outputs = [out.asnumpy() for out in found.forward(is_train=False, data=wanted["data"])]
    worst = max(difference(out, wanted[f"output{k}"]) for k, out in enumerate(outputs))
    requests = dict.fromkeys(symbol.list_arguments(), "write")
    requests["data"] = "write" if images else "null"

    def step(dtype):
        trained = symbol.simple_bind(
            mx.cpu(), grad_req=requests, data=shape, type_dict=dict.fromkeys([*requests, *aux], dtype)
        )
        assert trained.allocated_bytes == trained.memory_plan.peak
        trained.copy_params_from(args, aux)
        trained.forward(is_train=True, data=wanted["data"])
        trained.backward([mx.nd.array(wanted[f"head{k}"], dtype=dtype) for k in range(len(outputs))])
        return {key: value.asnumpy() for key, value in trained.grad_dict.items() if value is not None}

    ours = step("float32")
    gradients = {key[5:]: wanted[key] for key in wanted.files if key.startswith("grad:")}
    scale = max((float(np.abs(value).max(initial=0.0)) for value in gradients.values()), default=1.0)

    def size(key):
        """What is zero but for rounding (a bias in front of BatchNorm) is measured by the largest gradient of all."""
        return max(float(np.abs(gradients[key]).max(initial=0.0)), 1e-3 * scale)

    def worst_of(one, other):
        return max(
            ((float(np.abs(one[key] - other[key]).max(initial=0.0)) / size(key), key) for key in gradients),
            default=(0.0, "-"),
        )

    apart, where = worst_of(ours, gradients)
    said = f"{apart:.1e} ({where})"
    exact = {key[6:]: wanted[key] for key in wanted.files if key.startswith("exact:")}
    if exact:  # a gradient jumps where a ReLU's input is 0 but for rounding: less often in float64
        apart, where = worst_of(step("float64"), exact)
        said = f"{apart:.1e} ({where}); in float32 {said}, MXNet's from its float64 {worst_of(gradients, exact)[0]:.1e}"
    cells = [len(symbol.get_internals().list_outputs()), f"{worst:.1e}", said, len(gradients)]
    if "planned" in wanted:
        side = 299 if name.startswith("inception") else 224
        shape = (1, 3, side, side)
        plan = plan_symbol(symbol, {"data": shape}).memory
        bare = plan_symbol(symbol, {"data": shape}, options=plan.options.replace(workspaces=False)).memory
        theirs = int(wanted["planned"])
        cells += [f"{plan.peak:,}", f"{bare.peak:,}", f"{theirs:,}", f"{plan.peak / theirs:.2f}"]
    return worst, apart, cells


def main():
    """Export, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mxnet-python", required=True, help="interpreter of a virtual environment with mxnet==1.9.1")
    parser.add_argument("--folder", required=True, type=Path, help="where files are kept")
    parser.add_argument("--only", nargs="+", help="names; default: all")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    args.folder.mkdir(parents=True, exist_ok=True)
    names = args.only or peer(args.mxnet_python, "--list")[0].split()
    missing = [name for name in names if not (args.folder / f"{name}.npz").exists()]
    for name in missing:  # a process for each: MXNet keeps what memory it once had
        for line in peer(args.mxnet_python, args.folder, name):
            if line and not line.endswith(" ok"):
                print(f"MXNet: {line}")
    columns = [
        "entries",
        "outputs differ by",
        "gradients differ by (worst)",
        "gradients",
        "planned, batch 1, with scratch",
        "without",
        "MXNet's, fused, without its scratch",
        "ratio",
    ]
    print("| network | " + " | ".join(columns) + " |\n" + "|---" * (len(columns) + 1) + "|")
    good = total = 0
    for name in names:
        if not (args.folder / f"{name}.npz").exists():
            continue
        total += 1
        try:
            worst, apart, cells = judged(args.folder, name)
            good += worst <= 1e-4 and apart <= 1e-4
        except Exception as error:
            cells = [f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"]
        print(f"| {name} | " + " | ".join(map(str, cells)) + " |", flush=True)
    print(f"\n{good} of {total} networks: outputs and gradients within 1e-4 of MXNet's")


if __name__ == "__main__":
    sys.exit(main())
