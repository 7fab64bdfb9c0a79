"""Fully connected cells: plain RNN, LSTM and GRU.

A cell owns the names of its weights and builds symbols; it computes nothing itself. Only one thread may use a cell,
since it counts its steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weftplan import symbol as sym
from weftplan.rnn.base import Activation, BaseRNNCell, RNNParams, StateInfo, activated
from weftplan.symbol import Symbol
from weftplan.training.initializers.initializer import LSTMBias


class GatedCell(BaseRNNCell):
    """Base of cells whose input and previous output enter the gates."""

    def __init__(self, num_hidden: int, prefix: str, params: RNNParams | None, **i2h_bias: Any) -> None:
        super().__init__(prefix, params)
        self._num_hidden = num_hidden
        shared = self._params
        self._iW, self._hW = shared.get("i2h_weight"), shared.get("h2h_weight")
        self._iB, self._hB = shared.get("i2h_bias", **i2h_bias), shared.get("h2h_bias")

    @property
    def state_info(self) -> list[StateInfo]:
        return [{"shape": (0, self._num_hidden), "__layout__": "NC"}]

    def _step_name(self) -> str:
        self._counter += 1
        return f"{self._prefix}t{self._counter}_"

    def _gates(self, inputs: Symbol, state: Symbol, name: str) -> tuple[Symbol, Symbol]:
        """Return the contributions of the input and of the previous output to all gates."""
        size = self._num_hidden * len(self._gate_names)
        i2h = sym.FullyConnected(inputs, self._iW, self._iB, num_hidden=size, name=f"{name}i2h")
        h2h = sym.FullyConnected(state, self._hW, self._hB, num_hidden=size, name=f"{name}h2h")
        return i2h, h2h


class RNNCell(GatedCell):
    """``h = activation(W x + b + U h + c)``."""

    def __init__(
        self, num_hidden: int, activation: Activation = "tanh", prefix: str = "rnn_", params: RNNParams | None = None
    ) -> None:
        super().__init__(num_hidden, prefix, params)
        self._activation = activation

    @property
    def _gate_names(self) -> Sequence[str]:
        return ("",)

    def __call__(self, inputs: Symbol, states: Sequence[Symbol]) -> tuple[Symbol, list[Symbol]]:
        name = self._step_name()
        i2h, h2h = self._gates(inputs, states[0], name)
        output = self._get_activation(i2h + h2h, self._activation, name=f"{name}out")
        return output, [output]


class LSTMCell(GatedCell):
    """Long short-term memory (Hochreiter and Schmidhuber, 1997), with a forget gate.

    Args:
        forget_bias: initial value of the forget gate's bias.
    """

    def __init__(
        self, num_hidden: int, prefix: str = "lstm_", params: RNNParams | None = None, forget_bias: float = 1.0
    ) -> None:
        super().__init__(num_hidden, prefix, params, init=LSTMBias(forget_bias=forget_bias))

    @property
    def state_info(self) -> list[StateInfo]:
        return super().state_info * 2

    @property
    def _gate_names(self) -> Sequence[str]:
        return ("_i", "_f", "_c", "_o")

    def __call__(self, inputs: Symbol, states: Sequence[Symbol]) -> tuple[Symbol, list[Symbol]]:
        name = self._step_name()
        i2h, h2h = self._gates(inputs, states[0], name)
        return lstm_step(i2h + h2h, states[1], name, "tanh")


def lstm_step(gates: Symbol, cell: Symbol, name: str, activation: Activation) -> tuple[Symbol, list[Symbol]]:
    """Return (output, states), given the preactivations of the four gates and the last cell state."""
    parts = sym.SliceChannel(gates, num_outputs=4, name=f"{name}slice")
    enter, forget, leave = (
        sym.Activation(parts[k], act_type="sigmoid", name=f"{name}{letter}")
        for k, letter in ((0, "i"), (1, "f"), (3, "o"))
    )
    change = activated(parts[2], activation, name=f"{name}c")
    cell_state = sym.elemwise_add(forget * cell, enter * change, name=f"{name}state")
    output = sym.elemwise_mul(leave, activated(cell_state, activation), name=f"{name}out")
    return output, [output, cell_state]


class GRUCell(GatedCell):
    """Gated recurrent unit (Cho et al., 2014) with the reset gate after the matrix product, as in cuDNN."""

    def __init__(self, num_hidden: int, prefix: str = "gru_", params: RNNParams | None = None) -> None:
        super().__init__(num_hidden, prefix, params)

    @property
    def _gate_names(self) -> Sequence[str]:
        return ("_r", "_z", "_o")

    def __call__(self, inputs: Symbol, states: Sequence[Symbol]) -> tuple[Symbol, list[Symbol]]:
        name = self._step_name()
        i2h, h2h = self._gates(inputs, states[0], f"{name}_")
        return gru_step(i2h, h2h, states[0], name, "tanh")


def gru_step(i2h: Symbol, h2h: Symbol, state: Symbol, name: str, activation: Activation) -> tuple[Symbol, list[Symbol]]:
    """Return (output, states), given the contributions of input and state to the three gates."""
    of_input = sym.SliceChannel(i2h, num_outputs=3, name=f"{name}_i2h_slice")
    of_state = sym.SliceChannel(h2h, num_outputs=3, name=f"{name}_h2h_slice")
    reset, update = (
        sym.Activation(of_input[k] + of_state[k], act_type="sigmoid", name=f"{name}_{letter}_act")
        for k, letter in ((0, "r"), (1, "z"))
    )
    proposal = of_input[2] + reset * of_state[2]
    proposal = activated(proposal, activation, name=f"{name}_h_act")
    output = sym.elemwise_add((1.0 - update) * proposal, update * state, name=f"{name}out")
    return output, [output]
