"""Validation of Module arguments: contexts, input names and batches.

Each check raises before any state changes. The functions are stateless and run on the calling thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from weftplan.data.batch import DataDesc
from weftplan.device.context import Context, current_context
from weftplan.errors import BindError, MXNetError, ShapeError
from weftplan.symbol import Symbol
from weftplan.training.executor_group import ExecutorGroup, as_ndarray, replaced


def check_batch(batch: Any, group: ExecutorGroup, labels: Sequence[str]) -> list[tuple[int, ...]]:
    """Check that ``group`` can run ``batch``, possibly after a reshape; returns the shapes of its data arrays.

    Args:
        batch: value passed by the user.
        group: the bound executors.
        labels: names of the labels that this run needs; empty when it only predicts.

    Raises:
        MXNetError: not a batch, or required labels are missing.
        ShapeError: another number of data arrays than bound.
        BindError: the bound names in another order; arrays are matched by position.
        DTypeError: data that are not arrays.
    """
    if not isinstance(getattr(batch, "data", None), (list, tuple)):
        raise MXNetError(f"forward needs a batch: mx.io.DataBatch([data, …], [label, …]), got {type(batch).__name__}")
    batch_labels = getattr(batch, "label", None)  # a named tuple with only ``data`` is accepted as a batch
    if labels and not (batch_labels and group.label_shapes):
        missing = "the batch has no label" if group.label_shapes else "bind got no label_shapes"
        hint = "" if group.label_shapes or not batch_labels else ", bind again (fit: force_rebind=True)"
        raise MXNetError(
            f"forward: {missing}, and training this network needs {list(labels)}; give the iterator labels{hint}, or "
            f"pass is_train=False"
        )
    shapes = [tuple(as_ndarray(value, "data of the batch").shape) for value in batch.data]
    if len(shapes) != len(group.data_shapes):
        bound = [(d.name, d.shape) for d in group.data_shapes]
        raise ShapeError(f"forward: the batch has {len(shapes)} data arrays, bound were {len(bound)}: {bound}")
    for what, descs, provided in (
        ("data", group.data_shapes, getattr(batch, "provide_data", None)),
        ("label", group.label_shapes, getattr(batch, "provide_label", None)),
    ):
        expected = [desc.name for desc in descs]
        batch_names = [name for name, *_ in provided or ()]  # pairs of a name and a shape
        if batch_names != expected and sorted(batch_names) == sorted(expected):
            raise BindError(
                f"forward: the batch has its {what} in the order {batch_names}, bound were {expected}: give both "
                f"iterators their arrays in one order"
            )
    return shapes


def resized(
    group: ExecutorGroup, shapes: Sequence[tuple[int, ...]], labels: Sequence[object] | None
) -> tuple[list[DataDesc], list[DataDesc]]:
    """Return (data, labels) descriptions to bind for a batch with these data shapes.

    If a batch for prediction has no labels, the module keeps its label inputs, because training may continue later.
    """
    data = [DataDesc(d.name, shape, d.dtype, d.layout) for d, shape in zip(group.data_shapes, shapes, strict=True)]
    if labels:
        pairs = zip(group.label_shapes, labels, strict=False)
        return data, [DataDesc(d.name, as_ndarray(a, f"label {d.name!r}").shape, d.dtype, d.layout) for d, a in pairs]
    samples = shapes[0][data[0].batch_axis]
    return data, [
        DataDesc(d.name, replaced(d.shape, d.batch_axis, samples), d.dtype, d.layout) for d in group.label_shapes
    ]


def named_as(descs: list[DataDesc], names: Sequence[str], what: str) -> list[DataDesc]:
    """Return ``descs`` if their names match ``names``; unused labels are allowed."""
    provided = [desc.name for desc in descs]
    if len(set(provided)) != len(provided):
        raise BindError(f"{what}_shapes name an input twice: {provided}")
    if (set(provided) != set(names)) if what == "data" else not set(provided) >= set(names):
        raise BindError(
            f"{what}_shapes name {provided}, the module's {what}_names are {list(names)}: name the iterator's {what} "
            f"accordingly, or pass {what}_names={provided} to Module if the network's inputs are called so"
        )
    return descs


def load_list(work_load_list: Sequence[float] | None, contexts: int) -> list[float]:
    """Return each context's share of the batch; if ``work_load_list`` is None, 1 for each.

    Raises:
        BindError: another number of shares, or a share that is not positive.
    """
    loads: list[float] = [1.0] * contexts if work_load_list is None else list(work_load_list)
    numbers = all(isinstance(load, (int, float)) and 0 < load < float("inf") for load in loads)
    if len(loads) != contexts or not numbers:
        raise BindError(
            f"work_load_list must have a positive number for each of the {contexts} contexts, got {work_load_list!r}"
        )
    return loads


def group_placement(
    group2ctxs: Mapping[str, Context | Sequence[Context]] | Sequence[Mapping[str, Context]] | None, contexts: int
) -> list[Mapping[str, Context]] | None:
    """Return for each context the placement of node groups; None without groups.

    Raises:
        BindError: neither a dictionary nor a list with a dictionary per context.
    """
    if not group2ctxs:
        return None
    every = _contexts_by_group(group2ctxs, contexts) if isinstance(group2ctxs, Mapping) else list(group2ctxs)
    if len(every) != contexts or not all(isinstance(group, Mapping) for group in every):
        raise BindError(
            f"group2ctxs must be a dictionary from groups to contexts, or a list of one for each of the {contexts} "
            f"contexts, got {group2ctxs!r}"
        )
    return every


def _contexts_by_group(groups: Mapping[str, Context | Sequence[Context]], contexts: int) -> list[Mapping[str, Context]]:
    """Split {group: context, or list of 1 or ``contexts`` contexts} into a dictionary per context.

    Raises:
        BindError: a list of another length.
    """
    lists = {}
    for group, group_contexts in groups.items():
        per_context: list[Any] = list(group_contexts) if isinstance(group_contexts, (list, tuple)) else [group_contexts]
        if len(per_context) not in (1, contexts):
            raise BindError(f"group2ctxs: group {group!r} has {len(per_context)} contexts, the module has {contexts}")
        lists[group] = per_context * contexts if len(per_context) == 1 else per_context
    return [{group: per_context[i] for group, per_context in lists.items()} for i in range(contexts)]


class InputNames(NamedTuple):
    """Arguments of a network by their role in training."""

    data: list[str]
    labels: list[str]
    """Labels that the network reads."""
    states: list[str]
    """Arguments that are neither fed nor trained."""
    params: list[str]
    """All other arguments."""
    fixed: list[str]
    """Parameters that are not trained."""


def input_names(
    symbol: Symbol,
    data_names: Iterable[str] | None,
    label_names: Iterable[str] | None,
    fixed_param_names: Iterable[str] | None,
    state_names: Iterable[str] | None,
) -> InputNames:
    """Return the roles of a network's arguments.

    Raises:
        BindError: a name is no argument; the default label name may be missing.
    """
    arguments = symbol.list_arguments()
    data, labels = name_list(data_names, "data_names"), name_list(label_names, "label_names")
    fixed, states = name_list(fixed_param_names, "fixed_param_names"), name_list(state_names, "state_names")
    for what, names in (("label_names", labels), ("data_names", data), ("state_names", states)):
        missing = [name for name in names if name not in arguments]
        if missing and (what != "label_names" or names != ["softmax_label"]):
            raise BindError(f"{what} {missing} are no arguments of the symbol; it has {arguments}")
    labels = [name for name in labels if name in arguments]
    inputs = {*data, *labels, *states}
    params = [name for name in arguments if name not in inputs]
    unknown = [name for name in fixed if name not in arguments]
    if unknown:
        raise BindError(f"fixed_param_names {unknown} are no parameters; the symbol has {params}")
    return InputNames(data, labels, states, params, [name for name in fixed if name in params])


def name_list(names: Iterable[str] | None, what: str) -> list[str]:
    """Return ``names`` as a list of strings; empty for None."""
    if names is None:
        return []
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise BindError(f"{what} must be a list of names such as ['data'], got {names!r}")
    return list(names)


def context_list(context: Context | Iterable[Context] | None) -> list[Context]:
    """Return a context or several contexts as a list; None means the current context."""
    if context is None:
        context = current_context()
    several: Any = context
    contexts = [context] if isinstance(context, (Context, str)) or not isinstance(context, Iterable) else list(several)
    if not all(isinstance(context, Context) for context in contexts):
        raise BindError(f"context must be a context such as mx.cpu(0), or a list of them, got {context!r}")
    if not contexts:
        raise BindError("context is an empty list: give at least one context")
    return contexts
