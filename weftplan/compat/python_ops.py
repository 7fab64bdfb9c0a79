"""``mx.operator.NumpyOp`` and ``NDArrayOp``: the older interface of Python operators.

One object both declares and computes, and there is no ``req``: each method fills its output arrays. ``get_symbol``
creates a node, which is an ordinary custom operator.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from weftplan import symbol as sym
from weftplan.compat.custom_operators import CustomOp, CustomOpProp, register
from weftplan.device.context import Context
from weftplan.ndarray import NDArray
from weftplan.symbol import Symbol

_numbers = itertools.count()


class PythonOp:
    """Base of :class:`NumpyOp` and :class:`NDArrayOp`.

    Args:
        need_top_grad: False for a loss, whose gradient is independent of the output gradients.
    """

    def __init__(self, need_top_grad: bool = True) -> None:
        self.need_top_grad_ = need_top_grad

    def __call__(self, *args: object, **kwargs: object) -> Symbol:
        return self.get_symbol(*args, **kwargs)

    def get_symbol(self, *args: object, **kwargs: object) -> Symbol:
        """Return a node of this operator; inputs are symbols, by position or by name, and ``name`` is the node's."""
        kind = f"{type(self).__name__}_{next(_numbers)}"
        op = self

        class Bound(_Prop):
            def __init__(self) -> None:
                super().__init__(op)

        register(kind)(Bound)
        symbol: Symbol = sym.Custom(*args, op_type=kind, **kwargs)  # type: ignore[attr-defined]  # a hook
        return symbol

    def forward(self, in_data: list[Any], out_data: list[Any]) -> None:
        """Fill ``out_data``, by default with the first input."""
        out_data[0][:] = in_data[0]

    def backward(self, out_grad: list[Any], in_data: list[Any], out_data: list[Any], in_grad: list[Any]) -> None:
        """Fill ``in_grad``, by default with 1.

        Args:
            out_grad: gradients of the outputs.
            in_data: inputs.
            out_data: outputs.
            in_grad: gradients of the inputs.
        """
        in_grad[0][:] = 1.0

    def infer_shape(self, in_shape: list[Any]) -> Any:
        """Return (shapes of inputs, of outputs), given input shapes."""
        return in_shape, [in_shape[0]]

    def list_arguments(self) -> list[str]:
        """Return the names of the inputs."""
        return ["data"]

    def list_outputs(self) -> list[str]:
        """Return the names of the outputs."""
        return ["output"]

    def need_top_grad(self) -> bool:
        """Return whether the gradient depends on the output gradients."""
        return self.need_top_grad_

    def declare_backward_dependency(
        self, out_grad: Sequence[int], in_data: Sequence[int], out_data: Sequence[int]
    ) -> Iterable[int]:
        """Return the identifiers of the arrays that backward reads.

        Args:
            out_grad: identifiers of the gradients of outputs.
            in_data: identifiers of the inputs.
            out_data: identifiers of the outputs.
        """
        return [*(out_grad if self.need_top_grad() else ()), *in_data, *out_data]

    def _operands(self, arrays: list[NDArray]) -> list[Any]:
        """Return the arrays in the form that forward and backward expect."""
        raise NotImplementedError("PythonOp is the base of NumpyOp and NDArrayOp: subclass one of them")


class NumpyOp(PythonOp):
    """An operator on NumPy arrays. Subclasses define ``forward``, ``backward``, ``infer_shape`` and the names."""

    def _operands(self, arrays: list[NDArray]) -> list[Any]:
        return [array.asnumpy() for array in arrays]


class NDArrayOp(PythonOp):
    """An operator on arrays of ``mx.nd``, with the interface of :class:`NumpyOp`."""

    def _operands(self, arrays: list[NDArray]) -> list[Any]:
        return list(arrays)


class _Runner(CustomOp):
    """Adapter that computes with the user's object."""

    def __init__(self, op: PythonOp) -> None:
        self._op = op

    def _fill(self, targets: list[NDArray], req: list[str], results: list[Any]) -> None:
        for target, how, values in zip(targets, req, results, strict=True):
            if values is not target:
                self.assign(target, how, values)

    def forward(
        self, is_train: bool, req: list[str], in_data: list[NDArray], out_data: list[NDArray], aux: list[NDArray]
    ) -> None:
        targets = self._op._operands(out_data)
        self._op.forward(in_data=self._op._operands(in_data), out_data=targets)
        self._fill(out_data, req, targets)

    def backward(
        self,
        req: list[str],
        out_grad: list[NDArray],
        in_data: list[NDArray],
        out_data: list[NDArray],
        in_grad: list[NDArray],
        aux: list[NDArray],
    ) -> None:
        as_arrays, targets = self._op._operands, self._op._operands(in_grad)
        self._op.backward(
            out_grad=as_arrays(out_grad), in_data=as_arrays(in_data), out_data=as_arrays(out_data), in_grad=targets
        )
        self._fill(in_grad, req, targets)


class _Prop(CustomOpProp):
    """Adapter that declares the user's object."""

    def __init__(self, op: PythonOp) -> None:
        super().__init__(need_top_grad=op.need_top_grad())
        self._op = op

    def list_arguments(self) -> list[str]:
        return self._op.list_arguments()

    def list_outputs(self) -> list[str]:
        return self._op.list_outputs()

    def infer_shape(self, in_shape: list[Any]) -> Any:
        ins, outs = self._op.infer_shape(in_shape)
        return ins, outs, []

    def declare_backward_dependency(
        self, out_grad: Sequence[int], in_data: Sequence[int], out_data: Sequence[int]
    ) -> Iterable[int]:
        return self._op.declare_backward_dependency(out_grad, in_data, out_data)

    def create_operator(self, ctx: Context, in_shapes: list[list[int]], in_dtypes: list[type[np.generic]]) -> CustomOp:
        return _Runner(self._op)
