"""Infer the shape and dtype of every entry, by the rules of operators (:mod:`weftplan.planner.symbolic.infer`)."""

from __future__ import annotations

from dataclasses import replace

from weftplan.planner.symbolic.infer import infer_all
from weftplan.planner.symbolic.network import Network
from weftplan.planner.symbolic.passes.graph_pass import SIZES, GraphPass, Settings


def infer_sizes(network: Network, settings: Settings) -> tuple[Network, str]:
    """Infer all shapes and dtypes.

    Raises:
        ShapeError, DTypeError: something conflicts or cannot be inferred.
    """
    shapes, dtypes = infer_all(network, shapes=settings.shapes, dtypes=settings.dtypes)
    return replace(network, shapes=shapes, dtypes=dtypes), ""


PASS = GraphPass(name="sizes inferred", switch="shapes", run=infer_sizes, gives=frozenset((SIZES,)), shown=False)
