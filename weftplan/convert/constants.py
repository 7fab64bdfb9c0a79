"""Constant folding: nodes that depend on parameters alone are computed once and become parameters.

The rewritten symbol is an ordinary symbol: print it with ``debug_str``, plan it, save it. The values equal those of the
nodes bit by bit, since the nodes compute them. The rewrite is for inference only: folded parameters no longer learn.

The module is stateless; it does not change the input symbol and arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weftplan.convert.rewired import followed, rewired
from weftplan.device.context import cpu
from weftplan.ndarray import NDArray
from weftplan.symbol.node import FOLDED, Entry, Node, split_variables, topological_order
from weftplan.symbol.symbol import Symbol
from weftplan.training.fit.parameter_files import Params

MAX_BYTES = 1 << 24
"""Most bytes of a folded array: larger arrays cost more memory than the saved time is worth."""


def fold_constants(
    symbol: Symbol,
    arg_params: Mapping[str, NDArray],
    aux_params: Mapping[str, NDArray],
    *,
    most_bytes: int = MAX_BYTES,
) -> tuple[Symbol, Params, Params]:
    """Replace nodes that read only parameters by parameters; return the new symbol and its parameters.

    An output of the symbol stays a node, so that outputs keep their names. Nodes also stay if they draw random numbers,
    change states, belong to a device group, or have a result larger than ``most_bytes``.

    Args:
        symbol: the network.
        arg_params: parameters by name.
        aux_params: auxiliary states by name.
        most_bytes: size up to which a result is stored.

    Returns:
        (symbol, arg_params, aux_params): unchanged arrays are the input arrays. A folded array is named after its
        node's output (``<name>_output``), with a number appended if the name is taken.
    """
    order = topological_order(symbol.entries)
    constant = _constant_nodes(order, arg_params)
    read = [entry for node in order if node not in constant for entry in node.inputs]
    entries = [e for e in dict.fromkeys((*read, *symbol.entries)) if e.node in constant and not e.node.is_variable]
    values = _values(entries, arg_params)
    outputs = {entry.node for entry in symbol.entries}
    names_in_use = {node.name for node in order}
    variables: dict[Entry, Node] = {}
    arguments: Params = dict(arg_params)
    for entry, value in zip(entries, values, strict=True):
        if value.nbytes > most_bytes or entry.node in outputs:
            continue
        assert entry.node.op is not None
        name = f"{entry.node.name}_{entry.node.op.output_names(entry.node.params)[entry.index]}"
        while name in names_in_use:
            name += "_folded"
        names_in_use.add(name)
        variables[entry] = Node(None, name, attrs={FOLDED: entry.node.name})
        arguments[name] = value
    moved: dict[Node, Node] = {}
    for node in order:
        if node.is_variable:
            continue
        inputs = [Entry(variables[e]) if e in variables else followed(e, moved) for e in node.inputs]
        copy = rewired(node, inputs, moved)
        if copy is not node:
            moved[node] = copy
    folded = Symbol([followed(entry, moved) for entry in symbol.entries])
    names = {node.name for node in topological_order(folded.entries) if node.is_variable}
    return (
        folded,
        {name: value for name, value in arguments.items() if name in names},
        {name: value for name, value in aux_params.items() if name in names},
    )


def _constant_nodes(order: Sequence[Node], arguments: Mapping[str, NDArray]) -> set[Node]:
    """Return the nodes that depend only on the arguments in ``arguments``."""
    constants: set[Node] = set()
    states = set(split_variables(order)[1])
    for node in order:
        op = node.op
        if op is None:
            if node.name in arguments and node not in states:
                constants.add(node)
            continue
        if op.random or op.aux or op.single or node.control_deps or "__ctx_group__" in node.attrs:
            continue
        if not node.inputs and 0 in (node.params.get("shape") or (0,)):
            continue  # its shape follows from its readers
        if all(entry.node in constants for entry in node.inputs):
            constants.add(node)
    return constants


def _values(entries: Sequence[Entry], params: Mapping[str, NDArray]) -> Sequence[NDArray]:
    if not entries:
        return []
    part = Symbol(list(entries))
    arguments = {name: params[name].as_in_context(cpu()) for name in part.list_arguments()}
    near = next(iter(params.values())).context if params else cpu()
    results = part.bind(cpu(), arguments, grad_req="null").forward(is_train=False)
    return [result.copyto(near) for result in results]
