"""Built-in networks: MXNet's graphs, measured sizes, and small forms."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weftplan import models
from weftplan import symbol as sym
from weftplan.errors import ParameterError, ShapeError
from weftplan.symbol import Node, Symbol

SYMBOLS = Path(__file__).parent.parent.parent / "bench" / "data" / "symbols"
MEASURED = {
    # operator nodes (as MXNet 1.9.1 counts before the gradient), bytes of arguments, bytes of auxiliary states, batch
    "mlp": (6, 638_504, 0, 64),
    "lenet": (11, 1_925_280, 0, 64),
    "alexnet": (22, 263_671_072, 0, 32),
    "vgg16": (39, 572_697_888, 0, 32),
    "resnet18": (69, 66_025_760, 38_400, 32),
    "resnet50": (175, 121_571_360, 212_480, 32),
    "resnet152": (515, 260_278_304, 605_696, 32),
    "inception_v3": (314, 129_668_384, 137_728, 32),
    "densenet121": (428, 51_183_136, 334_592, 32),
    "mobilenet": (85, 36_195_616, 87_552, 32),
    "lstm": (952, 18_724_160, 0, 32),
}
NEUTRAL = {"dilate": (1, 1), "stride": (1, 1), "pad": (0, 0)}


def stored(name: str) -> str:
    """Return the text of the symbol file that MXNet wrote."""
    path = SYMBOLS / f"{name}.json"
    if path.exists():
        return path.read_text()
    return gzip.decompress((SYMBOLS / f"{name}.json.gz").read_bytes()).decode()


def essence(symbol: Symbol) -> list[tuple[Any, ...]]:
    """Return every node without its name: (operator, meaning of its parameters, origin of its inputs)."""
    nodes = sym.topological_order(symbol.entries)
    number = {node: i for i, node in enumerate(nodes)}
    return [
        (
            "null" if node.op is None else node.op.name,
            meaning(node),
            [(number[entry.node], entry.index, entry.version) for entry in node.inputs],
        )
        for node in nodes
    ]


def meaning(node: Node) -> dict[str, Any]:
    """Return the node's parameters without those that have no effect.

    Examples are a default layout, and the pooling convention of a global pooling.
    """
    params = {key: value for key, value in node.params.items() if key != "layout"}
    if node.op is not None and node.op.name in ("Convolution", "Pooling"):
        params.update({key: value for key, value in NEUTRAL.items() if key in params and params[key] in ((), None)})
    if params.get("global_pool"):
        del params["pooling_convention"]
    if params.get("count_include_pad") in (None, True):
        params.pop("count_include_pad", None)
    return params


def nbytes(shapes: list[tuple[int, ...]]) -> int:
    """Return the bytes of float32 arrays of these shapes."""
    return 4 * sum(int(np.prod(shape, dtype=np.int64)) for shape in shapes)


@pytest.mark.parametrize("name", MEASURED)
def test_same_graph_as_mxnet(name: str) -> None:
    """Each network has MXNet 1.9.1's operators, parameters and edges, node for node."""
    assert essence(models.get(name)) == essence(sym.load_json(stored(name)))


@pytest.mark.parametrize("name", MEASURED)
def test_measured_sizes(name: str) -> None:
    """The numbers of operators and the bytes of arguments and states equal those measured on MXNet 1.9.1."""
    operators, argument_bytes, state_bytes, batch = MEASURED[name]
    symbol = models.get(name)
    arguments, outputs, states = symbol.infer_shape(**models.input_shapes(name, batch))
    assert sum(node.op is not None for node in sym.topological_order(symbol.entries)) == operators
    assert nbytes(arguments) == argument_bytes
    assert nbytes(states) == state_bytes
    assert outputs == [(batch * 35, 10_000) if name == "lstm" else (batch, 10 if name in ("mlp", "lenet") else 1000)]


@pytest.mark.parametrize("name", models.names())
def test_every_network_is_complete(name: str) -> None:
    """Every listed network builds, infers shapes from its own input shapes, saves and loads."""
    symbol = models.get(name)
    shapes = models.input_shapes(name, 2)
    assert set(shapes) <= set(symbol.list_arguments())
    _, outputs, _ = symbol.infer_shape(**shapes)
    assert outputs is not None
    assert sym.load_json(symbol.tojson()).tojson() == symbol.tojson()


def test_parameter_counts_of_other_depths() -> None:
    """ResNet-34 and ResNet-101 have the numbers of parameters and statistics of MXNet 1.9.1's model zoo."""
    for name, parameters, statistics in (("resnet34", 21_797_672, 17_024), ("resnet101", 44_589_800, 105_344)):
        symbol = models.get(name)
        shapes, _, states = symbol.infer_shape(**models.input_shapes(name, 1))
        fed = ("data", "softmax_label")
        weights = [shape for n, shape in zip(symbol.list_arguments(), shapes, strict=True) if n not in fed]
        assert (nbytes(weights), nbytes(states)) == (4 * parameters, 4 * statistics)


def test_names_do_not_depend_on_the_past() -> None:
    """Building a network again, after other symbols, gives the same text."""
    first = models.get("resnet18").tojson()
    sym.Convolution(sym.Variable("x"), kernel=(1, 1), num_filter=1)
    assert models.get("resnet18").tojson() == first


@pytest.mark.parametrize("name", ["mlp", "lenet", "resnet"])
def test_small_forms(name: str) -> None:
    """The networks for 8x8 images have 10 classes and fewer than 200,000 parameters."""
    symbol = models.digits(name)
    arguments, outputs, _ = symbol.infer_shape(data=(4, 1, 8, 8))
    assert outputs == [(4, 10)]
    assert nbytes(arguments) < 800_000


def test_options() -> None:
    """Options set the classes and the image shape; a thumbnail ResNet has only one pooling."""
    assert models.get("alexnet", num_classes=7).infer_shape(data=(1, 3, 224, 224))[1] == [(1, 7)]
    small = models.get("resnet18", 10, (3, 32, 32))
    assert sum(n.op is not None and n.op.name == "Pooling" for n in sym.topological_order(small.entries)) == 1
    assert models.input_shapes("lstm", 4)["lstm_l1_begin_state_1"] == (4, 200)
    assert models.input_shapes("resnet18", 4, (3, 32, 32))["data"] == (4, 3, 32, 32)


def test_bad_requests() -> None:
    """The error for an unknown name suggests a similar name; images that are too small raise a ShapeError."""
    with pytest.raises(ParameterError, match="'resnet19'; did you mean 'resnet18'"):
        models.get("resnet19")
    with pytest.raises(ShapeError):
        models.get("vgg16", image_shape=(3, 8, 8))


@pytest.mark.parametrize("wrong", [-1, 0, 1.5, True, "3", None])
def test_sizes_are_integers_above_zero(wrong: Any) -> None:
    """Batches and shapes of samples that are no integers above 0 are refused by name, before any symbol is made."""
    for call in (
        lambda: models.input_shapes("lenet", batch=wrong),
        lambda: models.input_shapes("lstm", 2, image_shape=(wrong,)),
        lambda: models.get("lenet", image_shape=(1, wrong, 28)),
    ):
        with pytest.raises(ParameterError, match=rf"expected an integer of at least 1, got {wrong!r}"):
            call()
    with pytest.raises(ParameterError, match="expected a tuple of integers as image_shape, got 'abc'"):
        models.get("lenet", image_shape="abc")  # type: ignore[arg-type]
    assert models.input_shapes("mlp", np.int64(4)) == {"data": (4, 784), "softmax_label": (4,)}
