"""Planner peer: the plans of MXNet 1.9.1 for symbol files. Needs MXNet's own interpreter.

    python bench/peers/mxnet_planner.py < requests.json

Standard input is ``{network: {"file": path, "shapes": {name: dims}}}``. Prints a JSON object: for each network the
mebibytes that the executor reports after a bind for training and for inference (``debug_str`` prints whole mebibytes).
"""

import gc
import gzip
import json
import re
import sys
import warnings

warnings.filterwarnings("ignore")
import mxnet as mx  # noqa: E402 - MXNet warns while it is imported


def planned_mib(symbol, shapes, grad_req):
    """Bind a symbol, and return the whole mebibytes that the executor reports."""
    executor = symbol.simple_bind(mx.cpu(), grad_req=grad_req, **{k: tuple(v) for k, v in shapes.items()})
    return int(re.search(r"Total (\d+) MB allocated", executor.debug_str()).group(1))


def main():
    """Bind every network for training and for inference, and print the mebibytes."""
    by_name = {}
    for name, request in json.load(sys.stdin).items():
        path = request["file"]
        with (gzip.open if path.endswith(".gz") else open)(path, "rt") as file:
            symbol = mx.sym.load_json(file.read())
        by_name[name] = {}
        for mode, grad_req in (("training", "write"), ("inference", "null")):
            by_name[name][mode] = planned_mib(symbol, request["shapes"], grad_req)
            gc.collect()
    print(json.dumps(by_name))


main()
