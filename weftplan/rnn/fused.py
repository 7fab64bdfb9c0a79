"""Fused recurrent layers: all layers, directions and steps in one ``RNN`` operator.

The cell owns the layout of the packed parameters, and can be unfused into cells of one layer and one direction. It
builds symbols and computes nothing itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from weftplan import ndarray as nd
from weftplan import symbol as sym
from weftplan.errors import ParameterError
from weftplan.ndarray import NDArray
from weftplan.rnn import cells, containers, modifiers
from weftplan.rnn.base import BaseRNNCell, Outputs, RNNParams, StateInfo, States, Steps, Weights, merge_time, split_time
from weftplan.symbol import Symbol
from weftplan.training.initializers import initializer as initializers
from weftplan.training.initializers.base import InitDesc, Initializer, register

_GATES = {"rnn_relu": ("",), "rnn_tanh": ("",), "lstm": ("_i", "_f", "_c", "_o"), "gru": ("_r", "_z", "_o")}


class FusedRNNCell(BaseRNNCell):
    """Recurrent layers of one kind as a fused operator; the cell cannot make single steps.

    Args:
        mode: ``rnn_relu``, ``rnn_tanh``, ``lstm`` or ``gru``.
        dropout: between layers, in training.
        get_next_state: also return the last states.
        forget_bias: initial value of the forget gates' biases.
    """

    steps = False

    def __init__(
        self,
        num_hidden: int,
        num_layers: int = 1,
        mode: str = "lstm",
        bidirectional: bool = False,
        dropout: float = 0.0,
        get_next_state: bool = False,
        forget_bias: float = 1.0,
        prefix: str | None = None,
        params: RNNParams | None = None,
    ) -> None:
        if mode not in _GATES:
            raise ParameterError(f"FusedRNNCell: mode must be one of {', '.join(_GATES)}, got {mode!r}")
        super().__init__(f"{mode}_" if prefix is None else prefix, params)
        self._num_hidden = num_hidden
        self._num_layers = num_layers
        self._mode = mode
        self._bidirectional = bool(bidirectional)
        self._dropout = dropout
        self._get_next_state = get_next_state
        rule = FusedRNN(None, num_hidden, num_layers, mode, self._bidirectional, forget_bias)
        self._parameter = self._params.get("parameters", init=rule)

    @property
    def state_info(self) -> list[StateInfo]:
        rows = self._num_layers * (2 if self._bidirectional else 1)
        info: StateInfo = {"shape": (rows, 0, self._num_hidden), "__layout__": "LNC"}
        return [info.copy() for _ in range(2 if self._mode == "lstm" else 1)]

    @property
    def _gate_names(self) -> Sequence[str]:
        return _GATES[self._mode]

    def _layers(self) -> Iterator[tuple[int, str]]:
        for layer in range(self._num_layers):
            for direction in "lr" if self._bidirectional else "l":
                yield layer, direction

    def _pieces(self, columns: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Return the name and shape of each gate's weights and biases, in storage order."""
        hidden, above = self._num_hidden, self._num_hidden * (2 if self._bidirectional else 1)
        for kind in ("weight", "bias"):
            for layer, direction in self._layers():
                for part in ("i2h", "h2h"):
                    width = hidden if part == "h2h" else columns if layer == 0 else above
                    for gate in self._gate_names:
                        name = f"{self._prefix}{direction}{layer}_{part}{gate}_{kind}"
                        yield name, ((hidden, width) if kind == "weight" else (hidden,))

    def _cut(self, packed: NDArray, columns: int) -> Iterator[tuple[str, NDArray]]:
        """Return the name and a view of each piece of the packed parameters."""
        start = 0
        for name, shape in self._pieces(columns):
            size = shape[0] * (shape[1] if len(shape) > 1 else 1)
            yield name, packed[start : start + size].reshape(shape)
            start += size
        if start != packed.size:
            raise ParameterError(f"{self._parameter.name!r} has {packed.size} elements, the cell's pieces {start}")

    def _columns(self, size: int) -> int:
        """Return the input size, derived from the number of all parameters."""
        directions = 2 if self._bidirectional else 1
        hidden, gates = self._num_hidden, len(self._gate_names)
        upper = (self._num_layers - 1) * (hidden + directions * hidden + 2)
        return size // directions // hidden // gates - upper - hidden - 2

    def unpack_weights(self, args: Mapping[str, NDArray]) -> Weights:
        weights = dict(args)
        packed = weights.pop(str(self._parameter.name))
        weights.update({name: piece.copy() for name, piece in self._cut(packed, self._columns(packed.size))})
        return weights

    def pack_weights(self, args: Mapping[str, NDArray]) -> Weights:
        weights = dict(args)
        head = weights[f"{self._prefix}l0_i2h{self._gate_names[0]}_weight"]
        parts = [weights.pop(name).reshape((-1,)) for name, _ in self._pieces(head.shape[1])]
        weights[str(self._parameter.name)] = nd.concatenate(parts)
        return weights

    def __call__(self, inputs: Symbol, states: Sequence[Symbol]) -> tuple[Symbol, list[Symbol]]:
        raise NotImplementedError("FusedRNNCell makes all steps at once: call unroll, or unfuse() it")

    def _unroll(
        self, length: int, inputs: Steps, begin_state: States, layout: str, merge_outputs: bool | None
    ) -> tuple[Outputs, list[Symbol]]:
        if layout not in ("NTC", "TNC"):
            raise ParameterError(f"FusedRNNCell: layout must be 'TNC' or 'NTC', got {layout!r}")
        turned = layout == "NTC"
        data = merge_time(inputs, layout)
        if turned:
            warnings.warn("FusedRNNCell: layout 'NTC' is turned to 'TNC' and back; 'TNC' saves that", stacklevel=2)
            data = sym.swapaxes(data, dim1=0, dim2=1)
        state, *cells = self.begin_state() if begin_state is None else begin_state
        results = sym.RNN(
            data,
            self._parameter,
            state,
            cells[0] if cells else None,
            state_size=self._num_hidden,
            num_layers=self._num_layers,
            bidirectional=self._bidirectional,
            p=self._dropout,
            state_outputs=self._get_next_state,
            mode=self._mode,
            name=f"{self._prefix}rnn",
        )
        outputs: Any = results[0] if self._get_next_state else results
        states_out = [results[k] for k in range(1, len(results.list_outputs()))] if self._get_next_state else []
        if turned:
            outputs = sym.swapaxes(outputs, dim1=0, dim2=1)
        return (split_time(length, outputs, layout) if merge_outputs is False else outputs), states_out

    def unfuse(self) -> containers.SequentialRNNCell:
        """Return the same layers as single-step cells, with the same names of unpacked weights."""

        def layer(prefix: str) -> BaseRNNCell:
            if self._mode == "lstm":
                return cells.LSTMCell(self._num_hidden, prefix)
            if self._mode == "gru":
                return cells.GRUCell(self._num_hidden, prefix)
            return cells.RNNCell(self._num_hidden, self._mode.removeprefix("rnn_"), prefix)

        stack = containers.SequentialRNNCell()
        for k in range(self._num_layers):
            names = [f"{self._prefix}{direction}{k}_" for direction in ("lr" if self._bidirectional else "l")]
            if self._bidirectional:
                forth, backward = (layer(name) for name in names)
                stack.add(containers.BidirectionalCell(forth, backward, output_prefix=f"{self._prefix}bi_l{k}_"))
            else:
                stack.add(layer(names[0]))
            if self._dropout > 0 and k < self._num_layers - 1:
                stack.add(modifiers.DropoutCell(self._dropout, prefix=f"{self._prefix}_dropout{k}_"))
        return stack


