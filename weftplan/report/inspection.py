"""Inspection of a network and its parameters without running it: inputs, layers, sizes, problems.

:func:`inspect` is the entry point; ``weftplan inspect`` prints its result. Missing input shapes are inferred from the
parameters if possible.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import prod
from typing import Any

import numpy as np

from weftplan import planner
from weftplan.errors import MXNetError, ShapeError, listed
from weftplan.ndarray import NDArray
from weftplan.ops.core.floats import is_float
from weftplan.ops.core.rules import is_known
from weftplan.ops.core.schema import Shape
from weftplan.ops.nn.batch_norm import BATCH_NORMS
from weftplan.report.input_forms import Form, form_of, is_label, usual_shape
from weftplan.symbol import Symbol, placeholder, topological_order
from weftplan.symbol.inference import solver as infer
from weftplan.symbol.node import Entry, Node

Arrays = Mapping[str, NDArray]


@dataclass(frozen=True, slots=True)
class Input:
    """A variable that the caller feeds: data or a label."""

    name: str
    shape: Shape | None
    """The shape, with 0 for unknown sizes; None if it is unknown."""
    known: str
    """The shape as text, as far as the parameters determine it."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One operation of the network."""

    name: str
    op: str
    shape: Shape | None
    """Shape of the first output; None if unknown."""
    parameters: int | None
    """Elements of the parameters that this layer is the first to use; None if their shapes are unknown."""
    flops: int | None
    """Multiplications and additions; None if a shape is unknown."""
    nbytes: int | None
    """Bytes of the outputs; an unknown dtype counts as float32."""
    supported: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """The complete result of an inspection."""

    name: str
    version: str
    inputs: list[Input]
    outputs: list[str]
    layers: list[Layer]
    operators: dict[str, int]
    """The number of nodes of each operator."""
    missing_operators: dict[str, list[str]]
    matched: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    inference_bytes: int | None = None
    training_bytes: int | None = None
    scratch_free_bytes: int | None = None
    """Bytes of the inference plan without scratch memory, as MXNet counts."""
    plan: planner.MemoryPlan | None = field(default=None, repr=False)
    """The inference plan; None if shapes are unknown."""
    warnings: list[str] = field(default_factory=list)
    verdict: str = ""

    @property
    def parameters(self) -> int | None:
        """Return the number of elements of all parameters; None if a shape is unknown."""
        counts = [layer.parameters for layer in self.layers]
        return None if None in counts else sum(count for count in counts if count is not None)

    @property
    def flops(self) -> int | None:
        """Return the operations of one forward run; None if the shape of a layer is unknown."""
        counts = [layer.flops for layer in self.layers]
        return None if None in counts else sum(count for count in counts if count is not None)

    def as_dict(self) -> dict[str, object]:
        """Return the inspection as JSON-ready data."""
        fields = {**asdict(replace(self, plan=None)), "parameters": self.parameters, "flops": self.flops}
        del fields["plan"]
        if self.plan is not None:
            fields |= {
                "kernels": dict(self.plan.kernels),
                "passes": [graph_pass._asdict() for graph_pass in self.plan.passes],
            }
        return fields


