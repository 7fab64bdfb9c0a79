"""Write the executed graphs of MXNet 1.9.1: the inputs of each node, and the sizes of its outputs.

Run with the Python of an environment that has MXNet 1.9.1, from the repository's root:

    PYTHON-WITH-MXNET tests/planner/golden/make_mxnet_graphs.py

Each network is bound for training and run once with a monitor, which sees the shape of every output, hidden or visible.
The forward and backward graph, in MXNet's numbering, is read from the executor's debug text. The result,
``mxnet_graphs.json.gz``, contains for each network the operator of each node (null for a variable), its inputs as
[node, output], its control dependencies, the number of elements of each output, and the heads. Tests need no MXNet.
"""

import ctypes
import gzip
import itertools
import json
import math
import os
import re
import warnings

warnings.filterwarnings("ignore")
import mxnet as mx  # noqa: E402 - MXNet warns while it is imported

SYMBOLS = "bench/data/symbols"
NETWORKS = {
    "mlp": (64, 784),
    "lenet": (64, 1, 28, 28),
    "alexnet": (32, 3, 224, 224),
    "resnet18": (32, 3, 224, 224),
    "mobilenet": (32, 3, 224, 224),
    "inception_v3": (32, 3, 299, 299),
    "densenet121": (32, 3, 224, 224),
}


def load(name):
    """Return the symbol of the network ``name`` from its file."""
    path = os.path.join(SYMBOLS, name + ".json")
    if os.path.exists(path):
        return mx.sym.load(path)
    with gzip.open(path + ".gz", "rt") as file:
        return mx.sym.load_json(file.read())


def run(symbol, shape):
    """Return the debug text, the outputs and the shapes of variables of one training step.

    The outputs are (name, shape) in order of execution.
    """
    executor = symbol.simple_bind(mx.cpu(), grad_req="write", data=shape)
    seen = []

    def watch(name, handle):
        array = mx.nd.NDArray(ctypes.cast(handle, mx.base.NDArrayHandle), writable=False)
        seen.append((mx.base.py_str(name) if isinstance(name, bytes) else name, tuple(array.shape)))
        array.handle = None  # borrowed, so it must not be freed

    executor.set_monitor_callback(watch)
    executor.forward(is_train=True)
    executor.backward()
    mx.nd.waitall()
    known = {name: array.shape for name, array in {**executor.arg_dict, **executor.aux_dict}.items()}
    return executor.debug_str(), seen, known


def parse(text):
    """Return the nodes and heads of a debug text.

    A name that several nodes have means the last of them before the reference.
    """
    nodes, last, heads, current = [], {}, [], None

    def finish():
        nonlocal current
        if current is not None:
            last[current["name"]] = len(nodes)
            nodes.append(current)
            current = None

    def reference(word):
        name, output = re.match(r"(.*)\((\d+)\)$", re.sub(r" version=\d+$", "", word)).groups()
        return [last[name], int(output)]

    for line in text.split("\n"):
        if line.startswith("\toutput["):
            heads.append(line.split("=", 1)[1])
        elif line.startswith(("Variable:", "-----", "Total")):
            finish()
            if line.startswith("Variable:"):
                current = {"op": None, "name": line[9:], "inputs": [], "controls": []}
                finish()
        elif line.startswith("Op:"):
            op, name = re.match(r"Op:(.*), Name=(.*)$", line).groups()
            current = {"op": op, "name": name, "inputs": [], "controls": []}
        elif line.startswith("\targ["):
            current["inputs"].append(reference(line.split("=", 1)[1]))
        elif line.startswith("\tcdep["):
            current["controls"].append(last[line.split("=", 1)[1]])
    return nodes, [reference(word) for word in heads]


def add_sizes(nodes, seen, known):
    """Add to every node the numbers of elements of its outputs, from the outputs ``seen`` by the monitor."""
    at = 0
    operators = [node for node in nodes if node["op"]]
    following = {id(a): b["name"] for a, b in itertools.pairwise(operators)}
    for node in nodes:
        if node["op"] is None:
            node["sizes"] = [math.prod(known[node["name"]])]
            continue
        prefix, after = node["name"] + "_", following.get(id(node), "\0") + "_"
        sizes = []
        while at < len(seen) and seen[at][0].startswith(prefix):
            remaining = seen[at][0][len(prefix) :]
            longer_next = after.startswith(prefix) and seen[at][0].startswith(after)
            if sizes and (remaining in ("output", "output0") or longer_next):
                break
            sizes.append(math.prod(seen[at][1]))
            at += 1
        node["sizes"] = sizes
    assert at == len(seen), "outputs were left over: names could not be matched"


def main():
    """Write the golden file of all networks."""
    result = {}
    for name, shape in NETWORKS.items():
        text, seen, known = run(load(name), shape)
        nodes, heads = parse(text)
        add_sizes(nodes, seen, known)
        result[name] = {
            "nodes": [[n["op"], n["inputs"], n["controls"], n["sizes"]] for n in nodes],
            "heads": heads,
        }
        print(name, len(nodes), "nodes")
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "mxnet_graphs.json.gz")
    with open(path, "wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", mtime=0, filename="") as file:
        file.write(json.dumps(result, separators=(",", ":")).encode())


if __name__ == "__main__":
    main()
