"""MXNet's predicates: which forward nodes its mirroring repeats, by operator name and attributes alone.

The predicates look at one node only; the core says which nodes can be repeated at all.
"""

from __future__ import annotations

from weftplan.errors import PlanError
from weftplan.ops.joined import RELU
from weftplan.symbol.node import Node

FORCE = "__force_mirroring__"
NEVER_V1 = frozenset(("Convolution", "FullyConnected", "Concat", "SoftmaxOutput"))
NEVER_ECHO = NEVER_V1 | {"Embedding"}
TRUE, FALSE = frozenset(("1", "true")), frozenset(("0", "false", ""))


def forced(node: Node) -> bool | None:
    """The value of the attribute ``__force_mirroring__`` (or the older ``force_mirroring``), None without one.

    Raises:
        PlanError: the value is no boolean.
    """
    text = node.attrs.get(FORCE, node.attrs.get("force_mirroring"))
    if text is None:
        return None
    word = str(text).strip().lower()
    if word in TRUE or word in FALSE:
        return word in TRUE
    raise PlanError(f"attribute {FORCE} of {node.name!r} must be one of 0, 1, true, false; got {text!r}")


def rules(name: str, force: bool | None) -> frozenset[str]:
    """The rules that repeat a node of operator ``name``, whose attribute is ``force``.

    ``mxnet`` is the rule of MXNet 1.x, where the attribute adds nodes only; ``echo`` that of its echo pass, where the
    attribute decides either way. Neither repeats Dropout.

    >>> sorted(rules("Activation", None)), sorted(rules("Activation", False)), sorted(rules("Convolution", True))
    (['echo', 'mxnet'], ['mxnet'], ['echo', 'mxnet'])
    """
    if name == "Dropout":
        return frozenset()
    name = name.removesuffix(RELU)
    found = set()
    if force or name not in NEVER_V1:
        found.add("mxnet")
    if name not in NEVER_ECHO if force is None else force:
        found.add("echo")
    return frozenset(found)