@register
class FusedRNN(Initializer):
    """Initializer of packed parameters: an initializer for each gate, a constant for the biases of forget gates.

    Args:
        init: initializer of the gates; None: the network's.
    """

    def __init__(
        self,
        init: Initializer | str | None,
        num_hidden: int,
        num_layers: int,
        mode: str,
        bidirectional: bool = False,
        forget_bias: float = 1.0,
    ) -> None:
        rule = init.dumps() if isinstance(init, Initializer) else init
        super().__init__(
            init=rule,
            num_hidden=num_hidden,
            num_layers=num_layers,
            mode=mode,
            bidirectional=bidirectional,
            forget_bias=forget_bias,
        )
        self._init = None if init is None else initializers.create(init)
        self._shape = (num_hidden, num_layers, mode, bidirectional)
        self._forget_bias = forget_bias

    def _init_weight(self, desc: str, arr: NDArray) -> None:
        hidden, layers, mode, bidirectional = self._shape
        cell = FusedRNNCell.__new__(FusedRNNCell)  # skips ``__init__``, which would create parameters again
        BaseRNNCell.__init__(cell, "")
        cell._num_hidden, cell._num_layers, cell._mode, cell._bidirectional = hidden, layers, mode, bidirectional
        cell._parameter = sym.Variable(str(desc))
        rule = self._init or getattr(desc, "global_init", None)
        for name, piece in cell._cut(arr, cell._columns(arr.size)):
            if name.endswith("_f_bias"):
                piece[:] = self._forget_bias
            elif rule is None:
                raise ParameterError(f"FusedRNN: {desc!r} needs an initializer: give one to init_params")
            else:
                rule(InitDesc(name, global_init=getattr(desc, "global_init", None)), piece)
