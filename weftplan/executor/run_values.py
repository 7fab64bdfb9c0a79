"""Checks before a run: the caller's values for bound arrays, and whether the backward part can run.

All values of a call are checked before any is copied into a bound array. The checks run on the calling thread, and
store nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np

from weftplan.errors import BindError, DTypeError, MXNetError, ShapeError, did_you_mean, listed
from weftplan.executor.new_arrays import writes_of_zeros
from weftplan.executor.prepared_calls import PreparedStep
from weftplan.ndarray import NDArray
from weftplan.ops.core.floats import is_number
from weftplan.planner import PlannedGraph
from weftplan.planner.symbolic.network import MARK as SPILL_MARK
from weftplan.support.array_types import RawArray

T = TypeVar("T")
ArrayValue: TypeAlias = NDArray | RawArray | np.generic
"""A checked value for a bound array."""


def as_array(value: object, target: NDArray, what: str) -> ArrayValue:
    """Return ``value`` as an NDArray or a NumPy array, after checking that it fits ``target``.

    Args:
        value: an array, or an object with ``__array__``.
        target: the bound array.
        what: the subject of error messages.

    Raises:
        DTypeError: ``value`` is not an array of numbers.
        ShapeError: its shape differs from the target's.
    """
    if not isinstance(value, (NDArray, np.ndarray, np.generic)):
        if not hasattr(value, "__array__"):
            raise DTypeError(
                f"{what} must be an NDArray or a NumPy array of shape {target.shape}, got {type(value).__name__}; make "
                f"one with mx.nd.array(...)"
            )
        value = np.asarray(value)
    if tuple(value.shape) != tuple(target.shape):
        raise ShapeError(f"{what} was bound with shape {target.shape}, got {tuple(value.shape)}")
    if not isinstance(value, NDArray) and not is_number(value.dtype):
        raise DTypeError(f"{what} must hold numbers, got dtype {value.dtype}")
    return value


def check_switch(is_train: object) -> None:
    """Raise BindError if ``is_train`` is an array: inputs of ``forward`` are passed by name."""
    if hasattr(is_train, "__array__") and np.ndim(is_train):
        raise BindError(
            f"forward: is_train must be True or False, got an {type(is_train).__name__} of shape "
            f"{np.shape(is_train)}; give arrays by name, as in forward(data=array)"
        )


def copy_in(value: ArrayValue, target: NDArray) -> None:
    """Copy ``value`` into ``target``, cast to its dtype; asynchronously if ``value`` is an NDArray."""
    if not isinstance(value, NDArray):
        target[:] = value
        return
    (value if value.np_dtype == target.np_dtype else value.astype(target.np_dtype)).copyto(target)


def unset(executor: Any, valued: Collection[str]) -> list[str]:
    """Return the names of parameters that ``simple_bind`` made and that no operation has written since.

    Args:
        executor: the executor; this function waits for its parameters.
        valued: names to leave out. Names that end in ``label`` are left out, too.
    """
    tables = (executor.arg_dict, executor.aux_dict)
    arrays = {name: array for table in tables for name, array in table.items() if name in executor._inferred}
    names = []
    for name, array in arrays.items():
        if name not in valued and not name.endswith("label"):
            array.wait_to_read()
            if array.var.version <= writes_of_zeros(array):
                names.append(name)
    return names


def output_gradients(out_grads: object, names: Sequence[str]) -> list[object]:
    """Return the output gradients in the order of ``names``, with None for missing gradients.

    Args:
        out_grads: an array, a list, a dictionary by output name, or None. A list may be shorter than ``names``, as in
            MXNet.
        names: the names of the outputs.

    Raises:
        BindError: ``out_grads`` has another type, an unknown name, or more gradients than there are outputs.
    """
    count = len(names)
    if out_grads is None:
        return [None] * count
    if isinstance(out_grads, (NDArray, np.ndarray)):
        out_grads = [out_grads]
    if isinstance(out_grads, Mapping):
        unknown = [name for name in out_grads if name not in names]
        if unknown:
            raise BindError(f"backward: no outputs named {listed(unknown)}; the outputs are {listed(names)}")
        return [out_grads.get(name) for name in names]
    if not isinstance(out_grads, (list, tuple)):
        raise BindError(f"backward: out_grads must be an array, a list or a dictionary, got {type(out_grads).__name__}")
    if len(out_grads) > count:
        raise BindError(f"backward: {len(out_grads)} gradients for {count} outputs {listed(names)}")
    return [*out_grads, *[None] * (count - len(out_grads))]


def head_values(
    out_grads: object, names: Sequence[str], heads: Sequence[NDArray | None]
) -> list[tuple[ArrayValue, NDArray]]:
    """Return (value, target array) for each output whose gradient is needed.

    Args:
        out_grads: see :func:`output_gradients`.
        names: the names of the outputs.
        heads: the target array of each output; None if its gradient is not needed.

    Raises:
        MXNetError: a needed gradient is missing.
        BindError, ShapeError, DTypeError: see :func:`output_gradients` and :func:`as_array`.
    """
    pairs = []
    for name, head, value in zip(names, heads, output_gradients(out_grads, names), strict=True):
        if head is None:
            continue
        if value is None:
            raise MXNetError(
                f"backward: the gradient of output {name!r} is needed; pass out_grads, or end the network "
                f"in a loss operator such as SoftmaxOutput or make_loss"
            )
        pairs.append((as_array(value, head, f"backward: the gradient of output {name!r}"), head))
    return pairs


def parameter_values(
    tables: Iterable[tuple[Mapping[str, object], Mapping[str, NDArray], str]], *, allow_extra: bool
) -> list[tuple[ArrayValue, NDArray]]:
    """Return (value, bound array) of each parameter that has a value.

    Args:
        tables: (values by name, bound arrays by name, kind of parameter in error messages: ``arg`` or ``aux``).
        allow_extra: whether to ignore values with unknown names.

    Raises:
        BindError: an unknown name, unless ``allow_extra``; or values that are not in a dictionary.
        ShapeError, DTypeError: see :func:`as_array`.
    """
    pairs = []
    for values, table, what in tables:
        if not isinstance(values, Mapping):
            raise BindError(
                f"copy_params_from: {what}_params must be a dictionary of arrays by name, got {type(values).__name__}"
            )
        unknown = [name for name in values if name not in table]
        if unknown and not allow_extra:
            hint = did_you_mean(unknown[0], table)
            if unknown[0].startswith(("arg:", "aux:")):
                hint = "mx.model.load_params(prefix, epoch) takes the kinds off the names and gives two dictionaries; "
            raise BindError(
                f"copy_params_from: {listed(unknown)} {'is' if len(unknown) == 1 else 'are'} no {what} of the symbol: "
                f"{len(values) - len(unknown)} of {len(values)} names match; {hint}it has {listed(table)}"
            )
        matched = [(name, value, table[name]) for name, value in values.items() if name in table]
        check_shapes(
            ((name, target.shape, getattr(value, "shape", None)) for name, value, target in matched),
            "copy_params_from: ",
        )
        pairs += [(as_array(value, target, f"copy_params_from: {name!r}"), target) for name, value, target in matched]
    return pairs


def check_shapes(facts: Iterable[tuple[str, Sequence[int], Sequence[int] | None]], verb: str) -> None:
    """Raise a ShapeError that lists all parameters of wrong shape if there are at least two.

    A single wrong shape is left to :func:`as_array`, whose error says more.

    Args:
        facts: (name, bound shape, shape of the value) of each parameter; None, the shape of no array, is not wrong.
        verb: beginning of the message.
    """
    wrong = [
        f"{name!r} was bound with shape {tuple(bound)}, got {tuple(shape)}"
        for name, bound, shape in facts
        if shape is not None and tuple(bound) != tuple(shape)
    ]
    if len(wrong) > 1:
        raise ShapeError(f"{verb}{len(wrong)} parameters have other shapes: {'; '.join(wrong)}")


_Range = tuple[int, int, int]
"""Range of bytes: (slab, first byte, byte after the last)."""


def needs_training(forward: Iterable[PreparedStep]) -> str:
    """Return the reason why backward cannot run after ``forward(is_train=False)``; empty if it can."""
    for step in forward:
        op = step.node.op
        assert op is not None
        if op.needs_training is not None and op.needs_training(step.node.params):
            return f"{op.name} {step.node.name!r} keeps what its gradient needs in training only"
        if SPILL_MARK in step.node.attrs:
            return "results wait in host memory in training only"
    return ""


def reads_forward(planned: PlannedGraph, backward: Sequence[PreparedStep]) -> bool:
    """Return whether the steps ``backward`` read results of forward; if not, they can run without a forward."""
    graph = planned.graph
    backward_nodes = {step.nid for step in backward}
    return any(
        array is not None and graph.nodes[node := graph.entry_node[e]].op is not None and node not in backward_nodes
        for step in backward
        for e, array in zip(graph.inputs[step.nid], step.inputs, strict=True)
    )


def keeps_forward(planned: PlannedGraph, backward: Sequence[PreparedStep]) -> bool:
    """Return whether backward may run repeatedly after one forward, because it overwrites no result that it reads.

    Args:
        planned: graph and plan.
        backward: the steps of the backward part, in order.
    """
    plan, graph = planned.memory, planned.graph
    backward_entries = {e for step in backward for e in range(graph.row[step.nid], graph.row[step.nid + 1])}
    read: set[int] = set()
    written: set[int] = set()
    for step in backward:
        read.update(
            e
            for e, array in zip(graph.inputs[step.nid], step.inputs, strict=True)
            if array is not None and e not in backward_entries
        )
        if step.bind is None:
            continue  # an in-place identity writes nothing
        outputs = range(graph.row[step.nid], graph.row[step.nid + 1])
        written.update(
            int(plan.entry_storage[e]) for e, array in zip(outputs, step.outputs, strict=True) if array is not None
        )
        written.add(int(plan.workspace_storage[step.nid]))

    def ranges(storages: Iterable[int]) -> list[_Range]:
        sized = [s for s in storages if s >= 0 and plan.storage_nbytes[s]]
        starts, sizes = plan.storage_offset, plan.storage_nbytes
        return [(int(plan.storage_slab[s]), int(starts[s]), int(starts[s] + sizes[s])) for s in sized]

    return not _overlap(ranges({int(plan.entry_storage[e]) for e in read}), ranges(written))


def _overlap(read: Sequence[_Range], written: Sequence[_Range]) -> bool:
    """Return whether a range of one list overlaps a range of the other."""
    for slab in {r[0] for r in read} & {r[0] for r in written}:
        mine = [r for r in read if r[0] == slab]
        # Between two boundaries, count the ranges of each list that cover the bytes; both counts above 0 is an overlap.
        points = np.unique([bound for r in (*mine, *(c for c in written if c[0] == slab)) for bound in r[1:]])
        cover = np.zeros((2, len(points)), dtype=np.int64)
        for row, ranges in enumerate((mine, [c for c in written if c[0] == slab])):
            np.add.at(cover[row], np.searchsorted(points, [r[1] for r in ranges]), 1)
            np.add.at(cover[row], np.searchsorted(points, [r[2] for r in ranges]), -1)
        if (np.cumsum(cover, axis=1) > 0).all(axis=0).any():
            return True
    return False
