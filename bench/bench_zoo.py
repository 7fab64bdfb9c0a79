"""Question: do networks written by other programs open, bind and compute MXNet's values?

MXNet 1.9.1 exports every network of its Gluon model zoo for vision, and some made of its other layers, with random
weights. weftplan opens each pair of files, infers shapes, plans and binds. Outputs of inference and gradients of all
parameters are compared with MXNet's; gradients in float64 if MXNet can compute them. The measure is the largest
difference in an array divided by its largest value. Plans for one image, with scratch and without, are compared with
MXNet's, which include its fused operators and exclude its scratch. Allocated bytes are compared with planned bytes.
Files stay in FOLDER, and only missing files are made.

    python bench/bench_zoo.py --mxnet-python PATH --folder FOLDER [--only resnet18_v1 lstm]

Other files can be compared as well. FOLDER then has ``NAME-symbol.json``, and ``NAME-0000.params`` unless parameters
are to be drawn at random. ``SHAPES`` is a JSON file with the input shapes of each name, to run with and to plan for:
``{NAME: {"run": {"data": [2, 3, 64, 64]}, "plan": {"data": [1, 3, 224, 224]}}}``. The bench then also compares
arguments and inferred shapes, and whether MXNet computes the same bits from files that weftplan saved again.

    python bench/bench_zoo.py --mxnet-python PATH --folder FOLDER --files SHAPES
"""

