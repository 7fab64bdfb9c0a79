"""Nothing recurses: chains of more nodes than five times the frames that Python allows, and than the C stack holds."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest

from weftplan import symbol as sym
from weftplan.symbol import Symbol

DEPTH = 5_000


@pytest.fixture(scope="module")
def chain() -> Symbol:
    """x + 1 + 1 + ..."""
    x = sym.Variable("x")
    for _ in range(DEPTH):
        x = x + 1
    return x


def test_walks(chain: Symbol) -> None:
    """Lists, internals, attributes, inference, debug text."""
    assert chain.list_arguments() == ["x"]
    assert len(chain.get_internals()) == DEPTH + 1
    assert len(chain.attr_dict()) == DEPTH
    assert chain.infer_shape(x=(2, 3))[1] == [(2, 3)]
    assert chain.infer_shape_partial()[1] == [()]
    assert chain.debug_str().count("\n") > DEPTH


def test_copies(chain: Symbol) -> None:
    """deepcopy, pickle, JSON and composing give equal graphs with nodes of their own."""
    text = chain.tojson()
    for twin in (copy.deepcopy(chain), pickle.loads(pickle.dumps(chain))):
        assert twin.tojson() == text
        assert twin.entries[0].node is not chain.entries[0].node
    assert copy.copy(chain).list_arguments() == ["x"]
    assert chain(x=sym.Variable("y")).list_arguments() == ["y"]


def test_deletion() -> None:
    """Dropping the only reference to a deep chain frees every node, without overflowing the C stack."""
    x = sym.Variable("x")
    first = x.entries[0].node
    for _ in range(30_000):  # the destructors of nodes would be on the C stack
        x = x + 1

    class Witness(dict[str, str]):
        """Nodes have no weak references; their attributes can."""

    first.attrs = witness = Witness()
    alive = weakref.ref(witness)
    del first, witness, x
    gc.collect()
    assert alive() is None


def test_backwards_inference_through_a_deep_chain() -> None:
    """The last node's shape reaches the first variable in two passes, not in one per node."""
    x = sym.Variable("x")
    for _ in range(DEPTH // 10):
        x = x + 1
    assert (x + sym.Variable("y")).infer_shape(y=(3, 4))[0] == [(3, 4), (3, 4)]
