"""A memory planner to read in five minutes: count readers, free what nobody reads, reuse blocks of similar size.

    python examples/planner_in_100_lines.py

It plans the forward part of LeNet by MXNet's rule, and comes to the very peak that the strategy ``match_range`` of
weftplan does (without computing in place and without scratch memory, which are its next two steps).
"""

import json
from math import prod

import weftplan as mx

RANGE = 10  # a block serves requests from a tenth to ten times its own size


class Blocks:
    """Memory in whole blocks, which are handed on."""

    def __init__(self):
        self.sizes = []  # bytes of every block
        self.free = []  # (bytes, order of release, block)
        self.released = 0

    def take(self, nbytes):
        """The smallest free block that is large enough; else the largest of the others, which grows; else a new one."""
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
        """Nobody reads it any more."""
        self.free.append((self.sizes[block], self.released, block))
        self.released += 1


def plan(symbol, **shapes):
    """(bytes of all blocks, the block of each result)."""
    graph = json.loads(symbol.tojson())
    nodes = graph["nodes"]
    internals = symbol.get_internals()
    _, found, _ = internals.infer_shape(**shapes)
    size = dict(zip(internals.list_outputs(), (4 * prod(shape) for shape in found), strict=True))

    # 1. How often is every result read? An output of the network is read once more, by whoever asked for it.
    readers = [0] * len(nodes)
    for node in nodes:
        for source, _, *_ in node["inputs"]:
            readers[source] += 1
    for source, _, *_ in graph["heads"]:
        readers[source] += 1

    # 2. Walk in the order of execution: take memory for the result, then free what was read for the last time.
    blocks, home = Blocks(), {}
    for number, node in enumerate(nodes):
        if node["op"] == "null":
            continue  # a weight or an input: the caller brings it
        home[number] = blocks.take(size[f"{node['name']}_output"])
        for source, _, *_ in node["inputs"]:
            readers[source] -= 1
            if readers[source] == 0 and source in home:
                blocks.give_back(home[source])
    return sum(blocks.sizes), {nodes[number]["name"]: block for number, block in home.items()}


if __name__ == "__main__":
    net, shapes = mx.models.get("lenet"), {"data": (32, 1, 28, 28)}
    total, home = plan(net, **shapes)
    for name, block in home.items():
        print(f"{name:10} block {block}")
    own = net.plan(
        shapes,
        train=False,
        strategy="match_range",
        options=mx.planner.PlanOptions(),
        enable_inplace=False,
        workspaces=False,
    )
    print(f"this planner {total:,} bytes; weftplan's match_range {own.peak:,}")
    assert total == own.peak
