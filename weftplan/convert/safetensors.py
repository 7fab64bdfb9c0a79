"""Parameter files in the safetensors format.

Names are those of the parameters; which of them are auxiliary states stands in the metadata, under ``aux``. The
checkpoints that ``fit`` writes hold more than parameters; of those the parameters alone are read here.
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
    """Write parameters and auxiliary states, the file whole or not at all.

    Raises:
        FormatError: a name that is both, or a dtype that the format does not know.
    """
    both = sorted(arg_params.keys() & aux_params.keys())
    if both:
        raise FormatError(f"{os.fspath(path)}: {both} are parameters and auxiliary states at once")
    arrays = {name: array.asnumpy() for name, array in {**arg_params, **aux_params}.items()}
    file_format.write(path, arrays, parameter_metadata(aux_params))


def load_safetensors(path: str | os.PathLike[str]) -> tuple[Params, Params]:
    """(arg_params, aux_params) of a file; without metadata of ours all of them are arguments.

    Raises:
        FormatError: the file is damaged, or something else; says what.
    """
    return read_safetensors(path)
