"""Parameter files: MXNet's pair of symbol and parameters, and safetensors.

MXNet's pair is ``<prefix>-symbol.json`` and ``<prefix>-%04d.params``.
Writes are atomic: a file appears whole or not at all. Writing waits for the arrays. Any thread may write.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from weftplan import ndarray as nd
from weftplan import symbol as sym
from weftplan.errors import FormatError, ParameterError, listed
from weftplan.ndarray import NDArray
from weftplan.ndarray.formats import safetensors as file_format
from weftplan.support.keyword_errors import known_keywords
from weftplan.support.package_log import log
from weftplan.symbol import Symbol

Params = dict[str, NDArray]

BESIDES = "weftplan.besides"
"""Metadata key of a safetensors file: names of the arrays that are training state, not parameters."""


def params_path(prefix: str | os.PathLike[str], epoch: int) -> Path:
    """Return the path of an epoch's parameter file; raises ParameterError if ``epoch`` is not a whole number >= 0.

    >>> params_path("model", 7).name
    'model-0007.params'
    """
    if isinstance(epoch, bool) or not isinstance(epoch, (int, np.integer)) or epoch < 0:
        raise ParameterError(f"the epoch of a checkpoint is a number >= 0, got {epoch!r}")
    return Path(f"{os.fsdecode(prefix)}-{epoch:04d}.params")


@known_keywords()
def save_checkpoint(
    prefix: str | os.PathLike[str],
    epoch: int,
    symbol: Symbol | None,
    arg_params: Mapping[str, NDArray],
    aux_params: Mapping[str, NDArray],
    remove_amp_cast: bool = True,
) -> Path:
    """Write symbol and parameters, each file atomically; returns the parameter file's path.

    ``remove_amp_cast``: see :meth:`Symbol.tojson <weftplan.symbol.Symbol.tojson>`.

    Args:
        prefix: path and start of the files' names.
        epoch: number in the name of the parameter file.
        symbol: the network; None: no symbol file.
        arg_params: parameters by name.
        aux_params: auxiliary states by name.
        remove_amp_cast: see :meth:`Symbol.tojson <weftplan.symbol.Symbol.tojson>`.
    """
    path = params_path(prefix, epoch)
    if symbol is not None:
        symbol.save(f"{os.fsdecode(prefix)}-symbol.json", remove_amp_cast)
    write_params(path, arg_params, aux_params)
    log.info('Saved checkpoint to "%s"', path)
    return path


def write_params(
    path: str | os.PathLike[str], arg_params: Mapping[str, NDArray], aux_params: Mapping[str, NDArray]
) -> None:
    """Write a parameter file; names are prefixed with ``arg:`` or ``aux:``."""
    entries = {f"arg:{name}": value for name, value in arg_params.items()}
    entries.update({f"aux:{name}": value for name, value in aux_params.items()})
    nd.save(os.fspath(path), entries)


def read_params(path: str | os.PathLike[str]) -> tuple[Params, Params]:
    """Read (arg_params, aux_params) from a parameter file, or from a safetensors file such as a checkpoint of ``fit``.

    Raises:
        FormatError: a name has neither prefix, or the file is damaged.
    """
    if os.fsdecode(path).endswith(".safetensors"):
        return read_safetensors(path)
    loaded = nd.load(os.fspath(path))
    if not loaded:  # the file of a network without parameters
        return {}, {}
    if not isinstance(loaded, dict):
        raise FormatError(f"{path} holds a list of arrays without names, not a checkpoint")
    arg_params: Params = {}
    aux_params: Params = {}
    for name, value in loaded.items():
        kind, _, key = name.partition(":")
        if kind == "arg":
            arg_params[key] = value
        elif kind == "aux":
            aux_params[key] = value
        else:
            raise FormatError(
                f"{path}: array {name!r} is named neither arg:… nor aux:…, so this is no checkpoint; where Gluon's "
                f"save_parameters wrote it, let the block write a symbol and a checkpoint: block.export(prefix)"
            )
    return arg_params, aux_params


def load_params(prefix: str | os.PathLike[str], epoch: int) -> tuple[Params, Params]:
    """Read (arg_params, aux_params) of an epoch.

    Raises:
        FileNotFoundError: there are no parameters of this epoch; the message names the existing files.
        FormatError: a name has neither prefix.
    """
    path = params_path(prefix, epoch)
    if not path.exists():
        existing = ", ".join(file.name for file in parameter_files(prefix))
        hint = f"; beside it there are {existing}" if existing else "; there are no parameters with this prefix"
        raise FileNotFoundError(errno.ENOENT, f"{os.strerror(errno.ENOENT)}{hint}", os.fspath(path))
    return read_params(path)


def parameter_files(prefix: str | os.PathLike[str]) -> list[Path]:
    """List the parameter files of a prefix, by epoch."""
    path = Path(prefix)
    name = re.compile(re.escape(path.name) + r"-\d+")
    return sorted(file for file in path.parent.glob("*.params") if name.fullmatch(file.stem))


@known_keywords()
def load_checkpoint(prefix: str | os.PathLike[str], epoch: int) -> tuple[Symbol, Params, Params]:
    """Read (symbol, arg_params, aux_params) of an epoch.

    Raises:
        FileNotFoundError: no symbol with this prefix, or no parameters of this epoch; the message names existing files.
        FormatError: a file is damaged or has another format.
    """
    path = Path(f"{os.fsdecode(prefix)}-symbol.json")
    if not path.exists():
        existing = sorted(file.name for file in path.parent.glob("*-symbol.json"))
        base = Path(os.fsdecode(prefix))
        hint = f"; beside it there are {listed(existing)}" if existing else "; there is no other -symbol.json beside it"
        if base.is_file():
            start = re.sub(r"-symbol\.json$|-[0-9]+\.params$", "", base.name)
            hint = f"; {base.name} is a file, and a prefix is what its name begins with: {start}"
        raise FileNotFoundError(errno.ENOENT, f"{os.strerror(errno.ENOENT)}{hint}", os.fspath(path))
    return (sym.load(path), *load_params(prefix, epoch))


def parameter_metadata(aux_names: Iterable[str], besides: Iterable[str] = ()) -> dict[str, str]:
    """Return safetensors metadata that marks auxiliary states and arrays that are not parameters."""
    texts = {"format": "mxnet", "aux": json.dumps(sorted(aux_names))}
    named = sorted(besides)
    return {**texts, BESIDES: json.dumps(named)} if named else texts


def read_safetensors(path: str | os.PathLike[str]) -> tuple[Params, Params]:
    """Read (arg_params, aux_params) from a safetensors file; without our metadata all its arrays are arguments.

    Raises:
        FormatError: the file is damaged or has another format.
    """
    raw, metadata = file_format.read(path)
    states = named_in(metadata, "aux", path)
    other_arrays = named_in(metadata, BESIDES, path)
    arrays = {name: nd.array(values, dtype=values.dtype) for name, values in raw.items() if name not in other_arrays}
    return (
        {name: value for name, value in arrays.items() if name not in states},
        {name: value for name, value in arrays.items() if name in states},
    )


def named_in(metadata: Mapping[str, object], key: str, path: str | os.PathLike[str]) -> set[str]:
    """Return the names that a metadata entry lists; raises FormatError if it is not a list of names."""
    text = metadata.get(key, "[]")
    try:
        names: Any = text  # what is no text raises
        return {str(name) for name in json.loads(names)}
    except (TypeError, ValueError, RecursionError):
        what = "auxiliary states" if key == "aux" else "arrays that are no parameters"
        raise FormatError(f"{os.fspath(path)}: damaged: the metadata's list of {what} is {text!r}") from None