import argparse
import contextlib
import json
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
    """Return the lines that the MXNet process prints; the last line states its exit code if that is not 0."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MXNET_SUBGRAPH_VERBOSE": "0"}
    done = subprocess.run([python, str(PEER), *map(str, args)], capture_output=True, text=True, env=env, check=False)
    ended = [f"the process ended with {done.returncode}: {done.stderr[-200:]}"] if done.returncode else []
    return [*filter(None, done.stdout.split("\n")), *ended]


def print_failures(lines, source):
    """Print the lines of a peer that do not end in "ok", after the name ``source``."""
    for line in lines:
        if not line.endswith(" ok"):
            print(f"{source}: {line}", flush=True)


def difference(mine, theirs):
    """Return the largest difference of two arrays relative to the largest value of ``theirs``; inf if shapes differ."""
    if mine.shape != theirs.shape:
        return float("inf")
    largest = np.abs(theirs).max(initial=0.0)
    return float(np.abs(mine - theirs).max(initial=0.0) / (largest or 1.0))


def interface(symbol, shapes):
    """Return names and inferred shapes of arguments, auxiliary states and outputs, as lists like those from JSON."""
    names = (symbol.list_arguments(), symbol.list_auxiliary_states(), symbol.list_outputs())
    inferred = symbol.infer_shape(**shapes)
    return json.loads(json.dumps([names, [inferred[0], inferred[2], inferred[1]]]))


def without_dropout(path):
    """Return the symbol in a file with dropout switched off."""
    graph = json.loads(path.read_text())
    for node in graph["nodes"]:
        if node["op"] == "Dropout":
            next(node[key] for key in ("attrs", "param", "attr") if node.get(key))["p"] = "0"
    return mx.sym.load_json(json.dumps(graph))


def compare_network(folder, name):
    """Compare one network with MXNet; return (worst difference of outputs, of gradients, table cells)."""
    wanted = np.load(folder / f"{name}.npz")
    symbol, args, aux = mx.model.load_checkpoint(str(folder / name), 0)
    inputs = {key[6:]: wanted[key] for key in wanted.files if key.startswith("input:")}
    shapes = {key: value.shape for key, value in inputs.items()}
    assert interface(symbol, shapes) == json.loads(str(wanted["interface"])), "other names or shapes than MXNet's"
    mx.model.save_checkpoint(str(folder / f"{name}-again"), 0, symbol, args, aux)
    inner = symbol.get_internals()
    names = inner.list_outputs()[::-1]  # of equal names take the last
    scores = [inner[len(names) - 1 - names.index(key)] for key in json.loads(str(wanted["scores"]))]
    scored = mx.sym.Group([symbol, *scores])

    def inferred(dtype):
        dtypes = dict.fromkeys([*symbol.list_arguments(), *aux], dtype)
        actual = scored.simple_bind(mx.cpu(), grad_req="null", type_dict=dtypes, **shapes)
        assert actual.allocated_bytes == actual.memory_plan.peak
        actual.copy_params_from(args, aux, allow_extra_params=True)
        return [out.asnumpy() for out in actual.forward(is_train=False, **inputs)]

    worst = max(difference(out, wanted[f"output{k}"]) for k, out in enumerate(inferred("float32")))
    told = f"{worst:.1e}"
    if worst > 1e-4 and "precise0" in wanted:  # random weights may amplify rounding errors
        own = max(difference(wanted[f"output{k}"], wanted[f"precise{k}"]) for k in range(len(scored.list_outputs())))
        worst = max(difference(out, wanted[f"precise{k}"]) for k, out in enumerate(inferred("float64")))
        told = f"{worst:.1e} in float64; in float32 {told}, MXNet's from its float64 {own:.1e}"
    gradients = {key[5:]: wanted[key] for key in wanted.files if key.startswith("grad:")}
    requests = {key: "write" if key in gradients else "null" for key in symbol.list_arguments()}
    training = without_dropout(folder / f"{name}-symbol.json")

    def step(dtype):
        dtypes = dict.fromkeys([*requests, *aux], dtype)
        trained = training.simple_bind(mx.cpu(), grad_req=requests, type_dict=dtypes, **shapes)
        assert trained.allocated_bytes == trained.memory_plan.peak
        trained.copy_params_from(args, aux, allow_extra_params=True)
        trained.forward(is_train=True, **inputs)
        trained.backward([mx.nd.array(wanted[f"head{k}"], dtype=dtype) for k in range(len(symbol.list_outputs()))])
        return {key: value.asnumpy() for key, value in trained.grad_dict.items() if value is not None}

    ours = step("float32") if gradients else {}
    scale = max((float(np.abs(value).max(initial=0.0)) for value in gradients.values()), default=1.0)

    def size(key):
        """Return the scale of a gradient: its largest value, but at least 1/1000 of the largest of all gradients."""
        return max(float(np.abs(gradients[key]).max(initial=0.0)), 1e-3 * scale)

    def worst_of(one, other):
        return max(
            ((float(np.abs(one[key] - other[key]).max(initial=0.0)) / size(key), key) for key in gradients),
            default=(0.0, "-"),
        )

    apart, where = worst_of(ours, gradients)
    words = f"{apart:.1e} ({where})"
    exact = {key[6:]: wanted[key] for key in wanted.files if key.startswith("exact:")}
    if exact or apart > 1e-4:  # rounding may flip a ReLU whose input is near 0; less often in float64
        ours64 = None
        with contextlib.suppress(mx.errors.DTypeError):  # the network contains a float32 dtype
            ours64 = step("float64")
        if ours64 is None:
            words += "; the network has parts in float32"
        elif exact:
            apart, where = worst_of(ours64, exact)
            from_own = worst_of(gradients, exact)[0]
            words = f"{apart:.1e} ({where}); in float32 {words}, MXNet's from its float64 {from_own:.1e}"
        else:
            from_ours, own = worst_of(gradients, ours64)[0], worst_of(ours, ours64)[0]
            words += f"; MXNet has no float64: from ours MXNet's float32 {from_ours:.1e}, our own {own:.1e}"
    cells = [len(symbol.get_internals().list_outputs()), told, words, len(gradients)]
    if "planned" in wanted:
        shape = json.loads(str(wanted["planned_shapes"]))
        plan = plan_symbol(symbol, shape).memory
        bare = plan_symbol(symbol, shape, options=plan.options.replace(workspaces=False)).memory
        theirs = int(wanted["planned"])
        ratio = f"{plan.peak / theirs:.2f}" if theirs else "-"
        cells += [f"{plan.peak:,}", f"{bare.peak:,}", f"{theirs:,}", ratio]
    return worst, apart, cells


def main():
    """Export missing networks, compare all, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mxnet-python", required=True, help="interpreter of a virtual environment with mxnet==1.9.1")
    parser.add_argument("--folder", required=True, type=Path, help="where files are kept")
    parser.add_argument("--files", type=Path, metavar="SHAPES", help="take files that are in the folder already")
    parser.add_argument("--only", nargs="+", help="names; default: all")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    args.folder.mkdir(parents=True, exist_ok=True)
    of_others = ["--files", args.files] if args.files else []
    everything = json.loads(args.files.read_text()) if args.files else None
    names = args.only or everything or peer(args.mxnet_python, "--list")[0].split()
    missing = [name for name in names if not (args.folder / f"{name}.npz").exists()]
    for name in missing:  # a process for each, because MXNet does not return memory
        print_failures(peer(args.mxnet_python, *of_others, args.folder, name), "MXNet")
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
            worst, apart, cells = compare_network(args.folder, name)
            good += worst <= 1e-4 and apart <= 1e-4
        except Exception as error:
            cells = [f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"]
        print(f"| {name} | " + " | ".join(map(str, cells)) + " |", flush=True)
        if of_others:
            print_failures(peer(args.mxnet_python, "--again", args.folder, name), "MXNet, of the files saved again")
    print(f"\n{good} of {total} networks: outputs and gradients within 1e-4 of MXNet's")


if __name__ == "__main__":
    sys.exit(main())
