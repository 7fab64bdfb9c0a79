"""Inference with a loaded model: an executor bound for the inputs, with errors that name files and inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weftplan import ndarray as nd
from weftplan.cli.model_files import ModelFiles
from weftplan.convert import without_computed_labels
from weftplan.device.context import cpu
from weftplan.errors import BindError, DTypeError, ShapeError, listed
from weftplan.executor import Executor
from weftplan.ndarray import NDArray
from weftplan.ops.core.rules import is_known
from weftplan.report.input_forms import form_of, is_label, usual_shape
from weftplan.report.inspection import input_names
from weftplan.support.array_types import DType, RawArray
from weftplan.support.tensor_types import Shape
from weftplan.symbol import Symbol, topological_order


def predict(model: ModelFiles, fed: Mapping[str, RawArray]) -> dict[str, RawArray]:
    """Return the outputs by name of one run outside training; labels are optional. Raises as :func:`bind`."""
    return outputs_of(model, bind(model, fed), fed)


def outputs_of(model: ModelFiles, executor: Executor, fed: Mapping[str, RawArray]) -> dict[str, RawArray]:
    """Return the outputs by name of a bound executor on inputs of the shapes that it is bound for."""
    arrays = {name: nd.array(value, dtype=value.dtype) for name, value in fed.items()}
    outputs = executor.forward(is_train=False, **arrays)
    return {name: value.asnumpy() for name, value in zip(model.symbol.list_outputs(), outputs, strict=True)}


def bind(model: ModelFiles, fed: Mapping[str, RawArray]) -> Executor:
    """Bind a model with its parameters for inference on inputs of these shapes; labels are optional.

    Raises:
        BindError: an input or a parameter is missing; lists all.
        ShapeError: a parameter's or an input's shape contradicts the network's; lists all.
    """
    assert model.args is not None
    assert model.aux is not None
    symbol = model.symbol
    inputs, nodes = input_names(symbol, model.args), topological_order(symbol.entries)
    check_complete(model, inputs)
    unfed = [name for name in inputs if name not in fed and not is_label(nodes, name)]
    if unfed:
        raise BindError(f"{model.name}: give {listed(unfed)} with --input NAME=FILE")
    empty = [f"{name} has shape {tuple(value.shape)}" for name, value in fed.items() if 0 in value.shape]
    if empty:
        raise ShapeError(f"{model.name}: {'; '.join(empty)}: there is nothing to compute; give one sample or more")
    if not any(is_label(nodes, name) for name in fed):
        symbol = without_computed_labels(symbol)
    arguments, states = symbol.list_arguments(), symbol.list_auxiliary_states()
    shapes: dict[str, Any] = {name: tuple(value.shape) for name, value in fed.items()}
    stored = {**model.args, **model.aux}
    try:
        inferred, _, of_states = symbol.infer_shape_partial(**shapes)
    except ShapeError as error:
        reason = str(error).removeprefix("Error in ")
        raise ShapeError(f"{model.name}: {reason}{_expected(model, shapes)}") from None
    pairs = [*zip(arguments, inferred, strict=True), *zip(states, of_states, strict=True)]
    unknown = [name for name, shape in pairs if not is_known(shape)]
    if unknown:
        raise ShapeError(f"{model.name}: the inputs do not tell the shapes of {listed(unknown)}")
    wrong = [
        f"{name} has shape {tuple(stored[name].shape)}, the inputs ask for {shape}"
        for name, shape in pairs
        if name in stored and shape != tuple(stored[name].shape)
    ]
    if wrong:
        raise ShapeError(f"{model.name}: {'; '.join(wrong)}{_expected(model, shapes)}")
    kinds = _dtypes(symbol, stored, fed)
    executor = symbol.simple_bind(cpu(), grad_req="null", type_dict=kinds, **shapes)
    executor.copy_params_from(model.args, model.aux, allow_extra_params=True, allow_missing=True)
    return executor


def _dtypes(symbol: Symbol, stored: Mapping[str, NDArray], fed: Mapping[str, RawArray]) -> dict[str, DType]:
    """Return the dtypes of arguments and states: those of the inputs if the network accepts them, as for indices.

    Other inputs, such as pixels in bytes, are omitted: the executor casts them to the inferred dtype.
    """
    names = (*symbol.list_arguments(), *symbol.list_auxiliary_states())
    stored_dtypes = {name: value.np_dtype for name, value in stored.items() if name in names}
    dtypes = stored_dtypes | {name: value.dtype for name, value in fed.items() if name in names}
    try:
        symbol.infer_type_partial(**dtypes)
    except DTypeError:
        return stored_dtypes
    return dtypes


def check_complete(model: ModelFiles, inputs: Sequence[str]) -> None:
    """Raise BindError if parameters are missing; list all."""
    assert model.args is not None
    assert model.aux is not None
    arguments = model.symbol.list_arguments()
    missing = [name for name in arguments if name not in model.args and name not in inputs]
    missing += [name for name in model.symbol.list_auxiliary_states() if name not in model.aux]
    if missing:
        have = sum(name in model.args for name in arguments)
        raise BindError(f"{model.name}: the parameters lack {listed(missing)}; {have} of the others' names match")


def _expected(model: ModelFiles, shapes: Mapping[str, Shape]) -> str:
    """Return the shape of the first input that the stored parameters imply, if the input's shape differs."""
    nodes = topological_order(model.symbol.entries)
    for name, shape in shapes.items():
        form = form_of(nodes, name, model.stored_shapes)
        usual = usual_shape(nodes, name, form, model.stored_shapes)
        if form.axes and shape != usual and (usual or len(shape) != len(form.axes)):
            example = f", such as {usual}" if usual else ""
            return f"; {name} was given shape {shape}, the network takes ({', '.join(form.axes)}){example}"
    return ""
