"""``mx.operator``: Python operators, as ``mx.sym.Custom(data, op_type="mine")`` and ``mx.nd.Custom``.

A :class:`CustomOpProp` declares arguments, outputs and shapes; a :class:`CustomOp` computes. The planner places the
results of a custom operator like all others. Forward and backward run inside engine operations, on arrays that are
views of planned memory: after the call they show what the plan puts there. User code may use NumPy (``asnumpy``,
``array[:] = …``), the operators of ``mx.nd``, executors, modules, and arrays made anywhere. It must not wait for an
array that its own operation holds: its executor's outputs, and arguments or gradients that it writes.

Every node has its own operator object, created for the context, shapes and dtypes of its first run; values that forward
stores in ``self`` are available in backward.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from weftplan import ndarray as nd
from weftplan.compat.custom_kernels import Declared, backward_op, forward_op
from weftplan.device.context import Context
from weftplan.errors import ParameterError, UnknownOperatorError, did_you_mean
from weftplan.ndarray import NDArray
from weftplan.ops.core import registry
from weftplan.ops.core.params import meaning, p_str
from weftplan.ops.core.schema import REQUIRED, Op, Param
from weftplan.support import slots
from weftplan.symbol import Symbol, attribute, name
from weftplan.symbol.api.functions import visible
from weftplan.symbol.compose import apply, to_text
from weftplan.symbol.symbol import single

__all__ = [
    "CustomOp",
    "CustomOpProp",
    "OperatorArguments",
    "get_all_registered_operators",
    "get_operator_arguments",
    "register",
]

P = TypeVar("P", bound="type[CustomOpProp]")
_props: dict[str, type[CustomOpProp]] = {}


class CustomOp:
    """The computation of an operator. Subclasses define :meth:`forward`, and :meth:`backward` if it has a gradient."""

    def forward(
        self, is_train: bool, req: list[str], in_data: list[NDArray], out_data: list[NDArray], aux: list[NDArray]
    ) -> None:
        """Write ``out_data`` from ``in_data``, each as ``req`` says: ``write``, or ``null`` if the result is unused.

        Args:
            is_train: whether a backward may follow.
            req: ``write``, ``add`` or ``null`` for each array that is written.
            in_data: inputs.
            out_data: outputs.
            aux: auxiliary states.
        """

    def backward(
        self,
        req: list[str],
        out_grad: list[NDArray],
        in_data: list[NDArray],
        out_data: list[NDArray],
        in_grad: list[NDArray],
        aux: list[NDArray],
    ) -> None:
        """Write ``in_grad``, the gradients of ``in_data``, from ``out_grad``.

        Args:
            req: ``write``, ``add`` or ``null`` for each array that is written.
            out_grad: gradients of the outputs.
            in_data: inputs.
            out_data: outputs.
            in_grad: gradients of the inputs.
            aux: auxiliary states.
        """

    def assign(self, dst: NDArray, req: str, src: NDArray | ArrayLike) -> None:
        """Write ``src`` (an array or a number) to ``dst`` as ``req`` says.

        Args:
            dst: array that is written.
            req: ``write``, ``inplace``, ``add`` or ``null``.
            src: array or number.
        """
        if req in ("write", "inplace"):
            dst[:] = src
        elif req == "add":
            added: Any = src
            dst[:] = dst + added


class CustomOpProp:
    """The declaration of an operator: subclass and register it.

    Keyword arguments of ``mx.sym.Custom`` arrive at ``__init__`` as text.

    Args:
        need_top_grad: False for a loss, whose gradient is independent of the output gradients.
    """

    def __init__(self, need_top_grad: bool = True) -> None:
        self.need_top_grad_ = need_top_grad

    def list_arguments(self) -> list[str]:
        """Return the names of the inputs."""
        return ["data"]

    def list_outputs(self) -> list[str]:
        """Return the names of the outputs."""
        return ["output"]

    def list_auxiliary_states(self) -> list[str]:
        """Return the names of arrays that forward may change and that have no gradient."""
        return []

    def infer_shape(self, in_shape: list[Any]) -> Any:
        """Return (shapes of inputs, of outputs, of auxiliary states), given input shapes; the last list is optional.

        An unknown shape is an empty list. If shapes are unknown, a call may raise; the result then counts as unknown.
        """
        return in_shape, [in_shape[0]] * len(self.list_outputs()), []

    def infer_type(self, in_type: list[Any]) -> Any:
        """Return (dtypes of inputs, of outputs, of auxiliary states), given input dtypes."""
        head = in_type[0]
        return in_type, [head] * len(self.list_outputs()), [head] * len(self.list_auxiliary_states())

    def declare_backward_dependency(
        self, out_grad: Sequence[int], in_data: Sequence[int], out_data: Sequence[int]
    ) -> Iterable[int]:
        """Return the identifiers of the arrays that backward reads; its lists contain no others.

        Args:
            out_grad: identifiers of the gradients of outputs.
            in_data: identifiers of the inputs.
            out_data: identifiers of the outputs.
        """
        return [*(out_grad if self.need_top_grad_ else ()), *in_data, *out_data]

    def create_operator(self, ctx: Context, in_shapes: list[list[int]], in_dtypes: list[type[np.generic]]) -> CustomOp:
        """Return the operator object.

        Args:
            ctx: the device.
            in_shapes: shapes of the inputs.
            in_dtypes: dtypes of the inputs.
        """
        return CustomOp()


def register(reg_name: str) -> Callable[[P], P]:
    """Return a class decorator that registers a :class:`CustomOpProp` for ``op_type=reg_name``."""

    def decorate(prop: P) -> P:
        if not (isinstance(prop, type) and issubclass(prop, CustomOpProp)):
            raise ParameterError(f"mx.operator.register({reg_name!r}) is for subclasses of CustomOpProp, got {prop!r}")
        _props[reg_name] = prop
        return prop

    return decorate


def get_all_registered_operators() -> list[str]:
    """Return the names of all operators, including aliases and ``Custom``."""
    return [*registry.names(), "Custom"]


class OperatorArguments(NamedTuple):
    """The result of :func:`get_operator_arguments`."""

    narg: int
    names: list[str]
    types: list[str]


_TYPES = {"bool | int": "boolean", "int | Sequence[int]": "Shape(tuple)"}
"""MXNet's names of parameter types that differ from Python's."""


def _type_text(param: Param) -> str:
    kind = meaning(param.parse)
    optional = kind.endswith(" | None")
    kind = kind.removesuffix(" | None")
    if kind.startswith("Literal["):
        words = sorted(re.findall(r"'[^']*'", kind))
        kind = "{" + ", ".join(["None"] * optional + words) + "}"
    else:
        kind = _TYPES.get(kind, kind) + " or None" * optional
    return f"{kind}, required" if param.default is REQUIRED else f"{kind}, optional, default={param.default!r}"


def get_operator_arguments(op_name: str) -> OperatorArguments:
    """Return names and types of an operator's inputs and parameters, as text in MXNet's style.

    >>> get_operator_arguments("Activation").types
    ['NDArray-or-Symbol', "{'relu', 'sigmoid', 'softrelu', 'softsign', 'tanh'}, required"]
    """
    op = registry.get(op_name)
    names = [p.name for p in op.params]
    if op.variadic is not None:
        inputs, kind = ["data"], "NDArray-or-Symbol[]"
    else:
        defaults = {p.name: p.default for p in op.params}
        inputs, kind = list(op.input_names(defaults)), "NDArray-or-Symbol"
    types = [kind] * len(inputs) + [_type_text(p) for p in op.params]
    return OperatorArguments(len(types), [*inputs, *names], types)


def _make(attrs: Mapping[str, object]) -> Op:
    """Return the operator of one node, built from its attributes."""
    kind = attrs.get("op_type")
    prop = _props.get(str(kind))
    if prop is None:
        if kind is None:
            raise ParameterError("operator Custom needs op_type, the name that mx.operator.register was given")
        raise UnknownOperatorError(
            f"no custom operator is registered as {kind!r}: {did_you_mean(str(kind), _props)}import the module that "
            f"registers it with mx.operator.register before the symbol is made or loaded"
        )
    settings = {k: to_text(v) for k, v in attrs.items() if k != "op_type" and not k.startswith("__")}
    try:
        prop_instance = prop(**settings)  # type: ignore[arg-type]  # a subclass takes what it will
    except TypeError as error:
        raise ParameterError(f"operator Custom ({kind}): {prop.__name__} does not take {settings}: {error}") from error
    declared = Declared(str(kind), prop_instance, tuple(settings))
    return forward_op(declared, backward_op(declared))


def _symbol(*args: Any, **kwargs: Any) -> Symbol:
    """Return a node of a custom operator: ``mx.sym.Custom(data, op_type="mine", name="layer", scale=2)``."""
    given_name, attr = kwargs.pop("name", None), kwargs.pop("attr", None)
    keyword = {k: single(v, f"operator Custom: {k}") for k, v in kwargs.items() if isinstance(v, Symbol)}
    params = {k: v for k, v in kwargs.items() if not isinstance(v, Symbol)}
    op = _make(params)
    inputs = [None if value is None else single(value, f"operator Custom: input {i}") for i, value in enumerate(args)]
    attrs = {**params, **{k: v for k, v in attribute.current(attr).items() if k.startswith("__")}}
    return visible(apply(op, name.current().get(given_name, "custom"), inputs, keyword, attrs))


def _call(*args: Any, **kwargs: Any) -> Any:
    """Call a custom operator: ``mx.nd.Custom(data, op_type="mine", scale=2)``."""
    kwargs.pop("name", None)
    out, ctx, is_train = kwargs.pop("out", None), kwargs.pop("ctx", None), kwargs.pop("is_train", False)
    arrays = {k: kwargs.pop(k) for k in list(kwargs) if isinstance(kwargs[k], NDArray)}
    op = _make(kwargs)
    names = op.input_names({})
    placed = dict(zip(names, args, strict=False))
    unknown = [key for key in arrays if key not in names or key in placed]
    if len(args) > len(names) or unknown:
        raise ParameterError(f"operator Custom ({kwargs['op_type']}): the inputs are {', '.join(names)}; got {unknown}")
    placed.update(arrays)
    inputs = [placed[key] for key in names if key in placed]
    results = nd.invoke(op, inputs, kwargs, out, ctx=ctx, is_train=bool(is_train))
    return results[0] if len(results) == 1 else results


def _stand_in(attrs: Mapping[str, object]) -> Op:
    """Return the user-registered operator for a file's node whose operator weftplan does not have."""
    return replace(_make(attrs), name=str(attrs["op_type"]), params=tuple(Param(k, p_str, "") for k in attrs))


registry.register_maker("Custom", _make)
registry.register_maker(registry.ANY, _stand_in)
slots.ARRAY_CUSTOM.fill(_call)
slots.SYMBOL_CUSTOM.fill(_symbol)
