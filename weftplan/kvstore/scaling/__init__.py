"""What an exchange of gradients would take on machines that are not here: closed forms, nothing is sent.

``topology.py`` has the links, ``costs.py`` the time of one exchange by each algorithm, ``step.py`` a training step
whose exchanges overlap backward. Everything is a pure function of numbers, but for ``measured.py``, which measures the
links of a job. ``weftplan scale`` prints it.
"""

from weftplan.kvstore.scaling.costs import ALGORITHMS, cheapest, seconds
from weftplan.kvstore.scaling.measured import measure, slowest
from weftplan.kvstore.scaling.step import Gradient, Step, best_step, step
from weftplan.kvstore.scaling.topology import PRESETS, Link, Topology, parse_topology

__all__ = [
    "ALGORITHMS",
    "PRESETS",
    "Gradient",
    "Link",
    "Step",
    "Topology",
    "best_step",
    "cheapest",
    "measure",
    "parse_topology",
    "seconds",
    "slowest",
    "step",
]
