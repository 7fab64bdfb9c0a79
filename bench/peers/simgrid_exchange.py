"""Simulated seconds of exchanges, by SimGrid 3.32 or later: every message is sent between actors on hosts of a star.

    simgrid_exchange.py ALGORITHM WORKERS BYTES LATENCY BANDWIDTH

Runs with a Python that imports ``simgrid`` and with nothing of this package. Prints the seconds.
"""

import sys

from simgrid import Actor, Engine, LinkInRoute, Mailbox, NetZone


def exchange(kind, me, workers, nbytes):
    """One worker's part of it."""
    part = int(nbytes / workers)

    def swap(pairs):
        """Send to and receive from each (target, source) at once."""
        going = [Mailbox.by_name(f"{me}>{target}").put_async(b"x", part) for target, _ in pairs]
        coming = [Mailbox.by_name(f"{source}>{me}").get_async() for _, source in pairs]  # with what keeps the data
        for comm in [*going, *(comm for comm, _ in coming)]:
            comm.wait()

    if kind == "one_step":
        for _ in range(2):
            others = [(me + step) % workers for step in range(1, workers)]
            swap([(other, other) for other in others])
    elif kind == "ring":
        for _ in range(2 * (workers - 1)):
            swap([((me + 1) % workers, (me - 1) % workers)])
    else:
        sys.exit(f"unknown algorithm {kind}")


def main(kind, workers, nbytes, latency, bandwidth):
    """Build the star, run, print."""
    engine = Engine(
        [
            "simgrid_exchange",
            "--cfg=network/model:CM02",
            "--cfg=network/TCP-gamma:1e15",
            "--cfg=network/crosstraffic:0",
            "--log=root.threshold:warning",
        ]
    )
    zone = NetZone.create_star_zone("star")
    hosts = []
    for index in range(workers):
        host = zone.create_host(f"host{index}", 1e9)
        link = zone.create_split_duplex_link(f"link{index}", bandwidth)
        link.set_latency(latency / 2)
        zone.add_route(host.netpoint, None, None, None, [LinkInRoute(link, LinkInRoute.UP)], True)
        hosts.append(host)
    zone.seal()
    for index, host in enumerate(hosts):
        Actor.create(f"worker{index}", host, exchange, kind, index, workers, nbytes)
    engine.run()
    print(Engine.clock)


main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]), float(sys.argv[5]))
