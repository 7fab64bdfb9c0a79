"""A memory planner to read in five minutes: count readers, free results without readers, reuse blocks of similar size.

    python examples/planner_in_100_lines.py [NETWORK]

It plans the forward part of a built-in network by MXNet's rule. Its peak equals that of weftplan's strategy
``match_range`` if weftplan omits the steps that are missing here: computing in place, fusing layers, counting scratch
memory, and aligning addresses. A test compares the two for every built-in network.
"""

import json
import sys
from math import prod

import weftplan as mx

RANGE = 10  # a block serves requests from a tenth to ten times its own size


class Blocks:
    """Memory blocks, each used by one result after another."""

    def __init__(self):
        self.sizes = []  # bytes of every block
        self.free = []  # (bytes, order of release, block)
        self.released = 0

    def take(self, nbytes):
        """Return the smallest sufficient free block; else the largest smaller block, grown; else a new block."""
        large = [item for item in self.free if nbytes <= item[0] <= nbytes * RANGE]
        small = [item for item in self.free if nbytes // RANGE <= item[0] < nbytes]
        if large or small:
            chosen = min(large) if large else max(small)
            self.free.remove(chosen)
            block = chosen[2]
            self.sizes[block] = max(self.sizes[block], nbytes)
            return block
        self.sizes.append(nbytes)
        return len(self.sizes) - 1

    def give_back(self, block):
        """Mark a block as free; its content has no more readers."""
        self.free.append((self.sizes[block], self.released, block))
        self.released += 1


def plan(symbol, **shapes):
    """Return (bytes of all blocks, {(name, output number) of each result: its block})."""
    graph = json.loads(symbol.tojson())
    nodes = graph["nodes"]
    internals = symbol.get_internals()
    sizes = {}  # name of a node -> bytes of each of its outputs
    for output, shape in zip(internals, internals.infer_shape(**shapes)[1], strict=True):
        sizes.setdefault(output.name, []).append(4 * prod(shape))

    # 1. How often is every result read? The caller reads the outputs of the network.
    readers = {}
    for source, index, *_ in [*(edge for node in nodes for edge in node["inputs"]), *graph["heads"]]:
        readers[source, index] = readers.get((source, index), 0) + 1

    # 2. Walk in the order of execution: take memory for each result, then free the inputs that have no more readers.
    blocks, block_of = Blocks(), {}
    for number, node in enumerate(nodes):
        if node["op"] == "null":
            continue  # a weight or an input, which the caller provides
        for index, nbytes in enumerate(sizes[node["name"]]):
            if (number, index) in readers:
                block_of[number, index] = blocks.take(nbytes)
        for source, index, *_ in node["inputs"]:
            readers[source, index] -= 1
            if readers[source, index] == 0 and (source, index) in block_of:
                blocks.give_back(block_of[source, index])
    return sum(blocks.sizes), {(nodes[number]["name"], index): block for (number, index), block in block_of.items()}


def reference(symbol, shapes):
    """Return the peak of weftplan's planner without the steps that this example lacks."""
    options = mx.planner.PlanOptions(strategy="match_range", enable_inplace=False, fusion=False, alignment=8)
    return symbol.plan(shapes, train=False, workspaces=False, options=options).peak


if __name__ == "__main__":
    name = sys.argv[1] if len(sys.argv) > 1 else "lenet"
    net, shapes = mx.models.get(name), mx.models.input_shapes(name, 32)
    total, block_of = plan(net, **shapes)
    for (result, index), block in block_of.items():
        print(f"{result:14} output {index}: block {block}")
    expected = reference(net, shapes)
    print(f"this planner {total:,} bytes; weftplan's match_range {expected:,}")
    assert total == expected
