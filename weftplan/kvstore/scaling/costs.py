"""Seconds of one exchange, in which every worker ends up with the sum: closed forms over latency and bandwidth.

With P workers, S bytes, latency a, seconds a byte b and o seconds that a message keeps its sender busy:

    one_step   every worker sums one range for all:      2 (a + (P-1) o) + 2 (P-1)/P S b
    ring       ranges travel around twice:               2 (P-1) (a + o) + 2 (P-1)/P S b
    halving    halves, quarters, … there and back:       2 log2(P) (a + o) + 2 (P-1)/P S b
    tree       pairs up to a root, and down again:       2 log2(P) (a + o + S b)
    gather     everybody sends everything to everybody:  a + (P-1) (o + S b)

``halving`` folds workers beyond a power of two into others first, which sends S twice more. ``one_step`` is what
``dist_sync`` does. On a link that all share, every worker's bytes go one after the other. On machines of several
workers, parts are summed within each machine, each range is exchanged between machines, and the sums are handed round
within; algorithms over all workers at once are tried, too. Additions and copies take what was measured of them beside
the links (:attr:`Topology.per_byte`). On links that are given they count as nothing: they can run while bytes arrive.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, log2

from weftplan.errors import KVStoreError
from weftplan.kvstore.scaling.topology import Link, Topology


def _per_byte(link: Link, workers: int) -> float:
    return (workers if link.shared else 1) / link.bandwidth


def _one_step(nbytes: float, workers: int, link: Link) -> float:
    sent = 2 * (workers - 1) / workers * nbytes
    return 2 * (link.latency + (workers - 1) * link.overhead) + sent * _per_byte(link, workers)


def _ring(nbytes: float, workers: int, link: Link) -> float:
    sent = 2 * (workers - 1) / workers * nbytes
    return 2 * (workers - 1) * (link.latency + link.overhead) + sent * _per_byte(link, workers)


def _halving(nbytes: float, workers: int, link: Link) -> float:
    within = 1 << (workers.bit_length() - 1)
    rest = 2 * (link.latency + link.overhead + nbytes * _per_byte(link, workers)) if workers > within else 0.0
    sent = 2 * (within - 1) / within * nbytes
    return rest + 2 * log2(within) * (link.latency + link.overhead) + sent * _per_byte(link, within)


def _tree(nbytes: float, workers: int, link: Link) -> float:
    # On a shared link only half of the workers send in the lowest level, a quarter in the next, …: P - 1 messages.
    levels = ceil(log2(workers))
    moved = nbytes * ((workers - 1) if link.shared else levels) / link.bandwidth
    return 2 * (levels * (link.latency + link.overhead) + moved)


def _gather(nbytes: float, workers: int, link: Link) -> float:
    return link.latency + (workers - 1) * (link.overhead + nbytes * _per_byte(link, workers))


ALGORITHMS: dict[str, Callable[[float, int, Link], float]] = {
    "one_step": _one_step,
    "ring": _ring,
    "halving": _halving,
    "tree": _tree,
}
"""Ways to make the same sum everywhere."""


def seconds(algorithm: str, nbytes: float, workers: int, topology: Topology, keys: int = 1) -> float:
    """Seconds of one exchange of ``nbytes`` from each of ``workers``.

    Args:
        keys: how many gradients these bytes are.
        algorithm: one of :data:`ALGORITHMS`, ``"gather"``, or ``"within+"`` and one of :data:`ALGORITHMS`: sums within
            each machine first.

    Raises:
        KVStoreError: an unknown algorithm.

    >>> from weftplan.kvstore.scaling import parse_topology
    >>> one = parse_topology("(5us,12.5GB/s)")
    >>> round(seconds("ring", 1e6, 4096, one) * 1e3), round(seconds("halving", 1e6, 4096, one) * 1e3, 2)
    (49, 0.3)
    """
    if workers <= 1:
        return 0.0
    beside = topology.fixed + keys * topology.per_key + nbytes * topology.per_byte
    return beside + _moving(algorithm, nbytes, workers, topology)


def _moving(algorithm: str, nbytes: float, workers: int, topology: Topology) -> float:
    name = algorithm.removeprefix("within+")
    formula = _gather if name == "gather" else ALGORITHMS.get(name)
    if formula is None:
        raise KVStoreError(f"unknown algorithm {algorithm!r}: known are {', '.join(ALGORITHMS)}, gather and within+…")
    group, inner, outer = topology.per_machine, topology.inner, topology.outer
    if workers <= group:
        return formula(nbytes, workers, inner)
    if group == 1:
        return formula(nbytes, workers, outer)
    machines = ceil(workers / group)
    if name == algorithm:
        # A ring crosses each machine's link once in each direction; other patterns share it between its workers.
        return formula(nbytes, workers, outer if name == "ring" else _divided(outer, group))
    # Each worker of a machine exchanges its own range, and all of them share the machine's link.
    return _ring(nbytes, group, inner) + formula(nbytes, machines, outer)


def _divided(link: Link, count: int) -> Link:
    return Link(link.latency, link.bandwidth / count, link.overhead, link.shared)


def cheapest(nbytes: float, workers: int, topology: Topology, keys: int = 1) -> tuple[str, float]:
    """The algorithm with the least time, and that time; arguments as of :func:`seconds`."""
    names = list(ALGORITHMS)
    if 1 < topology.per_machine < workers:
        names += [f"within+{name}" for name in ALGORITHMS]
    return min(((name, seconds(name, nbytes, workers, topology, keys)) for name in names), key=lambda found: found[1])
