"""What ``weftplan plan`` is given: a network, shapes of its inputs, dtypes, a batch size."""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

import weftplan.ops  # noqa: F401 - registers every operator
from weftplan import models
from weftplan.errors import FormatError, did_you_mean
from weftplan.symbol import Symbol, load_json, topological_order

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Network:
    """A network and the usual shapes of what is fed to it."""

    name: str
    symbol: Symbol
    built_in: bool

    def shapes(self, given: Shapes, batch: int | None) -> dict[str, tuple[int, ...]]:
        """Shapes of the inputs: for a built-in network its usual ones, then those given, then another batch size.

        Raises:
            click.UsageError: a batch size, but no shape to put it into.
        """
        if not self.built_in:
            return dict(given) if batch is None else with_batch(given, batch)
        if batch is None:
            # Labels and states follow the batch of the first shape that was given.
            batch = next((shape[0] for shape in given.values()), 32)
            return {**models.input_shapes(self.name, batch), **given}
        return (
            with_batch({**models.input_shapes(self.name), **given}, batch)
            if given
            else models.input_shapes(self.name, batch)
        )

    def requests(self, shapes: Shapes, *, input_grads: bool) -> str | dict[str, str]:
        """Which arguments get gradients: all, or all but the inputs (those with a shape, and labels)."""
        if input_grads:
            return "write"
        names = self.symbol.list_arguments()
        return {name: "null" if name in shapes or name.endswith("label") else "write" for name in names}


def load_network(model: str) -> Network:
    """A built-in network by name, or a symbol file (``.json``, also gzipped).

    Raises:
        click.BadParameter: neither; names what is near.
        FormatError: the file is no symbol.
    """
    if model in models.names():
        symbol = models.get(model)
        for node in topological_order(symbol.entries):
            node.created_at = None  # nobody's line: the outermost caller is the library that runs commands
        return Network(model, symbol, built_in=True)
    path = Path(model)
    if not path.is_file():
        hint = did_you_mean(model, models.names())
        raise click.BadParameter(
            f"{model!r} is neither a file nor a built-in network; {hint}built in are {', '.join(models.names())}",
            param_hint="MODEL",
        )
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise FormatError(
            f"{model}: expected symbol JSON, as Symbol.save writes it; reading failed: {error}"
        ) from error
    if text[:100].split()[:2] == ["{", '"format":'] and '"weftplan-plan"' in text[:100]:
        raise FormatError(
            f"{model} holds a plan, as --save writes it, and no network; weftplan.planner.MemoryPlan.from_json reads it"
        )
    return Network(path.name, load_json(text, model), built_in=False)


def with_batch(shapes: Shapes, batch: int) -> dict[str, tuple[int, ...]]:
    """The shapes with another batch size: the first dimension of the first shape, wherever a shape begins with it.

    >>> with_batch({"data": (32, 3, 8, 8), "label": (32,), "table": (7, 2)}, 4)
    {'data': (4, 3, 8, 8), 'label': (4,), 'table': (7, 2)}

    Raises:
        click.UsageError: there is no shape with a first dimension.
    """
    old = next((shape[0] for shape in shapes.values() if shape), None)
    if old is None:
        raise click.UsageError("a batch size needs an input shape to go into: give --shape NAME=DIMS")
    return {name: (batch, *shape[1:]) if shape and shape[0] == old else shape for name, shape in shapes.items()}


def parse_shapes(texts: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """Shapes from ``data=32,3,224,224`` (or ``32x3x224x224``).

    >>> parse_shapes(("data=32,3,8,8", "label=32"))
    {'data': (32, 3, 8, 8), 'label': (32,)}

    Raises:
        click.BadParameter: a text of another form, or a name given twice.
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


def parse_dtypes(texts: tuple[str, ...], shapes: Shapes, arguments: Iterable[str]) -> dict[str, Any]:
    """Dtypes by name from ``float16`` (all variables with a shape) or ``data=float16``.

    >>> parse_dtypes(("float16",), {"data": (2, 3)}, ["data", "weight"])
    {'data': 'float16'}

    Raises:
        click.BadParameter: a name that is none of ``arguments``; names what is near.
    """
    dtypes: dict[str, Any] = {}
    known = list(arguments)
    for text in texts:
        name, equals, dtype = text.partition("=")
        if equals and name not in known:
            hint = did_you_mean(name, known).rstrip() or f"it has: {', '.join(known[:8])}"
            raise click.BadParameter(f"{name!r} is no argument of the network; {hint}", param_hint="--dtype")
        dtypes.update({name: dtype} if equals else dict.fromkeys(shapes, text))
    return dtypes
