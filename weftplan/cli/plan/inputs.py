"""Inputs of ``weftplan plan``: a network, the shapes of its inputs, dtypes, a batch size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import click

from weftplan import models
from weftplan.cli.plan.python_names import is_python_name, load_symbol
from weftplan.convert.onnx_in import OnnxFile, Params
from weftplan.errors import FormatError, PlanError, ShapeError, did_you_mean
from weftplan.planner.batch import with_batch
from weftplan.report.input_forms import advice
from weftplan.support.atomic_files import unpack_gzip
from weftplan.symbol import Symbol, load_json, topological_order

Shapes = Mapping[str, tuple[int, ...]]
PARAMETERS = (0x112).to_bytes(8, "little")
"""First bytes of a parameter file."""


@dataclass(frozen=True, slots=True)
class PlannedNetwork:
    """A network and the usual shapes of its inputs."""

    name: str
    symbol: Symbol
    built_in: bool
    declared: Shapes = field(default_factory=dict)
    """Shapes of inputs that the file declares."""

    def shapes(self, explicit: Shapes, batch: int | None) -> dict[str, tuple[int, ...]]:
        """Return the input shapes: a built-in network's usual shapes, overridden by ``--shape`` and the batch size.

        Raises:
            click.UsageError: a batch size, but no shape that it applies to.
        """
        usual = models.input_shapes(self.name) if self.built_in else self.declared
        if batch is None:
            if not self.built_in:
                return {**self.declared, **explicit}
            # Labels and states follow the batch of the first specified shape.
            batch = next((shape[0] for shape in explicit.values()), 32)
            return {**{name: (batch, *shape[1:]) for name, shape in usual.items()}, **explicit}
        try:
            return with_batch({**usual, **explicit}, batch)
        except PlanError as error:
            raise click.UsageError(f"{error}: give --shape NAME=DIMS") from None


def load_network(model: str) -> PlannedNetwork:
    """Load a built-in network by name, a symbol file (``.json``, also gzipped) or its prefix, an ONNX file, or a symbol
    of a Python program (``FILE.py:NAME`` or ``package.module:NAME``).

    Raises:
        click.BadParameter: none of these; the message suggests similar names.
        FormatError: the file is not a symbol.
    """
    if model in models.names():
        return PlannedNetwork(model, _nobodys(models.get(model)), built_in=True)
    if is_python_name(model) and not Path(model).is_file():
        return PlannedNetwork(model, load_symbol(model), built_in=False)
    path = next((p for p in (Path(model), Path(f"{model}-symbol.json")) if p.is_file()), None)
    if path is None:
        if Path(model).is_dir():
            raise click.BadParameter(f"{model!r} is a folder; give a model file in it", param_hint="MODEL")
        beside = [str(file).removesuffix("-symbol.json") for file in Path(model).parent.glob("*-symbol.json")]
        hint = did_you_mean(model, [*models.names(), *beside])
        raise click.BadParameter(
            f"there is no file {model!r}, no file '{model}-symbol.json' and no built-in network {model!r}; "
            f"{hint}built-in networks: {', '.join(models.names())}",
            param_hint="MODEL",
        )
    if path.suffix == ".onnx":
        return onnx_network(path)[0]
    if path.suffix == ".py":
        raise click.BadParameter(
            f"{model} is a Python program: add the name of a symbol, or of a function that returns one, as in "
            f"{model}:net",
            param_hint="MODEL",
        )
    try:
        content = path.read_bytes()
        if content[:8] == PARAMETERS:
            raise FormatError(f"{model} holds parameters and no network: give the symbol file, {_beside(path)}")
        text = unpack_gzip(content, model).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError(
            f"{model}: expected symbol JSON, as Symbol.save writes it; reading failed: {error}"
        ) from error
    if text[:100].split()[:2] == ["{", '"format":'] and '"weftplan-plan"' in text[:100]:
        raise FormatError(
            f"{model} holds a plan, as --save writes it, and no network; weftplan.planner.MemoryPlan.from_json reads it"
        )
    return PlannedNetwork(path.name, load_json(text, model), built_in=False)


def onnx_network(path: Path) -> tuple[PlannedNetwork, Params, Params]:
    """Return the network in an ONNX file with its declared shapes, and its parameters."""
    file = OnnxFile(path)
    symbol, args, aux = file.read()
    used = symbol.list_arguments()
    declared = {key: dims for key, dims in file.declared_shapes()[0].items() if key in used and dims and 0 not in dims}
    return PlannedNetwork(path.name, _nobodys(symbol), built_in=False, declared=declared), args, aux


def _nobodys(symbol: Symbol) -> Symbol:
    """Remove the creation sites of the nodes: their outermost caller is the library that runs commands."""
    for node in topological_order(symbol.entries):
        node.created_at = None
    return symbol


def _beside(path: Path) -> str:
    """Return words for the symbol file that belongs to a parameter file."""
    symbol = path.with_name(f"{path.stem.rpartition('-')[0]}-symbol.json")
    return f"{symbol} beside it" if symbol.is_file() else "which ends in -symbol.json"


def parse_shapes(texts: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """Parse shapes such as ``data=32,3,224,224`` (or ``32x3x224x224``).

    >>> parse_shapes(("data=32,3,8,8", "label=32"))
    {'data': (32, 3, 8, 8), 'label': (32,)}

    Raises:
        click.BadParameter: a malformed text, or a repeated name.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for text in texts:
        name, equals, dims = text.partition("=")
        parts = dims.strip("()[] ").replace("x", ",").rstrip(",").split(",")
        try:
            shape = tuple(int(part) for part in parts)
        except ValueError:
            shape = ()
        if not equals or not name or not shape:
            raise click.BadParameter(
                f"expected NAME=DIMS such as data=32,3,224,224; got {text!r}", param_hint="--shape"
            )
        if name in shapes:
            raise click.BadParameter(f"{name!r} is given twice", param_hint="--shape")
        shapes[name] = shape
    return shapes


