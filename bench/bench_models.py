"""Question: how long does it take to open, bind and run a model file, compared with MXNet 1.9.1?

The built-in networks, and chains of 2,000 and 20,000 nodes, are written as pairs of files. The symbol has a form that
MXNet wrote once: 0.8, 0.9, 1.0 or 1.9 (alternating, or from --format). Each framework opens the files in its own
process. Each job runs in both, directly one after the other, and the ratio is the median of the pairs. The jobs are:
load, bind for inference at batch 1, a run, bind for training, a step (forward and backward); with one thread and with
two.

"bind" binds a symbol that was just opened, and finds its plan in the plan cache on disk. "replanned" has no plan cache.
"bind again" binds a symbol that was bound for the same shapes before in the same process. weftplan prepares its calls
in the first run and MXNet in the bind, so a bind with its first run is timed as well. Both frameworks return while
other threads still fill new arrays with zeros, so a bind that waits for these is also timed. Runs and steps are the
median of several in a row, since the other framework leaves the processor's caches empty.

The last column is planned bytes at batch 1. MXNet's figure excludes its own scratch; it is a sixteenth of the plan at
batch 16, since MXNet reports whole mebibytes. MXNet's second figure is without its fused operators.

By default one network of each kind is measured, which takes some minutes; --all adds the larger networks.

    python bench/bench_models.py --mxnet-python PATH [--quick | --all] [--networks mlp lstm] [--threads 1] [--rounds 3]
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import blas_setting
import numpy as np

import weftplan as mx

PEER = Path(__file__).parent / "peers" / "model_files.py"
FORMATS = ("0.8", "0.9", "1.0", "1.9")
QUICK = ("mlp", "lenet", "resnet18", "lstm")
REPEATED = {"vgg16", "resnet34", "resnet101", "resnet152"}
"""Built-in networks that only --all measures: the larger networks of a kind."""
LARGE = {"vgg16", "resnet101", "resnet152", "inception_v3", "densenet121"}
RUN = 0.25
"""Seconds for which a framework repeats a run before the other framework gets the processor."""
CHAINS = {"chain of 2,000 nodes": 2_000, "chain of 20,000 nodes": 20_000}


def in_format(text, version):
    """Return a symbol's current JSON rewritten as MXNet release ``version`` (0.8, 0.9, 1.0 or 1.9) wrote it."""
    if version == "1.9":
        return text
    data = json.loads(text)
    data["attrs"] = {"mxnet_version": ["int", {"0.9": 905, "1.0": 10000}.get(version)]}
    if version == "1.0":
        return json.dumps(data, indent=2)
    aux = set()
    for node in data["nodes"]:
        attrs = node.pop("attrs", {})
        op = node["op"]
        if version == "0.9":
            node.update({"attr": attrs} if attrs else {})
            continue
        hidden = {key: value for key, value in attrs.items() if key.startswith("__")}
        node["param"] = {key: value for key, value in attrs.items() if key not in hidden}
        node.update({"attr": hidden} if hidden else {})
        node["backward_source_id"] = -1
        node["inputs"] = [entry[:2] for entry in node["inputs"]]
        if op == "BatchNorm":
            aux.update(entry[0] for entry in node["inputs"][3:])
            del node["inputs"][3:]
    if version == "0.8":
        _drop(data, aux)
        del data["attrs"], data["node_row_ptr"]
        data["heads"] = [entry[:2] for entry in data["heads"]]
    return json.dumps(data, indent=2)


def _drop(data, gone):
    """Remove the nodes with the numbers ``gone`` from a symbol's JSON, in place, and renumber the others."""
    new = {}
    for number in range(len(data["nodes"])):
        if number not in gone:
            new[number] = len(new)
    data["nodes"] = [node for number, node in enumerate(data["nodes"]) if number not in gone]
    for entries in (*(node["inputs"] for node in data["nodes"]), data["heads"]):
        for entry in entries:
            entry[0] = new[entry[0]]
    data["arg_nodes"] = [new[number] for number in data["arg_nodes"] if number in new]


