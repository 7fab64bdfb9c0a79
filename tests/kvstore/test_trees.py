"""Trees and rings over the links between devices: the search for them, and the variables that change them."""

from __future__ import annotations

import numpy as np
import pytest

import weftplan as mx
from weftplan.device.links import connect, matrix, nvlink_mesh, ports
from weftplan.kvstore.exchange.trees import binary_trees, ring
from weftplan.kvstore.exchange.ways import TreeRule, trees

pytestmark = pytest.mark.usefixtures("no_links")


def edges(parents):
    """Return the edges of a tree; ``parents`` has the parent of each place, and the root is its own parent."""
    return {frozenset((place, parent)) for place, parent in enumerate(parents) if place != parent}


def depth(parents):
    """Return the number of edges from the root of a tree to its deepest place."""

    def up(place):
        return 0 if parents[place] == place else 1 + up(parents[place])

    return max(map(up, range(len(parents))))


@pytest.mark.parametrize("exhaustive", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 8, 11, 16])
def test_trees_reach_all_devices_in_few_levels(count, exhaustive):
    """For each root, the tree connects all devices and has at most ceil(log2(count)) levels."""
    rng = np.random.default_rng(count)
    weights = tuple(map(tuple, rng.random((count, count)).tolist()))
    for root, parents in enumerate(binary_trees(weights, 0.7, exhaustive=exhaustive)):
        assert parents[root] == root
        assert len(edges(parents)) == count - 1
        assert depth(parents) <= (count - 1).bit_length()


def test_an_exhaustive_search_finds_no_worse_trees():
    """On random links an exhaustive search finds trees of at least the heuristic's weight, and sometimes of more."""
    gains = []
    for seed in range(8):
        rng = np.random.default_rng(seed)
        half = np.triu(rng.integers(1, 4, (8, 8)) / 3, 1)
        weights = tuple(map(tuple, (half + half.T).tolist()))

        def worth(exhaustive, weights=weights):
            parents = binary_trees(weights, 1.0, exhaustive=exhaustive)[0]
            return sum(weights[a][b] for a, b in map(sorted, edges(parents)))

        gains.append(worth(True) - worth(False))
    assert min(gains) >= -1e-9
    assert max(gains) > 0.1


def test_trees_of_the_mesh_use_nvlinks_only_and_share_them_out():
    """All trees of the mesh use NVLinks only; a penalty on used links makes them use more different links."""
    links = nvlink_mesh()
    used = {}
    for penalty in (0.7, 1.0):
        rule = TreeRule(bound=1, penalty=penalty)
        (way,) = trees(links, 80, 0, rule)
        assert way.name == "trees"
        used[penalty] = set().union(*(edges(share.parents) for share in way.shares))
        assert all(links.peers(*pair) for pair in used[penalty])
    assert len(used[0.7]) > len(used[1.0])


def test_a_ring_takes_the_best_links_that_close_it():
    """The ring of the mesh uses NVLinks only, and in a matrix with one ring of fast links that ring is found."""
    links = nvlink_mesh()
    speeds = tuple(tuple(0.0 if a == b else links.bandwidth(a, b) for b in range(8)) for a in range(8))
    actual = ring(speeds)
    assert sorted(actual) == list(range(8))
    assert all(links.peers(a, b) for a, b in zip(actual, actual[1:] + actual[:1], strict=True))
    order = [0, 3, 1, 4, 2]
    weights = [[0.1] * 5 for _ in range(5)]
    for a, b in zip(order, order[1:] + order[:1], strict=True):
        weights[a][b] = 1.0
    assert list(ring(tuple(map(tuple, weights)))) == order


@pytest.mark.shows(
    "MXNET_KVSTORE_USETREE",
    "MXNET_KVSTORE_LOGTREE",
    "MXNET_KVSTORE_TREE_ARRAY_BOUND",
    "MXNET_KVSTORE_TREE_BACKTRACK",
    "MXNET_KVSTORE_TREE_LINK_USAGE_PENALTY",
)
def test_the_tree_variables_act(monkeypatch, caplog):
    """``MXNET_KVSTORE_USETREE`` chooses trees; the other variables split large arrays, change trees or log them."""
    connect(ports(8, 450e9, 3e-6))
    contexts = [mx.sim(index) for index in range(8)]

    def way(elements):
        return mx.kv.create("device")._between.plan(contexts, contexts[0], elements, 4).way

    assert way(100).name == "one_step"
    monkeypatch.setenv("MXNET_KVSTORE_USETREE", "1")
    monkeypatch.setenv("MXNET_KVSTORE_TREE_ARRAY_BOUND", "1000")
    assert (way(1000).name, way(1001).name) == ("tree", "trees")
    assert not caplog.records
    monkeypatch.setenv("MXNET_KVSTORE_LOGTREE", "1")
    taken = way(1001)
    assert [record.getMessage() for record in caplog.records] == [
        f"elements {share.begin} to {share.end}: parents {share.parents}" for share in taken.shares
    ]
    connect(nvlink_mesh())
    monkeypatch.setenv("MXNET_KVSTORE_TREE_LINK_USAGE_PENALTY", "1.0")
    alike = way(1001)
    monkeypatch.setenv("MXNET_KVSTORE_TREE_LINK_USAGE_PENALTY", "0.3")
    assert way(1001) != alike
    rng = np.random.default_rng(1)
    half = np.triu(rng.integers(1, 4, (8, 8)), 1) * 1e9
    connect(matrix((half + half.T + np.eye(8)).tolist()))
    actual = way(1000)
    monkeypatch.setenv("MXNET_KVSTORE_TREE_BACKTRACK", "1")
    assert way(1000) != actual
