"""Exchange symbols with MXNet 1.9.1; run with the Python of an environment that has it.

    PYTHON-WITH-MXNET tests/golden/interchange.py

Two directions, both stored under ``tests/golden/interchange`` so that the suite needs no MXNet:

* every case of ``interchange_cases.py`` is built and saved by MXNet (``<case>-symbol.json``, ``<case>-0000.params``),
  run on its parameters, and the outputs stored (``<case>.npz``);
* every ``ours-<network>-symbol.json``, written by weftplan (``write_ours.py`` beside this file), is loaded by MXNet
  and run the same way.

Nothing random is left: arrays are drawn from a seed made of their names.
"""

import os
import sys
import warnings
import zlib

import numpy as np

os.environ["MXNET_SUBGRAPH_BACKEND"] = "NONE"  # fused subgraphs rename arguments while binding
warnings.filterwarnings("ignore")
import mxnet as mx  # noqa: E402 - MXNet warns while it is imported

HERE = os.path.dirname(os.path.abspath(__file__))
FOLDER = os.path.join(HERE, "interchange")
sys.path.insert(0, HERE)
import interchange_cases as cases  # noqa: E402 - lies beside this file


def values(name, shape):
    """The array called ``name``: uniform, positive (so that every operator is defined) and away from ties."""
    random = np.random.RandomState(zlib.crc32(name.encode()) & 0x7FFFFFFF)
    return random.uniform(0.2, 1.2, size=shape).astype(np.float32)


def run(name, symbol, shapes):
    """Save parameters and outputs of ``symbol``."""
    arg_shapes, _, aux_shapes = symbol.infer_shape(**shapes)
    args = {n: mx.nd.array(values(n, s)) for n, s in zip(symbol.list_arguments(), arg_shapes, strict=True)}
    aux = {n: mx.nd.array(values(n, s)) for n, s in zip(symbol.list_auxiliary_states(), aux_shapes, strict=True)}
    outputs = symbol.bind(mx.cpu(), args, aux_states=aux, grad_req="null").forward(is_train=False)
    stored = {"arg:" + n: a for n, a in args.items()}
    stored.update({"aux:" + n: a for n, a in aux.items()})
    mx.nd.save(os.path.join(FOLDER, name + "-0000.params"), stored)
    arrays = {f"output{i}": o.asnumpy() for i, o in enumerate(outputs)}
    np.savez_compressed(os.path.join(FOLDER, name + ".npz"), **arrays)
    print(name, [a.shape for a in arrays.values()])


def main():
    """Both directions."""
    os.makedirs(FOLDER, exist_ok=True)
    for name, (build, shapes) in cases.CASES.items():
        with mx.name.NameManager():
            symbol = build(mx)
        symbol.save(os.path.join(FOLDER, name + "-symbol.json"))
        run(name, symbol, shapes)
    for name, shapes in cases.OURS.items():
        path = os.path.join(FOLDER, f"ours-{name}-symbol.json")
        run("ours-" + name, mx.sym.load(path), shapes)


if __name__ == "__main__":
    main()
