"""Division of an array's elements among participants of a sum (processes, devices) and among servers.

Threads of one process divide by :func:`weftplan.support.core_sharing.share_out`. The functions are pure.
"""

from __future__ import annotations


def even_range(size: int, count: int, position: int) -> tuple[int, int]:
    """Return (begin, end) of the elements, out of ``size``, that participant ``position`` of ``count`` sums.

    >>> [even_range(10, 3, position) for position in range(3)]
    [(0, 3), (3, 6), (6, 10)]
    """
    return size * position // count, size * (position + 1) // count


def placement(number: int, size: int, servers: int, bound: int) -> list[tuple[int, int, int]]:
    """Return (position of the server, first element, end) for each range of key ``number``, as MXNet places them.

    >>> placement(1, 10, 3, 100), placement(1, 10, 3, 5)
    ([(1, 0, 10)], [(0, 0, 3), (1, 3, 7), (2, 7, 10)])
    """
    if size < bound or servers == 1:
        return [((number * 9973) % servers, 0, size)]
    bounds = [round(size / servers * part) for part in range(servers + 1)]
    return [(server, bounds[server], bounds[server + 1]) for server in range(servers)]
