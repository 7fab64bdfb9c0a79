"""Executor group of a data-parallel Module: an executor per context, each on its slice of the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from weftplan import ndarray as nd
from weftplan.data.batch import DataBatch, DataDesc
from weftplan.data.device_placement import Placed, split_batch
from weftplan.device.context import Context
from weftplan.errors import BindError, BudgetError, DTypeError, ShapeError, listed
from weftplan.executor import Executor, simple_bind
from weftplan.ndarray import NDArray
from weftplan.ops.core.floats import is_number
from weftplan.support.array_types import DTypeLike
from weftplan.support.package_log import log
from weftplan.symbol import Symbol, topological_order
from weftplan.training.memory import MemoryShare
from weftplan.training.metrics.base import EvalMetric
from weftplan.training.mxnet_names import GroupNames

GradReq = str | Sequence[str] | Mapping[str, str]


def as_ndarray(value: object, what: str, *, dtype: DTypeLike | None = None) -> NDArray:
    """Return ``value`` as an NDArray; NumPy arrays are converted.

    Raises:
        DTypeError: it is neither; the message names it ``what``.
    """
    if isinstance(value, NDArray):
        return value
    if not isinstance(value, (np.ndarray, np.generic)) or not is_number(value.dtype):
        came = f"{type(value).__name__} of dtype {value.dtype}" if hasattr(value, "dtype") else type(value).__name__
        raise DTypeError(
            f"{what} must be an NDArray or a NumPy array of numbers, got {came}; make one with mx.nd.array(...)"
        )
    return nd.array(value, dtype=value.dtype if dtype is None else dtype)


class ExecutorGroup(GroupNames):
    """Executors of one symbol on a list of contexts.

    Args:
        symbol: the network.
        contexts: one executor each; a context may not occur twice.
        data_shapes, label_shapes: of a whole batch; the batch axis is the first of each.
        param_names: arguments that are parameters.
        for_training: bind gradients too.
        inputs_need_grad: also the gradients of the data.
        fixed_param_names: parameters without a gradient.
        grad_req: ``write`` or ``add`` for all trained arguments; or a grad_req per argument, as a list in argument
            order or by name (default: ``write``).
        shared_group: executors whose planned memory and parameters are reused (for another batch size).
        group2ctxs: for each context a mapping from node groups to contexts.
        share: each executor's share of a memory budget.
        state_names: arguments that are neither fed nor trained; initially zero.
        loads: for each context its share of the batch; default: equal shares.

    Raises:
        BudgetError: an executor does not fit its share.
        BindError: a context occurs twice although there is a memory budget; or a network trained on several contexts
            has a layer with statistics over the whole batch.
    """

    def __init__(
        self,
        symbol: Symbol,
        contexts: Sequence[Context],
        data_shapes: Sequence[DataDesc],
        label_shapes: Sequence[DataDesc],
        param_names: Sequence[str],
        *,
        for_training: bool,
        inputs_need_grad: bool = False,
        fixed_param_names: Sequence[str] = (),
        grad_req: GradReq = "write",
        shared_group: ExecutorGroup | None = None,
        group2ctxs: Sequence[Mapping[str, Context]] | None = None,
        share: MemoryShare | None = None,
        state_names: Sequence[str] = (),
        loads: Sequence[float] | None = None,
    ) -> None:
        if share is not None and len(set(contexts)) != len(contexts):
            raise BindError(f"with a memory budget a context may occur only once, got {list(contexts)}")
        if for_training and len(contexts) > 1:
            _refuse_shared_statistics(symbol, len(contexts))
        self.symbol, self.for_training, self.inputs_need_grad = symbol, for_training, inputs_need_grad
        self.fixed_param_names, self.state_names = list(fixed_param_names), list(state_names)
        self.workload = [1.0] * len(contexts) if loads is None else list(loads)
        self.contexts = list(contexts)
        self.data_shapes = list(data_shapes)
        self.label_shapes = list(label_shapes)
        self.param_names = list(param_names)
        self.aux_names = symbol.list_auxiliary_states()
        self.batch_size = data_shapes[0].shape[data_shapes[0].batch_axis] if data_shapes[0].shape else 0
        for desc in (*data_shapes, *label_shapes):
            axis = desc.batch_axis
            if len(desc.shape) <= axis or desc.shape[axis] != self.batch_size:
                raise ShapeError(
                    f"input {desc.name!r} has shape {desc.shape}, expected {self.batch_size} samples along axis {axis}"
                )
        layouts = [symbol[i].attr("__layout__") for i in range(len(symbol.list_outputs()))]
        self._output_axes = [max(0, DataDesc.get_batch_axis(layout)) for layout in layouts]
        self.slices = split_batch(self.batch_size, len(contexts), loads)
        arguments = symbol.list_arguments()
        trained = [n for n in self.param_names if for_training and n not in fixed_param_names]
        if for_training and inputs_need_grad:
            trained += [desc.name for desc in data_shapes]
        requests = self.grad_req = _requests(arguments, trained, grad_req if for_training else "null")
        self.executors: list[Executor] = []
        for i, (ctx, part) in enumerate(zip(self.contexts, self.slices, strict=True)):
            shapes = {
                desc.name: replaced(desc.shape, desc.batch_axis, part.stop - part.start)
                for desc in (*data_shapes, *label_shapes)
                if desc.name in arguments
            }
            types = {desc.name: desc.dtype for desc in (*data_shapes, *label_shapes) if desc.name in arguments}
            shared = shared_group.executors[i] if shared_group is not None else None
            self.executors.append(
                _bound(
                    symbol,
                    share,
                    ctx,
                    grad_req=requests,
                    group2ctx=None if group2ctxs is None else group2ctxs[i],
                    type_dict=types,
                    shared_arg_names=self.param_names if shared is not None else None,
                    shared_exec=shared,
                    **shapes,
                )
            )
        self.param_arrays = [[e.arg_dict[name] for e in self.executors] for name in self.param_names]
        self.grad_arrays = [
            None
            if requests[name] == "null"
            else [grad for e in self.executors if (grad := e.grad_dict[name]) is not None]
            for name in self.param_names
        ]
        self.aux_arrays = [[e.aux_dict[name] for e in self.executors] for name in self.aux_names]
        self.state_arrays = [[e.arg_dict[name] for e in self.executors] for name in state_names]
        self.set_states(value=0)

    def load(self, batch: DataBatch) -> None:
        """Copy each context's slice of the batch into its executor, asynchronously.

        Raises:
            ShapeError: an array does not have the bound shape; nothing is copied.
            DTypeError: a value is not an array.
        """
        work: list[tuple[DataDesc, NDArray, Placed]] = []
        labels = getattr(batch, "label", None) or []
        ahead = getattr(batch, "placed", None) or [{}] * (len(batch.data) + len(labels))
        arrays_ahead = {"data": ahead[: len(batch.data)], "label": ahead[len(batch.data) :]}
        for what, descs, arrays in (("data", self.data_shapes, batch.data), ("label", self.label_shapes, labels)):
            if what == "label" and (not arrays or not descs):
                continue  # a network without labels, or a run that only predicts
            if len(arrays) != len(descs):
                raise ShapeError(
                    f"the batch has {len(arrays)} {what} arrays, bound were {len(descs)}: {[d.name for d in descs]}"
                )
            for desc, value, placed in zip(descs, arrays, arrays_ahead[what], strict=True):
                array = as_ndarray(value, f"{what} {desc.name!r} of the batch", dtype=desc.dtype)
                if tuple(array.shape) != tuple(desc.shape):
                    raise ShapeError(f"{what} {desc.name!r} was bound with shape {desc.shape}, got {array.shape}")
                work.append((desc, array, placed))
        for desc, array, placed in work:
            for executor, part in zip(self.executors, self.slices, strict=True):
                target = executor.arg_dict.get(desc.name)
                if target is not None:
                    piece = None if desc.batch_axis else placed.get((executor.context, part.start, part.stop))
                    if piece is None:
                        piece = array if len(self.executors) == 1 else _cut(array, part, desc.batch_axis)
                    (piece if piece.dtype == target.dtype else piece.astype(target.dtype)).copyto(target)

    def forward(self, *, is_train: bool) -> None:
        """Run forward on every context, asynchronously."""
        for executor in self.executors:
            executor.forward(is_train=is_train)

    def backward(self, out_grads: Sequence[NDArray] | None = None) -> None:
        """Run backward on every context; ``out_grads`` are of the whole batch, one per output."""
        for executor, part in zip(self.executors, self.slices, strict=True):
            if out_grads is None:
                executor.backward()
            else:
                grads = zip(out_grads, self._output_axes, strict=False)
                executor.backward([_cut(g, part, axis).as_in_context(executor.context) for g, axis in grads])

    def set_argument(self, name: str, value: float) -> None:
        """Fill an argument of every executor that has it with a number."""
        for executor in self.executors:
            if name in executor.arg_dict:
                executor.arg_dict[name][:] = value

    def clear_gradients(self) -> None:
        """Set every gradient to zero, before accumulation with grad_req ``add``."""
        for executor in self.executors:
            for gradient in executor.grad_dict.values():
                if gradient is not None:
                    gradient[:] = 0

    def outputs(self) -> list[list[NDArray]]:
        """Return for each output the arrays of all contexts, in order."""
        return [list(parts) for parts in zip(*(e.outputs for e in self.executors), strict=True)]

    def merged_outputs(self) -> list[NDArray]:
        """Return each output of the whole batch, on the host if there are several contexts."""
        return [_merge(parts, axis) for parts, axis in zip(self.outputs(), self._output_axes, strict=True)]

    def update_metric(
        self, eval_metric: EvalMetric, labels: Sequence[Any], pre_sliced: bool = False, pad: int = 0
    ) -> None:
        """Update a metric with the outputs of each context, in order.

        Args:
            eval_metric: metric that is updated in place.
            labels: labels of the whole batch, or with ``pre_sliced`` a list with those of each context.
            pad: number of samples at the end of the batch that do not count.
        """
        names, outputs = self.label_names, self.output_names
        axes = [desc.batch_axis for desc in self.label_shapes]
        for k, (part, executor) in enumerate(zip(self.slices, self.executors, strict=True)):
            samples, padded = part.stop - part.start, max(0, part.stop - (self.batch_size - pad))
            if padded >= samples:
                continue
            own: Sequence[Any] = labels[k] if pre_sliced else labels
            if not pre_sliced and len(self.slices) > 1:
                own = [_cut(one, part, axis) for one, axis in zip(labels, [*axes, *[0] * len(labels)], strict=False)]
            own, results = ([without_padding(one, samples, padded) for one in many] for many in (own, executor.outputs))
            if len(names) == len(own) and len(set(outputs)) == len(outputs):
                eval_metric.update_dict(dict(zip(names, own, strict=True)), dict(zip(outputs, results, strict=True)))
            else:
                eval_metric.update(own, results)

    def output_shapes(self) -> list[tuple[int, ...]]:
        """Return the shape of each output of the whole batch; before the first forward, too."""
        return [
            replaced(parts[0].shape, axis, sum(part.shape[axis] for part in parts)) if parts[0].shape else ()
            for parts, axis in zip(self.outputs(), self._output_axes, strict=True)
        ]

    def merged_input_grads(self) -> list[NDArray | None]:
        """Gradients of the data arrays for the whole batch; None for an array with grad_req ``null``."""
        merged: list[NDArray | None] = []
        for parts, desc in zip(self.input_grad_arrays, self.data_shapes, strict=True):
            present = [part for part in parts if part is not None]
            merged.append(_merge(present, desc.batch_axis) if present else None)
        return merged

    @property
    def input_grad_arrays(self) -> list[list[NDArray | None]]:
        """For each data array, its gradients on all contexts."""
        return [[e.grad_dict[desc.name] for e in self.executors] for desc in self.data_shapes]

    def merged_states(self) -> list[NDArray]:
        """Return each state of the whole batch, whose samples are axis 0."""
        return [_merge(parts, 0) for parts in self.state_arrays]

    def set_states(self, states: Sequence[Sequence[NDArray]] | None = None, value: float | None = None) -> None:
        """Set the states: all to the same number, or each to a list with an array per context."""
        if states is None:
            for parts in self.state_arrays:
                for part in parts:
                    part[:] = value
            return
        for parts, values in zip(self.state_arrays, states, strict=True):
            for part, source in zip(parts, values, strict=True):
                source.copyto(part)

    def set_params(self, arg_params: Mapping[str, NDArray], aux_params: Mapping[str, NDArray]) -> None:
        """Copy parameters and auxiliary states to every context."""
        for executor in self.executors:
            executor.copy_params_from(arg_params, aux_params, allow_extra_params=True, allow_missing=True)

    def get_params(self, *, apart: bool = False) -> tuple[dict[str, NDArray], dict[str, NDArray]]:
        """Return host copies: averaged auxiliary states, and the parameters of the first context (all are equal).

        Args:
            apart: whether the contexts train separate parameters, which are then averaged, too.
        """
        held = [arrays if apart else arrays[:1] for arrays in self.param_arrays]
        args = {n: _average(arrays) for n, arrays in zip(self.param_names, held, strict=True)}
        aux = {n: _average(arrays) for n, arrays in zip(self.aux_names, self.aux_arrays, strict=True)}
        return args, aux


def _bound(symbol: Symbol, share: MemoryShare | None, ctx: Context, **settings: Any) -> Executor:
    """Bind an executor within its budget share, at least 1 byte so that the error reports the smallest budget."""
    if share is None:
        return simple_bind(symbol, ctx, **settings)
    try:
        return simple_bind(symbol, ctx, budget=max(1, share.each), **settings)
    except BudgetError as error:
        raise share.refusal(error) from None


_HOST = Context("cpu", 0)


def _refuse_shared_statistics(symbol: Symbol, contexts: int) -> None:
    """Refuse layers with statistics over the whole batch, because each executor sees only its slice."""
    names = [
        node.name
        for node in topological_order(symbol.entries)
        if node.op is not None
        and node.op.name == "_contrib_SyncBatchNorm"
        and node.params["ndev"] > 1
        and not node.params["use_global_stats"]
    ]
    if names:
        raise BindError(
            f"{listed(names)}: SyncBatchNorm takes its statistics of the whole batch, and each of {contexts} contexts "
            f"would see its slice alone: train on one context, or make these layers BatchNorm"
        )


def _requests(arguments: Sequence[str], trained: Sequence[str], grad_req: GradReq) -> dict[str, str]:
    """Return the grad_req of every argument: null, write or add."""
    if isinstance(grad_req, str):
        return {name: grad_req if name in trained else "null" for name in arguments}
    if isinstance(grad_req, Mapping):
        unknown = [name for name in grad_req if name not in arguments]
        if unknown:  # those of another bucket's network, for instance
            log.warning("grad_req names %s, which are no arguments; there are %s", unknown, listed(arguments))
        return {name: grad_req.get(name, "write" if name in trained else "null") for name in arguments}
    if len(grad_req) != len(arguments):
        raise BindError(
            f"grad_req has {len(grad_req)} items, the symbol {len(arguments)} arguments: {listed(arguments)}"
        )
    return dict(zip(arguments, grad_req, strict=True))


def replaced(shape: tuple[int, ...], axis: int, samples: int) -> tuple[int, ...]:
    """Return ``shape`` with ``samples`` samples along ``axis``.

    >>> replaced((7, 4, 3), 1, 2)
    (7, 2, 3)
    """
    return (*shape[:axis], samples, *shape[axis + 1 :])


def without_padding(array: NDArray, samples: int, pad: int) -> NDArray:
    """Return a batch's ``array`` without the rows of its last ``pad`` samples.

    An output may have several consecutive rows per sample, for instance a row per word of a sentence. If the number of
    rows is not a multiple of the samples (a loss of the whole batch), the output is returned unchanged.
    """
    if not pad or not array.shape or array.shape[0] % samples:
        return array
    return array[: array.shape[0] // samples * (samples - pad)]


def _cut(array: NDArray, part: slice, axis: int) -> NDArray:
    """Slice the samples ``part`` along an axis; a view if it is the first axis."""
    if axis == 0:
        return array[part]
    cut: NDArray = nd.slice_axis(array, axis=axis, begin=part.start, end=part.stop)
    return cut


def _merge(parts: Sequence[NDArray], axis: int) -> NDArray:
    if len(parts) == 1:
        return parts[0]
    merged: NDArray = nd.concat(*(part.as_in_context(_HOST) for part in parts), dim=axis)
    return merged


def _average(arrays: Sequence[NDArray]) -> NDArray:
    total: Any = arrays[0].copyto(_HOST)
    if len(arrays) == 1:
        return total  # type: ignore[no-any-return]
    for array in arrays[1:]:
        total = total + array.as_in_context(_HOST)
    return total / len(arrays)  # type: ignore[no-any-return]