def check_names(names: Iterable[str], symbol: Symbol, option: str) -> None:
    """Raise click.BadParameter if a name is not an argument of the network; suggest similar names."""
    input_names = [*symbol.list_arguments(), *symbol.list_auxiliary_states()]
    for name in names:
        if name not in input_names:
            hint = did_you_mean(name, input_names).rstrip() or f"it has: {', '.join(input_names[:8])}"
            raise click.BadParameter(f"{name!r} is no argument of the network; {hint}", param_hint=option)


@contextmanager
def shape_advice(network: PlannedNetwork, shapes: Shapes, stored: Shapes | None = None) -> Iterator[None]:
    """Return advice if the shape of an input is missing or has the wrong number of axes; ``stored``: shapes of
    parameters."""
    try:
        yield
    except ShapeError as error:
        differing = {name: shape for name, shape in network.declared.items() if shapes.get(name, shape) != shape}
        if differing:
            stated = " ".join(f"{name}={','.join(map(str, shape))}" for name, shape in differing.items())
            raise ShapeError(
                f"{error}; {network.name} was exported for {stated}, and values in it have sizes that follow: plan it "
                f"with that shape, or export it again for the other one"
            ) from None
        usual = models.input_shapes(network.name, 1) if network.built_in else None
        typed = advice(network.symbol, shapes, stored, usual)
        if not typed:
            raise
        raise ShapeError(f"{error}; type for example {typed}") from None


def parse_dtypes(texts: tuple[str, ...], shapes: Shapes, symbol: Symbol) -> dict[str, str]:
    """Parse dtypes by name: ``float16`` (all variables with a shape) or ``data=float16``.

    >>> parse_dtypes(("float16",), {"data": (2, 3)}, models.get("mlp"))
    {'data': 'float16'}

    Raises:
        click.BadParameter: a name that is not an argument of ``symbol``; the message suggests similar names.
    """
    dtypes: dict[str, str] = {}
    for text in texts:
        name, equals, dtype = text.partition("=")
        if equals:
            check_names([name], symbol, "--dtype")
        dtypes.update({name: dtype} if equals else dict.fromkeys(shapes, text))
    return dtypes
