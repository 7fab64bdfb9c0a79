"""Cells that modify another cell: dropout between layers, zoneout, residual connections.

Names and weights remain those of the inner cell, which must no longer be called directly. Modifiers build symbols and
compute nothing themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from weftplan import symbol as sym
from weftplan.errors import ParameterError
from weftplan.ndarray import NDArray
from weftplan.rnn.base import BaseRNNCell, Outputs, RNNParams, StateInfo, States, Steps, Weights, merge_time, split_time
from weftplan.symbol import Symbol
from weftplan.training.keyword_checks import number


class DropoutCell(BaseRNNCell):
    """A stateless cell that zeroes elements of its input with probability ``dropout``, in training."""

    def __init__(self, dropout: float, prefix: str = "dropout_", params: RNNParams | None = None) -> None:
        super().__init__(prefix, params)
        self.dropout = number(dropout, "DropoutCell: dropout", low=0, below=1)

    @property
    def state_info(self) -> list[StateInfo]:
        return []

    def __call__(self, inputs: Symbol, states: Sequence[Symbol]) -> tuple[Symbol, list[Symbol]]:
        return (sym.Dropout(inputs, p=self.dropout) if self.dropout else inputs), list(states)

    def _unroll(
        self, length: int, inputs: Steps, begin_state: States, layout: str, merge_outputs: bool | None
    ) -> tuple[Outputs, list[Symbol]]:
        if isinstance(inputs, Symbol) and merge_outputs is not False:
            return self(inputs, [])  # all steps in one operator
        return super()._unroll(length, inputs, begin_state, layout, merge_outputs)


class ModifierCell(BaseRNNCell):
    """Base of modifiers: states and weights belong to the inner cell, which must no longer be called directly."""

    def __init__(self, base_cell: BaseRNNCell) -> None:
        super().__init__()
        base_cell._modified = True
        self.base_cell = base_cell

    @property
    def params(self) -> RNNParams:
        self._own_params = False
        return self.base_cell.params

    @property
    def state_info(self) -> list[StateInfo]:
        return self.base_cell.state_info

    def reset(self) -> None:
        super().reset()
        if hasattr(self, "base_cell"):
            self.base_cell.reset()

    def begin_state(  # type: ignore[override]  # MXNet's name of the parameter differs from its base's
        self, init_sym: Callable[..., Symbol] = sym.zeros, **kwargs: object
    ) -> list[Symbol]:
        if self._modified:
            raise ParameterError(f"begin_state: {type(self).__name__} was given to a modifier; call the modifier's")
        self.base_cell._modified = False
        try:
            return self.base_cell.begin_state(init_sym, **kwargs)
        finally:
            self.base_cell._modified = True

    def unpack_weights(self, args: Mapping[str, NDArray]) -> Weights:
        return self.base_cell.unpack_weights(args)

    def pack_weights(self, args: Mapping[str, NDArray]) -> Weights:
        return self.base_cell.pack_weights(args)


class ZoneoutCell(ModifierCell):
    """A modifier that, in training, randomly keeps the previous outputs and states (Krueger et al., 2017).

    Args:
        zoneout_outputs, zoneout_states: the probabilities.
    """

    def __init__(self, base_cell: BaseRNNCell, zoneout_outputs: float = 0.0, zoneout_states: float = 0.0) -> None:
        if not base_cell.steps:
            raise ParameterError(
                f"ZoneoutCell works on single steps, which {type(base_cell).__name__} does not make: unfuse it, or "
                f"modify the cells in it"
            )
        super().__init__(base_cell)
        self.zoneout_outputs = number(zoneout_outputs, "ZoneoutCell: zoneout_outputs", low=0, below=1)
        self.zoneout_states = number(zoneout_states, "ZoneoutCell: zoneout_states", low=0, below=1)
        self.prev_output: Symbol | None = None

    def reset(self) -> None:
        super().reset()
        self.prev_output = None

    def __call__(self, inputs: Symbol, states: Sequence[Symbol]) -> tuple[Symbol, list[Symbol]]:
        output, states_out = self.base_cell(inputs, states)

        def mixed(new: Symbol, old: Symbol, share: float) -> Symbol:
            chosen: Symbol = sym.where(sym.Dropout(sym.ones_like(new), p=share), new, old)
            return chosen

        if self.zoneout_outputs:
            previous = sym.zeros_like(output) if self.prev_output is None else self.prev_output
            output = mixed(output, previous, self.zoneout_outputs)
        if self.zoneout_states:
            states_out = [mixed(new, old, self.zoneout_states) for new, old in zip(states_out, states, strict=True)]
        self.prev_output = output
        return output, states_out


class ResidualCell(ModifierCell):
    """A modifier that adds the input to the cell's output (He et al., 2016)."""

    def __call__(self, inputs: Symbol, states: Sequence[Symbol]) -> tuple[Symbol, list[Symbol]]:
        output, states_out = self.base_cell(inputs, states)
        return sym.elemwise_add(output, inputs, name=f"{output.name}_plus_residual"), states_out

    def _unroll(
        self, length: int, inputs: Steps, begin_state: States, layout: str, merge_outputs: bool | None
    ) -> tuple[Outputs, list[Symbol]]:
        self.base_cell._modified = False
        try:
            unrolled, states_out = self.base_cell.unroll(length, inputs, begin_state, layout, merge_outputs)
        finally:
            self.base_cell._modified = True
        if isinstance(unrolled, Symbol):
            return sym.elemwise_add(
                unrolled, merge_time(inputs, layout), name=f"{unrolled.name}_plus_residual"
            ), states_out
        steps = zip(unrolled, split_time(length, inputs, layout), strict=True)
        return [sym.elemwise_add(a, b, name=f"{a.name}_plus_residual") for a, b in steps], states_out