def network(name):
    """Return (symbol, function from a batch size to the shapes of the inputs)."""
    if name in CHAINS:
        x = mx.sym.Variable("data")
        for k in range(CHAINS[name] // 4):  # four nodes: two variables, two operators
            x = mx.sym.Activation(mx.sym.FullyConnected(x, num_hidden=4, name=f"fc{k}"), act_type="tanh", name=f"a{k}")
        return mx.sym.MakeLoss(x), lambda batch: {"data": (batch, 4)}
    return mx.models.get(name), lambda batch: mx.models.input_shapes(name, batch)


def write(folder, name, version):
    """Write a network's files; return ({"symbol": path, "params": path}, function from a batch size to shapes)."""
    symbol, shapes = network(name)
    known = shapes(1)
    of_args, _, of_states = symbol.infer_shape(**known)
    random = np.random.RandomState(1)
    stored = {}
    for key, shape in zip(symbol.list_arguments(), of_args, strict=True):
        if key not in known:
            fan = int(np.prod(shape[1:])) or 1
            stored[f"arg:{key}"] = mx.nd.array(random.standard_normal(shape).astype(np.float32) / np.sqrt(fan))
    for key, shape in zip(symbol.list_auxiliary_states(), of_states, strict=True):
        stored[f"aux:{key}"] = mx.nd.array(random.uniform(0.5, 1.5, shape).astype(np.float32))
    stem = folder / name.replace(" ", "_").replace(",", "")
    paths = {"symbol": f"{stem}-symbol.json", "params": f"{stem}-0000.params"}
    Path(paths["symbol"]).write_text(in_format(symbol.tojson(), version))
    mx.nd.save(paths["params"], stored)
    return paths, shapes


class Peer:
    """One framework in its own process."""

    def __init__(self, python, package, threads, **more):
        keys = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "WEFTPLAN_BLAS_NTHREADS")
        env = {**os.environ, **dict.fromkeys(keys, str(threads)), "MXNET_SUBGRAPH_VERBOSE": "0", **more}
        self.process = subprocess.Popen(
            [python, str(PEER), package], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, bufsize=1, env=env,
        )  # fmt: skip

    def do(self, job, **more):
        """Send a job and return its answer; the key ``error`` says that the job failed or the process died."""
        try:
            self.process.stdin.write(json.dumps({"do": job, **more}) + "\n")
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        return json.loads(answer) if answer else {"error": f"the process ended with {self.process.wait()}"}

    def close(self):
        """Close the job pipe, so that the process exits, and wait for its exit."""
        self.process.stdin.close()
        self.process.wait()


def compare(ours, theirs, rounds, key, job, *, before=None, **more):
    """Run a job in both frameworks in turn; return (our median seconds, MXNet's, median ratio), or an error's text.

    ``key`` is the clock, ``wall`` or ``cpu``. MXNet's figures are None if ``theirs`` is None. ``before`` names files to
    open before each job, outside the clock.
    """
    pairs = []
    for _ in range(rounds):
        for peer in (ours, theirs):
            if before is not None and peer is not None:
                peer.do("load", **before)
        pair = [peer.do(job, **more) for peer in (ours, theirs) if peer is not None]
        failed = next((one["error"] for one in pair if "error" in one), None)
        if failed:
            return failed
        pairs.append([one[key] for one in pair])
    mine = statistics.median(pair[0] for pair in pairs)
    if theirs is None:
        return mine, None, None
    return mine, statistics.median(p[1] for p in pairs), statistics.median(p[0] / p[1] for p in pairs)


def shown(result):
    """Return a table cell for a result of :func:`compare`: our milliseconds, MXNet's, and the ratio."""
    if isinstance(result, str):
        return result.replace("|", "/")
    mine, theirs, ratio = result
    return f"{mine * 1e3:.2f}" if theirs is None else f"{mine * 1e3:.2f} / {theirs * 1e3:.2f} = **{ratio:.2f}**"


