"""Built-in networks, as symbols: ``models.get("resnet50")``; ``models.input_shapes("resnet50", 32)``.

Every call creates new nodes and the module is stateless, so any thread may call it; ``catalogue.py`` has the names.
"""

from weftplan.models.catalogue import NETWORKS, digits, get, input_shapes

__all__ = ["NETWORKS", "digits", "get", "input_shapes", "names"]


def names() -> list[str]:
    """Return the names of all built-in networks."""
    return list(NETWORKS)


def __dir__() -> list[str]:
    return sorted(__all__)