def inspect(
    symbol: Symbol,
    *,
    name: str = "network",
    version: str = "",
    args: Arrays | None = None,
    aux: Arrays | None = None,
    shapes: Mapping[str, Shape] | None = None,
) -> Inspection:
    """Inspect a network and its parameters, and plan its memory if all shapes are known.

    Args:
        version: the release that wrote the file, as the file states it.
        args, aux: parameters by name.
        shapes: shapes of inputs by name.

    Raises:
        ShapeError, ParameterError: the shapes given do not fit the network.
    """
    nodes = topological_order(symbol.entries)
    explicit = {name: tuple(shape) for name, shape in (shapes or {}).items()}
    fed = input_names(symbol, args)
    stored = {key: tuple(value.shape) for table in (args, aux) if table is not None for key, value in table.items()}
    variables = [*symbol.list_arguments(), *symbol.list_auxiliary_states()]
    warnings: list[str] = []
    wrong = _wrong_shapes(nodes, explicit, stored, variables)
    all_shapes = {**{key: shape for key, shape in stored.items() if key in variables and key not in wrong}, **explicit}
    hints = {key: form_of(nodes, key, stored) for key in fed}
    if args is not None and not explicit:
        all_shapes.update({key: hint.shape for key, hint in hints.items() if hint.shape and len(fed) == 1})
    contradiction = ""
    try:
        values = infer.infer_shapes(nodes, all_shapes)
    except ShapeError as error:
        if args is None or all_shapes == explicit:
            raise
        contradiction = "the shapes of the parameters contradict each other"
        warnings.append(f"{contradiction}: {str(error).removeprefix('Error in ')}")
        values = infer.infer_shapes(nodes, explicit)
    by_name = _variable_shapes(nodes, values)
    # Operators may change a label on its way to the loss; its shape then does not follow from the others.
    labels = [key for key in fed if is_label(nodes, key) and not is_known(by_name.get(key))]
    if labels and explicit and not contradiction:
        values = _with_labels(nodes, all_shapes, labels, [explicit[key] for key in fed if key in explicit]) or values
        by_name = _variable_shapes(nodes, values)
    inputs = []
    for key in fed:
        shape = by_name.get(key)
        inputs.append(Input(key, shape if shape is not None else hints[key].shape, hints[key].words))
    missing_operators = placeholder.missing(nodes)
    result: dict[str, Any] = {
        "name": name,
        "version": version,
        "inputs": inputs,
        "outputs": symbol.list_outputs(),
        "layers": _layers(nodes, infer.entry_rows(nodes), values, set(fed)),
        "operators": _counts(nodes),
        "missing_operators": missing_operators,
        "warnings": warnings,
        "wrong": [f"{key}: stored {stored[key]}, the network needs {_open(shape)}" for key, shape in wrong.items()],
    }
    if args is not None:
        needed = [key for key in variables if key not in fed]
        result.update(
            matched=[key for key in needed if key in stored and key not in wrong],
            missing=[key for key in needed if key not in stored],
            unused=[key for key in stored if key not in variables],
        )
        warnings += _doubts(nodes, args, aux or {})
    complete = not missing_operators and all(is_known(by_name.get(key)) for key in variables)
    if complete:
        sizes = {key: shape for key, shape in by_name.items() if shape is not None}
        result.update(_plans(symbol, sizes, fed, warnings))
    result["verdict"] = _verdict(nodes, result, hints, stored if args is not None else None)
    if contradiction and not missing_operators:
        result["verdict"] = f"It can be opened, but {contradiction}, so that it cannot be run with them."
    return Inspection(**result)


def version_of(text: str) -> str:
    """Return the release that wrote a symbol file, as its text states it.

    >>> version_of('{"attrs": {"mxnet_version": ["int", 10901]}}')
    'MXNet 1.9.1'
    """
    stored = json.loads(text).get("attrs", {}).get("mxnet_version", [None, None])[1]
    if not isinstance(stored, int):
        return "MXNet 0.8 or earlier"
    return f"MXNet {stored // 10000}.{stored // 100 % 100}.{stored % 100}"


def input_names(symbol: Symbol, args: Arrays | None) -> list[str]:
    """Return the inputs: arguments without stored values, or the first inputs of operators if there are no parameters.

    A parameter that is missing from an otherwise fitting file does not become an input: an input belongs to no layer.
    """
    nodes = topological_order(symbol.entries)
    owned = {
        entry.node
        for node in nodes
        if node.op is not None and not placeholder.is_placeholder(node)
        for name, entry in zip(node.op.input_names(node.params), node.inputs, strict=False)
        if entry.node.op is None and entry.node.name == f"{node.name}_{name}" and name not in ("data", "label")
    }
    arguments = set(symbol.list_arguments())
    free = [node.name for node in nodes if node.op is None and node not in owned and node.name in arguments]
    if args is not None:
        return [name for name in free if name not in args]
    flowing = {node.inputs[0].node.name for node in nodes if node.inputs}
    return [name for name in free if name in flowing or is_label(nodes, name)]


