"""Call signatures of operators, their documentation and the text of their stubs.

``mx.sym`` and ``mx.nd`` have the same signatures: inputs by name, then parameters with defaults and legal values.
"""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Sequence

from weftplan.ops.core.documented_shapes import INPUT_SHAPES
from weftplan.ops.core.examples import EXAMPLES
from weftplan.ops.core.params import meaning
from weftplan.ops.core.registry import call_order, usual_inputs
from weftplan.ops.core.rules import same_shape
from weftplan.ops.core.schema import REQUIRED, Op

_KEYWORD = inspect.Parameter.KEYWORD_ONLY
_EITHER = inspect.Parameter.POSITIONAL_OR_KEYWORD
_ANY_NUMBER = inspect.Parameter.VAR_POSITIONAL


class Hint(str):
    """The text of an annotation, which a signature shows without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def signature(op: Op, array: str, extra: Sequence[str], by_name: Sequence[str] = ()) -> inspect.Signature:
    """Return the signature of an operator's function.

    Args:
        array: class of the inputs and of the result, ``Symbol`` or ``NDArray``.
        extra: further arguments after the parameters, whose default is None.
        by_name: further keywords, whose default is None.

    >>> from weftplan.ops.core import registry
    >>> print(signature(registry.get("clip"), "Symbol", ["name"]))
    (data: Symbol | None = None, a_min: float = REQUIRED, a_max: float = REQUIRED, name: Any = None) -> Symbol
    """
    inputs, ordered = call_order(op)
    declared = {param.name for param in op.params}
    names: list[inspect.Parameter] = []
    if op.any_number:
        name = "data" if "data" not in declared else "args"
        names.append(inspect.Parameter(name, _ANY_NUMBER, annotation=Hint(f"{array} | Sequence[{array}] | None")))
    every = () if op.any_number else (*inputs, *(name for name in usual_inputs(op) or () if name not in inputs))
    for name in every:
        kind = _EITHER if name in inputs else _KEYWORD
        names.append(inspect.Parameter(name, kind, default=None, annotation=Hint(f"{array} | None")))
    for param in op.params:
        hint = meaning(param.parse)
        default = None if param.name == op.variadic else param.default  # the number of inputs is counted
        if default is None and "None" not in hint and hint != "Any":
            hint += " | None"
        kind = _EITHER if param.name in ordered else _KEYWORD
        names.append(inspect.Parameter(param.name, kind, default=default, annotation=Hint(hint)))
    used = {*every, *declared}
    for name in (*extra, *by_name):
        if name not in used:
            kind = _EITHER if name in extra and not op.any_number else _KEYWORD
            names.append(inspect.Parameter(name, kind, default=None, annotation=Hint("Any")))
    names = [parameter for parameter in names if not keyword.iskeyword(parameter.name)]
    names.sort(key=lambda parameter: parameter.kind)  # parameters by name follow the others
    visible = op.visible_outputs
    outputs = op.outputs if visible is None else visible
    is_single = outputs == 1 or (isinstance(outputs, tuple) and len(outputs) == 1)
    returns = array if is_single or array == "Symbol" else "Any"
    return inspect.Signature(names, return_annotation=Hint(returns))


def document(op: Op) -> str:
    """Return the documentation of an operator, the same for arrays and symbols."""
    lines = [op.doc or f"The operator {op.name}.", ""]
    inputs = usual_inputs(op)
    if inputs is None:
        lines += ["Inputs: any number, by position or as one list.", ""]
    elif inputs:
        any_shape = len(inputs) == 1 and op.infer_shape is same_shape
        shapes = {inputs[0]: "of any shape"} if any_shape else INPUT_SHAPES.get(op.name, {})
        lines += ["Inputs: " + ", ".join(f"{name} {shapes.get(name, '')}".rstrip() for name in inputs) + ".", ""]
    params = [param for param in op.params if param.name != op.variadic]
    if params:
        lines.append("Parameters:")
    for param in params:
        default = "required" if param.default is REQUIRED else f"default {param.default!r}"
        about = f" {param.doc}" if param.doc else ""
        lines.append(f"    {param.name} ({meaning(param.parse)}, {default}){':' * bool(about)}{about}")
    if op.name in EXAMPLES:
        lines += ["", "Example:", "", *(f"    {line}" for line in EXAMPLES[op.name].splitlines())]
    return "\n".join(lines).rstrip()


def _open(hint: str) -> str:
    """Return the annotation for type checkers: ``Literal`` also accepts ``str``, for texts that a program computes."""
    return f"{hint} | str" if hint.startswith("Literal[") else hint


def stub(
    name: str, op: Op, array: str, extra: Sequence[str], by_name: Sequence[str] = (), *, method: bool = False
) -> str:
    """Return a line of a stub file: the definition of an operator's function, or with ``method`` of an array's method.

    ``extra``, ``by_name``: see :func:`signature`.
    """
    parameters = signature(op, array, extra, by_name)
    return written(
        name, parameters.replace(parameters=_of_method(parameters) if method else list(parameters.parameters.values()))
    )


def written(name: str, definition: inspect.Signature) -> str:
    """Return a line of a stub file: the definition of a function called ``name`` with the signature ``definition``."""
    plain = [
        p.replace(default=... if p.default is not p.empty else p.empty, annotation=Hint(_open(str(p.annotation))))
        if p.annotation is not p.empty
        else p
        for p in definition.parameters.values()
    ]
    shown = str(definition.replace(parameters=plain)).replace("Ellipsis", "...")
    return f"def {name}{shown}: ..."


def _of_method(function: inspect.Signature) -> list[inspect.Parameter]:
    """Return the parameters of a method: ``self`` replaces the first input, or precedes a variable number of inputs."""
    parameters = list(function.parameters.values())
    if parameters and parameters[0].kind is not _ANY_NUMBER:
        parameters = parameters[1:]
    return [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY), *parameters]
