"""Loading of model files for ``inspect``, ``run`` and ``convert``: a network and its parameters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from weftplan.cli.plan.inputs import PARAMETERS, PlannedNetwork, load_network, onnx_network
from weftplan.convert import load_safetensors
from weftplan.errors import FormatError
from weftplan.ndarray import NDArray
from weftplan.report.inspection import version_of
from weftplan.support.atomic_files import unpack_gzip
from weftplan.symbol import Symbol
from weftplan.training.fit.parameter_files import parameter_files, read_params

Params = dict[str, NDArray]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A network, and its parameters if there are any."""

    network: PlannedNetwork
    version: str
    args: Params | None
    aux: Params | None

    @property
    def name(self) -> str:
        """Return the name of the file, or of the built-in network."""
        return self.network.name

    @property
    def symbol(self) -> Symbol:
        """Return the network as a symbol."""
        return self.network.symbol

    @property
    def stored_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all parameters, by name."""
        return {name: tuple(value.shape) for table in (self.args, self.aux) for name, value in (table or {}).items()}


def load_model(model: str, params: str | None) -> ModelFiles:
    """Load the network in ``model`` (a symbol file, a checkpoint prefix, an ONNX file, or a built-in network's name)
    and its parameters in ``params`` (a file, or the number of an epoch of that prefix).

    Raises:
        click.BadParameter: no such file; the message lists the existing files.
        FormatError: a file of another kind; the message names the kind.
    """
    path = _symbol_path(model)
    if path is not None and path.suffix == ".onnx":
        if params not in (None, "-"):
            raise click.BadParameter(f"{model} holds its parameters itself; give a dash", param_hint="PARAMS")
        network, args, aux = onnx_network(path)
        return ModelFiles(network, "ONNX", args, aux)
    if params is not None and Path(params).is_file() and path is not None and _looks_like_params(path):
        raise FormatError(f"{model} holds arrays and no network: give the symbol file first, then the parameters")
    network = load_network(str(path) if path is not None else model)
    version = "weftplan" if network.built_in or path is None else version_of(_text(path))
    if params is None:
        return ModelFiles(network, version, None, None)
    params_path = _params_path(params, path)
    args, aux = load_safetensors(params_path) if params_path.suffix == ".safetensors" else read_params(params_path)
    states = set(network.symbol.list_auxiliary_states())  # another writer's file does not distinguish them
    aux = {**aux, **{name: args.pop(name) for name in states & args.keys()}}
    return ModelFiles(network, version, args, aux)


def epochs(path: Path) -> list[Path]:
    """Return the parameter files next to a symbol file; none for a folder such as ``.``."""
    if not path.name:
        return []
    return parameter_files(path.with_name(path.name.removesuffix(".gz").removesuffix("-symbol.json")))


def only_parameters(model: str) -> str | None:
    """Return the parameter file next to a symbol file or checkpoint prefix if there is exactly one."""
    files = epochs(Path(model))
    return str(files[0]) if len(files) == 1 else None


def class_names_path(prefix: Path) -> Path:
    """Return the file with the names of the classes of a checkpoint, one on each line."""
    return prefix.with_name(f"{prefix.name}-classes.txt")


def class_names(model: str, labels: Path | None) -> list[str] | None:
    """Return the names of the classes from ``labels``, or from the file next to a checkpoint; None if there is none."""
    prefix = Path(model.removesuffix(".gz").removesuffix("-symbol.json"))
    beside = class_names_path(prefix) if prefix.name else None
    path = labels or (beside if beside is not None and beside.is_file() else None)
    return None if path is None else path.read_text(encoding="utf-8").splitlines()


def _symbol_path(model: str) -> Path | None:
    for candidate in (Path(model), Path(f"{model}-symbol.json")):
        if candidate.is_file():
            return candidate
    return None


def _params_path(params: str, symbol_path: Path | None) -> Path:
    path = Path(params)
    beside = epochs(symbol_path) if symbol_path is not None else []
    if params.isdigit():
        for candidate in beside:
            if int(candidate.stem.rpartition("-")[2]) == int(params):
                return candidate
    if not path.is_file():
        if path.is_dir():
            raise click.BadParameter(f"{params!r} is a folder; give a parameter file in it", param_hint="PARAMS")
        hint = f"; beside {symbol_path} there are {', '.join(p.name for p in beside)}" if beside else ""
        raise click.BadParameter(f"there is no parameter file {params!r}{hint}", param_hint="PARAMS")
    if path.read_bytes()[:64].lstrip().startswith(b"{"):
        raise FormatError(f"{path} is JSON text, such as a symbol file, and holds no parameters")
    return path


def _looks_like_params(path: Path) -> bool:
    return path.read_bytes()[:8] == PARAMETERS


def _text(path: Path) -> str:
    return unpack_gzip(path.read_bytes(), str(path)).decode("utf-8-sig")
