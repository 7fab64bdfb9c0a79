"""What every recurrent cell is made of: shared parameters, a beginning state, and unrolling over time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from weftplan import ndarray as nd
from weftplan import symbol as sym
from weftplan.errors import ParameterError
from weftplan.ndarray import NDArray
from weftplan.support.keyword_errors import Constructed
from weftplan.symbol import Symbol

Weights = dict[str, NDArray]
Outputs = Symbol | list[Symbol]
Steps = Symbol | Sequence[Symbol]
"""One symbol with an axis of time, or one for each step."""
States = Sequence[Symbol] | None


class RNNParams:
    """Variables by name, made when first asked for; cells that have one of these in common share their weights."""

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self._params: dict[str, Symbol] = {}

    def get(self, name: str, **kwargs: Any) -> Symbol:
        """The variable ``<prefix><name>``; ``kwargs`` are those of ``mx.sym.Variable`` where it is made."""
        full = self._prefix + name
        if full not in self._params:
            self._params[full] = sym.Variable(full, **kwargs)
        return self._params[full]


class BaseRNNCell(Constructed):
    """Base of cells: one step is a call with (input, states), which returns (output, new states).

    Args:
        prefix: of the names of nodes, and of weights that are not shared.
        params: weights shared with other cells.
    """

    steps: ClassVar[bool] = True
    """Whether it makes single steps, or all of time at once."""

    def __init__(self, prefix: str = "", params: RNNParams | None = None) -> None:
        self._own_params = params is None
        self._params = RNNParams(prefix) if params is None else params
        self._prefix = prefix
        self._modified = False
        self.reset()

    def reset(self) -> None:
        """Count steps and beginning states from 0 again; :meth:`unroll` does so first."""
        self._init_counter = -1
        self._counter = -1
        for cell in getattr(self, "_cells", ()):
            cell.reset()

    def __call__(self, inputs: Symbol, states: Sequence[Symbol]) -> tuple[Symbol, list[Symbol]]:
        """One step."""
        raise NotImplementedError

    # -- what a cell says of itself ---------------------------------------------------------------------------------

    @property
    def params(self) -> RNNParams:
        """Its weights, to be shared."""
        self._own_params = False
        return self._params

    @property
    def state_info(self) -> list[dict[str, Any]]:
        """Shape and layout of each state; 0 is the batch."""
        raise NotImplementedError

    @property
    def state_shape(self) -> list[tuple[int, ...]]:
        """Shapes of the states."""
        return [info["shape"] for info in self.state_info]

    @property
    def _gate_names(self) -> Sequence[str]:
        """Endings of the names of single gates' weights, in the order in which they lie."""
        return ()

    def begin_state(self, func: Callable[..., Symbol] = sym.zeros, **kwargs: Any) -> list[Symbol]:
        """States to begin with: zeros, or what ``func`` makes of a name, a shape and ``kwargs``."""
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
        """A copy of ``args`` with a weight and a bias for each gate instead of this cell's joined ones."""
        found = dict(args)
        gates = self._gate_names
        for part in ("i2h", "h2h") if gates else ():
            for kind in ("weight", "bias"):
                joined = found.pop(f"{self._prefix}{part}_{kind}")
                size = joined.shape[0] // len(gates)
                for k, gate in enumerate(gates):
                    found[f"{self._prefix}{part}{gate}_{kind}"] = joined[k * size : (k + 1) * size].copy()
        return found

    def pack_weights(self, args: Mapping[str, NDArray]) -> Weights:
        """What :meth:`unpack_weights` has taken apart, joined again."""
        found = dict(args)
        gates = self._gate_names
        for part in ("i2h", "h2h") if gates else ():
            for kind in ("weight", "bias"):
                pieces = [found.pop(f"{self._prefix}{part}{gate}_{kind}") for gate in gates]
                found[f"{self._prefix}{part}_{kind}"] = nd.concatenate(pieces)
        return found

    # -- time -------------------------------------------------------------------------------------------------------

    def unroll(
        self,
        length: int,
        inputs: Steps,
        begin_state: States = None,
        layout: str = "NTC",
        merge_outputs: bool | None = None,
    ) -> tuple[Outputs, list[Symbol]]:
        """``length`` steps; returns (outputs, last states).

        Args:
            inputs: one symbol with time along the axis that ``layout`` calls T, or a list with one for each step.
            begin_state: default: :meth:`begin_state`.
            merge_outputs: True: outputs as one symbol, time along the axis T; False: a list; None: whatever it is.
        """
        self.reset()
        return self._unroll(length, inputs, begin_state, layout, merge_outputs)

    def _unroll(
        self, length: int, inputs: Steps, begin_state: States, layout: str, merge_outputs: bool | None
    ) -> tuple[Outputs, list[Symbol]]:
        """:meth:`unroll` once the cell is reset; cells that do more than one step after the other have their own."""
        steps = split_time(length, inputs, layout)
        states = list(self.begin_state() if begin_state is None else begin_state)
        outputs = []
        for step in steps:
            output, states = self(step, states)
            outputs.append(output)
        return (merge_time(outputs, layout) if merge_outputs else outputs), states

    def _get_activation(self, inputs: Symbol, activation: Any, **kwargs: Any) -> Symbol:
        """``activation`` by name, or a function of a symbol."""
        return activated(inputs, activation, **kwargs)


def activated(inputs: Symbol, activation: Any, **kwargs: Any) -> Symbol:
    """``activation`` of a symbol, by name or a function of a symbol."""
    made: Symbol = (
        sym.Activation(inputs, act_type=activation, **kwargs)
        if isinstance(activation, str)
        else activation(inputs, **kwargs)
    )
    return made


def split_time(length: int, inputs: Symbol | Sequence[Symbol], layout: str) -> list[Symbol]:
    """One symbol for each step.

    Raises:
        ParameterError: a group of symbols, or a list of another length.
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
    """One symbol of all steps, time along the axis that ``layout`` calls T; ``name`` is for a node that joins them."""
    if isinstance(steps, Symbol):
        return steps
    axis = layout.find("T")
    merged: Symbol = sym.concat(*(sym.expand_dims(step, axis=axis) for step in steps), dim=axis, name=name)
    return merged