def _wrong_shapes(
    nodes: Sequence[Node], shapes: Mapping[str, Shape], stored: Mapping[str, Shape], variables: Sequence[str]
) -> dict[str, Shape]:
    """Return parameters whose stored shapes contradict the inferred shapes."""
    rows = infer.entry_rows(nodes)
    values = infer.infer_shapes(nodes, shapes)
    inferred = {node.name: values[row] for node, row in zip(nodes, rows, strict=False) if node.op is None}
    return {
        key: shape
        for key in variables
        if key in stored and key not in shapes and (shape := inferred.get(key)) and not _agree(stored[key], shape)
    }


def _open(shape: Shape) -> str:
    """Return a shape with ? for unknown sizes."""
    return str(shape).replace(" 0", " ?").replace("(0", "(?") if 0 in shape else str(shape)


def _agree(stored: Shape, needed: Shape) -> bool:
    """Return whether two shapes are compatible; 0 is unknown."""
    return len(stored) == len(needed) and all(
        not dim or not need or dim == need for dim, need in zip(stored, needed, strict=True)
    )


def _layers(nodes: Sequence[Node], rows: Sequence[int], values: Sequence[Shape | None], fed: set[str]) -> list[Layer]:
    counted: set[Node] = set()
    at = dict(zip(nodes, rows, strict=False))

    def shape_of(entry: Entry) -> Shape | None:
        shape: Shape | None = values[at[entry.node] + entry.index]
        return shape if is_known(shape) else None

    layers = []
    for node in nodes:
        if node.op is None:
            continue
        parameters = dict.fromkeys(e for e in node.inputs if e.node.op is None and e.node.name not in fed)
        fresh = [entry for entry in parameters if entry.node not in counted]
        counted.update(entry.node for entry in fresh)
        sizes = [shape_of(entry) for entry in fresh]
        ins = [shape_of(entry) for entry in node.inputs]
        outs = [shape_of(Entry(node, k)) for k in range(node.num_visible_outputs)]
        complete = None not in ins and None not in outs
        layers.append(
            Layer(
                name=node.name,
                op=placeholder.label(node),
                shape=outs[0] if outs else None,
                parameters=None if None in sizes else sum(prod(size) for size in sizes if size is not None),
                flops=operations(node, ins, outs) if complete else None,  # type: ignore[arg-type]
                nbytes=sum(4 * prod(out) for out in outs if out is not None) if complete else None,
                supported=not placeholder.is_placeholder(node),
            )
        )
    return layers


