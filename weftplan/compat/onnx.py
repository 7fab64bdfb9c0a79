"""``mx.onnx`` and ``mx.contrib.onnx``: import and export of ONNX files, under MXNet's names.

The module handles MXNet's arguments, which may be files or objects, and calls ``convert``. Any thread may call it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from weftplan.convert.onnx_in import OnnxFile, import_model
from weftplan.convert.onnx_out.free_sizes import OpenShape, export_open
from weftplan.ndarray import NDArray
from weftplan.support.atomic_files import replacing
from weftplan.support.keyword_errors import known_keywords
from weftplan.symbol import Symbol, load
from weftplan.training.fit.parameter_files import read_params

__all__ = ["export_model", "get_model_metadata", "import_model"]


def get_model_metadata(model_file: str | os.PathLike[str]) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
    """Return the inputs and outputs that an ONNX file declares: ``input_tensor_data`` and ``output_tensor_data``.

    Each is a list of names and shapes, with 0 for a dimension that the file leaves open. Parameters are not inputs.

    Raises:
        FormatError: the file is damaged or not an ONNX model.
        MXNetError: ``onnx`` is not installed.
    """
    inputs, outputs = OnnxFile(model_file).declared_shapes()
    return {"input_tensor_data": list(inputs.items()), "output_tensor_data": list(outputs.items())}


@known_keywords()
def export_model(
    sym: Symbol | str | os.PathLike[str],
    params: Mapping[str, NDArray] | str | os.PathLike[str],
    in_shapes: Sequence[tuple[int, ...]] | None = None,
    in_types: object = None,
    onnx_file_path: str | os.PathLike[str] = "model.onnx",
    verbose: bool = False,
    dynamic: bool = False,
    dynamic_input_shapes: Sequence[OpenShape] | None = None,
    run_shape_inference: bool = False,
    input_type: object = None,
    input_shape: Sequence[tuple[int, ...]] | None = None,
) -> str:
    """Write an ONNX model and return its path.

    Args:
        sym, params: a symbol and its parameters by name (``arg:`` and ``aux:`` before a name are understood), or files.
        in_shapes: shapes of the inputs, in the order of ``list_arguments()``; ``input_shape`` is MXNet's older name.
        dynamic: leave sizes open: those that are None or text in ``dynamic_input_shapes``, without it the first axis of
            every input.
        in_types, input_type, verbose, run_shape_inference: accepted for MXNet's sake, no effect.

    Raises:
        UnknownOperatorError: operators that ONNX models cannot have; names all of them.
        ShapeError: with ``dynamic``, an operator that needs the number of an open size.
        MXNetError: ``onnx`` is not installed, or parameters that ONNX has no counterpart for.
    """
    symbol = sym if isinstance(sym, Symbol) else load(sym)
    states = set(symbol.list_auxiliary_states())
    if isinstance(params, Mapping):
        named = {name.partition(":")[2] if name[:4] in ("arg:", "aux:") else name: v for name, v in params.items()}
        args = {name: value for name, value in named.items() if name not in states}
        aux = {name: value for name, value in named.items() if name in states}
    else:
        args, aux = read_params(params)
    inputs = [name for name in symbol.list_arguments() if name not in args and not name.endswith("label")]
    shapes: Sequence[OpenShape] = in_shapes or input_shape or ()
    if dynamic:
        shapes = dynamic_input_shapes or [(None, *shape[1:]) for shape in shapes]
    sizes = [tuple(size if isinstance(size, int) else None for size in shape) for shape in shapes]
    content = export_open(symbol, args, aux, dict(zip(inputs, sizes, strict=False)))
    with replacing(onnx_file_path) as file:
        file.write(content)
    return os.fspath(onnx_file_path)
