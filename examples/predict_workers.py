"""Predict a training step of many workers: formulas for exchanges, and buckets that are sent during backward.

    python examples/predict_workers.py
    python examples/predict_workers.py --network vgg16 --step-ms 180 --workers 1,8,64 --topology "(20us,1.1GB/s)"

The program sends nothing and measures nothing. With P workers, S bytes, latency a, b seconds per byte and o seconds of
a sender's time per message, an exchange that gives every worker the sum takes

    one_step   every worker sums one range for all:      2 (a + (P-1) o) + 2 (P-1)/P S b
    ring       ranges travel around twice:               2 (P-1) (a + o) + 2 (P-1)/P S b
    halving    halves, quarters, ... there and back:     2 log2(P) (a + o) + 2 (P-1)/P S b
    tree       pairs up to a root, and down again:       2 log2(P) (a + o + S b)

``one_step`` is the algorithm of ``dist_sync``. On machines of several workers the table also tries the hierarchy: sum
within each machine, exchange between machines, and distribute the sums within each machine (``within+ring`` and so on).
"""

import argparse
import re
from dataclasses import dataclass
from math import ceil, log2, prod

import weftplan as mx

BUCKETS = [float(1 << power) for power in range(18, 31)]  # 256 KiB to 1 GiB
BACKWARD = 2 / 3  # the share of a step that backward takes


@dataclass(frozen=True)
class Link:
    """The connection of one worker, or of one machine, to the others; workers share the bandwidth of a shared link."""

    latency: float  # seconds to the first byte
    bandwidth: float  # bytes a second in each direction
    overhead: float = 1e-6  # seconds of the sender's time per message
    shared: bool = False


@dataclass(frozen=True)
class Topology:
    """Machines of ``per_machine`` workers: ``inner`` connects workers of one machine, ``outer`` connects machines."""

    inner: Link
    outer: Link
    per_machine: int = 1


# From data sheets, not measured. Networks have 92 % of their line rate.
PRESETS = {
    "nvlink4": Link(2e-6, 370e9),
    "pcie4": Link(8e-6, 13e9, shared=True),
    "10gbe": Link(30e-6, 1.15e9, 3e-6),
    "25gbe": Link(20e-6, 2.9e9, 3e-6),
    "100gbe": Link(5e-6, 11.5e9, 2e-6),
    "ib400": Link(2.5e-6, 46e9),
}


def parse_topology(text):
    """Return a topology from ``100gbe``, ``8xnvlink4+100gbe``, or with numbers, ``4x(5us,12GB/s)+(20us,1.1GB/s)``."""
    count, inner, outer = re.fullmatch(r"(?:(\d+)x([^+]+)\+)?([^+]+)", text.strip()).groups()
    outer = parse_link(outer)
    return Topology(outer, outer) if count is None else Topology(parse_link(inner), outer, int(count))


def parse_link(text):
    """Return a link from its name in PRESETS or from its numbers, as in ``(5us,12GB/s)``."""
    numbers = re.fullmatch(r"\(\s*([\d.]+)\s*us\s*,\s*([\d.]+)\s*GB/s\s*\)", text)
    if numbers is not None:
        return Link(float(numbers[1]) / 1e6, float(numbers[2]) * 1e9)
    if text not in PRESETS:
        raise SystemExit(f"unknown link {text!r}: expected one of {', '.join(PRESETS)}, or numbers as in (5us,12GB/s)")
    return PRESETS[text]


# 1. One exchange on links of one kind.


def byte_seconds(link, workers):
    """Return the seconds per byte; on a shared link the bytes of all workers follow one another."""
    return (workers if link.shared else 1) / link.bandwidth


def one_step(nbytes, workers, link):
    """Return the seconds of two rounds; in a round every worker sends a range to each other worker."""
    sent = 2 * (workers - 1) / workers * nbytes
    return 2 * (link.latency + (workers - 1) * link.overhead) + sent * byte_seconds(link, workers)


def ring(nbytes, workers, link):
    """Return the seconds of a ring: P - 1 rounds add and P - 1 copy, each with one message to the neighbour."""
    sent = 2 * (workers - 1) / workers * nbytes
    return 2 * (workers - 1) * (link.latency + link.overhead) + sent * byte_seconds(link, workers)


def halving(nbytes, workers, link):
    """Return the seconds of recursive halving, including the step that folds extra workers into a power of two."""
    within = 1 << (workers.bit_length() - 1)
    extra = 2 * (link.latency + link.overhead + nbytes * byte_seconds(link, workers)) if workers > within else 0.0
    sent = 2 * (within - 1) / within * nbytes
    return extra + 2 * log2(within) * (link.latency + link.overhead) + sent * byte_seconds(link, within)


def tree(nbytes, workers, link):
    """Return the seconds of a binary tree: pairs send all bytes towards a root, and the sums go back down."""
    levels = ceil(log2(workers))
    moved = nbytes * ((workers - 1) if link.shared else levels) / link.bandwidth
    return 2 * (levels * (link.latency + link.overhead) + moved)


