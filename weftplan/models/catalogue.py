"""The table of built-in networks: their builders and usual inputs.

The networks themselves are in the other files of this folder. Every call builds a new network, on any thread; the
module is stateless.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral

from weftplan.errors import ParameterError, did_you_mean
from weftplan.models import lstm as language
from weftplan.models.classic import alexnet, lenet, lenet_small, mlp, vgg16
from weftplan.models.densenet import densenet121
from weftplan.models.inception import inception_v3
from weftplan.models.mobilenet import mobilenet
from weftplan.models.resnet import DEPTHS, resnet, resnet_small
from weftplan.support.keyword_errors import known_keywords
from weftplan.symbol import NameManager, Symbol

DIGITS = (1, 8, 8)
"""Channels, height, width of the small handwritten digits."""


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """One network: builder, usual image (or feature) shape without batch, usual number of classes.

    ``small`` builds the variant for images of fewer than ``small_below`` pixels a side.
    """

    build: Callable[[int], Symbol]
    image_shape: tuple[int, ...]
    classes: int = 1000
    small: Callable[[int], Symbol] | None = None
    small_below: int = 0


_IMAGE = (3, 224, 224)
NETWORKS: dict[str, CatalogueEntry] = {
    "mlp": CatalogueEntry(mlp, (784,), 10),
    "lenet": CatalogueEntry(lenet, (1, 28, 28), 10, small=lenet_small, small_below=16),
    "alexnet": CatalogueEntry(alexnet, _IMAGE),
    "vgg16": CatalogueEntry(vgg16, _IMAGE),
    **{
        f"resnet{depth}": CatalogueEntry(
            partial(resnet, depth), _IMAGE, small=partial(resnet, depth, thumbnail=True), small_below=64
        )
        for depth in DEPTHS
    },
    "inception_v3": CatalogueEntry(inception_v3, (3, 299, 299)),
    "densenet121": CatalogueEntry(densenet121, _IMAGE),
    "mobilenet": CatalogueEntry(mobilenet, _IMAGE),
    "lstm": CatalogueEntry(language.lstm, (35,), 10_000),
    "resnet": CatalogueEntry(resnet_small, DIGITS, 10),
}


def find(name: str) -> CatalogueEntry:
    """Return the network called ``name``; raise ParameterError with all names if there is none."""
    network = NETWORKS.get(name)
    if network is None:
        hint = did_you_mean(name, NETWORKS)
        raise ParameterError(f"no built-in network is called {name!r}; {hint}there are {', '.join(NETWORKS)}")
    return network


@known_keywords()
def get(name: str, num_classes: int | None = None, image_shape: tuple[int, ...] | None = None) -> Symbol:
    """Return the symbol of a built-in network, ending in a SoftmaxOutput called ``softmax``.

    Args:
        name: one of :data:`NETWORKS`.
        num_classes: size of the softmax (for ``lstm``, of the vocabulary); default: as in the literature.
        image_shape: shape of one sample; for small images a network with a small variant gets a smaller first layer.

    Raises:
        ParameterError: no such network, or ``image_shape`` is no shape.
        ShapeError: the network does not fit samples of this shape.

    >>> get("mlp").list_arguments()[:3]
    ['data', 'fc1_weight', 'fc1_bias']
    """
    network = find(name)
    build = network.build
    if image_shape is not None:
        image_shape = _shape("get", "image_shape", image_shape)
    if image_shape is not None and network.small is not None and max(image_shape[1:], default=0) < network.small_below:
        build = network.small
    with NameManager():  # names do not depend on earlier builds
        symbol = build(network.classes if num_classes is None else num_classes)
    if image_shape is not None:
        symbol.infer_shape_partial(data=(1, *image_shape))
    return symbol


def input_shapes(name: str, batch: int = 32, image_shape: tuple[int, ...] | None = None) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all inputs of a network, by argument name.

    Args:
        name: name of a built-in network.
        batch: number of samples.
        image_shape: (channels, height, width) of a sample; None: the usual shape of the network.

    Raises:
        ParameterError: no such network, or a number that is no integer above 0.

    >>> input_shapes("lenet", 64)
    {'data': (64, 1, 28, 28), 'softmax_label': (64,)}
    """
    network = find(name)
    sample = network.image_shape if image_shape is None else _shape("input_shapes", "image_shape", image_shape)
    (batch,) = _shape("input_shapes", "batch", (batch,))
    data = (batch, *sample)
    if name == "lstm":
        return {"data": data, "softmax_label": data, **language.begin_states(batch)}
    return {"data": data, "softmax_label": (batch,)}


def _shape(function: str, what: str, values: Sequence[object]) -> tuple[int, ...]:
    """Return ``values`` as integers above 0."""
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise ParameterError(f"models.{function}: expected a tuple of integers as {what}, got {values!r}")
    shape = []
    for value in values:
        if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
            raise ParameterError(f"models.{function}: {what}: expected an integer of at least 1, got {value!r}")
        shape.append(int(value))
    return tuple(shape)


def digits(name: str, num_classes: int = 10) -> Symbol:
    """Return ``mlp``, ``lenet`` or ``resnet`` for 8x8 images of one channel."""
    return get(name, num_classes, DIGITS)
