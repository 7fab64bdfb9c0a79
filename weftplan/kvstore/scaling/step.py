"""A training step of many workers: backward makes gradients one by one, and full buckets are exchanged meanwhile.

Exchanges take turns, in the order in which backward ends with their buckets, as the stores do it. A step ends when both
backward and the last exchange have ended; the update is part of neither, unless :attr:`Topology.per_key` counts it.
Where processes share all their cores, as on one machine, an exchange takes time from the computation instead of running
beside it (:attr:`Topology.busy`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weftplan.kvstore.compression import Compression
from weftplan.kvstore.scaling.costs import cheapest, seconds
from weftplan.kvstore.scaling.topology import Topology

BUCKETS = tuple(float(1 << power) for power in range(18, 31))
"""Bytes at which a bucket is full: 256 KiB to 1 GiB."""

CODEC = 1.2e9
"""Bytes of gradients that are compressed, or expanded and added, in a second: measured on one core of an EPYC (1.6 and
1.2 GB/s)."""


@dataclass(frozen=True, slots=True)
class Gradient:
    """One gradient of a step."""

    nbytes: int
    ready: float
    """Seconds from the beginning of the step until backward has made it."""


@dataclass(frozen=True, slots=True)
class Step:
    """What is predicted for a number of workers."""

    workers: int
    seconds: float
    exchanging: float
    """Seconds in which something is exchanged."""
    exposed: float
    """Seconds that the step is longer than the computation."""
    bucket: float
    """Bytes at which a bucket is full."""
    buckets: int
    algorithm: str
    """The one that the largest bucket takes."""

    @property
    def efficiency(self) -> float:
        """The part of the step that is computation."""
        return 1 - self.exposed / self.seconds if self.seconds else 1.0


def step(
    gradients: Sequence[Gradient],
    computation: float,
    workers: int,
    topology: Topology,
    *,
    bucket: float,
    compression: Compression | None = None,
) -> Step:
    """One step with buckets of at least ``bucket`` bytes.

    Args:
        gradients: in the order in which backward makes them.
        computation: seconds of forward and backward.
    """
    free = exchanging = largest = 0.0
    algorithm, filled, keys, count = "none", 0, 0, 0
    for index, gradient in enumerate(gradients):
        filled, keys = filled + gradient.nbytes, keys + 1
        if filled < bucket and index < len(gradients) - 1:
            continue
        name, taken = _exchange(filled, keys, workers, topology, compression)
        if filled > largest:
            algorithm, largest = name, filled
        free = max(free, gradient.ready) + taken
        exchanging += taken
        filled, keys, count = 0, 0, count + 1
    end = computation
    if workers > 1:
        end = computation + exchanging if topology.busy else max(computation, free)
    return Step(workers, end, exchanging, end - computation, bucket, count, algorithm if workers > 1 else "none")


def _exchange(
    nbytes: int, keys: int, workers: int, topology: Topology, compression: Compression | None
) -> tuple[str, float]:
    if workers <= 1:
        return "none", 0.0
    if compression is None:
        return cheapest(nbytes, workers, topology, keys)
    # Packed gradients cannot be added, so everybody gets everybody's, and expands them one after the other.
    sent = compression.packed_size(nbytes // 4)
    return "gather", seconds("gather", sent, workers, topology, keys) + (1 + workers) * nbytes / CODEC


def best_step(
    gradients: Sequence[Gradient],
    computation: float,
    workers: int,
    topology: Topology,
    *,
    compression: Compression | None = None,
) -> Step:
    """The step with the bucket size that makes it shortest; of equal ones the one with the fewest exchanges."""
    tried = [
        step(gradients, computation, workers, topology, bucket=bucket, compression=compression) for bucket in BUCKETS
    ]
    return min(tried, key=lambda found: (found.seconds, found.buckets))
