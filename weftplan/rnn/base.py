"""The base of recurrent cells: shared parameters, initial states, and unrolling over time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypedDict

from weftplan import ndarray as nd
from weftplan import symbol as sym
from weftplan.errors import ParameterError
from weftplan.ndarray import NDArray
from weftplan.support.keyword_errors import Constructed
from weftplan.symbol import Symbol

Weights = dict[str, NDArray]
Outputs = Symbol | list[Symbol]
Steps = Symbol | Sequence[Symbol]
"""One symbol with a time axis, or one symbol per step."""
States = Sequence[Symbol] | None
Activation = str | Callable[..., Symbol]
"""Name of an activation, or a function from a symbol to a symbol."""


class StateInfo(TypedDict):
    """Shape (0 is the batch) and layout of a state."""

    shape: tuple[int, ...]
    __layout__: str


class RNNParams:
    """Variables by name, created on first use; cells that share an instance share their weights."""

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self._params: dict[str, Symbol] = {}

    def get(self, name: str, **kwargs: Any) -> Symbol:
        """Return the variable ``<prefix><name>``; ``kwargs`` go to ``mx.sym.Variable`` when it is created."""
        full = self._prefix + name
        if full not in self._params:
            self._params[full] = sym.Variable(full, **kwargs)
        return self._params[full]


class BaseRNNCell(Constructed):
    """Base of cells: one step is a call with (input, states) that returns (output, new states).

    Args:
        prefix: prefix of the names of nodes and unshared weights.
        params: weights shared with other cells.
    """

    steps: ClassVar[bool] = True
    """Whether the cell makes single steps, rather than all steps in a single operator."""

    def __init__(self, prefix: str = "", params: RNNParams | None = None) -> None:
        self._own_params = params is None
        self._params = RNNParams(prefix) if params is None else params
        self._prefix = prefix
        self._modified = False
        self.reset()

    def reset(self) -> None:
        """Restart the counts of steps and initial states; :meth:`unroll` does so first."""
        self._init_counter = -1
        self._counter = -1
        for cell in getattr(self, "_cells", ()):
            cell.reset()

    def __call__(self, inputs: Symbol, states: Sequence[Symbol]) -> tuple[Symbol, list[Symbol]]:
        """Compute one step."""
        raise NotImplementedError

    # -- what a cell says of itself ---------------------------------------------------------------------------------

    @property
    def params(self) -> RNNParams:
        """Return the cell's weights, for sharing."""
        self._own_params = False
        return self._params

    @property
    def state_info(self) -> list[StateInfo]:
        """Return the shape and layout of each state; 0 is the batch."""
        raise NotImplementedError

    @property
    def state_shape(self) -> list[tuple[int, ...]]:
        """Return the shapes of the states."""
        return [info["shape"] for info in self.state_info]

    @property
    def _gate_names(self) -> Sequence[str]:
        """Return the name suffixes of single gates' weights, in storage order."""
        return ()

    def begin_state(self, func: Callable[..., Symbol] = sym.zeros, **kwargs: object) -> list[Symbol]:
        """Return initial states: zeros, or the result of ``func`` for a name, a shape and ``kwargs``."""
        if self._modified:
            raise ParameterError(
                f"begin_state: {type(self).__name__} {self._prefix!r} was given to a modifier; call the modifier's"
            )
        states = []
        for info in self.state_info:
            self._init_counter += 1
            states.append(func(name=f"{self._prefix}begin_state_{self._init_counter}", **{**kwargs, **(info or {})}))
        return states

    # -- weights ----------------------------------------------------------------------------------------------------

    def unpack_weights(self, args: Mapping[str, NDArray]) -> Weights:
        """Return a copy of ``args`` with a weight and a bias per gate instead of this cell's packed arrays."""
        weights = dict(args)
        gates = self._gate_names
        for part in ("i2h", "h2h") if gates else ():
            for kind in ("weight", "bias"):
                joined = weights.pop(f"{self._prefix}{part}_{kind}")
                size = joined.shape[0] // len(gates)
                for k, gate in enumerate(gates):
                    weights[f"{self._prefix}{part}{gate}_{kind}"] = joined[k * size : (k + 1) * size].copy()
        return weights

    def pack_weights(self, args: Mapping[str, NDArray]) -> Weights:
        """Return a copy of ``args`` with packed arrays, the inverse of :meth:`unpack_weights`."""
        weights = dict(args)
        gates = self._gate_names
        for part in ("i2h", "h2h") if gates else ():
            for kind in ("weight", "bias"):
                pieces = [weights.pop(f"{self._prefix}{part}{gate}_{kind}") for gate in gates]
                weights[f"{self._prefix}{part}_{kind}"] = nd.concatenate(pieces)
        return weights

    # -- time -------------------------------------------------------------------------------------------------------

    def unroll(
        self,
        length: int,
        inputs: Steps,
        begin_state: States = None,
        layout: str = "NTC",
        merge_outputs: bool | None = None,
    ) -> tuple[Outputs, list[Symbol]]:
        """Unroll ``length`` steps; return (outputs, last states).

        Args:
            inputs: one symbol with time along the axis that ``layout`` calls T, or a list with one symbol per step.
            begin_state: default: :meth:`begin_state`.
            merge_outputs: True: outputs as one symbol, time along the axis T; False: a list; None: either of them.
        """
        self.reset()
        return self._unroll(length, inputs, begin_state, layout, merge_outputs)

    def _unroll(
        self, length: int, inputs: Steps, begin_state: States, layout: str, merge_outputs: bool | None
    ) -> tuple[Outputs, list[Symbol]]:
        """Unroll a cell that has been reset; cells with another algorithm override this."""
        steps = split_time(length, inputs, layout)
        states = list(self.begin_state() if begin_state is None else begin_state)
        outputs = []
        for step in steps:
            output, states = self(step, states)
            outputs.append(output)
        return (merge_time(outputs, layout) if merge_outputs else outputs), states

    def _get_activation(self, inputs: Symbol, activation: Activation, **kwargs: object) -> Symbol:
        """Apply ``activation``, a name or a function of a symbol."""
        return activated(inputs, activation, **kwargs)


def activated(inputs: Symbol, activation: Activation, **kwargs: object) -> Symbol:
    """Apply ``activation``, a name or a function, to a symbol."""
    result: Symbol = (
        sym.Activation(inputs, act_type=activation, **kwargs)
        if isinstance(activation, str)
        else activation(inputs, **kwargs)
    )
    return result


def split_time(length: int, inputs: Symbol | Sequence[Symbol], layout: str) -> list[Symbol]:
    """Return one symbol per step.

    Raises:
        ParameterError: a group of symbols, or a list of the wrong length.
    """
    if inputs is None:
        raise ParameterError("unroll needs inputs: a symbol with an axis of time, or a list with one for each step")
    if isinstance(inputs, Symbol):
        if len(inputs.list_outputs()) != 1:
            raise ParameterError("unroll: inputs are a group of symbols; give list(inputs)")
        return list(sym.split(inputs, axis=layout.find("T"), num_outputs=length, squeeze_axis=True))
    if len(inputs) != length:
        raise ParameterError(f"unroll: {len(inputs)} inputs for {length} steps")
    return list(inputs)


def merge_time(steps: Symbol | Sequence[Symbol], layout: str, name: str | None = None) -> Symbol:
    """Return one symbol of all steps, time along the axis T of ``layout``; ``name`` names a concatenation node."""
    if isinstance(steps, Symbol):
        return steps
    axis = layout.find("T")
    merged: Symbol = sym.concat(*(sym.expand_dims(step, axis=axis) for step in steps), dim=axis, name=name)
    return merged
