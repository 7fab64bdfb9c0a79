"""Call signatures of operators, their documentation and the text of their stubs.

``mx.sym`` and ``mx.nd`` have the same signatures: inputs by name, then parameters with defaults and legal values.
"""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Sequence

from weftplan.ops.core.examples import EXAMPLES
from weftplan.ops.core.input_shapes import INPUT_SHAPES
from weftplan.ops.core.params import meaning
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


def usual_inputs(op: Op) -> tuple[str, ...] | None:
    """Return the names of an operator's inputs with default parameters; None if their number is not fixed."""
    if op.variadic is not None:
        return None
    if isinstance(op.inputs, tuple):
        return op.inputs
    defaults = {param.name: None if param.default is REQUIRED else param.default for param in op.params}
    try:
        return op.inputs(defaults)
    except (TypeError, ValueError, KeyError):
        return None


def signature(op: Op, array: str, extra: Sequence[str]) -> inspect.Signature:
    """Return the signature of an operator's function.

    Args:
        array: class of the inputs and of the result, ``Symbol`` or ``NDArray``.
        extra: further keywords, whose default is None.

    >>> from weftplan.ops.core import registry
    >>> print(signature(registry.get("clip"), "Symbol", ["name"]))
    (data: Symbol | None, a_min: float, a_max: float, *, name: Any = None) -> Symbol
    """
    inputs = usual_inputs(op)
    names: list[inspect.Parameter] = []
    taken = {param.name for param in op.params}
    params = [param for param in op.params if param.name != op.variadic and not keyword.iskeyword(param.name)]
    needs = any(param.default is REQUIRED for param in params)
    # Parameters may follow the inputs by position. Python has no signature for a required parameter after an optional
    # input; such parameters are shown as keywords.
    by_position = inputs is not None and (not needs or len(inputs) == 1)
    if inputs is None:
        name = "data" if "data" not in taken else "args"
        names.append(inspect.Parameter(name, _ANY_NUMBER, annotation=Hint(f"{array} | Sequence[{array}] | None")))
    else:
        for name in inputs:
            if name not in taken and not keyword.iskeyword(name):
                default = inspect.Parameter.empty if needs and by_position else None
                names.append(inspect.Parameter(name, _EITHER, default=default, annotation=Hint(f"{array} | None")))
                taken.add(name)
    for param in params:
        hint = meaning(param.parse)
        if param.default is None and "None" not in hint and hint != "Any":
            hint += " | None"
        default = inspect.Parameter.empty if param.default is REQUIRED else param.default
        by_position = by_position and not (
            param.default is REQUIRED and names and names[-1].default is not names[-1].empty
        )
        kind = _EITHER if by_position else _KEYWORD
        names.append(inspect.Parameter(param.name, kind, default=default, annotation=Hint(hint)))
    for name in extra:
        if name not in taken:
            names.append(inspect.Parameter(name, _KEYWORD, default=None, annotation=Hint("Any")))
    visible = op.visible_outputs
    outputs = op.outputs if visible is None else visible
    one = outputs == 1 or (isinstance(outputs, tuple) and len(outputs) == 1)
    returns = array if one or array == "Symbol" else "Any"
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


def stub(name: str, op: Op, array: str, extra: Sequence[str], *, method: bool = False) -> str:
    """Return a line of a stub file: the definition of an operator's function, or with ``method`` of an array's method.

    ``extra``: see :func:`signature`.
    """
    parameters = signature(op, array, extra)
    return written(
        name, parameters.replace(parameters=_of_method(parameters) if method else list(parameters.parameters.values()))
    )


def written(name: str, found: inspect.Signature) -> str:
    """Return a line of a stub file: the definition of a function called ``name`` with the signature ``found``."""
    plain = [
        p.replace(default=... if p.default is not p.empty else p.empty, annotation=Hint(_open(str(p.annotation))))
        if p.annotation is not p.empty
        else p
        for p in found.parameters.values()
    ]
    shown = str(found.replace(parameters=plain)).replace("Ellipsis", "...")
    return f"def {name}{shown}: ..."


def _of_method(found: inspect.Signature) -> list[inspect.Parameter]:
    """Return the parameters of a method: ``self`` replaces the first input, or precedes a variable number of inputs."""
    kept = list(found.parameters.values())
    if kept and kept[0].kind is not _ANY_NUMBER:
        kept = kept[1:]
    return [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY), *kept]
