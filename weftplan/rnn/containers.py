"""Composite cells: a sequence of cells, and a pair of cells for both directions of time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from weftplan import symbol as sym
from weftplan.errors import ParameterError
from weftplan.ndarray import NDArray
from weftplan.rnn.base import BaseRNNCell, Outputs, RNNParams, StateInfo, States, Steps, Weights, merge_time, split_time
from weftplan.symbol import Symbol


class Container(BaseRNNCell):
    """Base of composite cells: states and weights belong to the inner cells, in order."""

    def __init__(self, prefix: str = "", params: RNNParams | None = None) -> None:
        super().__init__(prefix, params)
        self._override_cell_params = params is not None
        self._cells: list[BaseRNNCell] = []

    def _adopt(self, cell: BaseRNNCell) -> None:
        self._cells.append(cell)
        if self._override_cell_params:
            if not cell._own_params:
                raise ParameterError(f"params are given to {type(self).__name__} and to a cell in it; give them to one")
            cell._params._params.update(self._params._params)
        self._params._params.update(cell.params._params)

    @property
    def state_info(self) -> list[StateInfo]:
        return [info for cell in self._cells for info in cell.state_info]

    def begin_state(self, func: Callable[..., Symbol] = sym.zeros, **kwargs: object) -> list[Symbol]:
        if self._modified:
            raise ParameterError(f"begin_state: {type(self).__name__} was given to a modifier; call the modifier's")
        return [state for cell in self._cells for state in cell.begin_state(func, **kwargs)]

    def unpack_weights(self, args: Mapping[str, NDArray]) -> Weights:
        weights = dict(args)
        for cell in self._cells:
            weights = cell.unpack_weights(weights)
        return weights

    def pack_weights(self, args: Mapping[str, NDArray]) -> Weights:
        weights = dict(args)
        for cell in self._cells:
            weights = cell.pack_weights(weights)
        return weights

    def _shares(self, states: Sequence[Symbol]) -> list[list[Symbol]]:
        """Split the states by cell."""
        shares, start = [], 0
        for cell in self._cells:
            count = len(cell.state_info)
            shares.append(list(states[start : start + count]))
            start += count
        return shares


class SequentialRNNCell(Container):
    """A sequence of cells: the output of each is the input of the next."""

    def __init__(self, params: RNNParams | None = None) -> None:
        super().__init__("", params)

    def add(self, cell: BaseRNNCell) -> None:
        """Append a cell."""
        self._adopt(cell)

    def __call__(self, inputs: Symbol, states: Sequence[Symbol]) -> tuple[Symbol, list[Symbol]]:
        self._counter += 1
        states_out: list[Symbol] = []
        for cell, share in zip(self._cells, self._shares(states), strict=True):
            inputs, new = cell(inputs, share)
            states_out += new
        return inputs, states_out

    def _unroll(
        self, length: int, inputs: Steps, begin_state: States, layout: str, merge_outputs: bool | None
    ) -> tuple[Outputs, list[Symbol]]:
        states = self.begin_state() if begin_state is None else begin_state
        states_out: list[Symbol] = []
        passed: Any = inputs
        for k, (cell, share) in enumerate(zip(self._cells, self._shares(states), strict=True)):
            merged = merge_outputs if k == len(self._cells) - 1 else None
            passed, new = cell.unroll(length, passed, share, layout, merged)
            states_out += new
        return passed, states_out


class BidirectionalCell(Container):
    """A pair of cells, one forward and one backward in time; their outputs are concatenated.

    Args:
        output_prefix: prefix of the names of the concatenated outputs.
    """

    steps = False

    def __init__(
        self, l_cell: BaseRNNCell, r_cell: BaseRNNCell, params: RNNParams | None = None, output_prefix: str = "bi_"
    ) -> None:
        super().__init__("", params)
        self._output_prefix = output_prefix
        for cell in (l_cell, r_cell):
            self._adopt(cell)

    def __call__(self, inputs: Symbol, states: Sequence[Symbol]) -> tuple[Symbol, list[Symbol]]:
        raise NotImplementedError("BidirectionalCell needs all of time at once: call unroll")

    def _unroll(
        self, length: int, inputs: Steps, begin_state: States, layout: str, merge_outputs: bool | None
    ) -> tuple[Outputs, list[Symbol]]:
        steps = split_time(length, inputs, layout)
        forth, backward = self._shares(self.begin_state() if begin_state is None else begin_state)
        forward_result, forward_states = self._cells[0].unroll(length, steps, forth, layout, False)
        right, right_states = self._cells[1].unroll(length, steps[::-1], backward, layout, False)
        pairs = zip(
            split_time(length, forward_result, layout), reversed(split_time(length, right, layout)), strict=True
        )
        outputs = [sym.Concat(a, b, dim=1, name=f"{self._output_prefix}t{k}") for k, (a, b) in enumerate(pairs)]
        joined = merge_time(outputs, layout, f"{self._output_prefix}out") if merge_outputs else outputs
        states: Any = [forward_states, right_states]  # nested, as in MXNet
        return joined, states
