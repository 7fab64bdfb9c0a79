"""Parameter files in the safetensors format.

Names are those of the parameters; the metadata lists the auxiliary states under ``aux``. Checkpoints written by ``fit``
hold more than parameters; this module reads only their parameters.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from weftplan.errors import FormatError
from weftplan.ndarray import NDArray
from weftplan.ndarray.formats import safetensors as file_format
from weftplan.training.fit.parameter_files import Params, parameter_metadata, read_safetensors

__all__ = ["load_safetensors", "save_safetensors"]


def save_safetensors(
    path: str | os.PathLike[str], arg_params: Mapping[str, NDArray], aux_params: Mapping[str, NDArray]
) -> None:
    """Write parameters and auxiliary states atomically.

    Args:
        path: the file.
        arg_params: parameters by name.
        aux_params: auxiliary states by name.

    Raises:
        FormatError: a name that is both, or a dtype that the format does not support.
    """
    shared_names = sorted(arg_params.keys() & aux_params.keys())
    if shared_names:
        raise FormatError(f"{os.fspath(path)}: {shared_names} are parameters and auxiliary states at once")
    arrays = {name: array.asnumpy() for name, array in {**arg_params, **aux_params}.items()}
    file_format.write(path, arrays, parameter_metadata(aux_params))


def load_safetensors(path: str | os.PathLike[str]) -> tuple[Params, Params]:
    """Return (arg_params, aux_params) of a file; without our metadata all of them are arguments.

    Raises:
        FormatError: the file is damaged, or not a safetensors file; the message says which.
    """
    return read_safetensors(path)
