"""Checks before a run: values that callers hand to it, and whether a backward run may follow.

Values are checked before anything changes, then copied into bound arrays. The checks keep nothing; they are called on
the thread that calls the executor, before it pushes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np

from weftplan.errors import BindError, DTypeError, MXNetError, ShapeError, did_you_mean, listed
from weftplan.executor.new_arrays import writes_of_zeros
from weftplan.executor.prepared_calls import Step
from weftplan.ndarray import NDArray
from weftplan.ops.core.floats import is_number
from weftplan.planner import PlannedGraph
from weftplan.planner.symbolic.network import MARK as SPILL_MARK
from weftplan.support.array_types import RawArray

T = TypeVar("T")
ArrayValue: TypeAlias = NDArray | RawArray | np.generic
"""A value for a bound array, once it has been checked."""


def as_array(value: object, target: NDArray, what: str) -> ArrayValue:
    """``value``, an NDArray or a NumPy array of the shape of ``target``; raises with ``what`` otherwise."""
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
    """Raises BindError for an array in the place of ``is_train``: inputs are given by name."""
    if hasattr(is_train, "__array__") and np.ndim(is_train):
        raise BindError(
            f"forward: is_train must be True or False, got an {type(is_train).__name__} of shape "
            f"{np.shape(is_train)}; give arrays by name, as in forward(data=array)"
        )


def copy_in(value: ArrayValue, target: NDArray) -> None:
    """Copy ``value``, cast to the target's dtype, into ``target``, asynchronously if it is an NDArray."""
    if not isinstance(value, NDArray):
        target[:] = value
        return
    (value if value.dtype == target.dtype else value.astype(target.dtype)).copyto(target)


def unset(executor: Any, valued: Collection[str]) -> list[str]:
    """Return parameters that are as ``simple_bind`` has made them, those in ``valued`` and labels left out."""
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
    """Return ``out_grads`` as backward takes it (an array, a list or a dictionary), one item per output, None where
    missing.

    A list may end before the outputs do, as in MXNet.

    Raises:
        BindError: none of these, unknown names, or more gradients than outputs.
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
    """Return (value, target) for each output whose gradient is needed; ``heads`` is None for the others.

    Raises:
        MXNetError: one that is needed is missing.
        BindError, ShapeError, DTypeError: as :func:`output_gradients` and :func:`as_array`.
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
    """Return (value, target) of parameters given by name.

    Args:
        tables: (values, bound arrays, what they are called in errors).
        allow_extra: pass over names that are not bound.

    Raises:
        BindError: an unknown name.
        ShapeError, DTypeError: as :func:`as_array`.
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
        known = [(name, value, table[name]) for name, value in values.items() if name in table]
        check_shapes(
            ((name, target.shape, getattr(value, "shape", None)) for name, value, target in known), "copy_params_from: "
        )
        pairs += [(as_array(value, target, f"copy_params_from: {name!r}"), target) for name, value, target in known]
    return pairs


def check_shapes(facts: Iterable[tuple[str, Sequence[int], Sequence[int] | None]], verb: str) -> None:
    """Raise ShapeError that lists all (name, bound shape, given shape) of several that differ; None differs from none.

    A single one is left to :func:`as_array`, which says more of it.
    """
    wrong = [
        f"{name!r} was bound with shape {tuple(bound)}, got {tuple(shape)}"
        for name, bound, shape in facts
        if shape is not None and tuple(bound) != tuple(shape)
    ]
    if len(wrong) > 1:
        raise ShapeError(f"{verb}{len(wrong)} parameters have other shapes: {'; '.join(wrong)}")


_Range = tuple[int, int, int]
"""(slab, first byte, end)."""


def needs_training(forward: Iterable[Step]) -> str:
    """Return why the backward part cannot follow a forward run outside training, in words; empty if it can."""
    for step in forward:
        op = step.node.op
        assert op is not None
        if op.needs_training is not None and op.needs_training(step.node.params):
            return f"{op.name} {step.node.name!r} keeps what its gradient needs in training only"
        if SPILL_MARK in step.node.attrs:
            return "results wait in host memory in training only"
    return ""


def reads_forward(planned: PlannedGraph, backward: Sequence[Step]) -> bool:
    """Return whether ``backward`` reads results of the forward part; else it may run without it."""
    graph = planned.graph
    own = {step.nid for step in backward}
    return any(
        array is not None and graph.nodes[node := graph.entry_node[e]].op is not None and node not in own
        for step in backward
        for e, array in zip(graph.inputs[step.nid], step.inputs, strict=True)
    )


def keeps_forward(planned: PlannedGraph, backward: Sequence[Step]) -> bool:
    """Return whether ``backward`` may run twice after one forward: it overwrites no result of forward that it reads.

    Args:
        planned: graph and plan.
        backward: the steps of the backward part, in order.
    """
    plan, graph = planned.memory, planned.graph
    own = {e for step in backward for e in range(graph.row[step.nid], graph.row[step.nid + 1])}
    read: set[int] = set()
    written: set[int] = set()
    for step in backward:
        read.update(
            e
            for e, array in zip(graph.inputs[step.nid], step.inputs, strict=True)
            if array is not None and e not in own
        )
        if step.bind is None:
            continue  # an identity in place: the bytes stay what they are
        outputs = range(graph.row[step.nid], graph.row[step.nid + 1])
        written.update(
            int(plan.entry_storage[e]) for e, array in zip(outputs, step.outputs, strict=True) if array is not None
        )
        written.add(int(plan.workspace_storage[step.nid]))

    def ranges(storages: Iterable[int]) -> list[_Range]:
        sized = [s for s in storages if s >= 0 and plan.storage_nbytes[s]]
        starts, sizes = plan.storage_offset, plan.storage_nbytes
        return [(int(plan.storage_slab[s]), int(starts[s]), int(starts[s] + sizes[s])) for s in sized]

    return not _meet(ranges({int(plan.entry_storage[e]) for e in read}), ranges(written))


def _meet(kept: Sequence[_Range], changed: Sequence[_Range]) -> bool:
    """Return whether a range of one list overlaps a range of the other."""
    for slab in {r[0] for r in kept} & {r[0] for r in changed}:
        mine = [r for r in kept if r[0] == slab]
        # Marks per byte boundary: sums of both lists that are above 0 at once.
        points = np.unique([bound for r in (*mine, *(c for c in changed if c[0] == slab)) for bound in r[1:]])
        cover = np.zeros((2, len(points)), dtype=np.int64)
        for row, ranges in enumerate((mine, [c for c in changed if c[0] == slab])):
            np.add.at(cover[row], np.searchsorted(points, [r[1] for r in ranges]), 1)
            np.add.at(cover[row], np.searchsorted(points, [r[2] for r in ranges]), -1)
        if (np.cumsum(cover, axis=1) > 0).all(axis=0).any():
            return True
    return False
