"""Question: how many Python functions does one `simple_bind` of a small network call, and in how many files?

The network is a convolution, batch norm, relu, a fully connected layer and softmax. Two networks like it are bound
first, to warm the caches of operators; the plan of the third is not cached. Only functions of weftplan are counted.

    python bench/bind_calls.py          the totals
    python bench/bind_calls.py --most 20   and the functions that are called most
"""

import argparse
import collections
import os
import sys

os.environ["WEFTPLAN_PLAN_CACHE"] = "0"

import weftplan as mx

PACKAGE = os.path.dirname(mx.__file__) + os.sep


def network(prefix):
    """Return the network's symbol; its names begin with ``prefix``."""
    net = mx.sym.Convolution(mx.sym.Variable("data"), kernel=(3, 3), num_filter=8, name=f"{prefix}_conv")
    net = mx.sym.Activation(mx.sym.BatchNorm(net, name=f"{prefix}_norm"), act_type="relu", name=f"{prefix}_relu")
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(net, num_hidden=10, name=f"{prefix}_fc"), name=f"{prefix}_loss")


def calls():
    """Return {(file, function): number of calls} of one bind."""
    counts = collections.Counter()

    def note(frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            counts[code.co_filename.removeprefix(PACKAGE), getattr(code, "co_qualname", code.co_name)] += 1

    for prefix in ("first", "second"):
        network(prefix).simple_bind(mx.cpu(), data=(2, 3, 8, 8))
    symbol = network("third")
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        symbol.simple_bind(mx.cpu(), data=(2, 3, 8, 8))
    finally:
        sys.setprofile(before)
    return counts


def main():
    """Count the calls, and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=0, help="how many functions to list")
    counts = calls()
    print(f"{counts.total()} calls in {len({file for file, _ in counts})} files")
    for (file, name), count in counts.most_common(parser.parse_args().most):
        print(f"{count:6d}  {file}  {name}")


if __name__ == "__main__":
    main()
