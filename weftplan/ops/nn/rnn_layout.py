"""Memory layout of the RNN operator: packed parameters, and values saved for backward.

``parameters`` is one vector, in cuDNN's order, which MXNet 1.9.1 uses on every device. First come the weights of each
layer and direction: of the input (gates · state_size, inputs), of the state (gates · state_size, units) and, with a
projection, of the projection (units, state_size). Then come the biases of each layer and direction: of the input and of
the state. The order of the gates is i, f, g, o (lstm) or r, z, n (gru).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

from weftplan.ops.core.schema import Params, Shape
from weftplan.support.array_types import RawArray

GATES = {"rnn_relu": 1, "rnn_tanh": 1, "lstm": 4, "gru": 3}


class Weights(NamedTuple):
    """Views of the packed parameters for one layer and direction."""

    of_input: Any
    """(gates · state_size, inputs)."""
    of_state: Any
    """(gates · state_size, units)."""
    of_projection: Any
    """(units, state_size); None without projection."""
    input_bias: Any
    state_bias: Any


class SavedValues(NamedTuple):
    """Views of ``reserve`` for one layer and direction; None for values that the mode does not have."""

    gates: Any
    """Gates after their activation, (steps, batch, gates · state_size)."""
    cells: Any
    """lstm: the cell after each step, (steps, batch, state_size)."""
    hidden: Any
    """(steps, batch, state_size). lstm with projection: its input. gru: the summand of gate n that r multiplies."""
    states: Any
    """With sequence lengths: the state after each step, (steps, batch, units); constant after a sequence's end."""


class RnnLayout:
    """Sizes of one call, and the views of parameters and ``reserve`` that follow from them."""

    def __init__(self, params: Params, data: Shape) -> None:
        self.steps, self.batch, self.inputs = data
        self.mode: str = params["mode"]
        self.size: int = params["state_size"]
        self.units: int = params["projection_size"] or self.size
        self.layers: int = params["num_layers"]
        self.directions = 2 if params["bidirectional"] else 1
        self.gates: int = GATES[self.mode] * self.size
        self.lengths: bool = params["use_sequence_length"]
        self.projected = params["projection_size"] is not None
        self.wide: Shape = (self.steps, self.batch, self.directions * self.units)
        """Shape of a layer's output."""

    def fan_in(self, layer: int) -> int:
        """Return the number of inputs per step of ``layer``."""
        return self.inputs if layer == 0 else self.directions * self.units

    def num_parameters(self) -> int:
        """Return the length of the packed parameters."""
        weights = sum(self.gates * self.fan_in(layer) for layer in range(self.layers))
        weights += self.layers * self.gates * self.units
        if self.projected:
            weights += self.layers * self.units * self.size
        total: int = self.directions * (weights + self.layers * 2 * self.gates)
        return total

    def weights(self, vector: RawArray) -> list[Weights]:
        """Return the views of the packed parameters ``vector`` for each layer, and within it for each direction."""
        at = 0
        matrices: list[tuple[Any, Any, Any]] = []
        for layer in range(self.layers):
            for _ in range(self.directions):
                shapes = [(self.gates, self.fan_in(layer)), (self.gates, self.units)]
                if self.projected:
                    shapes.append((self.units, self.size))
                layers: list[Any] = []
                for shape in shapes:
                    layers.append(vector[at : at + math.prod(shape)].reshape(shape))
                    at += math.prod(shape)
                matrices.append((layers[0], layers[1], layers[2] if self.projected else None))
        parts = []
        for matrix in matrices:
            parts.append(Weights(*matrix, vector[at : at + self.gates], vector[at + self.gates : at + 2 * self.gates]))
            at += 2 * self.gates
        return parts

    def _saved_shapes(self) -> tuple[Shape | None, ...]:
        leading = (self.steps, self.batch)
        return (
            (*leading, self.gates),
            (*leading, self.size) if self.mode == "lstm" else None,
            (*leading, self.size) if self.projected or self.mode == "gru" else None,
            (*leading, self.units) if self.lengths else None,
        )

    def reserve_size(self) -> int:
        """Return the number of elements of ``reserve``."""
        count = sum(math.prod(shape) for shape in self._saved_shapes() if shape is not None)
        return self.layers * self.directions * count + (self.layers - 1) * math.prod(self.wide)

    def between(self, reserve: RawArray) -> list[RawArray]:
        """Return views of the outputs, before dropout, of all layers but the last; each has shape :attr:`wide`."""
        size = math.prod(self.wide)
        return [reserve[k * size : (k + 1) * size].reshape(self.wide) for k in range(self.layers - 1)]

    def saved(self, reserve: RawArray) -> list[SavedValues]:
        """Return the views of ``reserve`` for each layer and direction, in the order of :meth:`weights`."""
        at = (self.layers - 1) * math.prod(self.wide)
        saved = []
        for _ in range(self.layers * self.directions):
            views: list[Any] = []
            for shape in self._saved_shapes():
                if shape is None:
                    views.append(None)
                    continue
                views.append(reserve[at : at + math.prod(shape)].reshape(shape))
                at += math.prod(shape)
            saved.append(SavedValues(*views))
        return saved


@lru_cache(maxsize=256)
def _layout(key: tuple[tuple[str, object], ...], data: Shape) -> RnnLayout:
    return RnnLayout(dict(key), data)


def layout(params: Params, data: Shape) -> RnnLayout:
    """Return the cached :class:`RnnLayout` for these parameters and this shape of the data."""
    return _layout(tuple(sorted(params.items())), data)