ALGORITHMS = {"one_step": one_step, "ring": ring, "halving": halving, "tree": tree}


# 2. One exchange on machines of several workers.


def seconds(algorithm, nbytes, workers, topology):
    """Return the seconds of one exchange with an algorithm of ALGORITHMS; ``within+`` first sums within machines."""
    formula, group = ALGORITHMS[algorithm.removeprefix("within+")], topology.per_machine
    inner, outer = topology.inner, topology.outer
    if workers <= 1:
        return 0.0
    if workers <= group:
        return formula(nbytes, workers, inner)
    if algorithm in ALGORITHMS:
        # A ring crosses each machine's link once in each direction; in other patterns its workers share the link.
        share = 1 if algorithm == "ring" else group
        return formula(nbytes, workers, Link(outer.latency, outer.bandwidth / share, outer.overhead, outer.shared))
    # Each worker of a machine exchanges its own range, and all workers share the machine's link.
    return ring(nbytes, group, inner) + formula(nbytes, ceil(workers / group), outer)


def cheapest(nbytes, workers, topology):
    """Return (seconds, name) of the fastest algorithm; of equally fast algorithms the first."""
    names = list(ALGORITHMS)
    if 1 < topology.per_machine < workers:
        names += [f"within+{name}" for name in ALGORITHMS]
    return min(((seconds(name, nbytes, workers, topology), name) for name in names), key=lambda found: found[0])


# 3. A step: backward makes gradients one by one, and full buckets are exchanged meanwhile, one after the other.


@dataclass(frozen=True)
class Step:
    """A predicted step: its seconds, the seconds of its exchanges, and the algorithm of its largest bucket."""

    seconds: float
    exchanging: float
    buckets: int
    algorithm: str


def step(gradients, computation, workers, topology, bucket):
    """Return a step with buckets of ``bucket`` bytes or more, except the last bucket.

    ``gradients`` are (bytes, seconds until ready) in the order of backward; ``computation`` is the seconds of forward
    and backward.
    """
    free = exchanging = filled = largest = 0.0
    algorithm, count = "none", 0
    for index, (nbytes, ready) in enumerate(gradients):
        filled += nbytes
        if filled < bucket and index < len(gradients) - 1:
            continue
        taken, name = cheapest(filled, workers, topology)
        if filled > largest:
            algorithm, largest = name, filled
        free = max(free, ready) + taken  # full bucket, idle link
        exchanging, filled, count = exchanging + taken, 0.0, count + 1
    return Step(max(computation, free), exchanging, count, algorithm if workers > 1 else "none")


def best_step(gradients, computation, workers, topology):
    """Return the fastest step over all sizes of buckets; of equally fast steps, one with the fewest exchanges."""
    steps = [step(gradients, computation, workers, topology, bucket) for bucket in BUCKETS]
    return min(steps, key=lambda found: (found.seconds, found.buckets))


# 4. The gradients of a network: backward makes them from the last layer to the first, here at even intervals.


def gradients_of(network, batch, computation):
    """Return (bytes, seconds until ready) of each parameter's float32 gradient, the last layer's first."""
    symbol, given = mx.models.get(network), mx.models.input_shapes(network, batch)
    shapes, _, _ = symbol.infer_shape(**given)
    sizes = [
        4 * prod(shape)
        for name, shape in zip(symbol.list_arguments(), shapes, strict=True)
        if name not in given and not name.endswith("label")
    ]
    begin, each = (1 - BACKWARD) * computation, BACKWARD * computation / len(sizes)
    return [(nbytes, begin + each * (place + 1)) for place, nbytes in enumerate(reversed(sizes))]


def main():
    """Print the prediction for each number of workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="resnet50", help="a built-in network")
    parser.add_argument("--batch", type=int, default=32, help="of each worker")
    parser.add_argument("--step-ms", type=float, default=100.0, help="measured milliseconds of forward and backward")
    parser.add_argument("--workers", default="1,2,4,8,16,64,256,1024,4096")
    parser.add_argument(
        "--topology", default="8xnvlink4+100gbe", help="LINK, or NxINNER+OUTER with N workers a machine"
    )
    args = parser.parse_args()
    topology, computation = parse_topology(args.topology), args.step_ms * 1e-3
    gradients = gradients_of(args.network, args.batch, computation)
    total = sum(nbytes for nbytes, _ in gradients)
    print(f"{args.network} on {args.topology}: {total / 1e6:,.1f} MB in {len(gradients)} gradients\n")
    print(f"{'workers':>8} {'step ms':>9} {'exchange ms':>12} {'efficiency':>11} {'buckets':>8}  algorithm")
    for workers in map(int, args.workers.split(",")):
        found = best_step(gradients, computation, workers, topology)
        print(
            f"{workers:>8,} {found.seconds * 1e3:>9,.2f} {found.exchanging * 1e3:>12,.2f} "
            f"{computation / found.seconds:>10.1%} {found.buckets:>8}  {found.algorithm}"
        )


if __name__ == "__main__":
    main()
