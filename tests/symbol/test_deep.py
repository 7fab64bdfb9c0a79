"""Chains of 5,000 and more nodes: no function recurses once per node."""

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
    """The chain x + 1 + 1 + ... of ``DEPTH`` nodes."""
    x = sym.Variable("x")
    for _ in range(DEPTH):
        x = x + 1
    return x


def test_walks(chain: Symbol) -> None:
    """Lists, internals, attributes, inference and debug text work on a deep chain."""
    assert chain.list_arguments() == ["x"]
    assert len(chain.get_internals()) == DEPTH + 1
    assert len(chain.attr_dict()) == DEPTH
    assert chain.infer_shape(x=(2, 3))[1] == [(2, 3)]
    assert chain.infer_shape_partial()[1] == [()]
    assert chain.debug_str().count("\n") > DEPTH


def test_copies(chain: Symbol) -> None:
    """Copies by deepcopy and pickle have the same JSON and other nodes; copy and composition work, too."""
    text = chain.tojson()
    for twin in (copy.deepcopy(chain), pickle.loads(pickle.dumps(chain))):
        assert twin.tojson() == text
        assert twin.entries[0].node is not chain.entries[0].node
    assert copy.copy(chain).list_arguments() == ["x"]
    assert chain(x=sym.Variable("y")).list_arguments() == ["y"]


def test_deletion() -> None:
    """Deleting a chain of 30,000 nodes frees all of them without overflowing the C stack."""
    x = sym.Variable("x")
    first = x.entries[0].node
    for _ in range(30_000):  # recursive destructors would overflow the C stack
        x = x + 1

    class Witness(dict[str, str]):
        """A dictionary with weak references, which nodes do not have."""

    first.attrs = witness = Witness()
    alive = weakref.ref(witness)
    del first, witness, x
    gc.collect()
    assert alive() is None


def test_backwards_inference_through_a_deep_chain() -> None:
    """The shape of the last node of a chain reaches its first variable."""
    x = sym.Variable("x")
    for _ in range(DEPTH // 10):
        x = x + 1
    assert (x + sym.Variable("y")).infer_shape(y=(3, 4))[0] == [(3, 4), (3, 4)]