def main():
    """Measure the networks, and print a table per number of threads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mxnet-python", help="interpreter of a virtual environment with mxnet==1.9.1")
    parser.add_argument("--networks", nargs="+", help="built-in networks and the two chains; default: all")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--all", action="store_true", help=f"also {', '.join(sorted(REPEATED))}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--format", choices=FORMATS, help="of the symbol files; default: each in turn")
    parser.add_argument("--quick", action="store_true", help=f"one round of {', '.join(QUICK)} and the small chain")
    parser.add_argument("--cpu", action="store_true", help="CPU time of all threads, not wall time")
    args = parser.parse_args()
    some = [name for name in mx.models.NETWORKS if args.all or name not in REPEATED]
    names = args.networks or ([*QUICK, *list(CHAINS)[:1]] if args.quick else [*some, *CHAINS])
    rounds, key = (1 if args.quick else args.rounds), "cpu" if args.cpu else "wall"
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {rounds} rounds; "
          f"{'CPU' if args.cpu else 'wall'} milliseconds: weftplan / MXNet = median ratio")  # fmt: skip
    print(blas_setting.describe())
    ratios = {}
    with tempfile.TemporaryDirectory() as scratch:
        for threads in args.threads:
            print(f"\n### {threads} thread{'s' * (threads > 1)}\n")
            columns = ("load", "bind, inference", "replanned", "bind again", "run, batch 1", "bind, training",
                       "replanned, training", "bind again, training", "step", "bind with its fills, training",
                       "bind and first run, inference")  # fmt: skip
            print(f"| network | format | {' | '.join(columns)} | planned bytes, with scratch (MXNet's, unfused) |")
            print("|---" * (len(columns) + 3) + "|")
            for k, name in enumerate(names):
                version = args.format or FORMATS[k % len(FORMATS)]
                paths, shapes = write(Path(scratch), name, version)
                ours = Peer(sys.executable, "weftplan", threads)
                theirs = Peer(args.mxnet_python, "mxnet", threads) if args.mxnet_python else None
                uncached = Peer(sys.executable, "weftplan", threads, WEFTPLAN_PLAN_CACHE="0")
                peers = [peer for peer in (ours, theirs) if peer is not None]
                for peer in (*peers, uncached):  # the first load imports modules
                    peer.do("load", **paths)
                cells = [compare(ours, theirs, rounds, key, "load", **paths)]
                plans = []
                for mode in ("inference", "training"):
                    batch = 1 if mode == "inference" or name in CHAINS else 2 if name in LARGE else 8
                    job = {"mode": mode, "shapes": shapes(batch)}
                    for peer in (*peers, uncached):  # the first bind imports and compiles
                        peer.do("bind", **job)
                    # weftplan caches plans with their symbol; a symbol that was just opened has none.
                    for mine, before in ((ours, paths), (uncached, paths), (ours, None)):
                        cells.append(compare(mine, theirs, rounds, key, "bind", before=before, **job))
                    actual = [peer.do("facts") for peer in peers]
                    plans = plans or actual
                    cells.append(compare(ours, theirs, rounds, key, "runs", seconds=RUN))
                    if mode == "inference" and theirs is not None:
                        values = [peer.do("outputs") for peer in peers]
                        if "error" not in values[0] and "error" not in values[1]:
                            assert np.isclose(values[0]["mean"], values[1]["mean"], rtol=1e-3), (name, values)
                filled = {"before": paths, "mode": mode, "shapes": shapes(batch)}
                cells.append(compare(ours, theirs, rounds, key, "bind_and_fill", **filled))
                cells.append(compare(ours, theirs, rounds, key, "bind_and_run", mode="inference", shapes=shapes(1)))
                for peer in (*peers, uncached):
                    peer.close()
                for column, cell in zip(columns, cells, strict=True):
                    if not isinstance(cell, str) and cell[2]:
                        ratios.setdefault((threads, column), []).append(cell[2])
                print(f"| {name} | {version} | {' | '.join(map(shown, cells))} | "
                      f"{_plans(plans, args.mxnet_python, paths, shapes(16), threads)} |", flush=True)  # fmt: skip
    for (threads, column), actual in ratios.items():
        mean = np.exp(np.mean(np.log(actual)))
        print(f"\n{threads} thread{'s' * (threads > 1)}, {column}: geometric mean of the ratios {mean:.2f}, "
              f"worst {max(actual):.2f}", end="")  # fmt: skip
    print()


def _plans(plans, python, paths, shapes, threads):
    """Return the cell of planned bytes for inference: ours without and with scratch; MXNet's with and without fusion.

    ``shapes`` are those of MXNet's plans, at batch 16.
    """
    mine = plans[0]
    text = f"{mine.get('planned', 0):,}, {mine.get('with_scratch', 0):,}"
    if python is None or "error" in plans[1]:
        return text
    results = []
    for backend in ({}, {"MXNET_SUBGRAPH_BACKEND": "NONE"}):
        peer = Peer(python, "mxnet", threads, **backend)
        peer.do("load", **paths)
        peer.do("bind", mode="inference", shapes=shapes)
        results.append(peer.do("facts").get("planned", 0) // 16)
        peer.close()
    return f"{text} ({results[0]:,}, {results[1]:,})"


if __name__ == "__main__":
    main()
