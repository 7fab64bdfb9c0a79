"""Exchange symbols with MXNet 1.9.1; run with the Python of an environment that has it.

    PYTHON-WITH-MXNET tests/golden/interchange.py

Two directions, both stored under ``tests/golden/interchange`` so that the suite needs no MXNet:

* every case of ``interchange_cases.py`` is built and saved by MXNet (``<case>-symbol.json``, ``<case>-0000.params``),
  run on its parameters, and the outputs stored (``<case>.npz``);
* every ``ours-<network>-symbol.json``, written by weftplan (``write_ours.py``), is loaded by MXNet and run the same
  way; its parameters are not stored, since they follow from their names.
"""

import os
import sys
import warnings

import numpy as np

os.environ["MXNET_SUBGRAPH_BACKEND"] = "NONE"  # fused subgraphs rename arguments while binding
warnings.filterwarnings("ignore")
import mxnet as mx  # noqa: E402 - MXNet warns while it is imported

HERE = os.path.dirname(os.path.abspath(__file__))
FOLDER = os.path.join(HERE, "interchange")
sys.path.insert(0, HERE)
import interchange_cases as cases  # noqa: E402 - in this folder


def run(name, symbol, shapes, params):
    """Run ``symbol`` and save its outputs; save its parameters too if ``params`` is true."""
    arg_shapes, _, aux_shapes = symbol.infer_shape(**shapes)
    args = {n: mx.nd.array(cases.values(n, s)) for n, s in zip(symbol.list_arguments(), arg_shapes, strict=True)}
    aux = {n: mx.nd.array(cases.values(n, s)) for n, s in zip(symbol.list_auxiliary_states(), aux_shapes, strict=True)}
    outputs = symbol.bind(mx.cpu(), args, aux_states=aux, grad_req="null").forward(is_train=False)
    if params:
        stored = {"arg:" + n: a for n, a in args.items()}
        stored.update({"aux:" + n: a for n, a in aux.items()})
        mx.nd.save(os.path.join(FOLDER, name + "-0000.params"), stored)
    arrays = {f"output{i}": o.asnumpy() for i, o in enumerate(outputs)}
    np.savez_compressed(os.path.join(FOLDER, name + ".npz"), **arrays)
    print(name, [a.shape for a in arrays.values()])


def main():
    """Run both directions."""
    os.makedirs(FOLDER, exist_ok=True)
    for name, (build, shapes) in cases.CASES.items():
        with mx.name.NameManager():
            symbol = build(mx)
        symbol.save(os.path.join(FOLDER, name + "-symbol.json"))
        run(name, symbol, shapes, params=True)
    for name, shapes in cases.OURS.items():
        path = os.path.join(FOLDER, f"ours-{name}-symbol.json")
        run("ours-" + name, mx.sym.load(path), shapes, params=False)


if __name__ == "__main__":
    main()