def operations(node: Node, ins: Sequence[Shape], outs: Sequence[Shape]) -> int:
    """Return a forward node's multiplications and additions: two per product term, otherwise one per element."""
    assert node.op is not None
    name, out = node.op.name, sum(map(prod, outs))
    if name == "Convolution":
        return 2 * out * (prod(ins[1]) // int(node.params["num_filter"])) + (out if len(ins) > 2 else 0)
    if name == "Deconvolution":
        return 2 * prod(ins[0]) * (prod(ins[1]) // ins[1][0]) + (out if len(ins) > 2 else 0)
    if name == "FullyConnected":
        return 2 * out * ins[1][-1] + (out if len(ins) > 2 else 0)
    if name in ("dot", "batch_dot", "_linalg_gemm2"):
        shape = ins[0]
        return 2 * out * (shape[-2] if node.params.get("transpose_a") and len(shape) > 1 else shape[-1])
    if name == "Pooling":
        window = prod(ins[0][2:]) if node.params["global_pool"] else prod(node.params["kernel"])
        return prod(ins[0]) if node.params["global_pool"] else out * max(1, window)
    if name == "RNN":
        return 2 * prod(ins[1]) * ins[0][0] * ins[0][1]
    return out


def _counts(nodes: Sequence[Node]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for node in nodes:
        if node.op is not None:
            counts[placeholder.label(node)] = counts.get(placeholder.label(node), 0) + 1
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _doubts(nodes: Sequence[Node], args: Arrays, aux: Arrays) -> list[str]:
    """Return warnings about suspicious parameter values."""
    doubts: list[str] = []
    ignored, fresh, broken = [], [], []
    for node in nodes:
        if node.op is None or node.op.name not in BATCH_NORMS:
            continue
        gamma, mean, var = (node.inputs[k].node.name for k in (1, 3, 4))
        if node.params["fix_gamma"] and gamma in args and not np.all(args[gamma].asnumpy() == 1):
            ignored.append(node.name)
        if mean not in aux or var not in aux:
            fresh.append(node.name)
    for table in (args, aux):
        broken += [key for key, value in table.items() if is_float(value.np_dtype) and not _finite(value)]
    if ignored:
        doubts.append(f"{listed(ignored)}: fix_gamma is set, so the stored gamma, which is not 1, has no effect")
    if fresh:
        doubts.append(f"{listed(fresh)}: the moving mean or variance is missing; inference needs both")
    if broken:
        doubts.append(f"{listed(broken)}: not every value is a finite number")
    return doubts


def _finite(value: NDArray) -> bool:
    return bool(np.isfinite(value.asnumpy()).all())


def _variable_shapes(nodes: Sequence[Node], values: Sequence[Any]) -> dict[str, Shape | None]:
    """Return the inferred shape of each variable by name."""
    rows = infer.entry_rows(nodes)
    return {node.name: values[row] for node, row in zip(nodes, rows, strict=False) if node.op is None}


def _with_labels(
    nodes: Sequence[Node], shapes: Mapping[str, Shape], labels: Sequence[str], data: Sequence[Shape]
) -> list[Any] | None:
    """Return the inferred shapes if ``labels`` have leading axes of the shapes ``data``; None if no such axes fit."""
    for leading in (shape[:length] for shape in data for length in range(len(shape), 0, -1)):
        try:
            return list(infer.infer_shapes(nodes, {**shapes, **dict.fromkeys(labels, leading)}))
        except ShapeError:
            continue
    return None


def _plans(symbol: Symbol, sizes: Mapping[str, Shape], fed: Sequence[str], warnings: list[str]) -> dict[str, Any]:
    """Return the inference plan, and the bytes of inference and of a training step, with parameters and gradients."""
    plan = planner.plan(symbol, sizes, train=False)
    fields: dict[str, Any] = {"plan": plan, "inference_bytes": plan.total}
    fields["scratch_free_bytes"] = planner.plan(symbol, sizes, train=False, workspaces=False).total
    requests = {name: "null" if name in fed else "write" for name in symbol.list_arguments()}
    try:
        fields["training_bytes"] = planner.plan(symbol, sizes, grad_req=requests).total
    except MXNetError as error:
        warnings.append(f"it cannot be trained as it is: {error}")
    return fields


def _verdict(
    nodes: Sequence[Node], facts: Mapping[str, Any], hints: Mapping[str, Form], stored: Mapping[str, Shape] | None
) -> str:
    """Return a verdict of one sentence; ``stored``: shapes of parameters, if there are any."""
    if facts["missing_operators"]:
        return f"It cannot be run as a whole. {placeholder.explain(nodes)}."
    misfits = len(facts.get("missing", ())) + len(facts["wrong"])
    if stored is not None and misfits and len(facts["matched"]) <= misfits:
        return (
            f"These are the parameters of another network: {len(facts['matched'])} of "
            f"{len(facts['matched']) + misfits} match, {len(facts['missing'])} are missing, {len(facts['wrong'])} have "
            f"another shape and {len(facts['unused'])} are unused."
        )
    if stored is not None and (facts["missing"] or facts["wrong"]):
        numbers = ((len(facts["missing"]), "missing"), (len(facts["wrong"]), "of another shape"))
        named = " and ".join(f"{n} {'parameter is' if n == 1 else 'parameters are'} {what}" for n, what in numbers if n)
        needed = "it has to be trained on, or given the rest, before its outputs mean anything"
        return f"It can be opened, but {named}; {needed}."
    parts = ["All its operators are supported"]
    if stored is not None:
        parts.append(f"all its {len(facts['matched'])} parameters are there")
    text = " and ".join(parts)
    if "inference_bytes" not in facts:
        unknown = next((entry.name for entry in facts["inputs"] if not is_known(entry.shape)), "data")
        form = hints.get(unknown, Form())
        typed = form.advice(unknown, usual_shape(nodes, unknown, form, stored))
        return f"{text}. To see sizes, give the shape of {unknown}: {typed}."
    return f"{text}: it can be run, and inference takes {facts['inference_bytes']:,} bytes."
